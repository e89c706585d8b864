"""PyTorch Lightning, made private: a strategy with which an unchanged LightningModule trains by a plan.

    strategy = PrivateStrategy(plan, train_dataset, account=account)
    trainer = Trainer(strategy=strategy, max_steps=plan.steps)
    trainer.fit(module, strategy.lots)

Automatic optimisation hands the optimizer a closure that runs `training_step` and goes backward. Here the closure runs
first: `training_step` is the program that every example runs alone, as a lot of one, and its clipped gradients are
added up. Then the optimizer steps without it, on the noisy sum. What `training_step` logs is private and is not logged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from terrine.errors import MissingExtra

try:
    import lightning  # noqa: F401
except ImportError as error:
    raise MissingExtra("lightning", extra="lightning") from error

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from terrine import check
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.integrations import loops
from terrine.sgd import Plan
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.handed_out import Withheld
from terrine.sgd.lots import Collate
from terrine.sgd.private import Account, Lots, start
from terrine.sgd.training import running_epsilon
from terrine.sgd.validate import validate


class PrivateStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """One device, on which a LightningModule trains by a plan; `lots` are the batches to fit on.

    `collate` and `workers` are the data's, `memory` is about how many bytes the activations and gradients of the
    examples in memory take. With `checkpoint`, a path, the private run is saved with every checkpoint of Lightning's,
    and `fit(..., ckpt_path=...)` goes on with the noise that it would have had.

    Guarantee: `fit` costs at most `plan.event`, which the account is charged for before the first lot is drawn.
    """

    strategy_name = "private"

    def __init__(
        self,
        plan: Plan,
        train_dataset: Any,
        *,
        account: Account | None = None,
        collate: Collate | None = None,
        workers: int = 0,
        memory: float | None = None,
        checkpoint: str | Path | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(device=device)
        self.plan, self.account = plan, account
        self._dataset, self._collate, self._workers = train_dataset, collate, workers
        self._memory = None if memory is None else check.positive("memory", memory)
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self.lots = loops.Epochs(self._begin, plan)
        self._trainer: Trainer | None = None
        self._loss: loops.Loss | None = None
        self._given: tuple[Any, ...] = ()  # to training_step, after the batch
        self._log: _Log | None = None

    # -- before a run ----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Lightning's own, after everything that the run would depend on was looked at.

        Raises:
            InvalidArgument: flags or hooks that contradict the plan, or could mix examples, all of them.
        """
        module = self.lightning_module
        if trainer.state.fn == TrainerFn.FITTING:
            assert module is not None
            if self._trainer is not None:
                raise OutOfOrder("fit: this strategy has trained; another run costs again, want a new PrivateStrategy")
            wrong = [*_flags(trainer, self.plan, self.precision_plugin), *_hooks(trainer, module), *self._kept(trainer)]
            if wrong:
                raise InvalidArgument(f"Trainer: {'; '.join(wrong)}")
            validate(module)
            self._trainer, self._log = trainer, _Log(trainer, module)
            self._loss = loops.Loss(module, self._alone)
            trainer.callbacks.append(_Epsilon(self))
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and len(self.optimizers) != 1:
            raise InvalidArgument(f"configure_optimizers: {len(self.optimizers)} optimizers; want one")

    def _kept(self, trainer: Trainer) -> list[str]:
        """What is wrong with where the run is kept."""
        path = self._checkpoint
        if trainer.ckpt_path is not None and (path is None or not path.exists()):
            missing = "no checkpoint= was given" if path is None else f"{path} is missing"
            return [f"ckpt_path: {missing}, which holds the noise that the run would have had; want that of the run"]
        if trainer.ckpt_path is None and path is not None and path.exists():
            if path.with_name(path.name + ".key").exists():
                return [f"{path} holds an unfinished run: want ckpt_path=, or another path, where a run is paid for"]
            path.unlink()  # of a run that is over
        return []

    def process_dataloader(self, dataloader: object) -> object:
        """Refuse to train on anything but the plan's lots."""
        training = self._trainer is not None and self._trainer.training
        if training and dataloader is not self.lots:
            raise InvalidArgument(
                f"train_dataloaders: a {type(dataloader).__name__}; want fit(module, strategy.lots), which the plan "
                "draws"
            )
        return super().process_dataloader(dataloader)

    def _begin(self) -> Lots:
        """Everything is ready: charge, and draw."""
        if self._trainer is None:
            raise OutOfOrder("lots: want them given to Trainer.fit, with this strategy")
        module, path = self.lightning_module, self._checkpoint
        assert self._log is not None
        with self._log.removed():  # which is no part of the model that a checkpoint is bound to
            _, _, lots = start(
                module, self.optimizers[0], self._dataset, self.plan, self.account,
                watch=False, collate=self._collate, workers=self._workers, memory=self._memory,
                checkpoint=None if path is None else Checkpoint(path, every=self.plan.steps + 1),
                bound={"loss": type(module).training_step}, purpose="DP-SGD by PrivateStrategy",
                by="terrine.integrations.lightning",
            )  # fmt: skip
        taken, counted = lots.run.step.taken, self._trainer.global_step
        if path is not None and taken != counted:
            raise InvalidArgument(
                f"ckpt_path: a checkpoint of step {counted}, and the private run was saved at {taken}; want that of "
                f"step {taken}"
            )
        return lots

    # -- a step ----------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """A lot is on the device already."""
        if isinstance(batch, loops.SealedLot):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Clip and add up a lot's gradients; the optimizer's step will release them. The loss is withheld."""
        lot, *others = (*args, *kwargs.values())
        trainer, module = self._trainer, self.lightning_module
        if not isinstance(lot, loops.SealedLot) or self.lots.lots is None or trainer is None or self._loss is None:
            raise OutOfOrder("training_step: the batch is no lot of the plan; want fit(module, strategy.lots)")
        if trainer.accumulate_grad_batches != 1:
            raise InvalidArgument(f"accumulate_grad_batches={trainer.accumulate_grad_batches}: want 1; {_ACCUMULATED}")
        self._given = tuple(others)
        with _unmetered(module):
            loops.add_clipped(self.lots.lots, self._loss, lot.opened(), self._memory)
        return loops.withheld(self.root_device)

    def _alone(self, batch: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        found = module.training_step(batch, *self._given)
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if not isinstance(loss, Tensor):
            raise InvalidArgument(f"training_step: want a loss for every example, got {type(loss).__name__}")
        return loss

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *_args: Any, **_others: Any) -> Tensor:
        """Nothing is left to do: the gradients were taken for every example alone."""
        del optimizer
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *_args: Any, **_others: Any) -> Any:
        """Run the closure on the lot that is out, once; then step on what the plan releases."""
        closure()
        return optimizer.step()

    # -- checkpoints -----------------------------------------------------------------------------------

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing in a private run, which keeps its optimizer with its noise."""
        if self._checkpoint is None:
            super().load_optimizer_state_dict(checkpoint)

    def save_checkpoint(self, *args: Any, **others: Any) -> None:
        """Save Lightning's checkpoint, and the private run at the same step."""
        super().save_checkpoint(*args, **others)
        if self.lots.lots is not None:
            run = self.lots.lots.run
            if run.checkpoint is not None and run.step.taken < run.step.limit:
                run.checkpoint.save(run)

    def teardown(self) -> None:
        """End the run."""
        self.lots.end()
        if self._log is not None:
            self._log.remove()
        super().teardown()


class _Log:
    """What stands for a module's `log` during a private run: training values are left out, with one warning."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module, self.public = trainer, module, module.log
        self._dropped: set[str] = set()
        module.log = self

    def __call__(self, name: str, *args: Any, **others: Any) -> None:
        if not self._trainer.training:
            self.public(name, *args, **others)
        elif name not in self._dropped:
            self._dropped.add(name)
            warnings.warn(
                f"log({name!r}): not logged; what is computed from a lot is private and no plan pays for it",
                stacklevel=2,
            )

    def remove(self) -> None:
        """Give the module its own back."""
        vars(self._module).pop("log", None)

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Within, the module has its own."""
        self.remove()
        try:
            yield
        finally:
            self._module.log = self


class _Epsilon(Callback):  # type: ignore[misc]
    """Logs the epsilon so far, and shows it in the progress bar."""

    def __init__(self, strategy: PrivateStrategy) -> None:
        self._strategy = strategy
        self._spent = running_epsilon(strategy.plan, strategy.plan.steps)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        strategy = self._strategy
        if strategy._log is not None and strategy.lots.lots is not None:
            spent = self._spent(strategy.lots.lots.run.step.taken)
            strategy._log.public("epsilon", spent, prog_bar=True, on_step=True, on_epoch=False, batch_size=1)


@contextmanager
def _unmetered(module: nn.Module) -> Iterator[None]:
    """Within, torchmetrics of the module take nothing in and give nothing out."""
    metrics = [one for one in module.modules() if isinstance(one, Metric | MetricCollection)]
    before = [(one, {name: vars(one)[name] for name in _METERED if name in vars(one)}) for one in metrics]
    try:
        for one in metrics:
            vars(one).update({name: _nothing for name in _METERED})
        yield
    finally:
        for one, own in before:
            for name in _METERED:
                vars(one).pop(name, None)
            vars(one).update(own)


_METERED = ("forward", "update", "compute")


def _nothing(*_: Any, **__: Any) -> Any:
    return Withheld("a training metric")


_ACCUMULATED = "a step is the plan's lot, taken in microbatches that fit"
_BEFORE_THE_MODEL = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_NEVER_CALLED = ("backward", "configure_gradient_clipping", "on_before_backward", "on_after_backward")
_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")


def _flags(trainer: Trainer, plan: Plan, precision: Any) -> list[str]:
    """Flags that the plan does not allow, and why."""
    per_epoch = min(loops.steps_per_epoch(plan), plan.steps)
    epochs = trainer.max_epochs
    wanted = {
        "max_steps": (trainer.max_steps, trainer.max_steps == plan.steps, f"want the plan's {plan.steps}"),
        "max_epochs": (
            epochs,
            epochs in (None, -1) or epochs * per_epoch >= plan.steps,
            f"want none, or enough for the plan's {plan.steps} steps of {per_epoch} an epoch",
        ),
        "accumulate_grad_batches": (
            trainer.accumulate_grad_batches, trainer.accumulate_grad_batches == 1, f"want 1; {_ACCUMULATED}"
        ),
        "gradient_clip_val": (
            trainer.gradient_clip_val, not trainer.gradient_clip_val, "want none; the plan clips each example's"
        ),
        "precision": (type(precision).__name__, type(precision) is Precision, "want 32-true"),
        "limit_train_batches": (
            trainer.limit_train_batches, trainer.limit_train_batches == 1.0, "want 1.0; the plan counts its lots"
        ),
        "overfit_batches": (trainer.overfit_batches, not trainer.overfit_batches, "want 0; the plan draws the lots"),
        "fast_dev_run": (trainer.fast_dev_run, not trainer.fast_dev_run, "want False, or no private data"),
    }  # fmt: skip
    return [f"{name}={value!r}: {why}" for name, (value, fits, why) in wanted.items() if not fits]


def _hooks(trainer: Trainer, module: LightningModule) -> list[str]:
    """Hooks that could mix examples before the model sees them, or that would never be called."""
    wrong = [
        f"{type(one).__name__}: tries lots, or puts several into one step; want settings found on public data"
        for one in trainer.callbacks
        if isinstance(one, LearningRateFinder | BatchSizeFinder | GradientAccumulationScheduler)
    ]
    if not module.automatic_optimization:
        wrong.append("automatic_optimization=False: a module that steps by itself; want automatic optimisation")
    for holder in (module, trainer.datamodule):
        for name in _BEFORE_THE_MODEL:
            if holder is not None and _is_own(holder, name):
                why = "sees a whole lot, and could mix its examples; want that in training_step, or in the data set"
                wrong.append(f"{type(holder).__name__}.{name}: {why}")
    wrong += [f"{type(module).__name__}.{name}: {_UNCALLED}" for name in _NEVER_CALLED if _is_own(module, name)]
    for holder in (module, *trainer.callbacks):
        for name in _HOOKS[2:] if holder is module else _HOOKS:
            if _is_own(holder, name):
                wrong.append(f"{type(holder).__name__}.{name}: {_UNCALLED}")
    return wrong


_UNCALLED = "would look at gradients before the noise, and is not called in a private run; want none"


def _is_own(holder: Any, name: str) -> bool:
    """Whether somebody has written this hook: it is not the library's own."""
    found = getattr(type(holder), name, None)
    return found is not None and not str(getattr(found, "__module__", "")).startswith("lightning.")


__all__ = ["PrivateStrategy"]

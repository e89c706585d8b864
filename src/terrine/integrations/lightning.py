"""PyTorch Lightning, made private: a strategy with which an unchanged LightningModule trains by a plan.

    strategy = PrivateStrategy(plan, train_dataset, account=account)
    trainer = Trainer(strategy=strategy, max_steps=plan.steps)
    trainer.fit(module, strategy.lots)

`training_step` is run for every example alone, as a batch of one. The loop holds no row: its batches are numbers of
steps. Where automatic optimisation would go backward, the next step's noisy gradient is released, and everything after
it, hooks and gradient clipping included, is post-processing. What `training_step` logs is private and is not logged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terrine.errors import InvalidArgument, MissingExtra, OutOfOrder

try:
    import lightning  # noqa: F401
except ImportError as error:
    raise MissingExtra("lightning", extra="lightning") from error

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from terrine.integrations import loops
from terrine.receipts import Charged
from terrine.sgd import Checkpoint, Plan, PrivateSteps, validate
from terrine.sgd.dataset import Collate
from terrine.sgd.steps import start


class PrivateStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """One device, on which a LightningModule trains by a plan; `lots` is what to fit on.

    Args:
        plan: Decides lots, clipping, noise and how many steps there are.
        train_dataset: A map-style data set, or a tuple of tensors.
        account: Charged for the whole plan before the first step.
        person: An id for every row, where the plan draws people.
        collate: Makes a batch of a list of the data set's items.
        workers: Processes that read the data set.
        microbatch: How many examples are in memory at a time, instead of as many as are fastest.
        memory: About how many bytes the activations and gradients of the examples in memory may take.
        checkpoint: Where to keep the private run, with every checkpoint of Lightning's; a run that was interrupted goes
            on from there, after what it has released.
        device: Where the module trains.
        reads_values: `training_step` may read an example's numbers into Python, and keeps nothing of them.
        purpose: What the account notes as the reason.
        by: What the account notes as who asked.

    Guarantee:
        `fit` costs at most `plan.event`, which the account is charged for before the first step.
    """

    strategy_name = "private"

    def __init__(
        self,
        plan: Plan,
        train_dataset: Any,
        *,
        account: Charged | None = None,
        person: Any = None,
        collate: Collate | None = None,
        workers: int = 0,
        microbatch: int | None = None,
        memory: float | None = None,
        checkpoint: str | Path | None = None,
        device: str | torch.device = "cpu",
        reads_values: bool = False,
        purpose: str = "DP-SGD",
        by: str = "terrine.integrations.lightning",
    ) -> None:
        super().__init__(device=device)
        self.plan, self._dataset = plan, train_dataset
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._options: dict[str, Any] = {
            "account": account, "person": person, "collate": collate, "workers": workers, "microbatch": microbatch,
            "memory": memory, "reads_values": reads_values, "purpose": purpose, "by": by,
        }  # fmt: skip
        self.lots = loops.StepLoader(self._begin, plan)
        self._trainer: Trainer | None = None
        self._token: Any = None  # of the step that training_step was called for
        self._given: tuple[Any, ...] = (0,)  # to training_step, after the batch
        self._log: _PublicLog | None = None

    # -- before a run ----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Set up as Lightning does, after everything that the run would depend on was looked at.

        Raises:
            InvalidArgument: flags or hooks that contradict the plan, or could mix examples, all of them.
        """
        module = self.lightning_module
        if trainer.state.fn == TrainerFn.FITTING:
            assert module is not None
            if self._trainer is not None:
                raise OutOfOrder("fit: this strategy has trained; another run costs again, want a new PrivateStrategy")
            wrong = [
                *_check_flags(trainer, self.plan, self.precision_plugin),
                *_check_hooks(trainer, module),
                *self._check_kept(trainer),
            ]
            if wrong:
                raise InvalidArgument(f"Trainer: {'; '.join(wrong)}")
            validate(module)
            self._trainer, self._log = trainer, _PublicLog(trainer, module)
            trainer.callbacks.append(_Epsilon(self))
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and len(self.optimizers) != 1:
            raise InvalidArgument(f"configure_optimizers: {len(self.optimizers)} optimizers; want one")

    def _check_kept(self, trainer: Trainer) -> list[str]:
        """What is wrong with where the run is kept."""
        progress = None if self._checkpoint is None else loops.read_progress(self._checkpoint)
        if progress is not None and progress[0] >= progress[1]:
            return [
                f"checkpoint={str(self._checkpoint)!r} holds a finished run: want another path, where one is paid for"
            ]
        if trainer.ckpt_path is not None and progress is None:
            missing = "no checkpoint= was given" if self._checkpoint is None else f"{self._checkpoint} is missing"
            return [f"ckpt_path: {missing}, which holds the private run; want that of the run"]
        return []

    def process_dataloader(self, dataloader: object) -> object:
        """Refuse to train on anything but the plan's lots, and to validate on the data that they are drawn from."""
        training = self._trainer is not None and self._trainer.training
        if training and dataloader is not self.lots:
            raise InvalidArgument(
                f"train_dataloaders: a {type(dataloader).__name__}; want fit(module, strategy.lots), which the plan "
                "draws"
            )
        if self._trainer is not None and getattr(dataloader, "dataset", None) is self._dataset:
            raise InvalidArgument(
                "val_dataloaders: the training data, whose numbers are private and no plan pays for; want public data"
            )
        return super().process_dataloader(dataloader)

    def _begin(self) -> PrivateSteps:
        """Everything is ready: charge, and draw."""
        trainer, module, path = self._trainer, self.lightning_module, self._checkpoint
        if trainer is None or module is None:
            raise OutOfOrder("lots: want them given to Trainer.fit, with this strategy")
        with _silence_metrics(module):
            steps = start(
                module, self.optimizers[0], self._dataset, self.plan,
                loss=loops.watch_loss(self._compute_alone, self._list_holders), roots=_find_roots(module, trainer),
                checkpoint=None if path is None else Checkpoint(path, every=self.plan.steps + 1),
                precision="bf16" if isinstance(self.precision_plugin, MixedPrecision) else None, **self._options,
            )  # fmt: skip
        if path is not None:
            steps.keep(**{f"schedule{index}": schedule for index, schedule in enumerate(_list_schedules(trainer))})
        loops.check_progress(steps, path, trainer.global_step)
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        progress.ready = progress.completed = steps.number
        return steps

    def _list_holders(self) -> list[Any]:
        """What a training step could keep an example in, or decide by one what the run does."""
        trainer = self._trainer
        assert trainer is not None
        progress = [trainer.fit_loop, trainer.fit_loop.epoch_loop]
        run = [*progress, *self.optimizers, *_list_schedules(trainer), *trainer.callbacks]
        return [self.lightning_module, trainer, *run]

    # -- a step ----------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch of validation; that of a private step is a number."""
        if isinstance(batch, loops.StepToken):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return nan for the loss of the lot, which is private: every example's own is computed at the release."""
        token, *others = (*args, *kwargs.values())
        trainer = self._trainer
        if trainer is not None and trainer.accumulate_grad_batches != 1:
            raise InvalidArgument(f"accumulate_grad_batches={trainer.accumulate_grad_batches}: want 1; {_ACCUMULATED}")
        self._token, self._given = token, tuple(others)
        return loops.withhold_loss(self.root_device).requires_grad_()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *_args: Any, **_others: Any) -> Tensor:
        """Release the next step instead, whose noisy gradient is in `.grad` then.

        Raises:
            OutOfOrder: the batch is not the one that waits.
        """
        del optimizer
        module = self.lightning_module
        assert module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        token, self._token = self._token, None
        with _silence_metrics(module):
            self.lots.release(token)
        detached: Tensor = self.precision_plugin.post_backward(closure_loss, module)
        return detached

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **others: Any) -> Any:
        """Run the closure, which releases a step, once; then step on its gradient."""
        loss = closure()
        return super().optimizer_step(optimizer, lambda: loss, model, **others)

    def _compute_alone(self, model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, LightningModule)
        assert self._trainer is not None
        values = self._trainer.callback_metrics
        before = len(values)
        output = model.training_step(batch, *self._given)
        if len(values) != before:
            raise InvalidArgument("training_step: writes to trainer.callback_metrics; want nothing of an example kept")
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise TypeError(f"training_step: want a loss, got {type(loss).__name__}")  # an example that adds nothing
        return loss

    # -- checkpoints -----------------------------------------------------------------------------------

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load nothing in a private run that is kept: its optimizer is kept with it."""
        if self._checkpoint is None:
            super().load_optimizer_state_dict(checkpoint)

    def save_checkpoint(self, *args: Any, **others: Any) -> None:
        """Save Lightning's checkpoint, and the private run at the same step."""
        super().save_checkpoint(*args, **others)
        self.lots.save()

    def teardown(self) -> None:
        """End the run."""
        self.lots.end()
        if self._log is not None:
            self._log.remove()
        super().teardown()


class _Epsilon(Callback):  # type: ignore[misc]
    """Logs the epsilon so far, which the progress bar shows, and what the plan measures."""

    def __init__(self, strategy: PrivateStrategy) -> None:
        self._strategy = strategy

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        log, last = self._strategy._log, self._strategy.lots.last
        if log is None or last is None:
            return
        how = {"on_step": True, "on_epoch": False, "batch_size": 1}
        log.public("epsilon_so_far", last.epsilon, prog_bar=True, **how)
        log.public("epsilon", self._strategy.plan.epsilon, **how)  # of the whole, wherever the run stops
        for name, value in last.metrics.items():
            log.public(name, value, prog_bar=True, **how)


def _list_schedules(trainer: Trainer) -> list[Any]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def _find_roots(module: LightningModule, trainer: Trainer) -> dict[str, Any]:
    """What the state of a training step is reached from: without the Trainer's own, whose bookkeeping goes on."""
    own = {name: value for name, value in vars(module).items() if name not in _OF_TRAINER}
    run = {"optimizers": list(trainer.optimizers), "schedules": _list_schedules(trainer)}
    return own | run | {type(module).__name__: type(module)}


_OF_TRAINER = ("_trainer", "_fabric", "log")


# -- what may be logged --------------------------------------------------------------------------------


class _PublicLog:
    """What stands for a module's `log` during a private run: training values are left out, with one warning."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module, self.public = trainer, module, module.log
        self._has_warned = False
        module.log = self

    def __call__(self, name: str, *args: Any, **others: Any) -> None:
        if not self._trainer.training:
            self.public(name, *args, **others)
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"log({name!r}): not logged, as whatever training_step logs; what is computed from a lot is private, "
                "and is bought by Plan(metrics=...)",
                stacklevel=2,
            )

    def remove(self) -> None:
        """Give the module its own back."""
        vars(self._module).pop("log", None)


@contextmanager
def _silence_metrics(module: nn.Module) -> Iterator[None]:
    """Within, torchmetrics of the module take nothing in and give nothing out."""
    metrics = [part for part in module.modules() if isinstance(part, Metric | MetricCollection)]
    before = [(metric, {name: vars(metric)[name] for name in _METERED if name in vars(metric)}) for metric in metrics]
    try:
        for metric in metrics:
            vars(metric).update(dict.fromkeys(_METERED, _return_nothing))
        yield
    finally:
        for metric, own in before:
            for name in _METERED:
                vars(metric).pop(name, None)
            vars(metric).update(own)


_METERED = ("forward", "update", "compute")


class _Withheld:
    """The value of a training metric, with which nothing can be computed."""


def _return_nothing(*_: Any, **__: Any) -> _Withheld:
    return _Withheld()


# -- what a Trainer, its callbacks and a module may ask for ---------------------------------------------

_ACCUMULATED = "a step is the plan's lot, taken in microbatches that fit"
_BEFORE_THE_MODEL = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def _check_flags(trainer: Trainer, plan: Plan, precision: Any) -> list[str]:
    """Flags that the plan does not allow, and why."""
    per_epoch = min(loops.steps_per_epoch(plan), plan.steps)
    epochs = trainer.max_epochs
    mixed = type(precision) is MixedPrecision and precision.precision == "bf16-mixed"
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
        "precision": (
            getattr(precision, "precision", type(precision).__name__), type(precision) is Precision or mixed,
            "want '32-true' or 'bf16-mixed'; losses that are scaled by what overflowed tell of it",
        ),
        "limit_train_batches": (
            trainer.limit_train_batches, trainer.limit_train_batches == 1.0, "want 1.0; the plan counts its lots"
        ),
        "overfit_batches": (trainer.overfit_batches, not trainer.overfit_batches, "want 0; the plan draws the lots"),
        "fast_dev_run": (trainer.fast_dev_run, not trainer.fast_dev_run, "want False, or no private data"),
    }  # fmt: skip
    return [f"{name}={value!r}: {why}" for name, (value, fits, why) in wanted.items() if not fits]


def _check_hooks(trainer: Trainer, module: LightningModule) -> list[str]:
    """Hooks that ask for batches of rows, or that would never be called, and why."""
    wrong = [
        f"{type(callback).__name__}: tries lots, or puts several into one step; want settings found on public data"
        for callback in trainer.callbacks
        if isinstance(callback, LearningRateFinder | BatchSizeFinder | GradientAccumulationScheduler)
    ]
    if "training_step" in vars(module):
        wrong.append("training_step: replaced on the module, as by torch.compile; want the module itself")
    if not module.automatic_optimization:
        wrong.append("automatic_optimization=False: a module that steps by itself; want automatic optimisation")
    for holder in (module, trainer.datamodule):
        for name in _BEFORE_THE_MODEL:
            if holder is not None and _is_own(holder, name):
                why = "the loop has no rows; want that in training_step, or in the data set"
                wrong.append(f"{type(holder).__name__}.{name}: {why}")
    if _is_own(module, "backward"):
        why = "is not called in a private run, which takes every example's gradient alone; want none"
        wrong.append(f"{type(module).__name__}.backward: {why}")
    return wrong


def _is_own(holder: Any, name: str) -> bool:
    """Whether somebody has written this hook: it is not the library's own."""
    hook = getattr(type(holder), name, None)
    return hook is not None and not str(getattr(hook, "__module__", "")).startswith("lightning.")


__all__ = ["PrivateStrategy"]

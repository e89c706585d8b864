"""PyTorch Lightning, made private: a strategy with which an unchanged LightningModule trains by a plan.

    strategy = PrivateStrategy(plan, train_dataset, account=account)
    trainer = Trainer(strategy=strategy, max_steps=plan.steps)
    trainer.fit(module, strategy.lots)

Automatic optimisation hands the optimizer a closure that runs `training_step` and goes backward. Here the closure runs
first: `training_step` is the program that every example runs alone, as a lot of one, and its clipped gradients are
added up. Then the optimizer steps without it, on the noisy sum. What `training_step` logs is private and is not logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from terrine import check
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.integrations import loops
from terrine.integrations.lightning.flags import ACCUMULATED, wrong_flags, wrong_hooks
from terrine.integrations.lightning.logs import PublicLog, unmetered
from terrine.receipts import Charged
from terrine.sgd import Plan
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.layers import validate
from terrine.sgd.lots import Collate
from terrine.sgd.private import Lots, start
from terrine.sgd.training import running_epsilon


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
        account: Charged | None = None,
        person: Any = None,
        collate: Collate | None = None,
        workers: int = 0,
        memory: float | None = None,
        checkpoint: str | Path | None = None,
        device: str | torch.device = "cpu",
        purpose: str = "DP-SGD",
        by: str = "terrine.integrations.lightning",
    ) -> None:
        super().__init__(device=device)
        self.plan, self.account, self._purpose, self._by, self._person = plan, account, purpose, by, person
        self._dataset, self._collate, self._workers = train_dataset, collate, workers
        self._memory = None if memory is None else check.positive("memory", memory)
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self.lots = loops.Epochs(self._begin, plan)
        self._trainer: Trainer | None = None
        self._loss: loops.Loss | None = None
        self._given: tuple[Any, ...] = ()  # to training_step, after the batch
        self._log: PublicLog | None = None

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
            wrong = [
                *wrong_flags(trainer, self.plan, self.precision_plugin),
                *wrong_hooks(trainer, module),
                *self._kept(trainer),
            ]
            if wrong:
                raise InvalidArgument(f"Trainer: {'; '.join(wrong)}")
            validate(module)
            self._trainer, self._log = trainer, PublicLog(trainer, module)
            self._loss = loops.Loss(module, self._alone, self._steers)
            trainer.callbacks.append(_Epsilon(self))
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and len(self.optimizers) != 1:
            raise InvalidArgument(f"configure_optimizers: {len(self.optimizers)} optimizers; want one")

    def _steers(self) -> list[Any]:
        """What a training step could keep an example in, or decide by one what the run does."""
        trainer = self._trainer
        assert trainer is not None
        schedules = [one.scheduler for one in trainer.lr_scheduler_configs]
        return [trainer, trainer.fit_loop, *self.optimizers, *schedules]

    def _kept(self, trainer: Trainer) -> list[str]:
        """What is wrong with where the run is kept."""
        path = self._checkpoint
        if trainer.ckpt_path is not None and (path is None or not path.exists()):
            missing = "no checkpoint= was given" if path is None else f"{path} is missing"
            return [f"ckpt_path: {missing}, which holds the noise that the run would have had; want that of the run"]
        if trainer.ckpt_path is None and path is not None and path.exists():
            unfinished = path.with_name(path.name + ".key").exists()
            want = "an unfinished run: want ckpt_path=, or" if unfinished else "a finished run: want"
            return [f"checkpoint={str(path)!r} holds {want} another path, where a run is paid for"]
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

    def _begin(self) -> Lots:
        """Everything is ready: charge, and draw."""
        if self._trainer is None:
            raise OutOfOrder("lots: want them given to Trainer.fit, with this strategy")
        module, path = self.lightning_module, self._checkpoint
        assert self._log is not None
        with self._log.removed():  # which is no part of the model that a checkpoint is bound to
            _, _, lots = start(
                module, self.optimizers[0], self._dataset, self.plan, self.account,
                watch=False, person=self._person, collate=self._collate, workers=self._workers, memory=self._memory,
                checkpoint=None if path is None else Checkpoint(path, every=self.plan.steps + 1),
                bound={"loss": type(module).training_step}, purpose=self._purpose, by=self._by,
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
            raise InvalidArgument(f"accumulate_grad_batches={trainer.accumulate_grad_batches}: want 1; {ACCUMULATED}")
        self._given = tuple(others)
        with unmetered(module):
            loops.add_clipped(self.lots.lots, self._loss, lot.opened(), self._memory)
        return loops.withheld(self.root_device)

    def _alone(self, batch: Any) -> Tensor:
        module, trainer = self.lightning_module, self._trainer
        assert module is not None
        assert trainer is not None
        before = len(trainer.callback_metrics)
        found = module.training_step(batch, *self._given)
        if len(trainer.callback_metrics) != before:
            raise InvalidArgument("training_step: writes to trainer.callback_metrics; want nothing of an example kept")
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


class _Epsilon(Callback):  # type: ignore[misc]
    """Logs the epsilon so far, and shows it in the progress bar."""

    def __init__(self, strategy: PrivateStrategy) -> None:
        self._strategy = strategy
        self._spent = running_epsilon(strategy.plan, strategy.plan.steps)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        strategy = self._strategy
        if strategy._log is not None and strategy.lots.lots is not None:
            spent = self._spent(strategy.lots.lots.run.step.taken)
            shown = {"on_step": True, "on_epoch": False, "batch_size": 1}
            strategy._log.public("epsilon_so_far", spent, prog_bar=True, **shown)
            strategy._log.public("epsilon", strategy.plan.epsilon, **shown)  # of the whole, wherever the run stops


__all__ = ["PrivateStrategy"]

"""transformers' Trainer, made private: one noisy step for every lot of the plan, of losses of one example each.

    trainer = PrivateTrainer(model, args, train_dataset=train, plan=plan, account=account)
    trainer.train()

`compute_loss`, the trainer's own or yours, is run for every example alone, as a batch of one: a mean over tokens is
over the example's own, without its padding and its labels of -100, and no other example's number of tokens divides it.
The loop holds no row: its batches are numbers of steps, and `training_step` releases the noisy gradient that the
optimizer then steps on. Arguments are free, set by the plan, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from terrine.errors import InvalidArgument, OutOfOrder
from terrine.integrations import loops
from terrine.integrations.accelerate import find_precision
from terrine.integrations.huggingface.arguments import TextCollator, check_arguments, check_collator
from terrine.receipts import Charged
from terrine.sgd import Checkpoint, Plan, PrivateSteps, validate
from terrine.sgd.run import epsilon_so_far
from terrine.sgd.steps import start
from terrine.sgd.trainer import epsilon_text

KEPT = "_private_run.pt"
"""The private run in `args.output_dir`, beside the count of its steps, `_private_run.pt.count`. Not pushed to a hub."""

_PRIVATE = ("loss", "total_flos", "num_input_tokens_seen")  # of a training log, and all that begins so:
_PRIVATE_PREFIX = "train_"


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that trains by a plan.

    Args:
        model: The model to train; adapters of peft are one.
        args: As for the Trainer. `per_device_train_batch_size` times `gradient_accumulation_steps` is the plan's lot,
            or neither is given. With `bf16` the loss runs under autocast; norms and sums stay in single precision.
        train_dataset: Examples that are dictionaries, as the model takes them.
        plan: Decides lots, clipping, noise and how many steps there are.
        account: Charged for the whole plan before the first step.
        person: An id for every example, where the plan draws people.
        length: A public length that every text is padded and cut to, so that texts of any length have one shape.
        memory: About how many bytes the activations and gradients of the examples in memory may take.
        reads_values: The loss may read an example's numbers into Python, and keeps nothing of them.
        purpose: What the account notes as the reason.
        by: What the account notes as who asked.
        others: Further arguments of the Trainer, such as callbacks.

    Raises:
        InvalidArgument: An argument contradicts the plan, or what it asks for is not known to keep examples apart.

    Guarantee:
        `train` costs at most `plan.event`, which the account is charged for before the first step.
    """

    data_collator: Any

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        train_dataset: Any,
        plan: Plan,
        account: Charged | None = None,
        person: Any = None,
        length: int | None = None,
        memory: float | None = None,
        reads_values: bool = False,
        purpose: str = "DP-SGD",
        by: str = "terrine.integrations.huggingface",
        **others: Any,
    ) -> None:
        callers = set(vars(self))
        if others.get("model_init") is not None:
            raise InvalidArgument("model_init: want model=; a model for every trial is a run for every trial")
        if others.get("eval_dataset") is not None:
            _refuse_private(train_dataset, others["eval_dataset"])
        if isinstance(train_dataset, TensorDataset | tuple | list) and not _has_mappings(train_dataset):
            raise InvalidArgument("train_dataset: want examples that are dictionaries, as a model takes them")
        validate(model)
        self.plan, self.account, self._person = plan, account, person
        arguments, microbatch = check_arguments(args, plan)
        super().__init__(model, arguments, train_dataset=train_dataset, **others)
        precision = find_precision(self.accelerator)
        if self.is_model_parallel:
            raise InvalidArgument("hf_device_map: a model on several devices; want one device for each process")
        if length is None:
            check_collator(self.data_collator)
        self._collate = TextCollator.from_trainer(self, length)
        if length is not None:
            self.data_collator = self._collate  # for evaluation as well
        self._options: dict[str, Any] = {
            "microbatch": microbatch, "memory": memory, "precision": precision, "reads_values": reads_values,
            "purpose": purpose, "by": by,
        }  # fmt: skip
        self._runs_examples = False  # while what is logged is an example's
        self._loader: loops.StepLoader | None = None  # from train() on
        self._resumes = False
        self.add_callback(_Privacy(self))
        self._bookkeeping = frozenset(vars(self)) - callers

    # -- what the loop asks for ------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the numbers of the plan's steps, for batches.

        Raises:
            OutOfOrder: it was asked for before.
        """
        if self._loader is not None:
            raise OutOfOrder("get_train_dataloader: a run draws its lots once; want a new PrivateTrainer for another")
        self._loader = loops.StepLoader(self._begin, self.plan)
        return self._loader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Release the next step, whose noisy gradient is in `.grad` then; return nan for its loss, which is private.

        Raises:
            OutOfOrder: the batch is not the one that waits.
        """
        del num_items_in_batch  # of the whole lot, which is other people's
        if self._loader is None:
            raise OutOfOrder("training_step: no run was begun; want train()")
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self._runs_examples = True
        try:
            self._loader.release(inputs)
        finally:
            self._runs_examples = False
        return loops.withhold_loss(self.args.device)

    def _compute_alone(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.compute_loss(model, dict(batch), num_items_in_batch=None)
        if not isinstance(loss, Tensor):
            raise TypeError(f"compute_loss: want a tensor, got {type(loss).__name__}")  # an example that adds nothing
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: how many there were tells how many examples were drawn."""
        del inputs
        return 0

    # -- a run -----------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **others: Any) -> TrainOutput:
        """Train to the plan's last step, or go on with a run that was interrupted, after what it has released.

        Raises:
            OutOfOrder: this trainer has trained, or the folder holds an unfinished run that is not resumed.
        """
        if trial is not None:
            raise InvalidArgument("trial: every trial is a run that has to be paid for; want train() without one")
        if self._loader is not None:
            raise OutOfOrder("train: this trainer has trained; another run costs again, want a new PrivateTrainer")
        self._resumes = bool(resume_from_checkpoint)
        self._check_kept()
        if resume_from_checkpoint is True and get_last_checkpoint(self.args.output_dir) is None:
            resume_from_checkpoint = None  # interrupted before its first checkpoint, after its first step
        try:
            output = super().train(resume_from_checkpoint=resume_from_checkpoint, **others)
        finally:
            self._end()
        public = {name: value for name, value in output.metrics.items() if not _is_private(name)}
        # of the whole plan, however many steps were taken: who stopped early may have stopped by what was released
        public |= {"epsilon": self.plan.epsilon, "delta": self.plan.delta}
        return TrainOutput(output.global_step, float("nan"), public)

    def hyperparameter_search(self, *_args: Any, **_others: Any) -> Any:
        """Refuse: the best of ten runs has spent ten plans."""
        raise InvalidArgument(
            "hyperparameter_search: every trial is a run on the private data; want terrine.events.RandomStopping, or "
            "public data"
        )

    def log(self, logs: dict[str, float], *args: Any, **others: Any) -> None:
        """Log what is public, the epsilon so far and what the plan measures; nothing that a loss logs."""
        if self._runs_examples:
            return
        public = {name: value for name, value in logs.items() if not _is_private(name)}
        last = None if self._loader is None else self._loader.last
        if last is not None:
            public["epsilon_so_far"] = last.epsilon
            if "loss" in logs:
                public |= last.metrics
        super().log(public, *args, **others)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the Trainer's own, on anything but the training data."""
        named = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        _refuse_private(self.train_dataset, self.eval_dataset if named is None else named)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the Trainer's own, on anything but the training data."""
        _refuse_private(self.train_dataset, test_dataset)
        return super().get_test_dataloader(test_dataset)

    # -- where a run is kept ---------------------------------------------------------------------------

    @property
    def _path(self) -> Path:
        return Path(self.args.output_dir) / KEPT

    def _check_kept(self) -> None:
        """Refuse to resume what is not there, and to begin afresh over an unfinished run; remove a finished one."""
        progress = loops.read_progress(self._path)
        if progress is None and self._resumes:
            raise InvalidArgument(
                f"resume_from_checkpoint: {self._path} is missing, which holds the private run; want the whole folder "
                "of the run, or a fresh one"
            )
        if progress is None or self._resumes:
            return
        taken, limit = progress
        if taken < limit:
            raise OutOfOrder(
                f"{self._path}: an unfinished private run; want resume_from_checkpoint=True, or another output_dir, "
                "where a fresh run has to be paid for"
            )
        if self.args.should_save:
            self._path.unlink()
            Checkpoint(self._path).count_path.unlink(missing_ok=True)

    def _begin(self) -> PrivateSteps:
        """Everything is ready: charge, and draw."""
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # without what accelerate puts around it
        keeps = self._resumes or str(self.args.save_strategy).rpartition(".")[2].lower() != "no"
        self.model.train()
        self._runs_examples = True  # made-up ones
        try:
            steps = start(
                self.model, optimizer, self.train_dataset, self.plan,
                loss=loops.watch_loss(self._compute_alone, lambda: self._list_holders(optimizer)),
                account=self.account, person=self._person, collate=self._collate,
                workers=self.args.dataloader_num_workers, roots=self._find_roots(),
                checkpoint=Checkpoint(self._path, every=self.plan.steps + 1) if keeps else None, **self._options,
            )  # fmt: skip
        finally:
            self._runs_examples = False
        if keeps:
            steps.keep(schedule=self.lr_scheduler)
        loops.check_progress(steps, self._path if keeps else None, self.state.global_step)
        self.state.global_step = steps.number
        return steps

    def _end(self) -> None:
        """End the run."""
        if self._loader is not None:
            self._loader.end()

    def _list_holders(self, optimizer: Any) -> list[Any]:
        """What a loss could keep an example in, or decide by one what the run does."""
        given = self.compute_loss_func
        loss = [self, given, getattr(given, "__self__", None), getattr(self.model, "config", None)]
        run = [self.args, self.state, self.control, optimizer, self.lr_scheduler, self.callback_handler]
        return [*loss, *run, *self.callback_handler.callbacks]

    def _find_roots(self) -> dict[str, Any]:
        """What the loss's state is reached from: model, losses and what a subclass keeps, without the Trainer's own."""
        own = {name: value for name, value in vars(self).items() if name not in self._bookkeeping}
        own.pop("_bookkeeping", None)
        return own | {
            "model": self.model, "compute_loss_func": self.compute_loss_func, type(self).__name__: type(self),
            "args": self.args, "state": self.state, "control": self.control, "optimizer": self.optimizer,
            "schedule": self.lr_scheduler,
        }  # fmt: skip


class _Privacy(TrainerCallback):  # type: ignore[misc]
    """Saves the private run with every checkpoint, and shows the epsilon so far in the progress bar."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        plan = self._trainer.plan
        state.epoch = state.global_step / loops.steps_per_epoch(plan)
        for callback in self._trainer.callback_handler.callbacks:
            if (bar := getattr(callback, "training_bar", None)) is not None:
                bar.set_postfix_str(epsilon_text(epsilon_so_far(plan, state.global_step)))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, state, control
        if self._trainer._loader is not None:
            self._trainer._loader.save()


def _is_private(name: str) -> bool:
    return name in _PRIVATE or name.startswith(_PRIVATE_PREFIX)


def _has_mappings(dataset: Any) -> bool:
    return len(dataset) > 0 and isinstance(dataset[0], Mapping)


def _refuse_private(train: Any, data: Any) -> None:
    several = data.values() if isinstance(data, Mapping) else [data]
    if any(part is train or getattr(part, "dataset", None) is train for part in several):
        raise InvalidArgument(
            "eval_dataset is train_dataset: its numbers are private and no plan pays for them; want public data, or "
            "terrine.sgd.Trainer(validation=Budgeted(...))"
        )


__all__ = ["PrivateTrainer"]

"""transformers' Trainer, made private: the plan's lots, losses of one example each, and one noisy step for every lot.

    trainer = PrivateTrainer(model, args, train_dataset=train, plan=plan, account=account)
    trainer.train()

`compute_loss`, the trainer's own or yours, is run for every example alone, as a lot of one: a mean over tokens is that
over the example's own tokens, without its padding and its labels of -100, and no other example's number of tokens
divides it. The gradient that the optimizer is given is the noisy sum of these clipped gradients; the training loss, its
norms and speeds are private and are not logged. Arguments are right, settled by the plan, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import TrainOutput

from terrine import check
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.integrations import loops
from terrine.integrations.accelerate import check_accelerator
from terrine.integrations.huggingface.arguments import settled
from terrine.integrations.huggingface.collating import Collating, checked_collator
from terrine.receipts import Charged
from terrine.sgd import Plan
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.layers import validate
from terrine.sgd.private import Lots, start
from terrine.sgd.training import epsilon_text, running_epsilon

KEPT = "_private_run.pt"
"""The run's own checkpoint in `args.output_dir`, beside which lies its key while the run is unfinished."""

_PRIVATE = ("loss", "grad_norm", "total_flos", "num_input_tokens_seen")  # of a training log, and all that begins so:
_PRIVATE_PREFIX = "train_"


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that trains by a plan.

    `length` pads and cuts every text to a public length, so that lots of any texts have one shape. `memory` is
    about how many bytes the activations and gradients of the examples in memory take. `purpose` and `by` are what the
    account notes. Further arguments are the Trainer's own.

    Guarantee: `train` costs at most `plan.event`, which the account is charged for before the first lot is drawn.

    Raises:
        InvalidArgument: an argument contradicts the plan, or what it asks for is not known to keep examples apart.
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
        purpose: str = "DP-SGD",
        by: str = "terrine.integrations.huggingface",
        **others: Any,
    ) -> None:
        if others.get("model_init") is not None:
            raise InvalidArgument("model_init: want model=; a model for every trial is a run for every trial")
        if others.get("eval_dataset") is not None:
            _refuse_private(train_dataset, others["eval_dataset"])
        if isinstance(train_dataset, TensorDataset | tuple | list) and not _is_of_mappings(train_dataset):
            raise InvalidArgument("train_dataset: want examples that are dictionaries, as a model takes them")
        validate(model)
        self.plan, self.account, self._purpose, self._by, self._person = plan, account, purpose, by, person
        self._memory = None if memory is None else check.positive("memory", memory)
        super().__init__(model, settled(args, plan), train_dataset=train_dataset, **others)
        check_accelerator(self.accelerator)
        if self.is_model_parallel:
            raise InvalidArgument("hf_device_map: a model on several devices; want one device for each process")
        if length is None:
            checked_collator(self.data_collator)
        self._collate = Collating.of(self, length)
        if length is not None:
            self.data_collator = self._collate  # for evaluation as well
        self._loss: loops.Loss | None = None
        self._inside = False  # a lot, where what is logged is an example's
        self._loader: loops.Epochs | None = None  # from train() on
        self._resumes = False
        self.add_callback(_Privacy(self))

    # -- what the loop asks for ------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The plan's lots, which nobody but `training_step` sees into."""
        if self._loader is not None:
            raise OutOfOrder("get_train_dataloader: a run draws its lots once; want a new PrivateTrainer for another")
        self._loader = loops.Epochs(self._begin, self.plan)
        return self._loader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Clip and add up a lot's gradients; the optimizer's step will release them. The loss is withheld."""
        del num_items_in_batch  # of the whole lot, which is other people's
        lots = None if self._loader is None else self._loader.lots
        if lots is None or self._loss is None or not isinstance(inputs, loops.SealedLot):
            raise OutOfOrder("training_step: the batch is no lot of the plan; want train(), with this trainer's loader")
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self._inside = True
        try:
            loops.add_clipped(lots, self._loss, inputs.opened(), self._memory)
        finally:
            self._inside = False
        return loops.withheld(self.args.device)

    def _alone(self, batch: Mapping[str, Any]) -> Tensor:
        loss = self.compute_loss(self.model, dict(batch), num_items_in_batch=None)
        if not isinstance(loss, Tensor):
            raise InvalidArgument(f"compute_loss: want a tensor, got {type(loss).__name__}")
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Nothing: how many there were tells how many examples were drawn."""
        del inputs
        return 0

    # -- a run -----------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **others: Any) -> TrainOutput:
        """Train to the plan's last step, or go on with a run that was interrupted, with the noise it would have had.

        Raises:
            OutOfOrder: this trainer has trained, or the folder holds an unfinished run that is not resumed.
        """
        if trial is not None:
            raise InvalidArgument("trial: every trial is a run that has to be paid for; want train() without one")
        if self._loader is not None:
            raise OutOfOrder("train: this trainer has trained; another run costs again, want a new PrivateTrainer")
        self._resumes = bool(resume_from_checkpoint)
        self._check_kept()
        try:
            found = super().train(resume_from_checkpoint=resume_from_checkpoint, **others)
        finally:
            self._end()
        public = {name: value for name, value in found.metrics.items() if not _is_private(name)}
        # of the whole plan, however many steps were taken: who stopped early may have stopped by what was released
        public |= {"epsilon": self.plan.epsilon, "delta": self.plan.delta}
        return TrainOutput(found.global_step, float("nan"), public)

    def hyperparameter_search(self, *_args: Any, **_others: Any) -> Any:
        """Refused: the best of ten runs has spent ten plans."""
        raise InvalidArgument(
            "hyperparameter_search: every trial is a run on the private data; want terrine.events.RandomStopping, or "
            "public data"
        )

    def log(self, logs: dict[str, float], *args: Any, **others: Any) -> None:
        """Log what is public, and the epsilon so far; nothing of what a loss logs of its examples."""
        if self._inside:
            return
        public = {name: value for name, value in logs.items() if not _is_private(name)}
        if self._loader is not None and self._loader.lots is not None:
            public["epsilon_so_far"] = self._loader.lots.epsilon
        super().log(public, *args, **others)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The Trainer's own, on anything but the training data."""
        named = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        _refuse_private(self.train_dataset, self.eval_dataset if named is None else named)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The Trainer's own, on anything but the training data."""
        _refuse_private(self.train_dataset, test_dataset)
        return super().get_test_dataloader(test_dataset)

    def push_to_hub(self, *args: Any, **others: Any) -> Any:
        """Hand on the model; not while the key of its noise lies in the folder."""
        if self._key.exists():
            raise OutOfOrder(f"push_to_hub: {self._key} would see through the noise; want the run finished first")
        return super().push_to_hub(*args, **others)

    # -- checkpoints -----------------------------------------------------------------------------------

    @property
    def _path(self) -> Path:
        return Path(self.args.output_dir) / KEPT

    @property
    def _key(self) -> Path:
        return self._path.with_name(KEPT + ".key")

    def _check_kept(self) -> None:
        if self._resumes and not self._path.exists():
            raise InvalidArgument(
                f"resume_from_checkpoint: {self._path} is missing, which holds the noise that the run would have had; "
                "want the whole folder of the run, or a fresh one"
            )
        if self._resumes or not self._path.exists():
            return
        if self._key.exists():
            raise OutOfOrder(
                f"{self._path}: an unfinished private run; want resume_from_checkpoint=True, or another output_dir, "
                "where a fresh run has to be paid for"
            )
        self._path.unlink(missing_ok=True)  # of a run that is over

    def _begin(self) -> Lots:
        """Everything is ready: charge, and draw."""
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # without what accelerate puts around it
        self._loss = loops.Loss(self.model, self._alone, lambda: self._steers(optimizer))
        keeps = self._resumes or str(self.args.save_strategy).rpartition(".")[2].lower() != "no"
        _, _, lots = start(
            self.model, optimizer, self.train_dataset, self.plan, self.account,
            watch=False, person=self._person, collate=self._collate, workers=self.args.dataloader_num_workers,
            memory=self._memory,
            checkpoint=Checkpoint(self._path, every=self.plan.steps + 1) if keeps else None, bound=self._bound(),
            purpose=self._purpose, by=self._by,
        )  # fmt: skip
        if keeps:
            lots.keep(schedule=self.lr_scheduler)
        if self._resumes and lots.run.step.taken != self.state.global_step:
            raise InvalidArgument(
                f"resume_from_checkpoint: a folder of step {self.state.global_step}, and the private run was saved at "
                f"{lots.run.step.taken}; want checkpoint-{lots.run.step.taken}"
            )
        return lots

    def _steers(self, optimizer: Any) -> list[Any]:
        """What a loss could keep an example in, or decide by one what the run does."""
        given = self.compute_loss_func
        loss = [self, given, getattr(given, "__self__", None), getattr(self.model, "config", None)]
        return [*loss, self.args, self.state, self.control, optimizer, self.lr_scheduler, self.callback_handler]

    def _end(self) -> None:
        """End the run."""
        if self._loader is not None and self._loader.lots is not None:
            self._loader.end()

    def _bound(self) -> dict[str, Any]:
        """What decides gradients beside model, optimizer, plan and data."""
        args = self.args
        loss = (type(self).compute_loss, self.compute_loss_func, args.label_smoothing_factor, args.neftune_noise_alpha)
        schedule = (str(args.lr_scheduler_type), args.warmup_steps, dict(args.lr_scheduler_kwargs or {}))
        return {"loss": loss, "schedule": schedule}

    def _save_private_run(self) -> None:
        if self._loader is not None and self._loader.lots is not None:
            run = self._loader.lots.run
            if run.checkpoint is not None and run.step.taken < run.step.limit:
                run.checkpoint.save(run)


class _Privacy(TrainerCallback):  # type: ignore[misc]
    """Saves the private run with every checkpoint, and shows the epsilon so far in the progress bar."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer
        self._spent = running_epsilon(trainer.plan, trainer.plan.steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        state.epoch = state.global_step / loops.steps_per_epoch(self._trainer.plan)
        for one in self._trainer.callback_handler.callbacks:
            if (bar := getattr(one, "training_bar", None)) is not None:
                bar.set_postfix_str(epsilon_text(self._spent(state.global_step)))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, state, control
        self._trainer._save_private_run()


def _is_private(name: str) -> bool:
    return name in _PRIVATE or name.startswith(_PRIVATE_PREFIX)


def _is_of_mappings(dataset: Any) -> bool:
    return len(dataset) > 0 and isinstance(dataset[0], Mapping)


def _refuse_private(train: Any, data: Any) -> None:
    several = data.values() if isinstance(data, Mapping) else [data]
    if any(one is train or getattr(one, "dataset", None) is train for one in several):
        raise InvalidArgument(
            "eval_dataset is train_dataset: its numbers are private and no plan pays for them; want public data, or "
            "terrine.sgd.Trainer(validation=Budgeted(...))"
        )


__all__ = ["PrivateTrainer"]

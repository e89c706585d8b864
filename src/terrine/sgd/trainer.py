"""Training without writing the loop: fit, evaluate, a running epsilon, the best model, averaged weights.

    trainer = Trainer(model, optimizer, loss, plan)
    history = trainer.fit(dataset)
    trainer.evaluate(test_set)

`loss` is a function of (model, batch) of one example, or a criterion, as for `private_steps`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim import Optimizer

from terrine import accounting, check
from terrine.errors import BudgetExceeded, InvalidArgument
from terrine.events import Budget, Composed, Event, settled_unit
from terrine.receipts import Charged
from terrine.rounding import up
from terrine.sgd import sharding
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.clipping import Clipper
from terrine.sgd.dataset import Collate, RowReader
from terrine.sgd.devices import find_device, move_batch
from terrine.sgd.loss import Loss, as_loss, average_views, call_model
from terrine.sgd.metrics import Best, Budgeted, PublicValidation, are_classes, right
from terrine.sgd.optimizers import Average
from terrine.sgd.plan import Plan
from terrine.sgd.run import PrivateStep, PrivateSteps
from terrine.sgd.setup import unwrap
from terrine.sgd.steps import start


@dataclass(frozen=True)
class History:
    """What a fit did: public facts only."""

    steps: int
    epsilon: float
    delta: float
    scores: tuple[tuple[int, float], ...] = ()
    best_step: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracy on the data given. On private data these numbers are not covered by the plan.

    The accuracy is nan where the targets are not classes.
    """

    loss: float
    accuracy: float


class Trainer:
    """Trains a model by a plan.

    Guarantee: `fit` costs at most `plan.event`, plus the event of a budgeted validation; the account is charged for
    both before the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        plan: Plan,
        *,
        account: Charged | None = None,
        schedule: Any = None,
        average: Average | None = None,
        validation: PublicValidation | Budgeted | None = None,
        augment: Callable[[Tensor], Tensor] | None = None,
        views: int = 1,
        checkpoint: Checkpoint | str | Path | None = None,
        collate: Collate | None = None,
        workers: int = 0,
        microbatch: int | None = None,
        memory: float | None = None,
        device: str | torch.device | None = None,
        precision: str | None = None,
        reads_values: bool = False,
        progress: bool | None = None,
    ) -> None:
        self.model, self.optimizer, self.loss, self.plan = model, optimizer, loss, plan
        self._loss = as_loss(loss)
        self.account, self.schedule, self.average, self.validation = account, schedule, average, validation
        self.augment, self.views = augment, check.whole("views", views)
        if augment is None and self.views > 1:
            raise check.refuse("views", views, "1 without augment=, which would make them")
        self._checkpoint = Checkpoint.at(checkpoint)
        self._options: dict[str, Any] = {
            "collate": collate, "workers": workers, "microbatch": microbatch, "memory": memory, "device": device,
            "precision": precision, "reads_values": reads_values,
        }  # fmt: skip
        self._progress = sys.stderr.isatty() if progress is None else progress

    def fit(
        self,
        dataset: Any,
        *,
        person: Any = None,
        until: Budget | None = None,
        purpose: str = "DP-SGD",
        on_start: Callable[[PrivateSteps], Any] | None = None,
    ) -> History:
        """Train on `dataset` to the plan's end, or to the last step that keeps `until`.

        Where the plan draws people, `person` has an id for every row of the data set. `on_start` is given the steps
        before the first of them, as an audit needs them.

        Raises:
            BudgetExceeded: the account has not enough left, or `until` not enough for one step; nothing was trained.
        """
        looks = None if self.validation is None else self.validation.event()
        limit = self.plan.steps if until is None else affordable_steps(self.plan, until, looks)
        if not limit:
            raise BudgetExceeded(f"until={until}: not one step of the plan keeps it; nothing was charged or trained")
        if looks is not None and settled_unit(looks) is not self.plan.unit:
            found = settled_unit(looks).value
            raise InvalidArgument(f"validation: protects one {found}; want one {self.plan.unit.value}, as the plan")
        keeps_parts = self._checkpoint is not None and (self.average is not None or self.validation is not None)
        if keeps_parts and sharding.is_sharded(unwrap(self.model)):
            raise InvalidArgument(
                "checkpoint= beside average= or validation=: not for a sharded model, whose best and "
                "mean weights are in parts; want one of them without the other"
            )
        loss = self._loss if self.augment is None else average_views(self._loss, self.augment, self.views)
        self.model.train()
        steps = start(
            self.model, self.optimizer, dataset, self.plan, loss=loss, account=self.account, person=person,
            limit=limit, looks=looks, checkpoint=self._checkpoint, purpose=purpose,
            roots={"model": self.model, "loss": self.loss, "augment": self.augment}, **self._options,
        )  # fmt: skip
        if on_start is not None:
            on_start(steps)
        return self._train(steps)

    def evaluate(self, dataset: Any, *, at_once: int = 1024) -> Evaluation:
        """Return the mean loss and the accuracy of the model on `dataset`: of data that needs no protection.

        Raises:
            InvalidArgument: it has no examples.
        """
        source = RowReader(dataset, collate=self._options["collate"], workers=self._options["workers"])
        count = source.examples
        if not count:
            raise InvalidArgument("a data set without examples: want one or more to evaluate on")
        places = torch.arange(count).numpy()
        total, correct, training = 0.0, 0.0, self.model.training
        self.model.eval()
        try:
            home, clipper = find_device(self.model, None), Clipper(unwrap(self.model), self.loss, reads_values=True)
            with sharding.gather(unwrap(self.model)):
                for batch in source.batches(iter([places[at : at + at_once] for at in range(0, count, at_once)])):
                    batch = move_batch(batch, home)
                    total += float(clipper.measure(self._loss, batch).sum())
                    correct += self._right_answers(batch)
        finally:
            self.model.train(training)
        return Evaluation(total / count, correct / count)

    @torch.no_grad()
    def _right_answers(self, batch: Any) -> float:
        """How many labels are the largest output; nan where a batch is not of inputs and classes."""
        if not isinstance(batch, tuple | list) or len(batch) < 2 or not isinstance(batch[-1], Tensor):
            return math.nan
        *inputs, target = batch
        output = call_model(self.model, *inputs)
        return float(right(output, target).sum()) if are_classes(output, target) else math.nan

    def _train(self, steps: PrivateSteps) -> History:
        best = Best()
        if self._checkpoint is not None:
            others = {"schedule": self.schedule, "average": self.average, "best": best if self.validation else None}
            steps.keep(**{name: one for name, one in others.items() if one is not None})
        with self._bar(len(steps)) as show, closing(steps):
            for step in steps:
                self.optimizer.step()
                if self.schedule is not None:
                    self.schedule.step()
                if self.average is not None:
                    self.average.update(self.model)
                show(step)
                if self.validation is not None and self.validation.due(step.number, len(steps)):
                    self._look(steps, best)
        self._finish(best)
        looks = None if self.validation is None else self.validation.event()
        spent = self.plan.epsilon_after(steps.number)
        if looks is not None and self.plan.private:
            spent = accounting.epsilon(Composed([self.plan.event_after(steps.number), looks]), delta=self.plan.delta)
        chosen = best.taken if self.validation else None
        return History(steps.number, spent, self.plan.delta, tuple(best.scores), chosen)

    def _look(self, steps: PrivateSteps, best: Best) -> None:
        assert self.validation is not None
        if self.average is not None:
            self.average.exchange(self.model)
        with sharding.gather(unwrap(self.model)):
            score = self.validation.score(self.model, steps.release.key, steps.number)
        best.offer(self.model, score, steps.number)
        if self.average is not None:
            self.average.exchange(self.model)

    def _finish(self, best: Best) -> None:
        if self.validation is not None:
            best.restore(self.model)
        elif self.average is not None:
            self.average.exchange(self.model)
        self.model.eval()

    @contextmanager
    def _bar(self, steps: int) -> Iterator[Callable[[PrivateStep], None]]:
        if not self._progress:
            yield lambda _step: None
            return
        columns = (TextColumn("DP-SGD"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[spent]}"))
        smooth: dict[str, float] = {}
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=steps, spent="")

            def show(step: PrivateStep) -> None:
                for name, value in step.metrics.items():
                    smooth[name] = value + 0.9 * (smooth.get(name, value) - value)
                words = [epsilon_text(step.epsilon), *(f"{name} {value:.3g}" for name, value in smooth.items())]
                bar.update(task, completed=step.number, spent="  ".join(words))

            yield show


def affordable_steps(plan: Plan, budget: Budget, looks: Event | None = None) -> int:
    """Return the most steps of `plan`, taken from its beginning, that keep `budget` together with other looks."""

    def kept(steps: int) -> bool:
        event = plan.event_after(steps)
        event = event if looks is None else Composed([event, looks])
        return plan.private and accounting.delta(event, epsilon=budget.epsilon) <= budget.delta

    low, high = 0, plan.steps
    if kept(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low


def epsilon_text(epsilon: float) -> str:
    """A running epsilon as a progress bar shows it."""
    return f"epsilon <= {up(epsilon, 3)}" if math.isfinite(epsilon) else "NOT private"


__all__ = ["Evaluation", "History", "Trainer", "affordable_steps", "epsilon_text"]

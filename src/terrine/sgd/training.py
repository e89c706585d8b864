"""Training without writing the loop: fit, evaluate, a running epsilon, the best model, averaged weights.

    trainer = Trainer(model, optimizer, criterion, plan)
    history = trainer.fit(dataset)
    trainer.evaluate(test_set)

A trainer knows its criterion, so it computes the clipped sums itself, a few examples at a time: a lot of any size
takes the memory of a small one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from terrine import accounting, check
from terrine.errors import BudgetExceeded, InvalidArgument
from terrine.events import Budget, settled_unit
from terrine.receipts import Charged
from terrine.rounding import up
from terrine.sgd.averaging import Average
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.clipping import clipped_sum
from terrine.sgd.clipping.alone import each_alone
from terrine.sgd.devices import moved, settled
from terrine.sgd.lots import Collate, RowReader
from terrine.sgd.plan import Plan
from terrine.sgd.private import Lots, start, unwrapped
from terrine.sgd.validation import Best, Budgeted, PublicValidation, are_classes, right
from terrine.sgd.views import Views, augmented, averaged, clipped_views


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
        criterion: Callable[[Any, Any], Tensor],
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
        memory: float | None = None,
        device: str | torch.device | None = None,
        progress: bool | None = None,
    ) -> None:
        if not callable(criterion):
            raise check.refuse("criterion", criterion, "a function of the output and the target")
        self.model, self.optimizer, self.criterion, self.plan = model, optimizer, criterion, plan
        self.account, self.schedule, self.average, self.validation = account, schedule, average, validation
        self.augment, self.views = augment, check.whole("views", views)
        if augment is None and self.views > 1:
            raise check.refuse("views", views, "1 without augment=, which would make them")
        self._checkpoint = Checkpoint(Path(checkpoint)) if isinstance(checkpoint, str | Path) else checkpoint
        self._collate, self._workers = collate, workers
        self._memory = None if memory is None else check.positive("memory", memory)
        self._device = device
        self._progress = sys.stderr.isatty() if progress is None else progress

    def fit(self, dataset: Any, *, person: Any = None, until: Budget | None = None, purpose: str = "DP-SGD") -> History:
        """Train on `dataset` to the plan's end, or to the last step that keeps `until`.

        Where the plan draws people, `person` has an id for every row of the data set.

        Raises:
            BudgetExceeded: the account has not enough left, or `until` not enough for one step; nothing was trained.
        """
        limit = self.plan.steps if until is None else affordable_steps(self.plan, until)
        if not limit:
            raise BudgetExceeded(f"until={until}: not one step of the plan keeps it; nothing was charged or trained")
        looks = None if self.validation is None else self.validation.event()
        if looks is not None and settled_unit(looks) is not self.plan.unit:
            found = settled_unit(looks).value
            raise InvalidArgument(f"validation: protects one {found}; want one {self.plan.unit.value}, as the plan")
        _, _, lots = start(
            self.model, self.optimizer, dataset, self.plan, self.account,
            watch=False, person=person, limit=limit, looks=looks, collate=self._collate, workers=self._workers,
            memory=self._memory, checkpoint=self._checkpoint, bound=self._bound(), device=self._device,
            purpose=purpose,
        )  # fmt: skip
        return self._train(lots)

    def evaluate(self, dataset: Any, *, at_once: int = 1024) -> Evaluation:
        """Mean loss and accuracy of the model on `dataset`.

        Raises:
            InvalidArgument: it has no examples.
        """
        source = RowReader(dataset, collate=self._collate, workers=self._workers)
        count = source.examples
        if not count:
            raise InvalidArgument("a data set without examples: want one or more to evaluate on")
        places = torch.arange(count).numpy()
        loss, correct, training = 0.0, 0.0, self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                home = settled(self.model, None)
                for batch in source.batches(iter([places[at : at + at_once] for at in range(0, count, at_once)])):
                    x, y = moved(batch, home)
                    output = self.model(x)
                    loss += self._total(output, y)
                    correct += float(right(output, y).sum()) if are_classes(output, y) else math.nan
        finally:
            self.model.train(training)
        return Evaluation(loss / count, correct / count)

    def _total(self, output: Any, y: Any) -> float:
        """The sum of the losses, each of an example alone."""
        leaves, nesting = tree_flatten((output, y))
        held = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def alone(*row: Tensor) -> Tensor:
            given = iter(row)
            lot = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return self.criterion(*tree_unflatten(lot, nesting)).sum()

        return float(each_alone(alone, held).sum())

    def _bound(self) -> dict[str, Any]:
        """What decides the gradients of a step, beside model, optimizer, plan and data."""
        return {
            "loss": self.criterion,
            "schedule": self.schedule,
            "average": self.average,
            "validation": self.validation,
            "augmentation": None if self.augment is None else (self.augment, self.views),
        }

    def _train(self, lots: Lots) -> History:
        step, best = lots.run.step, Best()
        if self._checkpoint is not None:
            others = {"schedule": self.schedule, "average": self.average, "best": best if self.validation else None}
            lots.keep(**{name: one for name, one in others.items() if one is not None})
        self.model.train()
        with self._bar(step.limit) as show:
            for batch in lots:
                self._step(lots, batch)
                show(step.taken)
                if self.validation is not None and self.validation.due(step.taken, step.limit):
                    self._look(lots, best)
        self._finish(best)
        found = self.plan.epsilon_after(step.taken)
        chosen = best.taken if self.validation else None
        return History(step.taken, found, self.plan.delta, tuple(best.scores), chosen)

    @cached_property
    def _learner(self) -> tuple[nn.Module, Callable[[Any, Any], Tensor]]:
        """What is clipped, the same from step to step."""
        model = unwrapped(self.model)
        return (model, self.criterion) if self.augment is None else (Views(model), averaged(self.criterion))

    def _step(self, lots: Lots, batch: Any) -> None:
        x, y = batch
        model, criterion = self._learner
        if self.augment is not None:
            x = augmented(self.augment, x, self.views)
        rule, room = lots.run.step.rule, self._memory
        clipped = clipped_sum if self.augment is None else clipped_views
        people = lots.run.people
        lots.run.step.add(clipped(model, criterion, x, y, clip=rule, memory=room, rows=people) if len(y) else None)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        if self.average is not None:
            self.average.update(self.model)

    def _look(self, lots: Lots, best: Best) -> None:
        assert self.validation is not None
        if self.average is not None:
            self.average.exchange(self.model)
        score = self.validation.score(self.model, lots.run.step.key, lots.run.step.taken)
        best.offer(self.model, score, lots.run.step.taken)
        if self.average is not None:
            self.average.exchange(self.model)

    def _finish(self, best: Best) -> None:
        if self.validation is not None:
            best.restore(self.model)
        elif self.average is not None:
            self.average.exchange(self.model)
        self.model.eval()

    @contextmanager
    def _bar(self, steps: int) -> Iterator[Callable[[int], None]]:
        if not self._progress:
            yield lambda _taken: None
            return
        columns = (TextColumn("DP-SGD"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[spent]}"))
        running = running_epsilon(self.plan, steps)
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=steps, spent="")
            yield lambda taken: bar.update(task, completed=taken, spent=epsilon_text(running(taken)))


def affordable_steps(plan: Plan, budget: Budget) -> int:
    """The most steps of `plan`, taken from its beginning, that keep `budget`."""

    def kept(steps: int) -> bool:
        return plan.private and accounting.delta(plan.event_after(steps), epsilon=budget.epsilon) <= budget.delta

    low, high = 0, plan.steps
    if kept(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low


def running_epsilon(plan: Plan, steps: int, looks: int = 20) -> Callable[[int], float]:
    """Epsilon so far, from above: computed at a few milestones, each shown until the next; infinite without noise."""
    found: dict[int, float] = {}

    def spent(taken: int) -> float:
        milestone = min(-(-taken * looks // steps) * steps // looks + 1, steps)
        if milestone not in found:
            found[milestone] = plan.epsilon_after(milestone)
        return found[milestone]

    return spent


def epsilon_text(epsilon: float) -> str:
    """A running epsilon as a progress bar shows it."""
    return f"epsilon <= {up(epsilon, 3)}" if math.isfinite(epsilon) else "NOT private"


__all__ = ["Evaluation", "History", "Trainer", "affordable_steps", "epsilon_text", "running_epsilon"]

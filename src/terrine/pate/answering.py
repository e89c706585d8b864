"""How every aggregator answers: plan, charge, draw, in this order.

A plan fixes, before any vote is looked at, how many queries may be asked and answered; the event is the plan's, so its
cost holds whatever the votes are. The account is charged before an answer is drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from terrine import accounting, check
from terrine.errors import BudgetExceeded, InvalidArgument
from terrine.events import Budget, Event, Reproducible, Unit
from terrine.pate.votes import Votes
from terrine.receipts import Charged, Receipt
from terrine.rng import SYSTEM, Source

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

ABSTAINED = -1
"""The label of a query that was not answered."""


@dataclass(frozen=True)
class AnswerPlan:
    """How far an aggregator may go: at most `queries` asked and `answers` given."""

    queries: int
    answers: int
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Answers:
    """What leaves the owner's side: labels with their event. `ABSTAINED` where there is none."""

    labels: Integers
    event: Event
    asked: int
    """How many queries, from the first on, were put to the teachers."""
    plan: AnswerPlan
    """How far they might have gone: what was paid for."""
    stopped: str = ""
    """Why not all queries were asked, if so."""

    @property
    def answered(self) -> Integers:
        """Which queries have a label."""
        return np.flatnonzero(self.labels != ABSTAINED)


@dataclass(frozen=True, eq=False)
class Questions:
    """All that a rule needs to answer what was planned and paid for."""

    votes: Votes
    plan: AnswerPlan
    student: Floats
    rng: Source

    @property
    def counts(self) -> Integers:
        """The votes on the planned queries."""
        return self.votes.counts[: self.plan.queries]


@dataclass(frozen=True)
class DrawnLabels:
    """Labels of the first queries, and where and why the drawing stopped if that was before the plan's end."""

    labels: Integers
    asked: int
    stopped: str = ""


class Aggregator(ABC):
    """A rule from votes to answers; its fields are public."""

    tests_first: ClassVar[bool] = False
    """Whether a query may cost a test only, so that fewer answers than queries can be planned."""
    wants_student: ClassVar[bool] = False
    """Whether it compares the votes with a student's predictions."""

    @abstractmethod
    def event(self, queries: int, answers: int | None = None, *, unit: Unit = Unit.EXAMPLE) -> Event:
        """The cost of asking `queries` times and answering at most `answers` of them."""

    def answer(
        self,
        votes: Votes,
        *,
        student: ArrayLike | None = None,
        most: int | None = None,
        rng: Source = SYSTEM,
        account: Charged | None = None,
        receipt: Receipt | None = None,
        budget: Budget | None = None,
        purpose: str = "pate: labels",
        by: str = "",
    ) -> Answers:
        """Labels for `votes`: at most `most`, and as many as fit `budget`; `student` for rules that want one.

        Guarantee: `event` of the plan, charged to `account` first, or before, for which the `receipt` stands; votes the
        rule is not private for are refused.
        """
        self.require(votes.deal)
        predicted = self.predictions(student, votes.counts.shape)
        plan = planned(self, len(votes), unit=votes.unit, budget=budget, most=most)
        event = self.event(plan.queries, plan.answers, unit=votes.unit)
        event = Reproducible(event) if rng.reproducible else event
        if receipt is not None:
            receipt.covers(event)
        elif account is not None:
            account.charge(event, purpose=purpose, by=by or type(self).__name__)
        drawn = self._draw(Questions(votes, plan, predicted, rng))
        labels = np.full(len(votes), ABSTAINED, dtype=np.int64)
        labels[: len(drawn.labels)] = drawn.labels
        return Answers(labels, event, drawn.asked, plan, drawn.stopped)

    def require(self, deal: Mapping[str, Any]) -> None:
        """Refuse a deal to teachers that share data: one person would move more than one vote."""
        if deal["kind"] != "disjoint" or deal["most_parts"] != 1:
            raise InvalidArgument(
                f"teachers are not disjoint ({deal['kind']}, up to {deal['most_parts']} parts for one"
                " example): want a Partition; SubsampleAggregate is for subsampled teachers"
            )

    @abstractmethod
    def _draw(self, asked: Questions) -> DrawnLabels:
        """Answer the planned queries."""

    def predictions(self, student: ArrayLike | None, shape: tuple[int, ...]) -> Floats:
        """The student's probabilities (queries, classes), where the rule wants them.

        Raises:
            InvalidArgument: they are missing, of another shape or not finite, or not wanted.
        """
        name = type(self).__name__
        if not self.wants_student:
            if student is not None:
                raise InvalidArgument(f"student given to {name}: want none; InteractiveGaussianMax compares with one")
            return np.zeros((shape[0], 0))
        predicted = np.asarray([] if student is None else student, dtype=float)
        if predicted.shape != shape or not np.isfinite(predicted).all():
            raise InvalidArgument(f"student has shape {predicted.shape}: {name} wants finite probabilities {shape}")
        return predicted


def planned(
    rule: Aggregator, queries: int, *, unit: Unit, budget: Budget | None = None, most: int | None = None
) -> AnswerPlan:
    """How many of `queries` queries, and how many answers, fit `budget`; nothing here looks at a vote.

    Raises:
        BudgetExceeded: not even one query fits.
    """
    answers = queries if most is None else min(queries, check.whole("most", most))
    reason = "" if rule.tests_first or answers == queries else f"{answers} of {queries} queries were wanted"
    queries = queries if rule.tests_first else answers
    if budget is None or not queries:
        return AnswerPlan(queries, answers, reason)

    def fits(asked: int, given: int) -> bool:
        event = rule.event(asked, given, unit=unit)
        return accounting.delta(event, epsilon=budget.epsilon) <= budget.delta

    if fits(queries, answers):
        return AnswerPlan(queries, answers, reason)
    if rule.tests_first and fits(queries, 1):  # all the tests, and as many answers as are left
        answers = most_that(lambda given: fits(queries, given), answers)
        return AnswerPlan(queries, answers, f"the budget allows {answers} answers")
    asked = most_that(lambda number: fits(number, min(number, answers)), queries)
    if not asked:
        raise BudgetExceeded(
            f"epsilon={budget.epsilon}, delta={budget.delta}: not even one query of {rule} fits; raise the noise"
        )
    return AnswerPlan(asked, min(asked, answers), f"the budget allows {asked} of {queries} queries")


def most_that(fits: Callable[[int], bool], upper: int) -> int:
    """The largest number up to `upper` that fits; 0 if none does."""
    low, high = 0, upper + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

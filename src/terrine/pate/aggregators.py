"""From votes to answers: noisy maxima, each with the event it costs [PAE17] [PSM18].

    LaplaceMax              argmax n_j + Lap(b)                      one vote moves two counts: (2/b, 0)-DP
    GaussianMax             argmax n_j + N(0, s^2)                   a Gaussian of sensitivity sqrt 2
    ConfidentGaussianMax    the same, if max n_j + N(0, s1^2) >= T   the test moves by 1; else it abstains
    InteractiveGaussianMax  the same test on max n_j - M p_j, with p the student's own prediction

An aggregator's fields are public. A plan fixes, before any vote is looked at, how many queries may be asked and
answered; the event is the plan's, so its cost holds whatever the votes are. The account is charged before an answer
is drawn.

Noise is drawn on a grid of 2^-20 votes, rounded from the real line, exactly; so events are the continuous ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from terrine import accounting, check
from terrine.errors import BudgetExceeded, InvalidArgument
from terrine.events import Budget, Composed, Event, Gaussian, Laplace, Neighbours, Repeated, Reproducible, Unit
from terrine.mechanisms.lattice import Shape
from terrine.mechanisms.lattice import noise as lattice_noise
from terrine.pate.votes import Votes
from terrine.rng import SYSTEM, Source

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Noise = float | Sequence[float]

ABSTAINED = -1
"""The label of a query that was not answered."""
GRID = 2**20
"""Steps of the noise to one vote."""
SLACK = 1 / GRID
"""How much a gap between two noisy counts can be off by rounding, in votes."""


class Account(Protocol):
    """Where costs are charged: a ledger's account, or anything with this method."""

    def charge(self, event: Event, *, purpose: str, by: str) -> Any:
        """Record the cost, or refuse it."""


@dataclass(frozen=True, eq=False)
class Answers:
    """What leaves the owner's side: labels with their event. `ABSTAINED` where there is none."""

    labels: Integers
    event: Event
    asked: int
    """How many queries, from the first on, were put to the teachers."""
    stopped: str = ""
    """Why not all queries were asked, if so."""

    @property
    def answered(self) -> Integers:
        """Which queries have a label."""
        return np.flatnonzero(self.labels != ABSTAINED)


@dataclass(frozen=True)
class Plan:
    """How far an aggregator may go: at most `queries` asked and `answers` given."""

    queries: int
    answers: int
    reason: str = ""


class Aggregator(Protocol):
    """What every aggregator offers."""

    def event(self, queries: int, answers: int | None = None, *, unit: Unit = Unit.EXAMPLE) -> Event:
        """The cost of asking `queries` times and answering at most `answers` of them."""


@dataclass(frozen=True)
class LaplaceMax:
    """LNMax: the plurality under Laplace noise of scale `noise` on every count; one scale, or one for each query.

    Guarantee: (2 / noise, 0)-DP for each answer. With the papers' gamma, noise = 1 / gamma.
    """

    noise: Noise

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise", _scales(self.noise))

    def event(self, queries: int, answers: int | None = None, *, unit: Unit = Unit.EXAMPLE) -> Event:
        """Two counts move by 1 each under independent noise."""
        counted = queries if answers is None else answers
        return _repeated(
            [
                (Repeated(Laplace(noise=one, neighbours=Neighbours.REPLACE_ONE, unit=unit), times=2), times)
                for one, times in _grouped(self.noise, counted)
            ]
        )

    def answer(
        self,
        votes: Votes,
        *,
        rng: Source = SYSTEM,
        account: Account | None = None,
        budget: Budget | None = None,
        purpose: str = "pate: labels",
    ) -> Answers:
        """A label for each query.

        Guarantee: `event` of as many queries as fit `budget`; votes of teachers that share data are refused.
        """
        plan = _planned(self, votes, budget=budget, most=None)
        event = _charged(self, plan, votes, rng, account, purpose)
        return _answered(_noisy_max(votes.counts[: plan.queries], self.noise, Shape.LAPLACE, rng), event, plan, votes)


@dataclass(frozen=True)
class GaussianMax:
    """GNMax: the plurality under Gaussian noise of deviation `noise`; one, or one for each query.

    Guarantee: one Gaussian of sensitivity sqrt 2 for each answer.
    """

    noise: Noise

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise", _scales(self.noise))

    def event(self, queries: int, answers: int | None = None, *, unit: Unit = Unit.EXAMPLE) -> Event:
        """One vote moves two counts by 1: the l2 sensitivity is sqrt 2."""
        counted = queries if answers is None else answers
        return _repeated([(_maximum(one, unit), times) for one, times in _grouped(self.noise, counted)])

    def answer(
        self,
        votes: Votes,
        *,
        rng: Source = SYSTEM,
        account: Account | None = None,
        budget: Budget | None = None,
        purpose: str = "pate: labels",
    ) -> Answers:
        """A label for each query, as many as fit `budget`."""
        plan = _planned(self, votes, budget=budget, most=None)
        event = _charged(self, plan, votes, rng, account, purpose)
        return _answered(_noisy_max(votes.counts[: plan.queries], self.noise, Shape.GAUSSIAN, rng), event, plan, votes)


@dataclass(frozen=True)
class ConfidentGaussianMax:
    """Confident-GNMax: answer only where the largest count, plus noise, reaches `threshold`.

    Guarantee: a Gaussian of sensitivity 1 and deviation `test_noise` for each query asked, and a GNMax of deviation
    `noise` for each answer that the plan allows.
    """

    threshold: float
    test_noise: float
    noise: float

    def __post_init__(self) -> None:
        check.number("threshold", self.threshold)
        check.positive("test_noise", self.test_noise)
        check.positive("noise", self.noise)

    def event(self, queries: int, answers: int | None = None, *, unit: Unit = Unit.EXAMPLE) -> Event:
        """A test for every query, a maximum for every answer."""
        test = Gaussian(noise=self.test_noise, neighbours=Neighbours.REPLACE_ONE, unit=unit)
        counted = queries if answers is None else answers
        return _repeated([(test, queries), (_maximum(self.noise, unit), counted)])

    def answer(
        self,
        votes: Votes,
        *,
        most: int | None = None,
        rng: Source = SYSTEM,
        account: Account | None = None,
        budget: Budget | None = None,
        purpose: str = "pate: labels",
    ) -> Answers:
        """Labels where the teachers agree, at most `most` of them; after that, no further query is asked."""
        plan = _planned(self, votes, budget=budget, most=most)
        event = _charged(self, plan, votes, rng, account, purpose)
        asked = votes.counts[: plan.queries]
        passed = _passes(asked.max(axis=1), self.threshold, self.test_noise, rng)
        return _answered_some(asked, passed, self.noise, event, plan, votes, rng)


@dataclass(frozen=True)
class InteractiveGaussianMax:
    """Interactive-GNMax: first see whether the teachers disagree with what the student already predicts.

    Where max n_j - M p_j, plus noise, reaches `threshold`, the teachers answer; elsewhere the student's own prediction
    stands if it is above `confidence`, at no further cost.
    """

    threshold: float
    test_noise: float
    noise: float
    confidence: float = 0.9

    def __post_init__(self) -> None:
        check.number("threshold", self.threshold)
        check.positive("test_noise", self.test_noise)
        check.positive("noise", self.noise)
        check.half_open_unit("confidence", self.confidence)

    def event(self, queries: int, answers: int | None = None, *, unit: Unit = Unit.EXAMPLE) -> Event:
        """A test for every query, a maximum for every answer of the teachers."""
        same = ConfidentGaussianMax(threshold=self.threshold, test_noise=self.test_noise, noise=self.noise)
        return same.event(queries, answers, unit=unit)

    def answer(
        self,
        votes: Votes,
        *,
        student: Floats,
        most: int | None = None,
        rng: Source = SYSTEM,
        account: Account | None = None,
        budget: Budget | None = None,
        purpose: str = "pate: labels",
    ) -> Answers:
        """Labels from the teachers where they correct the `student` (queries, classes), else the student's own."""
        predicted = np.asarray(student, dtype=float)
        if predicted.shape != votes.counts.shape or not np.isfinite(predicted).all():
            raise InvalidArgument(
                f"student has shape {predicted.shape}: want finite probabilities {votes.counts.shape}"
            )
        plan = _planned(self, votes, budget=budget, most=most)
        event = _charged(self, plan, votes, rng, account, purpose)
        asked, predicted = votes.counts[: plan.queries], predicted[: plan.queries]
        # Rounded to the grid by a public rule: one vote still moves it by at most 1.
        expected = np.rint(predicted * votes.teachers * GRID) / GRID
        passed = _passes((asked - expected).max(axis=1), self.threshold, self.test_noise, rng)
        found = _answered_some(asked, passed, self.noise, event, plan, votes, rng)
        own = (found.labels[: found.asked] == ABSTAINED) & (predicted[: found.asked].max(axis=1) > self.confidence)
        found.labels[: found.asked][own] = predicted[: found.asked].argmax(axis=1)[own]
        return found


def require_disjoint(votes: Votes) -> None:
    """Refuse votes of teachers that share data: one person would move more than one vote."""
    if not votes.disjoint:
        raise InvalidArgument(
            f"teachers are not disjoint ({votes.deal['kind']}, up to {votes.deal['most_parts']} parts for one example):"
            " want a Partition; SubsampleAggregate is for subsampled teachers"
        )


def _scales(noise: Noise) -> float | tuple[float, ...]:
    if isinstance(noise, Sequence | np.ndarray):
        if not len(noise):
            raise InvalidArgument("noise=[]: want one number, or one for each query")
        return tuple(check.positive("noise", one) for one in noise)
    return check.positive("noise", noise)


def _grouped(noise: Noise, queries: int) -> list[tuple[float, int]]:
    """Each noise with the number of queries that it serves."""
    if isinstance(noise, float | int):
        return [(float(noise), queries)]
    if queries > len(noise):
        raise InvalidArgument(f"noise has {len(noise)} entries for {queries} queries: want one for each")
    values, times = np.unique(np.asarray(noise[:queries]), return_counts=True)
    return [(float(value), int(count)) for value, count in zip(values, times, strict=True)]


def _maximum(noise: float, unit: Unit) -> Event:
    return Gaussian(noise=noise / math.sqrt(2), neighbours=Neighbours.REPLACE_ONE, unit=unit)


def _repeated(parts: list[tuple[Event, int]]) -> Event:
    found = [Repeated(event, times=times) for event, times in parts if times]
    return found[0] if len(found) == 1 else Composed(found)


def _planned(aggregator: Aggregator, votes: Votes, *, budget: Budget | None, most: int | None) -> Plan:
    require_disjoint(votes)
    queries = len(votes)
    answers = queries if most is None else min(queries, check.whole("most", most))
    if budget is None or not queries:
        return Plan(queries, answers)

    def fits(asked: int, given: int) -> bool:
        event = aggregator.event(asked, given, unit=votes.unit)
        return accounting.delta(event, epsilon=budget.epsilon) <= budget.delta

    if fits(queries, answers):
        return Plan(queries, answers)
    paired = not isinstance(aggregator, ConfidentGaussianMax | InteractiveGaussianMax)
    if not paired and fits(queries, 1):  # all the tests, and as many answers as are left
        answers = _most(lambda given: fits(queries, given), answers)
        return Plan(queries, answers, f"the budget allows {answers} answers")
    asked = _most(lambda number: fits(number, number), queries)
    if not asked:
        raise BudgetExceeded(
            f"epsilon={budget.epsilon}, delta={budget.delta}: not even one query fits; raise the noise"
        )
    return Plan(asked, asked, f"the budget allows {asked} of {queries} queries")


def _most(fits: Any, upper: int) -> int:
    """The largest number up to `upper` that fits; 0 if none does."""
    low, high = 0, upper + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _charged(
    aggregator: Aggregator, plan: Plan, votes: Votes, rng: Source, account: Account | None, purpose: str
) -> Event:
    event = aggregator.event(plan.queries, plan.answers, unit=votes.unit)
    if rng.reproducible:
        event = Reproducible(event)
    if account is not None:
        account.charge(event, purpose=purpose, by=type(aggregator).__name__)
    return event


def _draw(shape: Shape, scale: float, count: int, rng: Source) -> Integers:
    return lattice_noise(shape, scale * GRID, rounded=True).sample(count, rng)


def _noisy_max(counts: Integers, noise: Noise, shape: Shape, rng: Source) -> Integers:
    noisy = counts * GRID
    if isinstance(noise, float | int):
        return _first(noisy + _draw(shape, float(noise), counts.size, rng).reshape(counts.shape))
    scales = np.asarray(noise[: len(counts)])
    for scale in np.unique(scales):
        rows = np.flatnonzero(scales == scale)
        drawn = _draw(shape, float(scale), rows.size * counts.shape[1], rng)
        noisy[rows] += drawn.reshape(rows.size, counts.shape[1])
    return _first(noisy)


def _first(noisy: Integers) -> Integers:
    first: Integers = noisy.argmax(axis=1).astype(np.int64)
    return first


def _passes(largest: NDArray[Any], threshold: float, noise: float, rng: Source) -> NDArray[np.bool_]:
    scaled = np.rint(largest * float(GRID)).astype(np.int64)
    drawn = _draw(Shape.GAUSSIAN, noise, len(scaled), rng)
    return scaled + drawn >= math.ceil(threshold * GRID)


def _answered(labels: Integers, event: Event, plan: Plan, votes: Votes) -> Answers:
    every = np.full(len(votes), ABSTAINED, dtype=np.int64)
    every[: len(labels)] = labels
    return Answers(every, event, plan.queries, plan.reason)


def _answered_some(
    asked: Integers, passed: NDArray[np.bool_], noise: float, event: Event, plan: Plan, votes: Votes, rng: Source
) -> Answers:
    chosen = np.flatnonzero(passed)
    number, reason = plan.queries, plan.reason
    if len(chosen) > plan.answers:
        number = int(chosen[plan.answers])
        chosen = chosen[: plan.answers]
        reason = reason or f"all {plan.answers} planned answers were given"
    elif plan.queries == len(votes):
        reason = ""
    labels = np.full(len(votes), ABSTAINED, dtype=np.int64)
    labels[chosen] = _noisy_max(asked[chosen], noise, Shape.GAUSSIAN, rng)
    return Answers(labels, event, number, reason)

"""From votes to answers: noisy maxima, each with the event it costs [PAE17] [PSM18].

    LaplaceMax              argmax n_j + Lap(b)                      one vote moves two counts: (2/b, 0)-DP
    GaussianMax             argmax n_j + N(0, s^2)                   a Gaussian of sensitivity sqrt 2
    ConfidentGaussianMax    the same, if max n_j + N(0, s1^2) >= T   the test moves by 1; else it abstains
    InteractiveGaussianMax  the same test on max n_j - M p_j, with p the student's own prediction

Noise is drawn on a grid of 2^-20 votes, rounded from the real line, exactly; so events are the continuous ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine import check
from terrine.errors import InvalidArgument
from terrine.events import Composed, Event, Gaussian, Laplace, Neighbours, Repeated, Unit
from terrine.mechanisms.lattice import Shape
from terrine.mechanisms.lattice import noise as lattice_noise
from terrine.pate.answering import ABSTAINED, Aggregator, DrawnLabels, Integers, Questions
from terrine.rng import Source

Noise = float | Sequence[float]

GRID = 2**20
"""Steps of the noise to one vote."""
SLACK = 1 / GRID
"""How much a gap between two noisy counts can be off by rounding, in votes."""


@dataclass(frozen=True)
class LaplaceMax(Aggregator):
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

    def _draw(self, asked: Questions) -> DrawnLabels:
        return _every_maximum(asked, self.noise, Shape.LAPLACE)


@dataclass(frozen=True)
class GaussianMax(Aggregator):
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

    def _draw(self, asked: Questions) -> DrawnLabels:
        return _every_maximum(asked, self.noise, Shape.GAUSSIAN)


@dataclass(frozen=True)
class ConfidentGaussianMax(Aggregator):
    """Confident-GNMax: answer only where the largest count, plus noise, reaches `threshold`.

    Guarantee: a Gaussian of sensitivity 1 and deviation `test_noise` for each query asked, and a GNMax of deviation
    `noise` for each answer that the plan allows.
    """

    threshold: float
    test_noise: float
    noise: float
    tests_first = True

    def __post_init__(self) -> None:
        check.number("threshold", self.threshold)
        check.positive("test_noise", self.test_noise)
        check.positive("noise", self.noise)

    def event(self, queries: int, answers: int | None = None, *, unit: Unit = Unit.EXAMPLE) -> Event:
        """A test for every query, a maximum for every answer."""
        test = Gaussian(noise=self.test_noise, neighbours=Neighbours.REPLACE_ONE, unit=unit)
        counted = queries if answers is None else answers
        return _repeated([(test, queries), (_maximum(self.noise, unit), counted)])

    def _draw(self, asked: Questions) -> DrawnLabels:
        passed = _passes(asked.counts.max(axis=1), self.threshold, self.test_noise, asked.rng)
        return _some_maxima(asked, passed, self.noise)


@dataclass(frozen=True)
class InteractiveGaussianMax(Aggregator):
    """Interactive-GNMax: first see whether the teachers disagree with what the student already predicts.

    Where max n_j - M p_j, plus noise, reaches `threshold`, the teachers answer; elsewhere the student's own prediction
    stands if it is above `confidence`, at no further cost.
    """

    threshold: float
    test_noise: float
    noise: float
    confidence: float = 0.9
    tests_first = wants_student = True

    def __post_init__(self) -> None:
        check.number("threshold", self.threshold)
        check.positive("test_noise", self.test_noise)
        check.positive("noise", self.noise)
        check.half_open_unit("confidence", self.confidence)

    def event(self, queries: int, answers: int | None = None, *, unit: Unit = Unit.EXAMPLE) -> Event:
        """A test for every query, a maximum for every answer of the teachers."""
        same = ConfidentGaussianMax(threshold=self.threshold, test_noise=self.test_noise, noise=self.noise)
        return same.event(queries, answers, unit=unit)

    def _draw(self, asked: Questions) -> DrawnLabels:
        predicted = asked.student[: asked.plan.queries]
        # Rounded to the grid by a public rule: one vote still moves it by at most 1.
        expected = np.rint(predicted * asked.votes.teachers * GRID) / GRID
        passed = _passes((asked.counts - expected).max(axis=1), self.threshold, self.test_noise, asked.rng)
        found = _some_maxima(asked, passed, self.noise)
        own = (found.labels == ABSTAINED) & (predicted.max(axis=1) > self.confidence)
        own[found.asked :] = False
        return DrawnLabels(np.where(own, predicted.argmax(axis=1), found.labels), found.asked, found.stopped)


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


def _every_maximum(asked: Questions, noise: Noise, shape: Shape) -> DrawnLabels:
    return DrawnLabels(_noisy_max(asked.counts, noise, shape, asked.rng), asked.plan.queries, asked.plan.reason)


def _some_maxima(asked: Questions, passed: NDArray[np.bool_], noise: float) -> DrawnLabels:
    """Labels where the test passed, up to the planned number.

    What comes after the last of them is not asked: where the next test would have passed is not told.
    """
    plan = asked.plan
    chosen, number, reason = np.flatnonzero(passed)[: plan.answers], plan.queries, plan.reason
    if len(chosen) and len(chosen) == plan.answers:
        number = int(chosen[-1]) + 1
    if number < plan.queries:
        reason = reason or f"all {plan.answers} planned answers were given"
    elif number == len(asked.votes):
        reason = ""  # the budget would have cut answers, but it did not come to that
    labels = np.full(plan.queries, ABSTAINED, dtype=np.int64)
    labels[chosen] = _noisy_max(asked.counts[chosen], noise, Shape.GAUSSIAN, asked.rng)
    return DrawnLabels(labels, number, reason)


def _lattice(shape: Shape, scale: float, count: int, rng: Source) -> Integers:
    return lattice_noise(shape, scale * GRID, rounded=True).sample(count, rng)


def _noisy_max(counts: Integers, noise: Noise, shape: Shape, rng: Source) -> Integers:
    noisy = counts * GRID
    if isinstance(noise, float | int):
        return _first(noisy + _lattice(shape, float(noise), counts.size, rng).reshape(counts.shape))
    scales = np.asarray(noise[: len(counts)])
    for scale in np.unique(scales):
        rows = np.flatnonzero(scales == scale)
        drawn = _lattice(shape, float(scale), rows.size * counts.shape[1], rng)
        noisy[rows] += drawn.reshape(rows.size, counts.shape[1])
    return _first(noisy)


def _first(noisy: Integers) -> Integers:
    first: Integers = noisy.argmax(axis=1).astype(np.int64)
    return first


def _passes(largest: NDArray[Any], threshold: float, noise: float, rng: Source) -> NDArray[np.bool_]:
    scaled = np.rint(largest * float(GRID)).astype(np.int64)
    drawn = _lattice(Shape.GAUSSIAN, noise, len(scaled), rng)
    return scaled + drawn >= math.ceil(threshold * GRID)

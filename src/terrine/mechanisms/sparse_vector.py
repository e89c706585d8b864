"""Sparse vector: of many questions, find those above a threshold, and pay only for these [DNRRV09, LSL17].

AboveThreshold [DR14] Algorithm 1, D the sensitivity of every question:

    noisy threshold   T + Lap(2D / epsilon), drawn once
    noisy answer      f_i + Lap(4D / epsilon), drawn for each; 2D / epsilon where the questions are monotone
    above             f_i + noise >= noisy threshold: say so and halt; otherwise say "below" and go on

is (epsilon, 0)-DP however many questions were below. SparseVector runs it `answers` = Q times over, with a NEW noisy
threshold after each success: Q times (epsilon_0, 0)-DP, epsilon_0 = 2D / lambda with the threshold's noise Lap(lambda):

    delta = 0    lambda = 2 D Q / epsilon, by basic composition
    delta > 0    lambda = D sqrt(32 Q ln(2 / delta)) / epsilon if smaller, by advanced composition, which keeps
                 (epsilon, delta) for epsilon <= 8 ln(2 / delta)

Noise and answers are whole numbers of grid steps (discrete Laplace); the proof only shifts noise by whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from terrine import check, events
from terrine.errors import Halted
from terrine.mechanisms import grid, lattice
from terrine.mechanisms.laplace import noise_for
from terrine.mechanisms.release import Release, stamped
from terrine.rng import SYSTEM, Source


@dataclass(frozen=True, kw_only=True)
class SparseVector:
    """Up to `answers` times "above" on a stream of questions with the given sensitivity each.

    Guarantee: (epsilon, delta)-DP for the whole stream of answers, questions chosen adaptively. `monotone` promises
    that one unit moves all answers in one direction.

    Raises:
        InvalidArgument: a field out of range.
    """

    threshold: float
    epsilon: float
    answers: int
    delta: float | None = None
    sensitivity: float = 1.0
    monotone: bool = False
    neighbours: events.Neighbours | None = None
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "answers", check.whole("answers", self.answers))
        if self.delta is not None:
            object.__setattr__(self, "delta", check.open_unit("delta", self.delta))

    @property
    def round_epsilon(self) -> float:
        """What one run up to a success costs."""
        basic = self.epsilon / self.answers
        if self.delta is None or self.epsilon > 8 * math.log(2 / self.delta):
            return basic
        # 2 / lambda with lambda = sqrt(32 Q ln(2/delta)) / epsilon
        return max(basic, self.epsilon / math.sqrt(8 * self.answers * math.log(2 / self.delta)))

    @property
    def event(self) -> events.Repeated:
        once = events.PureDP(epsilon=self.round_epsilon, neighbours=self.neighbours, unit=self.unit)
        return events.Repeated(once, times=self.answers)

    def start(self, *, rng: Source = SYSTEM) -> Scan:
        """A stream that takes one private answer at a time; the event is due when it starts."""
        return Scan(self, self.answers, self.round_epsilon, stamped(self.event, rng), rng)

    def release(self, values: Iterable[float], *, rng: Source = SYSTEM) -> Release[list[bool]]:
        """Above or below for each of `values`, up to and including the last success allowed."""
        scan = self.start(rng=rng)
        return Release(scan.run(values), scan.event)


@dataclass(frozen=True, kw_only=True)
class AboveThreshold:
    """The place of the first answer above a threshold.

    Guarantee: (epsilon, 0)-DP for the whole stream, questions chosen adaptively. `monotone` promises that one unit
    moves all answers in one direction.
    """

    threshold: float
    epsilon: float
    sensitivity: float = 1.0
    monotone: bool = False
    neighbours: events.Neighbours | None = None
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def event(self) -> events.PureDP:
        return events.PureDP(epsilon=self.epsilon, neighbours=self.neighbours, unit=self.unit)

    def start(self, *, rng: Source = SYSTEM) -> Scan:
        """A stream that takes one private answer at a time; the event is due when it starts."""
        return Scan(self, 1, self.epsilon, stamped(self.event, rng), rng)

    def release(self, values: Iterable[float], *, rng: Source = SYSTEM) -> Release[int | None]:
        """The place of the first of `values` that came out above, or None if none did."""
        scan = self.start(rng=rng)
        said = scan.run(values)
        return Release(len(said) - 1 if said and said[-1] else None, scan.event)

    def error(self, *, confidence: float = 0.95, size: int) -> float:
        """[DR14] Theorem 3.24: how far on the wrong side of the threshold any of `size` answers may be."""
        chance = 1 - check.open_unit("confidence", confidence)
        return 8 * self.sensitivity * (math.log(check.whole("size", size)) + math.log(2 / chance)) / self.epsilon


class Scan:
    """A running sparse vector: it holds the noisy threshold, and refuses to go on once it has halted."""

    def __init__(self, rule: SparseVector | AboveThreshold, left: int, epsilon: float, event: Any, rng: Source) -> None:
        self._exponent, self._threshold_noise, self._answer_noise = _plan(rule.sensitivity, epsilon, rule.monotone)
        self._threshold = grid.index_of(rule.threshold, self._exponent)
        self._left, self._rng = left, rng
        self.event: events.Event = event
        self._noisy = self._threshold + self._threshold_noise.draw(rng)

    @property
    def halted(self) -> bool:
        """Whether all successes have been given out."""
        return self._left == 0

    def ask(self, value: float) -> bool:
        """Whether the noisy `value` is at or above the noisy threshold.

        Raises:
            Halted: every success was given out; more answers would have no guarantee.
            InvalidArgument: not a finite number.
        """
        if self.halted:
            raise Halted(
                "sparse vector: all its successes are spent and it has halted; start a new one, which costs again"
            )
        private = grid.checked("value", value)
        if not isinstance(private, int | float):
            raise check.refuse("value", value, "one number at a time", "release takes a list")
        above = grid.index_of(private, self._exponent) + self._answer_noise.draw(self._rng) >= self._noisy
        if above:
            self._left -= 1
            self._noisy = self._threshold + self._threshold_noise.draw(self._rng)
        return above

    def run(self, values: Iterable[float]) -> list[bool]:
        """`ask` each of `values` until the end or the halt."""
        said: list[bool] = []
        for value in values:
            said.append(self.ask(value))
            if self.halted:
                break
        return said


def _check(rule: SparseVector | AboveThreshold) -> None:
    threshold = check.number("threshold", rule.threshold)
    if not math.isfinite(threshold):
        raise check.refuse("threshold", rule.threshold, "a finite number")
    object.__setattr__(rule, "threshold", threshold)
    object.__setattr__(rule, "epsilon", check.positive("epsilon", rule.epsilon))
    object.__setattr__(rule, "sensitivity", check.positive("sensitivity", rule.sensitivity))


@lru_cache(maxsize=1024)
def _plan(sensitivity: float, epsilon: float, monotone: bool) -> tuple[int, lattice.IntegerNoise, lattice.IntegerNoise]:
    half = noise_for(epsilon / 2)
    chosen = grid.plan(lattice.Shape.LAPLACE, grid.Norm.L1, sensitivity, 2 * half, None, 1, False)
    scale = chosen.steps * half * (1 + 2.0**-50)
    answer = scale if monotone else 2 * scale
    return chosen.exponent, lattice.noise(lattice.Shape.LAPLACE, scale), lattice.noise(lattice.Shape.LAPLACE, answer)

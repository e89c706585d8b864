"""Choosing one of many by score: the exponential mechanism [MT07] and permute-and-flip [MS20].

Exponential:       P(i) ~ exp(epsilon u_i / 2D), D the most that one unit can move any score.
Permute-and-flip:  in random order, take i with probability exp(epsilon (u_i - max u) / 2D), else try the next;
                   never worse than the exponential mechanism at the same epsilon.

Where one unit can only move all scores in the same direction (`monotone`; counts under add/remove), the 2 goes
away. Both choose with exactly these chances (see `exact`). Accuracy [DR14] Corollary 3.12: with probability 1 - b
the chosen score is within 2D ln(n / b) / epsilon of the best of n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine import check, events
from terrine.errors import InvalidArgument
from terrine.mechanisms import exact, grid
from terrine.mechanisms.release import Release, stamped
from terrine.rng import SYSTEM, Source


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """What both share. `sensitivity` is per score."""

    sensitivity: float
    epsilon: float
    monotone: bool = False
    neighbours: events.Neighbours | None = None
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sensitivity", check.positive("sensitivity", self.sensitivity, "of one score"))
        object.__setattr__(self, "epsilon", check.positive("epsilon", self.epsilon))

    @property
    def event(self) -> events.Selection:
        return events.Selection(
            epsilon=self.epsilon, monotone=self.monotone, neighbours=self.neighbours, unit=self.unit
        )

    def error(self, *, confidence: float = 0.95, size: int) -> float:
        """How far below the best of `size` scores the chosen one is at most, with probability `confidence`."""
        chance = 1 - check.open_unit("confidence", confidence)
        factor = 1 if self.monotone else 2
        return factor * self.sensitivity * math.log(check.whole("size", size) / chance) / self.epsilon

    @property
    def _rate(self) -> Fraction:
        return Fraction(self.epsilon) / (Fraction(self.sensitivity) * (1 if self.monotone else 2))


@dataclass(frozen=True, kw_only=True)
class Exponential(_Choice):
    """The exponential mechanism.

    Guarantee: (epsilon, 0)-DP when no score moves by more than `sensitivity` between neighbours.
    """

    def release(self, scores: Any, *, rng: Source = SYSTEM) -> Release[int]:
        """The place of the chosen score.

        Raises:
            InvalidArgument: no scores, nan or infinity among them, or not a list of numbers.
        """
        private = scores_of(scores)
        best = private.max()
        exponents = _distances(private, best, self._rate)
        chosen = exact.lottery(
            np.ones(private.size, dtype=np.int64),
            exponents,
            lambda i: _exact_distance(private, best, i, self._rate),
            rng,
        )
        return Release(chosen, stamped(self.event, rng))


@dataclass(frozen=True, kw_only=True)
class PermuteAndFlip(_Choice):
    """Permute-and-flip: the same law as the largest score after exponential noise.

    Guarantee: (epsilon, 0)-DP when no score moves by more than `sensitivity` between neighbours.
    """

    def release(self, scores: Any, *, rng: Source = SYSTEM) -> Release[int]:
        """The place of the chosen score.

        Raises:
            InvalidArgument: no scores, nan or infinity among them, or not a list of numbers.
        """
        private = scores_of(scores)
        best, rate = private.max(), self._rate
        chances = np.exp(-_distances(private, best, rate))
        waiting = list(range(private.size))
        while True:  # the best score is always taken, so the list never runs out
            place = exact.below(len(waiting), rng)
            waiting[place], waiting[-1] = waiting[-1], waiting[place]
            i = waiting.pop()
            if exact.falls(lambda i=i: _exact_distance(private, best, i, rate), float(chances[i]), rng):  # type: ignore[misc]
                return Release(i, stamped(self.event, rng))


def scores_of(scores: Any) -> NDArray[Any]:
    """Scores as a flat array of floats, or of whole numbers kept exact."""
    checked = grid.checked("scores", scores)
    if not isinstance(checked, np.ndarray) or checked.ndim != 1:
        raise InvalidArgument(f"scores: shape {np.shape(checked)} arrived; want one list of numbers, one per candidate")
    return checked if checked.dtype.kind == "f" else checked.astype(object)


def _distances(scores: NDArray[Any], best: Any, rate: Fraction) -> NDArray[np.float64]:
    """(best - score) * rate in floats; differences are taken exactly where the scores are whole numbers."""
    with np.errstate(over="ignore"):
        gaps = best - scores
        if gaps.dtype.kind == "O":
            gaps = np.array([grid.to_float(gap, 0) for gap in gaps])
        distances: NDArray[np.float64] = gaps * float(rate)
    return distances


def _exact_distance(scores: NDArray[Any], best: Any, i: int, rate: Fraction) -> Fraction:
    return (Fraction(best) - Fraction(scores[i])) * rate

"""Quantiles and the most common value: two users of the exponential mechanism.

Quantile [Smi11]: every point r of a public grid between the bounds has the score -| #{values < r} - q n |, which one
unit moves by at most max(q, 1 - q) under add/remove and 1 under replace-one. Between two neighbouring values all points
have one score, so a gap is drawn with probability ~ points in it * exp(epsilon score / 2D), then a point in it.

Most common value: permute-and-flip on the counts of declared categories, monotone under add/remove.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from terrine import check, events
from terrine.errors import InvalidArgument
from terrine.events import Neighbours
from terrine.mechanisms import exact
from terrine.mechanisms.bounded import Origin, records
from terrine.mechanisms.exponential import PermuteAndFlip
from terrine.mechanisms.release import Release, stamped
from terrine.rng import SYSTEM, Source


@dataclass(frozen=True, kw_only=True)
class Quantile:
    """The q-th quantile (0.5: the median) of values clamped to [lower, upper], a point of a grid of `points` steps.

    Guarantee: (epsilon, 0)-DP when each unit gives one value.

    Raises:
        InvalidArgument: a field out of range.
    """

    q: float
    lower: float
    upper: float
    epsilon: float
    points: int = 2**20
    origin: Origin = Origin.DECLARED
    neighbours: Neighbours = Neighbours.ADD_REMOVE
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        q = check.number("q", self.q)
        if not 0 <= q <= 1:
            raise check.refuse("q", self.q, "between 0 and 1", "the median is 0.5")
        object.__setattr__(self, "q", q)
        object.__setattr__(self, "lower", check.number("lower", self.lower))
        object.__setattr__(self, "upper", check.number("upper", self.upper))
        if not self.lower < self.upper or not math.isfinite(self.upper - self.lower):
            raise InvalidArgument(f"lower={self.lower}, upper={self.upper}: want finite bounds with lower < upper")
        object.__setattr__(self, "epsilon", check.positive("epsilon", self.epsilon))
        object.__setattr__(self, "points", check.whole("points", self.points, at_least=2))
        if self.points > 2**40:
            raise check.refuse("points", self.points, "at most 2**40")

    @property
    def event(self) -> events.Selection:
        return events.Selection(epsilon=self.epsilon, neighbours=self.neighbours, unit=self.unit)

    def release(self, values: Any, *, rng: Source = SYSTEM) -> Release[float]:
        """A point between the bounds whose rank is near q n; of no values, any point.

        Raises:
            InvalidArgument: nan, or not a list of numbers.
        """
        private = np.sort(self._steps(records("values", values)))
        edges = np.concatenate([[-1], private, [self.points]])  # point r with edges[i] < r <= edges[i+1] has rank i
        widths = np.diff(edges)
        target, rate = Fraction(self.q) * private.size, self._rate
        gaps = np.where(widths > 0, np.abs(np.arange(widths.size) - float(target)), np.inf)
        least = abs(int(np.argmin(gaps)) - target)  # chances depend on differences only
        exponents = np.where(widths > 0, (gaps - float(least)) * float(rate), 0.0)
        chosen = exact.lottery(widths, exponents, lambda i: (abs(i - target) - least) * rate, rng)
        point = int(edges[chosen]) + 1 + exact.below(int(widths[chosen]), rng)
        share = point / self.points
        note = f"bounds {self.lower:g} to {self.upper:g}, {self.origin.value}; values outside were clamped"
        answer = min(self.upper, self.lower + share * (self.upper - self.lower))
        return Release(answer, stamped(self.event, rng), (note,))

    def error(self, *, confidence: float = 0.95) -> float:
        """By how many ranks the answer misses at most beyond the best point, with probability `confidence`."""
        chance = 1 - check.open_unit("confidence", confidence)
        return math.log((self.points + 1) / chance) / float(self._rate)

    @property
    def _rate(self) -> Fraction:
        moved = Fraction(1)
        if self.neighbours is not Neighbours.REPLACE_ONE:
            moved = max(Fraction(self.q), 1 - Fraction(self.q))
        return Fraction(self.epsilon) / (2 * moved)

    def _steps(self, values: Any) -> Any:
        share = (np.clip(values, self.lower, self.upper) - self.lower) / (self.upper - self.lower)
        return np.clip(np.rint(share * self.points), 0, self.points).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class MostCommonValue:
    """Which of the declared `categories` occurs most often; values that are none of them are not counted.

    Guarantee: (epsilon, 0)-DP when each unit gives one value.
    """

    categories: tuple[Hashable, ...]
    epsilon: float
    neighbours: Neighbours = Neighbours.ADD_REMOVE
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "categories", tuple(_hashable("categories", self.categories)))
        object.__setattr__(self, "epsilon", check.positive("epsilon", self.epsilon))
        if len(set(self.categories)) != len(self.categories) or not self.categories:
            raise InvalidArgument("categories: want at least one, each once; declare them without looking at the data")

    @property
    def event(self) -> events.Selection:
        return self._choice.event

    def release(self, values: Iterable[Hashable], *, rng: Source = SYSTEM) -> Release[Hashable]:
        """The category that was chosen.

        Raises:
            InvalidArgument: not a list of values that can be compared with categories.
        """
        seen = Counter(_hashable("values", values.tolist() if isinstance(values, np.ndarray) else values))
        chosen = self._choice.release([seen.get(one, 0) for one in self.categories], rng=rng)
        return Release(self.categories[chosen.value], chosen.event)

    def error(self, *, confidence: float = 0.95) -> float:
        """How many fewer occurrences than the most common the answer has at most, with probability `confidence`."""
        return self._choice.error(confidence=confidence, size=len(self.categories))

    @property
    def _choice(self) -> PermuteAndFlip:
        monotone = self.neighbours is not Neighbours.REPLACE_ONE
        return PermuteAndFlip(
            sensitivity=1.0, epsilon=self.epsilon, monotone=monotone, neighbours=self.neighbours, unit=self.unit
        )


def _hashable(name: str, values: Any) -> list[Hashable]:
    """A list of values that can be counted.

    Raises:
        InvalidArgument: no list, or one of lists, arrays or sets.
    """
    found = check.listed(name, values, "a list of values such as texts or whole numbers")
    for one in found:
        try:
            hash(one)
        except TypeError:
            kind = type(one).__name__
            raise InvalidArgument(f"{name}: holds a {kind}; want values such as texts or whole numbers") from None
    return found

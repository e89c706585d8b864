"""Sums and means of bounded values: clamp to declared public bounds, sum whole grid steps, add noise once.

    sum    sensitivity max(|lower|, |upper|) under add/remove, upper - lower under replace-one
    mean   replace-one: the number of values is public, mean = noisy sum / n
           add/remove: a noisy sum of distances from the middle, half the budget, over a noisy count, the other half

Each value is rounded to the grid BEFORE the sum, and the sum is of integers: a float sum depends on its order and can
move by more than the bounds say. How many values were clamped is not part of the answer, because nobody paid for it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine import check, events
from terrine.errors import InvalidArgument
from terrine.events import Neighbours
from terrine.mechanisms import gaussian, grid, lattice
from terrine.mechanisms.laplace import noise_for
from terrine.mechanisms.release import Release, stamped
from terrine.rng import SYSTEM, Source

_LARGEST = 1e250
"""Of a bound; and what it is one over, of the distance between two: grid steps are doubles."""


class Origin(enum.Enum):
    """How the bounds came to be."""

    DECLARED = "declared by the caller"
    RELEASED = "taken from an earlier private release"


@dataclass(frozen=True, kw_only=True)
class _Bounded:
    lower: float
    upper: float
    epsilon: float
    delta: float | None = None
    origin: Origin = Origin.DECLARED
    neighbours: Neighbours = Neighbours.ADD_REMOVE
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lower", check.number("lower", self.lower))
        object.__setattr__(self, "upper", check.number("upper", self.upper))
        if not (-math.inf < self.lower < self.upper < math.inf):
            raise InvalidArgument(f"lower={self.lower}, upper={self.upper}: want finite bounds with lower < upper")
        if math.isinf(self.upper - self.lower):
            raise InvalidArgument(f"lower={self.lower}, upper={self.upper}: want bounds less than 1.8e308 apart")
        if max(-self.lower, self.upper) > _LARGEST or self.upper - self.lower < 1 / _LARGEST:
            wanted = f"want bounds within {_LARGEST:g} and at least {1 / _LARGEST:g} apart; change the unit"
            raise InvalidArgument(f"lower={self.lower}, upper={self.upper}: {wanted}")
        object.__setattr__(self, "epsilon", check.positive("epsilon", self.epsilon))
        if self.delta is not None:
            object.__setattr__(self, "delta", check.open_unit("delta", self.delta))
        if self.neighbours is Neighbours.ZERO_OUT:
            raise check.refuse("neighbours", self.neighbours.value, "add-remove or replace-one")

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            f"bounds {self.lower:g} to {self.upper:g}, {self.origin.value}; values outside were clamped, "
            "how many is not part of this release",
        )

    def _plan(self, centred: bool, share: int) -> _SumPlan:
        apart = self.neighbours is Neighbours.REPLACE_ONE
        delta = None if self.delta is None else self.delta / share
        return _plan(self.lower, self.upper, self.epsilon / share, delta, apart, centred)

    def _event(self, share: int) -> events.Laplace | events.Gaussian:
        where: dict[str, Any] = {"neighbours": self.neighbours, "unit": self.unit}
        if self.delta is None:
            return events.Laplace(noise=noise_for(self.epsilon / share), **where)
        return events.Gaussian(noise=gaussian.noise_for(self.epsilon / share, self.delta / share), **where)


@dataclass(frozen=True, kw_only=True)
class BoundedSum(_Bounded):
    """The sum of values clamped to [lower, upper].

    Guarantee: (epsilon, delta)-DP, delta 0 if left out, when each unit gives one value.
    """

    @property
    def event(self) -> events.Laplace | events.Gaussian:
        return self._event(1)

    def release(self, values: Any, *, rng: Source = SYSTEM) -> Release[float]:
        """The noisy sum; of no values, noise around 0.

        Raises:
            InvalidArgument: nan, or not a list of numbers.
        """
        plan = self._plan(False, 1)
        total = plan.total(records("values", values), self.lower, self.upper) + plan.noise.draw(rng)
        return Release(grid.to_float(total, plan.exponent), stamped(self.event, rng), self.notes)

    def error(self, *, confidence: float = 0.95) -> float:
        """What the noise stays below with probability `confidence`; clamping adds its own error, which is private."""
        return self._plan(False, 1).error(confidence)


@dataclass(frozen=True, kw_only=True)
class BoundedMean(_Bounded):
    """The mean of values clamped to [lower, upper].

    Guarantee: (epsilon, delta)-DP, delta 0 if left out, when each unit gives one value.
    """

    @property
    def event(self) -> events.Event:
        if self.neighbours is Neighbours.REPLACE_ONE:
            return self._event(1)
        return events.Composed([self._event(2), self._count_event])

    def release(self, values: Any, *, rng: Source = SYSTEM) -> Release[float]:
        """The noisy mean, within the bounds.

        Raises:
            InvalidArgument: nan, not a list of numbers, or none at all under replace-one, where n is public.
        """
        private = records("values", values)
        share = 1 if self.neighbours is Neighbours.REPLACE_ONE else 2
        plan = self._plan(True, share)
        total = plan.total(private, self.lower, self.upper) + plan.noise.draw(rng)
        if share == 1:
            if not private.size:
                raise InvalidArgument("values: empty; want at least one value where their number is public")
            count = private.size
        else:
            count = max(1, private.size + _count_noise(self.epsilon / 2, self._half_delta).draw(rng))
        mean = grid.to_float(plan.middle, plan.exponent) + grid.to_float(total, plan.exponent) / count
        return Release(min(self.upper, max(self.lower, mean)), stamped(self.event, rng), self.notes)

    @property
    def _half_delta(self) -> float | None:
        return None if self.delta is None else self.delta / 2

    @property
    def _count_event(self) -> events.DiscreteLaplace | events.Gaussian:
        where: dict[str, Any] = {"neighbours": self.neighbours, "unit": self.unit}
        if self.delta is None:
            return events.DiscreteLaplace(noise=noise_for(self.epsilon / 2), **where)
        return events.Gaussian(noise=gaussian.noise_for(self.epsilon / 2, self.delta / 2), **where)


def records(name: str, values: Any) -> NDArray[np.float64]:
    """One number per unit, as a flat float array; infinities stay and will be clamped.

    Raises:
        InvalidArgument: nan, not numbers, or not one list.
    """
    array = grid.array_of(name, values)
    if array.dtype.kind not in "iuf" and array.size:
        raise InvalidArgument(f"{name}: {array.dtype} arrived; want a list of numbers")
    if array.ndim != 1:
        raise InvalidArgument(f"{name}: shape {array.shape} arrived; want one list, one number per unit")
    flat = array.astype(np.float64)
    if np.isnan(flat).any():
        raise InvalidArgument(f"{name}: holds nan; drop such values or replace them by a fixed public value first")
    return flat


@dataclass(frozen=True)
class _SumPlan:
    exponent: int
    middle: int
    noise: lattice.IntegerNoise

    def total(self, values: NDArray[np.float64], lower: float, upper: float) -> int:
        """The exact sum of distances from the middle, in steps."""
        total = 0
        for begin in range(0, values.size, 1 << 18):
            clamped = np.clip(values[begin : begin + (1 << 18)], lower, upper)
            scaled = np.ldexp(clamped, -self.exponent)
            floor = np.floor(scaled)
            steps = (floor + (scaled - floor >= 0.5)).astype(np.int64) - self.middle
            total += int(steps.sum())
        return total

    def error(self, confidence: float) -> float:
        chance = 1 - check.open_unit("confidence", confidence)
        step = math.ldexp(1.0, self.exponent)
        if self.noise.shape is lattice.Shape.LAPLACE:
            return (math.log(1 / chance) * self.noise.scale + 0.5) * step
        return (math.sqrt(2 * math.log(2 / chance)) * self.noise.scale + 0.5) * step


@lru_cache(maxsize=1024)
def _plan(lower: float, upper: float, epsilon: float, delta: float | None, apart: bool, centred: bool) -> _SumPlan:
    noise = noise_for(epsilon) if delta is None else gaussian.noise_for(epsilon, delta)
    largest = max(abs(lower), abs(upper))
    span = (upper - lower) if apart or centred else largest
    # Steps must stay below 2^44 each, so that 2^18 of them add up in 64 bits.
    exponent = max(math.frexp(span)[1] - 21 - max(0, math.ceil(-math.log2(noise))), math.frexp(largest)[1] - 44)
    low, high = grid.index_of(lower, exponent), grid.index_of(upper, exponent)
    middle = (low + high) // 2 if centred else 0
    reach = max(1, high - low if apart else max(abs(low - middle), abs(high - middle)))
    shape = lattice.Shape.LAPLACE if delta is None else lattice.Shape.GAUSSIAN
    return _SumPlan(exponent, middle, lattice.noise(shape, reach * noise * (1 + 2.0**-50), rounded=True))


@lru_cache(maxsize=1024)
def _count_noise(epsilon: float, delta: float | None) -> lattice.IntegerNoise:
    if delta is None:
        return lattice.noise(lattice.Shape.LAPLACE, noise_for(epsilon) * (1 + 2.0**-50))
    scale = gaussian.noise_for(epsilon, delta) * (1 + 2.0**-50)
    return lattice.noise(lattice.Shape.GAUSSIAN, scale, rounded=True)

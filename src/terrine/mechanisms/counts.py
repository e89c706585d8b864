"""Counts: how many, as whole numbers with whole noise.

    counting queries   a fixed list of m of them: l1 sensitivity m, l2 sensitivity sqrt(m)
    histogram          disjoint cells: l1 and l2 sensitivity 1 under add/remove; 2 and sqrt(2) under replace-one

Without `delta` the noise is discrete Laplace of scale sensitivity / epsilon [GRS12]; with it, the normal distribution
rounded to whole numbers, by analytic calibration.

The event of a vector under discrete Laplace noise is that of a single number with the whole l1 sensitivity D. Why that
is proven: go from one neighbour to the other one entry at a time; the trade-off function of a chain is at least the
composition f_a after f_b of its links, and for one log-concave noise, shifts a and b compose to exactly f_(a+b).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri_exp

from terrine import check, events
from terrine.errors import InvalidArgument
from terrine.events import Neighbours
from terrine.mechanisms import gaussian, grid, lattice
from terrine.mechanisms.laplace import noise_for
from terrine.mechanisms.release import Release, stamped
from terrine.rng import SYSTEM, Source

_FARTHEST = 2**61
"""Counts beyond this are clamped to it: no data set is that large, and clamping never moves neighbours apart."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The answers to a fixed list of `queries` counting questions about the same people.

    Guarantee: (epsilon, delta)-DP, delta 0 if left out, when one unit changes each answer by at most 1.
    """

    epsilon: float
    queries: int = 1
    delta: float | None = None
    neighbours: Neighbours = Neighbours.ADD_REMOVE
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "queries", check.whole("queries", self.queries))
        _check_budget(self)

    @property
    def sensitivity(self) -> float:
        """In l1 without delta, in l2 with it."""
        return self.queries if self.delta is None else math.sqrt(self.queries)

    @property
    def event(self) -> events.DiscreteLaplace | events.Gaussian:
        return _event(self, self.queries)

    def release(self, counts: Any, *, rng: Source = SYSTEM) -> Release[Any]:
        """One whole number for a single query; for a list of `queries` counts, as many whole numbers.

        Raises:
            InvalidArgument: not whole numbers, or not as many as `queries`.
        """
        if type(counts) is int and self.queries == 1:
            clamped = max(-_FARTHEST, min(_FARTHEST, counts))
            noise = _noise(self.sensitivity, self.epsilon, self.delta)
            return Release(clamped + noise.draw(rng), stamped(self.event, rng))
        private = whole_numbers("counts", counts)
        wanted = () if self.queries == 1 else (self.queries,)
        if private.shape != wanted and private.shape != (self.queries,):
            raise InvalidArgument(
                f"counts: shape {private.shape} arrived; want {self.queries} counts, as `queries` says"
            )
        return _release(private, self, rng)

    def error(self, *, confidence: float = 0.95) -> float:
        """What no answer is off by more than, with probability `confidence`."""
        return _error(self, confidence, self.queries)


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How many units fall in each of `bins` disjoint cells; the cells are fixed beforehand, empty ones included.

    Guarantee: (epsilon, delta)-DP, delta 0 if left out, when each unit is in exactly one cell.
    """

    epsilon: float
    bins: int
    delta: float | None = None
    neighbours: Neighbours = Neighbours.ADD_REMOVE
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bins", check.whole("bins", self.bins))
        _check_budget(self)

    @property
    def sensitivity(self) -> float:
        """In l1 without delta, in l2 with it."""
        moved = 2 if self.neighbours is Neighbours.REPLACE_ONE else 1
        return moved if self.delta is None else math.sqrt(moved)

    @property
    def event(self) -> events.DiscreteLaplace | events.Gaussian:
        return _event(self, 2 if self.neighbours is Neighbours.REPLACE_ONE else 1)

    def release(self, counts: Any, *, rng: Source = SYSTEM) -> Release[NDArray[np.int64]]:
        """The noisy counts of all cells; some may be negative, and rounding those up to 0 is free.

        Raises:
            InvalidArgument: not whole numbers, or not as many as `bins`.
        """
        private = whole_numbers("counts", counts)
        if private.shape != (self.bins,):
            raise InvalidArgument(f"counts: shape {private.shape} arrived; want {self.bins} counts, as `bins` says")
        return _release(private, self, rng)

    def error(self, *, confidence: float = 0.95) -> float:
        """What no cell is off by more than, with probability `confidence`."""
        return _error(self, confidence, self.bins)


def whole_numbers(name: str, values: Any) -> NDArray[np.int64]:
    """An array of whole numbers; those beyond 2^61 are clamped.

    Raises:
        InvalidArgument: of another type, or nothing.
    """
    array = grid.array_of(name, values)
    if not array.size:
        raise InvalidArgument(f"{name}: empty; want at least one count")
    if array.dtype.kind == "O" and all(type(one) is int for one in array.flat):
        array = np.array([max(-_FARTHEST, min(_FARTHEST, one)) for one in array.flat], dtype=np.int64).reshape(
            array.shape
        )
    if array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name}: {array.dtype} arrived; want whole numbers of an integer type")
    if array.dtype.kind == "u":
        array = np.minimum(array, np.asarray(_FARTHEST, dtype=np.uint64)) if array.dtype.itemsize == 8 else array
    return np.clip(array.astype(np.int64), -_FARTHEST, _FARTHEST)


def discrete_laplace_error(scale: float, size: int, chance: float) -> float:
    """A distance that none of `size` draws exceeds, but with probability `chance`; Laplace's where that holds."""
    bound = scale * math.log(size / chance)
    ratio = math.exp(-1 / scale)
    beyond = size * 2 * ratio ** (math.floor(bound) + 1) / (1 + ratio)
    return bound if beyond <= chance else float(math.floor(bound) + 1)


def _check_budget(mechanism: Counts | Histogram) -> None:
    object.__setattr__(mechanism, "epsilon", check.positive("epsilon", mechanism.epsilon))
    if mechanism.delta is not None:
        object.__setattr__(mechanism, "delta", check.open_unit("delta", mechanism.delta))
    if mechanism.neighbours is Neighbours.ZERO_OUT:
        raise check.refuse(
            "neighbours", mechanism.neighbours.value, "add-remove or replace-one", "a blank is in no cell"
        )
    _noise(mechanism.sensitivity, mechanism.epsilon, mechanism.delta)


@lru_cache(maxsize=1024)
def _noise(sensitivity: float, epsilon: float, delta: float | None) -> lattice.IntegerNoise:
    if delta is None:
        return lattice.noise(lattice.Shape.LAPLACE, sensitivity * noise_for(epsilon) * (1 + 2.0**-50))
    scale = sensitivity * gaussian.noise_for(epsilon, delta) * (1 + 2.0**-50)
    return lattice.noise(lattice.Shape.GAUSSIAN, scale, rounded=True)


def _event(mechanism: Counts | Histogram, moved: int) -> events.DiscreteLaplace | events.Gaussian:
    where: dict[str, Any] = {"neighbours": mechanism.neighbours, "unit": mechanism.unit}
    if mechanism.delta is None:
        return events.DiscreteLaplace(noise=noise_for(mechanism.epsilon), sensitivity=moved, **where)
    return events.Gaussian(noise=gaussian.noise_for(mechanism.epsilon, mechanism.delta), **where)


def _release(private: NDArray[np.int64], mechanism: Counts | Histogram, rng: Source) -> Release[Any]:
    noise = _noise(mechanism.sensitivity, mechanism.epsilon, mechanism.delta)
    event = stamped(mechanism.event, rng)
    if private.ndim == 0:
        return Release(int(private) + noise.draw(rng), event)
    return Release(private + noise.sample(private.size, rng), event)


def _error(mechanism: Counts | Histogram, confidence: float, size: int) -> float:
    chance = 1 - check.open_unit("confidence", confidence)
    scale = _noise(mechanism.sensitivity, mechanism.epsilon, mechanism.delta).scale
    if mechanism.delta is None:
        return discrete_laplace_error(scale, size, chance)
    return -float(ndtri_exp(math.log(chance / (2 * size)))) * scale + 0.5

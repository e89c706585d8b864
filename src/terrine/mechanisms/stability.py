"""Stable release (M_stab, propose-test-release) [DL09, BTT18]: where no neighbour would change the answer, give it.

The distance to instability of f at data D is the largest k such that changing any k units leaves f(D) as it is; it is
0 where some neighbour has another answer, and one unit moves it by at most 1. Release f(D) itself if

    distance + discrete Laplace(1 / epsilon) > T,     T the smallest whole number with P(noise > T) <= delta

and nothing otherwise: (epsilon, delta)-DP. If f(D) = f(D'), only the noisy distance tells them apart: epsilon. If not,
both distances are 0, and both answer nothing but with probability delta.

Two notions of stability: PERTURBATION stable means as above, f(D') = f(D) for every D' within k changes, and the
distance measures it. SUBSAMPLING stable means that f of a random part of D is f(D) with probability at least 3/4; it
makes f's own distance unnecessary: take the most common answer over many random parts, whose distance follows from the
gap between the two highest counts (`gap_distance`), as subsample-and-aggregate does.

Utility: if the distance is at least T + ln(1/b) / epsilon, the answer is given with probability 1 - b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from terrine import check, events
from terrine.errors import InvalidArgument
from terrine.events import Neighbours
from terrine.mechanisms import lattice
from terrine.mechanisms.counts import whole_numbers
from terrine.mechanisms.laplace import noise_for
from terrine.mechanisms.release import Release, stamped
from terrine.rng import SYSTEM, Source

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StableRelease:
    """The exact answer where it is stable enough, else None.

    Guarantee: (epsilon, delta)-DP when `distance` is a lower bound on the distance to instability that one unit moves
    by at most 1 and that is 0 wherever a neighbour has another answer.
    """

    epsilon: float
    delta: float
    neighbours: Neighbours | None = None
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check.positive("epsilon", self.epsilon))
        object.__setattr__(self, "delta", check.open_unit("delta", self.delta))
        self._noise()

    @property
    def event(self) -> events.ApproximateDP:
        return events.ApproximateDP(epsilon=self.epsilon, delta=self.delta, neighbours=self.neighbours, unit=self.unit)

    @property
    def threshold(self) -> int:
        """T: the noisy distance must be above it."""
        ratio = 1 / self._noise().scale
        # P(noise > T) = r^(T+1) / (1 + r); the 1e-9 covers the rounding of the logarithms
        least = -(math.log(self.delta) + math.log1p(math.exp(-ratio))) / ratio - 1
        return max(0, math.ceil(least + 1e-9 * (1 + abs(least))))

    def release(self, value: T, *, distance: float, rng: Source = SYSTEM) -> Release[T | None]:
        """`value` if its noisy distance to instability passes the threshold, else None.

        Raises:
            InvalidArgument: a negative or infinite distance, or nan.
        """
        steps = math.floor(check.not_negative("distance", distance))
        noisy = steps + self._noise().draw(rng)
        return Release(value if noisy > self.threshold else None, stamped(self.event, rng))

    def error(self, *, confidence: float = 0.95) -> float:
        """The distance from which on the value is given with probability `confidence`."""
        chance = 1 - check.open_unit("confidence", confidence)
        return self.threshold + 1 + math.log(1 / chance) * self._noise().scale

    def _noise(self) -> lattice.IntegerNoise:
        return lattice.noise(lattice.Shape.LAPLACE, noise_for(self.epsilon) * (1 + 2.0**-50))


def gap_distance(counts: Any, *, moved: int = 1) -> int:
    """Distance to instability of "the most common": the gap between the two highest counts.

    `moved` is how much one unit can change the gap: 1 under add/remove, 2 under replace-one.
    """
    private = whole_numbers("counts", counts)
    if private.ndim != 1:
        raise InvalidArgument(f"counts: shape {private.shape} arrived; want one list of counts")
    top = np.sort(private)[::-1]
    gap = int(top[0]) - (int(top[1]) if top.size > 1 else 0)
    return max(0, -(-gap // check.whole("moved", moved)) - 1)

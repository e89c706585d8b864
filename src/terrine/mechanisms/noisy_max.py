"""Report noisy max [DR14] Claim 3.9: add noise to every score and name the place of the largest, nothing else.

    Laplace, exponential noise     scale 2D / epsilon, or D / epsilon where monotone: (epsilon, 0)-DP
    Gaussian noise                 (epsilon, delta)-DP, see below

D is the most that one unit moves any one score. Scores and noise are whole numbers of grid steps, and ties go to the
lowest place. That keeps the proof: fix all noise but that of i; i wins iff its noise is at least some r; for a
neighbour r grows by at most 2D (D if monotone), and all that is used is P(K >= k + 1) >= e^(-1/t) P(K >= k).

Gaussian noise, n scores: the smaller of two proven scales. By the same argument, P(K >= r) <= e^epsilon P(K >= r + 2D)
+ d with d the Gaussian mechanism's delta at sensitivity 2D, summed over the n places: calibrated to delta / n. Or as a
post-processing of the whole vector with l2 sensitivity sqrt(n) D, or `l2` where the caller knows better.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from terrine import check, events
from terrine.mechanisms import gaussian, grid, lattice
from terrine.mechanisms.exponential import scores_of
from terrine.mechanisms.laplace import noise_for
from terrine.mechanisms.release import Release, stamped
from terrine.rng import SYSTEM, Source

_FARTHEST = 2**60


class Noise(enum.Enum):
    """What is added to the scores."""

    LAPLACE = "laplace"
    EXPONENTIAL = "exponential"
    GAUSSIAN = "gaussian"


@dataclass(frozen=True, kw_only=True)
class NoisyMax:
    """The place of the largest noisy score.

    `sensitivity` is per score; `delta` and `l2` (the l2 sensitivity of all scores together) belong to Gaussian noise.

    Guarantee: (epsilon, 0)-DP, with Gaussian noise (epsilon, delta)-DP. `monotone` promises that one unit moves all
    scores in one direction.

    Raises:
        InvalidArgument: a field out of range, Gaussian noise without delta, or delta without Gaussian noise.
    """

    sensitivity: float
    epsilon: float
    noise: Noise = Noise.EXPONENTIAL
    monotone: bool = False
    delta: float | None = None
    l2: float | None = None
    neighbours: events.Neighbours | None = None
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sensitivity", check.positive("sensitivity", self.sensitivity, "of one score"))
        object.__setattr__(self, "epsilon", check.positive("epsilon", self.epsilon))
        if self.noise is Noise.GAUSSIAN:
            check.open_unit("delta", self.delta if self.delta is not None else "missing", "Gaussian noise needs it")
            if self.l2 is not None:
                check.positive("l2", self.l2)
        elif self.delta is not None or self.l2 is not None:
            raise check.refuse("delta", self.delta, f"none with {self.noise.value} noise", "it is (epsilon, 0)-DP")

    @property
    def event(self) -> events.Selection | events.ApproximateDP | events.Gaussian:
        where: dict[str, Any] = {"neighbours": self.neighbours, "unit": self.unit}
        if self.delta is None:
            return events.Selection(epsilon=self.epsilon, monotone=self.monotone, **where)
        if self.l2 is not None:
            return events.Gaussian(noise=gaussian.noise_for(self.epsilon, self.delta), **where)
        return events.ApproximateDP(epsilon=self.epsilon, delta=self.delta, **where)

    def release(self, scores: Any, *, rng: Source = SYSTEM) -> Release[int]:
        """The place of the largest noisy score; the noisy score itself stays here.

        Raises:
            InvalidArgument: no scores, nan or infinity among them, or not a list of numbers.
        """
        private = scores_of(scores)
        plan = self._plan(private.size)
        places = np.array([_clipped(grid.index_of(one, plan.exponent)) for one in private.tolist()], dtype=np.int64)
        return Release(int(np.argmax(places + self._drawn(plan, places.size, rng))), stamped(self.event, rng))

    def error(self, *, confidence: float = 0.95, size: int) -> float:
        """How far below the best of `size` scores the named one is at most, with probability `confidence`.

        Two noises differ by at most twice the largest, or by the largest where none is negative.
        """
        chance = 1 - check.open_unit("confidence", confidence)
        plan = self._plan(check.whole("size", size))
        far = math.log(size / chance)
        if self.noise is Noise.GAUSSIAN:
            far = math.sqrt(2 * math.log(2 * size / chance))
        return (1 if self.noise is Noise.EXPONENTIAL else 2) * (far * plan.scale + plan.step)

    def _plan(self, size: int) -> grid.GridPlan:
        reach = self.sensitivity * (1 if self.monotone else 2)
        if self.delta is None:
            return _pure_plan(reach, self.epsilon)
        if self.l2 is not None:
            return grid.plan(
                lattice.Shape.GAUSSIAN,
                grid.Norm.L2,
                self.l2,
                gaussian.noise_for(self.epsilon, self.delta),
                None,
                size,
                False,
            )
        return _gaussian_plan(self.sensitivity, reach, self.epsilon, self.delta, size)

    def _drawn(self, plan: grid.GridPlan, size: int, rng: Source) -> lattice.Integers:
        drawn = plan.noise.sample(size, rng)
        if self.noise is Noise.EXPONENTIAL:  # the magnitude of a discrete Laplace, signs folded: geometric
            return drawn ^ (drawn >> 63)
        return drawn


@lru_cache(maxsize=1024)
def _pure_plan(reach: float, epsilon: float) -> grid.GridPlan:
    chosen = grid.plan(lattice.Shape.LAPLACE, grid.Norm.L1, reach, noise_for(epsilon), None, 1, False)
    # Each of the two scores that matter is rounded on its own, which can cost one more step.
    scale = (chosen.steps + 1) * noise_for(epsilon) * (1 + 2.0**-50)
    return grid.GridPlan(chosen.exponent, chosen.steps + 1, lattice.noise(lattice.Shape.LAPLACE, scale))


@lru_cache(maxsize=1024)
def _gaussian_plan(sensitivity: float, reach: float, epsilon: float, delta: float, size: int) -> grid.GridPlan:
    by_place = reach * (1 + 2.0**-18) * gaussian.noise_for(epsilon, delta / size)  # the 2^-18 pays for the rounding
    by_vector = sensitivity * math.sqrt(size) * (1 + 2.0**-18) * gaussian.noise_for(epsilon, delta)
    scale = min(by_place, by_vector)
    exponent = math.frexp(sensitivity)[1] - 1 - 20 - math.ceil(math.log2(size) / 2)
    steps = math.ceil(math.ldexp(reach, -exponent)) + 2
    return grid.GridPlan(
        exponent, steps, lattice.noise(lattice.Shape.GAUSSIAN, math.ldexp(scale, -exponent), rounded=True)
    )


def _clipped(index: int) -> int:
    return max(-_FARTHEST, min(_FARTHEST, index))

"""One noise for all of a question: Laplace or Gaussian, whole numbers on a public grid, and how far it reaches.

    Laplace    scale = multiplier x l1 sensitivity;  multiplier W / (w epsilon)
    Gaussian   scale = multiplier x l2 sensitivity;  one Gaussian's noise for (epsilon, delta), times sqrt(W / w)

for a measurement whose share of the budget is w, of W in all: the epsilons w epsilon / W add up to epsilon, and the
squared signal-to-noise ratios w / (W s^2) to 1 / s^2.

`chosen` takes the one that reaches less far at 95%; Gaussian only where a delta is spent. The grid and the exact
samplers are those of `terrine.mechanisms`, which proves both.

How far: one Laplace stays within ln(1 / b) scales with probability 1 - b. Of two with scales s > t, the sum has the
tail (s^2 e^(-x/s) - t^2 e^(-x/t)) / (s^2 - t^2); with s = t it is (1 + x / 2s) e^(-x/s).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri_exp

from terrine import events
from terrine.events import Neighbours, Unit
from terrine.mechanisms import gaussian, grid
from terrine.mechanisms.lattice import Shape
from terrine.rng import Source

CONFIDENCE = 0.95
_SLACK = 1 - 2.0**-40
"""Budgets are shared a little below the whole, so that rounded sums of the shares stay within it."""


@dataclass(frozen=True)
class NoiseKind:
    """The noise of a measurement: `multiplier` is scale / sensitivity."""

    shape: Shape
    multiplier: float

    @property
    def event(self) -> events.Laplace | events.Gaussian:
        """What one measurement costs."""
        kind = events.Laplace if self.shape is Shape.LAPLACE else events.Gaussian
        return kind(noise=self.multiplier, unit=Unit.PERSON, neighbours=Neighbours.ADD_REMOVE)

    @property
    def name(self) -> str:
        return "Laplace" if self.shape is Shape.LAPLACE else "Gaussian"

    def plan(self, sensitivity: float, size: int, step: float | None = None) -> grid.GridPlan:
        """The grid and the integer noise for `size` whole numbers."""
        norm = grid.Norm.L1 if self.shape is Shape.LAPLACE else grid.Norm.L2
        return grid.plan(self.shape, norm, float(sensitivity), self.multiplier, step, size, True)

    def scale(self, sensitivity: float, size: int) -> float:
        """The noise's scale on each of `size` numbers, with what their rounding to the grid adds."""
        return self.plan(sensitivity, size).scale

    def add(self, values: Sequence[int] | NDArray[Any], sensitivity: float, rng: Source) -> NDArray[np.float64]:
        """`values`, exact whole numbers, with noise."""
        private = np.asarray(values, dtype=object) if not isinstance(values, np.ndarray) else values
        if private.dtype.kind == "O" and all(abs(one) < 2**53 for one in private):
            private = private.astype(np.int64)
        noisy = grid.release(self.plan(sensitivity, private.size), private, rng)
        return np.asarray(noisy, dtype=np.float64)

    def reach(self, *scales: float, chance: float = 1 - CONFIDENCE) -> float:
        """What the sum of independent noises of one or two `scales` stays within, but with probability `chance`."""
        used = sorted((abs(one) for one in scales if one), reverse=True)
        if not used:
            return 0.0
        if self.shape is Shape.GAUSSIAN:
            return -float(ndtri_exp(math.log(chance / 2))) * math.hypot(*used)
        if len(used) == 1:
            return -math.log(chance) * used[0]
        if len(used) == 2:
            return _two_laplaces(used[0], used[1], chance)
        return sum(-math.log(chance / len(used)) * one for one in used)

    def of_share(self, share: float) -> NoiseKind:
        """The noise of a measurement with another share of the budget than 1."""
        if share == 1:
            return self
        return NoiseKind(self.shape, self.multiplier / (share if self.shape is Shape.LAPLACE else math.sqrt(share)))


def shared(shape: Shape, shares: float, epsilon: float, delta: float) -> NoiseKind:
    """The least noise of share 1 with which `shares` of them keep (epsilon, delta)."""
    if shape is Shape.LAPLACE:
        return NoiseKind(shape, math.nextafter(shares / (epsilon * _SLACK), math.inf))
    one = gaussian.noise_for(epsilon * _SLACK, delta * _SLACK)
    return NoiseKind(shape, math.nextafter(one * math.sqrt(shares), math.inf) * (1 + 2.0**-40))


def _two_laplaces(large: float, small: float, chance: float) -> float:
    if small > large * (1 - 1e-6):
        small = large

    def tail(x: float) -> float:
        if small == large:
            return (1 + x / (2 * large)) * math.exp(-x / large)
        first, second = large * large, small * small
        return (first * math.exp(-x / large) - second * math.exp(-x / small)) / (first - second)

    low, high = 0.0, 2 * large * (1 - math.log(chance))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) > chance else (low, middle)
    return high

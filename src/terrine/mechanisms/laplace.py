"""The Laplace mechanism [DMNS06]: value + Lap(l1 sensitivity / epsilon) in every entry is (epsilon, 0)-DP.

The noise is Lap rounded to a public grid, added to the value rounded to the same grid (see `grid`): the ideal
mechanism after a post-processing, exactly. The event of an array is that of one number which moves by the whole l1
sensitivity; `counts` says why that dominates. Accuracy [DR14] Theorem 3.8: with probability 1 - b, no one of n entries
is off by more than ln(n / b) * sensitivity / epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from terrine import check, events
from terrine.mechanisms import grid
from terrine.mechanisms.additive import Additive
from terrine.mechanisms.grid import GridPlan
from terrine.mechanisms.lattice import Shape


@dataclass(frozen=True, kw_only=True)
class Laplace(Additive):
    """Laplace noise for a number or an array of any shape.

    `sensitivity` is in l1: the most that one unit can move all entries together, sum of absolute changes. `grid`
    is the step of the answers, a power of 2; left out, it follows from the other fields and the number of entries.

    Guarantee: (epsilon, 0)-DP for neighbours whose values are at most `sensitivity` apart in l1.

    Raises:
        InvalidArgument: a field that is not a positive finite number, or a grid that is not a power of 2.
    """

    sensitivity: float
    epsilon: float
    grid: float | None = None
    neighbours: events.Neighbours | None = None
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sensitivity", check.positive("sensitivity", self.sensitivity, "in l1"))
        object.__setattr__(self, "epsilon", check.positive("epsilon", self.epsilon))
        if self.grid is not None:
            grid.power_of_two("grid", self.grid)
        self._keep()

    @property
    def event(self) -> events.Laplace:
        return events.Laplace(noise=noise_for(self.epsilon), neighbours=self.neighbours, unit=self.unit)

    def error(self, *, confidence: float = 0.95, size: int = 1) -> float:
        """What no one of `size` entries is off by more than, with probability `confidence`."""
        chance = 1 - check.open_unit("confidence", confidence)
        chosen = self._plan(check.whole("size", size), False)
        return math.log(size / chance) * chosen.scale + chosen.step  # one step: both roundings

    def _plan(self, size: int, whole: bool) -> GridPlan:
        noise = noise_for(self.epsilon)
        return grid.plan(Shape.LAPLACE, grid.Norm.L1, self.sensitivity, noise, self.grid, size, whole)


def noise_for(epsilon: float) -> float:
    """Scale / sensitivity that costs at most `epsilon`: 1 / epsilon, rounded up."""
    return math.nextafter(1 / epsilon, math.inf)

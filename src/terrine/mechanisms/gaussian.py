"""The Gaussian mechanism: value + N(0, (noise * l2 sensitivity)^2) in every entry is (epsilon, delta)-DP.

Calibrations of `noise`:

- ANALYTIC [BW18] Theorem 8: the smallest noise with Phi(1/2s - e s) - e^e Phi(-1/2s - e s) <= delta; any epsilon.
- CLASSIC [DR14] Theorem A.1: sqrt(2 ln(1.25 / delta)) / epsilon; proven for epsilon < 1 and refused above.

The noise is the normal distribution rounded to a public grid, added to the value rounded to the same grid (see
`grid`): the ideal mechanism after a post-processing, exactly, in any dimension.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import lru_cache

from scipy.special import ndtri_exp

from terrine import check, events
from terrine.accounting import gaussian
from terrine.mechanisms import grid
from terrine.mechanisms.additive import Additive
from terrine.mechanisms.grid import GridPlan
from terrine.mechanisms.lattice import Shape


class Calibration(enum.Enum):
    """Which theorem chooses the noise."""

    ANALYTIC = "analytic"
    CLASSIC = "classic"


@dataclass(frozen=True, kw_only=True)
class Gaussian(Additive):
    """Gaussian noise for a number or an array of any shape.

    `sensitivity` is in l2: the most that one unit can move the whole array, as a Euclidean distance. `grid` is the
    step of the answers, a power of 2; left out, it follows from the other fields and the number of entries.

    Guarantee: (epsilon, delta)-DP for neighbours whose values are at most `sensitivity` apart in l2.

    Raises:
        InvalidArgument: a field out of range; CLASSIC with epsilon >= 1.
    """

    sensitivity: float
    epsilon: float
    delta: float
    calibration: Calibration = Calibration.ANALYTIC
    grid: float | None = None
    neighbours: events.Neighbours | None = None
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sensitivity", check.positive("sensitivity", self.sensitivity, "in l2"))
        object.__setattr__(self, "epsilon", check.positive("epsilon", self.epsilon))
        object.__setattr__(self, "delta", check.open_unit("delta", self.delta))
        if self.grid is not None:
            grid.power_of_two("grid", self.grid)
        self._keep()

    @property
    def noise(self) -> float:
        """Standard deviation / sensitivity."""
        return noise_for(self.epsilon, self.delta, self.calibration)

    @property
    def event(self) -> events.Gaussian:
        return events.Gaussian(noise=self.noise, neighbours=self.neighbours, unit=self.unit)

    def error(self, *, confidence: float = 0.95, size: int = 1) -> float:
        """What no one of `size` entries is off by more than, with probability `confidence` (union bound)."""
        chance = 1 - check.open_unit("confidence", confidence)
        chosen = self._plan(check.whole("size", size), False)
        return -float(ndtri_exp(math.log(chance / (2 * size)))) * chosen.scale + chosen.step

    def _plan(self, size: int, whole: bool) -> GridPlan:
        return grid.plan(Shape.GAUSSIAN, grid.Norm.L2, self.sensitivity, self.noise, self.grid, size, whole)


@lru_cache(maxsize=1024)
def noise_for(epsilon: float, delta: float, calibration: Calibration = Calibration.ANALYTIC) -> float:
    """Standard deviation / sensitivity that keeps (epsilon, delta).

    Raises:
        InvalidArgument: CLASSIC with epsilon >= 1, where its theorem does not hold.
    """
    if calibration is Calibration.CLASSIC:
        if epsilon >= 1:
            raise check.refuse("epsilon", epsilon, "< 1 with the classic formula", "Calibration.ANALYTIC holds for all")
        return math.sqrt(2 * math.log(1.25 / delta)) / epsilon * (1 + 2.0**-50)
    low = high = 1.0
    while gaussian.delta(1 / high, epsilon) > delta:
        low, high = high, high * 2
    while gaussian.delta(1 / low, epsilon) <= delta:
        low, high = low / 2, low
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian.delta(1 / middle, epsilon) > delta else (low, middle)
    return high

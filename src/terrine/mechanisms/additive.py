"""What noise on a number or an array has in common, whichever it is: value and noise meet on a public grid."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, overload

import numpy as np
from numpy.typing import NDArray

from terrine.events import Event
from terrine.mechanisms import grid
from terrine.mechanisms.grid import GridPlan
from terrine.mechanisms.release import Release, stamped
from terrine.rng import SYSTEM, Source


class Additive(ABC):
    """Noise that does not depend on the value. A subclass is a frozen dataclass that says which noise, by `_plan`."""

    _number: ClassVar[GridPlan]  # the plan of a single number and the event, kept for speed
    _event: ClassVar[Event]

    @property
    @abstractmethod
    def event(self) -> Event:
        """What one release costs."""

    @abstractmethod
    def _plan(self, size: int, whole: bool) -> GridPlan:
        """The noise and the grid for `size` entries, whole numbers or not."""

    def _keep(self) -> None:
        object.__setattr__(self, "_number", self._plan(1, False))
        object.__setattr__(self, "_event", self.event)

    @property
    def scale(self) -> float:
        """The scale of the noise on one number; for a normal distribution its standard deviation."""
        return self._number.scale

    @overload
    def release(self, value: float, *, rng: Source = SYSTEM) -> Release[float]: ...

    @overload
    def release(self, value: NDArray[Any] | list[Any], *, rng: Source = SYSTEM) -> Release[NDArray[np.float64]]: ...

    def release(self, value: Any, *, rng: Source = SYSTEM) -> Release[Any]:
        """`value` with noise, on the grid; the same shape, as floats.

        Raises:
            InvalidArgument: nan, infinity, nothing, or not numbers.
        """
        private = grid.checked("value", value)
        plan = self._number if isinstance(private, int | float) else self._plan(*grid.size_of(private))
        return Release(grid.release(plan, private, rng), stamped(self._event, rng))

"""Events that look at a random part of the data: what the sampler did, around what was then done.

The sampler's own relation is part of the event. Adding or removing a unit fits Poisson sampling, whose lot
size is random; sampling a fixed number and shuffled epochs only make sense when the number of units is
public, that is, under replace-one (or zero-out, for epochs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrine import check
from terrine.errors import InvalidArgument
from terrine.events.relation import Neighbours, Unit

if TYPE_CHECKING:
    from terrine.events.compose import Event


_LEAST_RATE = 1e-300
"""Below it a share of a population has lost its digits."""


@dataclass(frozen=True)
class PoissonSampled:
    """`event` on a lot into which each unit falls independently with probability `rate`.

    The inner noise is relative to what the presence of one unit can move, under either outer relation.
    """

    event: Event
    rate: float
    neighbours: Neighbours = Neighbours.ADD_REMOVE

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", check.rate("rate", self.rate))
        if self.neighbours is Neighbours.ZERO_OUT:
            raise InvalidArgument("PoissonSampled: zero-out costs the same as add-remove; say add-remove")
        _demand(self.event, Neighbours.ADD_REMOVE, "PoissonSampled")

    @property
    def unit(self) -> Unit | None:
        return self.event.unit


@dataclass(frozen=True)
class FixedSizeSampled:
    """`event` on `size` units drawn without replacement from `population`; replace-one neighbours."""

    event: Event
    size: int
    population: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "population", check.whole("population", self.population))
        object.__setattr__(self, "size", check.whole("size", self.size))
        if self.size > self.population:
            raise check.refuse("size", self.size, f"at most population={self.population}")
        if self.rate < _LEAST_RATE:
            raise check.refuse("population", self.population, f"at most {1 / _LEAST_RATE:g} times the size")
        _demand(self.event, Neighbours.REPLACE_ONE, "FixedSizeSampled")

    @property
    def rate(self) -> float:
        return self.size / self.population

    @property
    def neighbours(self) -> Neighbours:
        return Neighbours.REPLACE_ONE

    @property
    def unit(self) -> Unit | None:
        return self.event.unit


@dataclass(frozen=True)
class ShuffledEpoch:
    """`steps` runs of `event` over a shuffled partition: each unit is in exactly one step of the epoch.

    Whatever the permutation, one step sees the unit, so the epoch costs one `event`; no amplification is
    claimed for the shuffle. The inner noise is relative to what changing one unit under `neighbours` moves.
    """

    event: Event
    steps: int
    neighbours: Neighbours = Neighbours.REPLACE_ONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", check.whole("steps", self.steps))
        if self.neighbours is Neighbours.ADD_REMOVE:
            raise InvalidArgument(
                "ShuffledEpoch: adding or removing a unit moves all others between steps; "
                "want neighbours replace-one or zero-out, or PoissonSampled lots"
            )
        _demand(self.event, self.neighbours, "ShuffledEpoch")

    @property
    def unit(self) -> Unit | None:
        return self.event.unit


def _demand(event: Event, wanted: Neighbours, by: str) -> None:
    if event.neighbours not in (None, wanted):
        found = event.neighbours.value if event.neighbours else "none"
        raise InvalidArgument(
            f"{by}: the inner event's noise is stated under {found} neighbours; want it under {wanted.value}"
        )

"""Events made of events: many in a row, the same one again, or one with a caveat.

Parts may be chosen adaptively within what each part's own fields fix. All parts of a whole share one
neighbour relation and one unit; a mix is refused, because no one number could describe it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from terrine import check
from terrine.errors import InvalidArgument
from terrine.events.noise import (
    ApproximateDP,
    DiscreteGaussian,
    DiscreteLaplace,
    Gaussian,
    Laplace,
    NonPrivate,
    PureDP,
    RandomizedResponse,
    Selection,
    Skellam,
    SummedDiscreteGaussian,
)
from terrine.events.relation import Neighbours, Unit
from terrine.events.sampling import FixedSizeSampled, PoissonSampled, ShuffledEpoch
from terrine.events.stopping import RandomStopping

_T = TypeVar("_T", Neighbours, Unit)


@dataclass(frozen=True)
class Repeated:
    """`event`, `times` times over."""

    event: Event
    times: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", check.whole("times", self.times))

    @property
    def neighbours(self) -> Neighbours | None:
        return self.event.neighbours

    @property
    def unit(self) -> Unit | None:
        return self.event.unit


@dataclass(frozen=True)
class Composed:
    """All of `parts`, in any order; with no parts, nothing happened."""

    parts: tuple[Event, ...]

    def __init__(self, parts: Iterable[Event] = ()) -> None:
        object.__setattr__(self, "parts", tuple(parts))
        _agreed("neighbours", [part.neighbours for part in self.parts])
        _agreed("units", [part.unit for part in self.parts])

    @property
    def neighbours(self) -> Neighbours | None:
        return _agreed("neighbours", [part.neighbours for part in self.parts])

    @property
    def unit(self) -> Unit | None:
        return _agreed("units", [part.unit for part in self.parts])


@dataclass(frozen=True)
class OneOf:
    """One of `parts`, chosen without a look at the data: at every Renyi order it costs no more than the dearest."""

    parts: tuple[Event, ...]

    def __init__(self, parts: Iterable[Event]) -> None:
        object.__setattr__(self, "parts", tuple(parts))
        if not self.parts:
            raise InvalidArgument("OneOf: no parts; want one or more")
        _agreed("neighbours", [settled_neighbours(part) for part in self.parts])
        _agreed("units", [settled_unit(part) for part in self.parts])

    @property
    def neighbours(self) -> Neighbours | None:
        return _agreed("neighbours", [part.neighbours for part in self.parts])

    @property
    def unit(self) -> Unit | None:
        return _agreed("units", [part.unit for part in self.parts])


@dataclass(frozen=True)
class Reproducible:
    """`event`, drawn from a seeded generator: whoever knows the seed sees through it. For tests only."""

    event: Event

    @property
    def neighbours(self) -> Neighbours | None:
        return self.event.neighbours

    @property
    def unit(self) -> Unit | None:
        return self.event.unit


Event = (
    Laplace
    | Gaussian
    | DiscreteLaplace
    | DiscreteGaussian
    | Skellam
    | SummedDiscreteGaussian
    | RandomizedResponse
    | PureDP
    | Selection
    | ApproximateDP
    | NonPrivate
    | PoissonSampled
    | FixedSizeSampled
    | ShuffledEpoch
    | Repeated
    | Composed
    | OneOf
    | Reproducible
    | RandomStopping
)


def leaves(event: Event, times: int = 1) -> Iterator[tuple[Event, int]]:
    """The events that `event` is made of, each with how often it happened.

    A shuffled epoch counts as one run of what it holds, which is its cost; samples are leaves, whatever is in them.
    """
    match event:
        case Composed(parts=parts):
            for part in parts:
                yield from leaves(part, times)
        case Repeated(event=inner, times=more):
            yield from leaves(inner, times * more)
        case Reproducible(event=inner) | ShuffledEpoch(event=inner):
            yield from leaves(inner, times)
        case _:
            yield event, times


def settled_neighbours(event: Event) -> Neighbours:
    """The relation `event` is stated under; add/remove where nothing in it says otherwise."""
    return event.neighbours or Neighbours.ADD_REMOVE


def settled_unit(event: Event) -> Unit:
    """The unit `event` protects; one example where nothing in it says otherwise."""
    return event.unit or Unit.EXAMPLE


def is_reproducible(event: Event) -> bool:
    """Whether any part was drawn from a seeded generator."""
    match event:
        case Reproducible():
            return True
        case Composed(parts=parts) | OneOf(parts=parts):
            return any(is_reproducible(part) for part in parts)
        case Repeated(event=inner) | PoissonSampled(event=inner):
            return is_reproducible(inner)
        case FixedSizeSampled(event=inner) | ShuffledEpoch(event=inner) | RandomStopping(event=inner):
            return is_reproducible(inner)
        case _:
            return False


def _agreed(what: str, found: list[_T | None]) -> _T | None:
    said = sorted({one for one in found if one is not None}, key=lambda one: one.value)
    if len(said) > 1:
        names = " and ".join(one.value for one in said)
        raise InvalidArgument(f"Composed: parts under different {what}: {names}; want one for all")
    return said[0] if said else None

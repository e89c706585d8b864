"""What a mechanism hands out: the value, and the event that says what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from terrine.events import Event, Reproducible
from terrine.rng import Source

T = TypeVar("T", covariant=True)


@dataclass(frozen=True)
class Release(Generic[T]):
    """A private answer. `notes` says in words what a reader must know, and holds nothing derived from the data."""

    value: T
    event: Event
    notes: tuple[str, ...] = ()


class Mechanism(Protocol):
    """A frozen value that knows its cost; its `release` takes the private part."""

    @property
    def event(self) -> Event:
        """What one release costs."""


def stamped(event: Event, rng: Source) -> Event:
    """`event`, marked if the noise came from a seed."""
    return Reproducible(event) if rng.reproducible else event

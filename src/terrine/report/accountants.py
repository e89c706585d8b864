"""A run's epsilon under every accountant, from its first step to its last."""

from __future__ import annotations

from collections.abc import Callable

from terrine import accounting
from terrine.accounting import composition, moments, renyi
from terrine.errors import TerrineError
from terrine.events import Composed, Event, OneOf, RandomStopping, Repeated, Reproducible

_METHODS: dict[str, Callable[[Event, float], float]] = {
    "tight": lambda event, delta: accounting.epsilon(event, delta=delta),
    "renyi": lambda event, delta: renyi.epsilon(event, delta=delta),
    "moments": lambda event, delta: moments.epsilon(event, delta=delta),
    "advanced": lambda event, delta: composition.advanced(event, delta=delta),
    "basic": lambda event, delta: composition.basic(event, delta=delta),
}


def so_far(event: Event, share: float) -> Event:
    """The event of the first `share` of the repetitions, at least one of each; what was done once counts whole."""
    match event:
        case Repeated(event=inner, times=times):
            return Repeated(inner, max(1, round(share * times)))
        case Composed(parts=parts):
            return Composed(so_far(part, share) for part in parts)
        case Reproducible(event=inner):
            return Reproducible(so_far(inner, share))
        case OneOf(parts=parts):
            return OneOf(so_far(part, share) for part in parts)
        case RandomStopping(event=inner, count=count):
            return RandomStopping(so_far(inner, share), count)
        case _:
            return event


def over_training(event: Event, delta: float, *, points: int = 12) -> tuple[list[float], dict[str, list[float]]]:
    """Shares of the run, and the epsilon of every accountant that can bound the event."""
    shares = [(place + 1) / points for place in range(points)]
    curves: dict[str, list[float]] = {}
    for name, method in _METHODS.items():
        try:
            curves[name] = [method(so_far(event, share), delta) for share in shares]
        except TerrineError:  # an accountant that does not know such an event has no curve
            continue
    return shares, curves

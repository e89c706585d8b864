"""The front door: the certified accountant, and Renyi DP for the few events that only it can bound."""

from __future__ import annotations

import math
from collections.abc import Callable

from terrine import check
from terrine.accounting import certified, composition, renyi
from terrine.accounting.certified import Bounds
from terrine.errors import UnsupportedEvent
from terrine.events import Event, leaves


def epsilon(event: Event, *, delta: float) -> float:
    """The tightest proven upper bound on epsilon at `delta`.

    Raises:
        UnsupportedEvent: no accountant can bound some part of the event.
    """
    delta = check.open_unit("delta", delta)
    try:
        found = certified.epsilon(event, delta=delta)
    except UnsupportedEvent as unsupported:
        found = _otherwise(unsupported, lambda: renyi.epsilon(event, delta=delta))
    return min(found, _stated(event, delta))


def delta(event: Event, *, epsilon: float) -> float:
    """The tightest proven upper bound on delta at `epsilon`.

    Raises:
        UnsupportedEvent: no accountant can bound some part of the event.
    """
    epsilon = check.not_negative("epsilon", epsilon)
    try:
        return certified.delta(event, epsilon=epsilon)
    except UnsupportedEvent as unsupported:
        return _otherwise(unsupported, lambda: renyi.delta(event, epsilon=epsilon))


def bounds(event: Event, *, delta: float) -> Bounds:
    """A proven enclosure of the smallest epsilon at `delta`, over the worst mechanism that the event describes.

    Raises:
        UnsupportedEvent: no accountant can bound some part of the event.
    """
    delta = check.open_unit("delta", delta)
    try:
        found = certified.bounds(event, delta=delta)
    except UnsupportedEvent as unsupported:
        found = Bounds(0.0, _otherwise(unsupported, lambda: renyi.epsilon(event, delta=delta)))
    upper = min(found.upper, _stated(event, delta))
    return Bounds(min(found.lower, upper), upper)


def _stated(event: Event, delta: float) -> float:
    """What the parts themselves say, to the last bit, where all of them do."""
    if any(composition.needs_delta(leaf) for leaf, _ in leaves(event)):
        return math.inf
    try:
        return composition.stated(event, delta=delta)
    except UnsupportedEvent:
        return math.inf


def _otherwise(unsupported: UnsupportedEvent, attempt: Callable[[], float]) -> float:
    """The other accountant's answer, or the first refusal where it has none either."""
    try:
        return attempt()
    except UnsupportedEvent:
        raise unsupported from None

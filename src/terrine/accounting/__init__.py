"""Events in, certified epsilon out."""

from __future__ import annotations

from dataclasses import dataclass

from terrine.accounting import gaussian, renyi
from terrine.accounting.calibrate import NOISE, RATE, STEPS, calibrate
from terrine.events import Event

__all__ = ["NOISE", "RATE", "STEPS", "Bounds", "bounds", "calibrate", "delta", "epsilon"]


@dataclass(frozen=True)
class Bounds:
    """A proven enclosure of the smallest epsilon."""

    lower: float
    upper: float


def epsilon(event: Event, *, delta: float) -> float:
    """The tightest proven upper bound on epsilon at `delta`."""
    noise = renyi.gaussian_noise(event)
    if noise is not None:
        return gaussian.epsilon(1 / noise, delta)
    return renyi.epsilon(event, delta=delta)


def delta(event: Event, *, epsilon: float) -> float:
    """The tightest proven upper bound on delta at `epsilon`."""
    noise = renyi.gaussian_noise(event)
    if noise is not None:
        return gaussian.delta(1 / noise, epsilon)
    return renyi.delta(event, epsilon=epsilon)


def bounds(event: Event, *, delta: float) -> Bounds:
    """A proven enclosure of epsilon at `delta`."""
    return Bounds(0.0, epsilon(event, delta=delta))

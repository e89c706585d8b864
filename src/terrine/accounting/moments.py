"""The moments accountant of Abadi et al., as they ran it: integer orders, both directions, numerical integration.

For one DP-SGD step with mu0 = N(0, s^2), mu1 = N(1, s^2) and mu = (1-q) mu0 + q mu1,

    alpha(l) = log max(E1, E2),   E1 = E_mu0[(mu0/mu)^l],   E2 = E_mu[(mu/mu0)^l];

moments add up, and the tail bound gives epsilon = min over l of (alpha(l) + ln(1/delta)) / l. [ACG16] Theorem 2,
Section 3.1
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from terrine import check
from terrine.accounting import renyi
from terrine.accounting.integer_noise import reduced
from terrine.accounting.reach import within_floats
from terrine.errors import UnsupportedEvent
from terrine.events import (
    Composed,
    Event,
    Gaussian,
    Laplace,
    Neighbours,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    Repeated,
    Reproducible,
    Selection,
)

LARGEST_ORDER = 32
"""What the paper's own experiments stop at."""

_OUTWARD = 1 + 1e-11


@within_floats(by="moments")
def epsilon(event: Event, *, delta: float, largest_order: int = LARGEST_ORDER) -> float:
    """The smallest epsilon at `delta` that moments up to `largest_order` prove."""
    delta = check.delta("delta", delta)
    orders, values = _moments(event, largest_order)
    return 0.0 if not values.any() else max(0.0, float(np.min((values + math.log(1 / delta)) / orders)) * _OUTWARD)


@within_floats(by="moments")
def delta(event: Event, *, epsilon: float, largest_order: int = LARGEST_ORDER) -> float:
    """The smallest delta at `epsilon`: min over l of exp(alpha(l) - l epsilon)."""
    epsilon = check.not_negative("epsilon", epsilon)
    orders, values = _moments(event, largest_order)
    return 0.0 if not values.any() else min(1.0, math.exp(float(np.min(values - orders * epsilon))) * _OUTWARD + 5e-324)


def log_moment(event: Event, order: int) -> float:
    """alpha(order): an upper bound on the log moment of the event's privacy loss.

    Raises:
        UnsupportedEvent: no moments are known for it.
    """
    match event:
        case PoissonSampled(event=inner, rate=rate, neighbours=Neighbours.ADD_REMOVE) if rate < 1:
            noise = renyi.gaussian_noise(inner)
            if noise is None:
                raise UnsupportedEvent(event, by="moments", hint="inside a sample it knows Gaussian noise")
            e1, e2 = (renyi.log_sampled_moment(rate, noise, power) for power in (-order, order + 1))
            return max(e1, e2)
        case PoissonSampled(event=inner, neighbours=Neighbours.ADD_REMOVE) | Reproducible(event=inner):
            return log_moment(inner, order)
        case Gaussian() | Laplace() | RandomizedResponse() | PureDP() | Selection():
            return order * float(renyi.curve(event, np.array([order + 1.0]))[0])
        case Repeated(event=inner, times=times):
            return math.nextafter(float(times), math.inf) * log_moment(inner, order)
        case Composed(parts=parts):
            return sum(log_moment(part, order) for part in parts)
        case _:
            raise UnsupportedEvent(event, by="moments")


def _moments(event: Event, largest_order: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    orders, event = np.arange(1, check.whole("largest_order", largest_order) + 1), reduced(event)
    return orders.astype(float), np.array([log_moment(event, int(order)) for order in orders])

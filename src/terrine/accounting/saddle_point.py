"""Saddle points of the inversion integral: good estimates of delta, epsilon and the tilt, and no bounds.

The integrand M(z) e^(-ez) / (z (z+1)) is smallest on the real axis where its logarithm has slope 0; there, its value
times the width of the Gaussian with the same curvature estimates delta [Da87].
"""

from __future__ import annotations

import math
from collections.abc import Callable

from terrine.accounting.independent import Composition
from terrine.accounting.roots import root as root_of

Cumulants = tuple[float, float, float]
"""log M and its first two derivatives."""


def saddle(composition: Composition, delta: float) -> tuple[float, float]:
    """The tilt and epsilon at which the saddle-point estimate of delta is the one asked for. An estimate, no bound."""
    found = _saddle_by_newton(composition, delta)
    return found if found is not None else _saddle_by_bracket(composition, delta)


def _saddle_by_newton(composition: Composition, delta: float) -> tuple[float, float] | None:
    """From where it would be if the loss were normal, which costs next to nothing."""
    variance = max(composition.about_variance, 1e-300)
    normal = _newton(lambda c: (variance * c * (c + 1) / 2, variance * (c + 0.5), variance), variance, delta, 0.1)
    return _newton(composition.cumulants, variance, delta, 1.0, normal[0] if normal else 0.0)


def _newton(
    cumulants: Callable[[float], Cumulants], variance: float, delta: float, close: float, tilt: float = 0.0
) -> tuple[float, float] | None:
    """Tilt and epsilon: log delta falls by about c^2 x variance for each unit of log c.

    Without a tilt to begin with, delta is about mu phi(z) / z^2 at the tilt z / mu.
    """
    mu = math.sqrt(variance)
    z = math.sqrt(2 * max(1.0, math.log(min(mu, 1.0) / delta) - 0.9))
    log_tilt = math.log(tilt or z / mu)
    for _ in range(8):
        excess, epsilon, slope = _saddle_estimate(cumulants, log_tilt, delta)
        if abs(excess) < close:  # the rest in one step, as log delta falls by the tilt for each unit of epsilon
            return math.exp(log_tilt), epsilon + excess / math.exp(log_tilt)
        log_tilt += max(-1.0, min(1.0, excess / slope))
    return None


def _saddle_by_bracket(composition: Composition, delta: float) -> tuple[float, float]:
    def excess(log_tilt: float) -> float:
        return _saddle_estimate(composition.cumulants, log_tilt, delta)[0]

    low, high = -1.0, 1.0
    while excess(high) > 0 and high < 36:
        low, high = high, high + 2.0
    while excess(low) < 0 and low > -36:
        low, high = low - 2.0, low
    root = root_of(excess, low, high, xtol=1e-2) if excess(low) > 0 > excess(high) else high
    return math.exp(root), _saddle_estimate(composition.cumulants, root, delta)[1]


def _saddle_estimate(
    cumulants: Callable[[float], Cumulants], log_tilt: float, delta: float
) -> tuple[float, float, float]:
    """log of the estimate over delta, its epsilon, and about how fast the former falls with log_tilt."""
    c = math.exp(log_tilt)
    value, slope, bend = cumulants(c)
    epsilon = slope - 1 / c - 1 / (c + 1)
    excess = _saddle_value(c, epsilon, value, bend) - math.log(delta)
    return excess, epsilon, c * c * bend + 1 + c * c / (c + 1) ** 2


def log_saddle_delta(composition: Composition, tilt: float, epsilon: float) -> float:
    """log of the saddle-point estimate of delta. An estimate, no bound."""
    value, _, bend = composition.cumulants(tilt)
    return _saddle_value(tilt, epsilon, value, bend)


def _saddle_value(tilt: float, epsilon: float, value: float, bend: float) -> float:
    """log of the integrand at the tilt times its Gaussian width."""
    bend += 1 / tilt**2 + 1 / (tilt + 1) ** 2
    return value - tilt * epsilon - math.log(tilt * (tilt + 1)) - 0.5 * math.log(2 * math.pi * bend)


def saddle_at(composition: Composition, epsilon: float) -> float:
    """The tilt that minimises the integrand at `epsilon`."""

    def slope(log_tilt: float) -> float:
        c = math.exp(log_tilt)
        return composition.cumulants(c)[1] - epsilon - 1 / c - 1 / (c + 1)

    low, high = -1.0, 1.0
    while slope(high) < 0 and high < 36:
        low, high = high, high + 2.0
    while slope(low) > 0 and low > -36:
        low, high = low - 2.0, low
    return math.exp(root_of(slope, low, high, xtol=1e-2)) if slope(low) < 0 < slope(high) else math.exp(high)

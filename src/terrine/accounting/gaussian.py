"""The Gaussian mechanism, exactly: its privacy curve in closed form [BW18], and Gaussian DP [DRS22].

With mu = sensitivity / standard deviation,

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu).

Compositions of Gaussians are Gaussian: mu^2 adds up.
"""

from __future__ import annotations

import math

from scipy.special import log_ndtr

from terrine import check
from terrine.accounting.roots import root as root_of

_ROUNDING = 1e-12
"""Relative error granted to the two normal tails and their difference, far above what scipy commits."""
_LARGEST = 1e300
"""The largest epsilon that is looked for."""


def delta(mu: float, epsilon: float) -> float:
    """The smallest delta at `epsilon` of a Gaussian mechanism with `mu`, rounded up."""
    return min(1.0, _bracket(mu, epsilon)[1] + 5e-324)  # never 0, and above what underflows


def delta_below(mu: float, epsilon: float) -> float:
    """A proven lower bound on the delta at `epsilon`."""
    return max(0.0, _bracket(mu, epsilon)[0])


def epsilon(mu: float, target: float) -> float:
    """The smallest epsilon at which `mu`-Gaussian DP gives delta at most `target`, rounded up."""
    target = check.open_unit("delta", target)
    return _solve(mu, target, delta, upward=True)


def epsilon_below(mu: float, target: float) -> float:
    """An epsilon that the mechanism provably exceeds or meets at `target`."""
    return _solve(mu, check.open_unit("delta", target), delta_below, upward=False)


def mu_of(noise: float, times: int = 1) -> float:
    """sqrt(times) / noise, for any whole number of times: to a few units in the last place.

    Raises:
        OverflowError: it is beyond floating point.
    """
    half = max(times.bit_length() - 64, 0) // 2
    found = math.ldexp(math.sqrt(times >> 2 * half) / noise, half)
    if math.isinf(found):
        raise OverflowError(f"noise={noise:g}: beyond floating point")
    return found


def _solve(mu: float, target: float, curve: object, *, upward: bool) -> float:
    assert callable(curve)
    if mu * mu > _LARGEST:
        raise OverflowError(f"mu={mu:g}: its epsilon is out of reach")
    if curve(mu, 0.0) <= target:
        return 0.0
    high = 0.5 * mu * mu + mu * math.sqrt(2 * math.log(1 / target)) + 1e-300  # Chernoff: delta(high) < target
    while curve(mu, high) > target:
        high *= 2
        if high > _LARGEST:
            raise OverflowError(f"mu={mu:g}: its epsilon is out of reach")
    root = root_of(lambda value: curve(mu, value) / target - 1, 0.0, high, xtol=1e-15 * high, rtol=1e-14)
    step = max(abs(root), 1e-300) * 1e-14
    while upward and curve(mu, root) > target:
        root, step = root + step, step * 2
    while not upward and root > 0 and curve(mu, root) < target:
        root, step = max(0.0, root - step), step * 2
    return root


def _bracket(mu: float, epsilon: float) -> tuple[float, float]:
    first = log_ndtr(mu / 2 - epsilon / mu)
    second = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    value = math.exp(first) * -math.expm1(min(0.0, second - first))
    # Both tails carry a relative error of _ROUNDING, which also absorbs the rounding of their exponents.
    slack = math.exp(first) * _ROUNDING * (1 + abs(first) + epsilon)
    return float(value - slack), float(value + slack)

"""Renyi DP: one curve per event, added up, converted once at the end [Mir17].

For an event dominated by the pair (P, Q), the curve at order a > 1 is

    D_a = 1/(a-1) log E_Q[(P/Q)^a],

the larger of both directions. Poisson-sampled Gaussians follow [MTZ19]: with u the likelihood ratio of the
unsampled Gaussian, D_a = 1/(a-1) log E_Q[(1 - q + q u)^a], for fractional orders too.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from terrine import check
from terrine.accounting import amplification, composition, integer_noise
from terrine.accounting.reach import within_floats
from terrine.errors import UnsupportedEvent
from terrine.events import (
    ApproximateDP,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    NegativeBinomialCount,
    Neighbours,
    OneOf,
    PoissonCount,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    RandomStopping,
    Repeated,
    Reproducible,
    Selection,
    ShuffledEpoch,
    Skellam,
    SummedDiscreteGaussian,
)
from terrine.rounding import inverse

Floats = NDArray[np.float64]
Conversion = Callable[[Floats, Floats, float], Floats]

ORDERS: Floats = np.concatenate([1 + np.geomspace(1e-3, 1, 40), np.arange(2.25, 16, 0.25), np.geomspace(16, 4096, 80)])
"""Orders at which curves are computed when the caller names none."""

_ROUNDING = 1e-11
"""Relative outward rounding of every curve: quadrature and summation commit far less."""
_LEAST = 1e-300
"""What a divergence that underflows may amount to."""
_MOST_POINTS = 80_000
"""Past this many points a moment is not integrated."""


@within_floats(by="renyi")
def epsilon(
    event: Event, *, delta: float, orders: Sequence[float] | Floats | None = None, convert: Conversion | None = None
) -> float:
    """The smallest epsilon that the event's Renyi curve proves at `delta`.

    Raises:
        UnsupportedEvent: a part has no Renyi bound here.
    """
    delta = check.delta("delta", delta)
    at = ORDERS if orders is None else np.asarray(orders, dtype=float)
    values = curve(event, at)
    if not values.any():
        return 0.0
    found = (convert or canonne_kamath_steinke)(at, values, delta)
    slack = 1e-15 * (1 - (math.log(delta) - np.log(at)) / (at - 1))  # what adding and subtracting may have lost
    return max(0.0, float(np.min(found * (1 + _ROUNDING) + slack)))


@within_floats(by="renyi")
def delta(event: Event, *, epsilon: float, orders: Sequence[float] | Floats | None = None) -> float:
    """The smallest delta that the event's Renyi curve proves at `epsilon`."""
    epsilon = check.not_negative("epsilon", epsilon)
    at = ORDERS if orders is None else np.asarray(orders, dtype=float)
    values = curve(event, at)
    return _delta(at, values, epsilon)


def mironov(orders: Floats, values: Floats, delta: float) -> Floats:
    """Epsilon at each order by the first conversion: D_a + ln(1/delta)/(a-1). [Mir17] Proposition 3."""
    return values + math.log(1 / delta) / (orders - 1)


def canonne_kamath_steinke(orders: Floats, values: Floats, delta: float) -> Floats:
    """Epsilon at each order by the tighter conversion. [CKS20] Proposition 12."""
    return values + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)


def curve(event: Event, orders: Floats) -> Floats:
    """An upper bound on the Renyi divergence of `event` at each of `orders`, all above 1.

    Raises:
        UnsupportedEvent: no bound is proven here.
    """
    match event:
        case Gaussian(noise=noise):
            return _gaussian(noise, orders)  # [Mir17] Corollary 3
        case DiscreteGaussian(noise=noise):
            return _gaussian(noise, orders)  # [CKS20] Theorem 4; any dimension by its Corollary 16
        case Skellam() | SummedDiscreteGaussian():
            return _gaussian(integer_noise.as_gaussian(event).noise, orders)
        case Laplace(noise=noise):
            return _laplace(noise, orders)
        case DiscreteLaplace(noise=noise):
            return _binary(inverse(noise), orders)
        case RandomizedResponse(epsilon=value) | PureDP(epsilon=value) | Selection(epsilon=value):
            return _binary(value, orders)  # randomized response dominates every pure mechanism [KOV15]
        case ApproximateDP(epsilon=value, delta=0.0):
            return _binary(value, orders)
        case PoissonSampled(neighbours=Neighbours.ADD_REMOVE, rate=rate, event=inner):
            return _sampled(event, inner, rate, orders)
        case ShuffledEpoch(event=inner) | Reproducible(event=inner):
            return curve(inner, orders)
        case FixedSizeSampled(event=inner):
            return curve(inner, orders)  # no amplification claimed by this accountant
        case OneOf(parts=parts):  # which one is public, and e^((a-1) D_a) is the mean of those of the parts
            dearest: Floats = np.max([curve(part, orders) for part in parts], axis=0)
            return dearest
        case RandomStopping(event=inner, count=NegativeBinomialCount() as count):
            return _best_of_negative_binomial(inner, count, orders)
        case RandomStopping(event=inner, count=PoissonCount(mean=mean)):
            return _best_of_poisson(inner, mean, orders)
        case Repeated(event=inner, times=times):
            return math.nextafter(float(times), math.inf) * curve(inner, orders)  # [Mir17] Proposition 1
        case Composed(parts=parts):
            return sum((curve(part, orders) for part in parts), start=np.zeros_like(orders))
        case _:
            raise UnsupportedEvent(event, by="renyi")


def _delta(at: Floats, values: Floats, epsilon: float) -> float:
    if not values.any():
        return 0.0
    exponent = (at - 1) * (values - epsilon + np.log1p(-1 / at)) - np.log(at)
    slack = 1e-15 * (at * (values + epsilon + 1) + np.log(at))
    return min(1.0, math.exp(min(0.0, float(np.min(exponent + slack)) + _ROUNDING)) + 5e-324)


def _gaussian(noise: float, orders: Floats) -> Floats:
    return orders * (0.5 / noise / noise * (1 + _ROUNDING)) + _LEAST


def _laplace(noise: float, orders: Floats) -> Floats:
    """[Mir17] Proposition 6: with e = 1/noise and r(x) = e^x - 1 - x,

    e^((a-1) D_a) - 1  =  (a r((a-1) e) + (a-1) r(-a e)) / (2a-1),

    a sum of positive terms, so that small divergences keep their digits.
    """
    pure = inverse(noise)
    first = np.log(orders / (2 * orders - 1)) + _log_remainder((orders - 1) * pure)
    second = np.log((orders - 1) / (2 * orders - 1)) + _log_remainder(-orders * pure)
    return _at_most(np.logaddexp(0, np.logaddexp(first, second)) / (orders - 1), pure)


def _binary(epsilon: float, orders: Floats) -> Floats:
    """[Mir17] Proposition 5 with p = e^epsilon / (1 + e^epsilon), as a product of positive terms:

    e^((a-1) D_a) - 1  =  (1 - e^(-(a-1) epsilon)) (e^(a epsilon) - 1) / (1 + e^epsilon).
    """
    if epsilon == 0:
        return np.zeros_like(orders)
    shrunk, grown = (orders - 1) * epsilon, orders * epsilon
    log = np.log(-np.expm1(-shrunk)) + grown + np.log(-np.expm1(-grown)) - np.logaddexp(0, epsilon)
    return _at_most(np.logaddexp(0, log) / (orders - 1), epsilon)


def _at_most(values: Floats, pure: float) -> Floats:
    """`values` rounded up, never above the pure epsilon, and never 0: what underflows still costs something."""
    bounded: Floats = np.minimum(values * (1 + _ROUNDING), pure) + _LEAST
    return bounded


def _log_remainder(x: Floats) -> Floats:
    """log of e^x - 1 - x: by its series near 0, where the difference would lose its digits."""
    near = np.clip(x, -1.0, 1.0)
    series = np.ones_like(near)
    for k in range(20, 2, -1):
        series = 1 + near / k * series
    small = 2 * np.log(np.maximum(np.abs(near), 1e-160)) - math.log(2) + np.log(series)
    large = np.clip(x, -np.inf, 500.0)
    direct = np.log(np.expm1(np.where(np.abs(x) < 1, 1.0, large)) - np.where(np.abs(x) < 1, 1.0, large))
    direct = np.where(x > 500.0, x, direct)  # e^x itself, which is larger
    return np.where(np.abs(x) < 1, small, direct)


def _sampled(event: Event, inner: Event, rate: float, orders: Floats) -> Floats:
    if rate == 1.0:
        return curve(inner, orders)
    noise = gaussian_noise(integer_noise.reduced(inner))
    if noise is not None:
        return np.array([_sampled_gaussian(rate, noise, float(order)) for order in orders])
    try:
        pure = composition.pure(inner)
    except UnsupportedEvent:
        hint = "inside a sample it knows Gaussian and pure events"
        raise UnsupportedEvent(event, by="renyi", hint=hint) from None
    return _binary(amplification.poisson(pure, rate=rate), orders)  # [BBG18] Theorem 8


def gaussian_noise(event: Event) -> float | None:
    """The noise of the one Gaussian that `event` amounts to, or None where it is not Gaussian throughout."""
    match event:
        case Gaussian(noise=noise):
            return noise
        case Repeated(event=inner, times=times):
            single = gaussian_noise(inner)
            return None if single is None else single / math.sqrt(times) * (1 - 1e-15)
        case Composed(parts=parts) if parts:
            noises = [gaussian_noise(part) for part in parts]
            if any(one is None for one in noises):
                return None
            return 1 / math.hypot(*(1 / one for one in noises if one is not None)) * (1 - 1e-15)
        case Reproducible(event=inner) | ShuffledEpoch(event=inner):
            return gaussian_noise(inner)
        case _:
            return None


def _best_of_negative_binomial(inner: Event, count: NegativeBinomialCount, orders: Floats) -> Floats:
    """[PS22] Theorem 2: for every order b >= 1, with D the curve of one run,

    D'_a  <=  D_a  +  (1 + shape) ((1 - 1/b) D_b + ln(1/gamma) / b)  +  ln(mean) / (a - 1).

    Of the b, the best is taken (b = 1 leaves ln(1/gamma)). Where one run is pure, so is the best: Corollary 3.
    """
    others = np.union1d(ORDERS, orders)
    known, toll = curve(inner, others), -math.log(count.gamma)
    best = min(toll, float(np.min((1 - 1 / others) * known + toll / others)))
    values = known[np.searchsorted(others, orders)] + (1 + count.shape) * best + math.log(count.mean) / (orders - 1)
    with contextlib.suppress(UnsupportedEvent):
        values = np.minimum(values, (2 + count.shape) * composition.pure(inner))
    return _growing(orders, values * (1 + _ROUNDING))


def _best_of_poisson(inner: Event, mean: float, orders: Floats) -> Floats:
    """[PS22] Theorem 6: where one run is (e, d)-DP for e = ln(1 + 1/(a - 1)),  D'_a  <=  D_a + mean d + ln(mean) / (a -
    1)."""
    others = np.union1d(ORDERS, orders)
    known = curve(inner, others)
    failing = np.array([_delta(others, known, math.log1p(1 / (order - 1)) * (1 - _ROUNDING)) for order in orders])
    with contextlib.suppress(UnsupportedEvent):
        failing[np.log1p(1 / (orders - 1)) * (1 - _ROUNDING) >= composition.pure(inner)] = 0.0
    values = known[np.searchsorted(others, orders)] + mean * failing + math.log(mean) / (orders - 1)
    return _growing(orders, values * (1 + _ROUNDING))


def _growing(orders: Floats, values: Floats) -> Floats:
    """A Renyi divergence grows with its order, so what bounds it at a larger order bounds it here."""
    places = np.argsort(orders)
    bounded = np.empty_like(values)
    bounded[places] = np.minimum.accumulate(values[places][::-1])[::-1]
    return bounded


def log_sampled_moment(rate: float, noise: float, power: float) -> float:
    """An upper bound on log E_Q[(1 - q + q u)^p], with u the likelihood ratio of N(1, noise^2) to Q = N(0, noise^2).

    x^p is convex, so it is at most log(1 - q + q E_Q[u^p]) with E_Q[u^p] = e^(p (p-1) / (2 noise^2)). Tighter where it
    can be computed: the trapezoid rule, which converges geometrically for this analytic integrand. Its error is below
    e^(-2 pi^2 / width^2) and e^(-2 pi^2 noise / width) of the integral at width <= 0.25 min(1, noise).
    """
    mu = 1 / noise
    unsampled = 0.5 * power * (power - 1) * mu * mu
    if math.isinf(unsampled):
        raise OverflowError(f"noise={noise:g}: its moments are out of reach")
    simple = amplification.poisson(unsampled * (1 + _ROUNDING), rate=rate) * (1 + _ROUNDING) + _LEAST
    width = 0.25 * min(1.0, noise)
    if rate == 1.0 or abs(power) * mu + 26 > _MOST_POINTS * width:
        return simple
    x = np.arange(-13.0 + min(0.0, power * mu), max(0.0, power * mu) + 13.0 + width, width)
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + mu * x - mu * mu / 2)
    total = float(logsumexp(power * ratio - x * x / 2)) + math.log(width / math.sqrt(2 * math.pi))
    return min(simple, max(total, 0.0) * (1 + _ROUNDING) + 1e-14 * (1 + abs(total)))


@functools.lru_cache(maxsize=1 << 14)
def _sampled_gaussian(rate: float, noise: float, order: float) -> float:
    """[MTZ19] Theorem 4 and its remark on the worse direction."""
    return log_sampled_moment(rate, noise, order) / (order - 1)

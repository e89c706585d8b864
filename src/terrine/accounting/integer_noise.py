"""Noise that people add in shares, Skellam and sums of discrete Gaussians: what Gaussian noise it is no worse than.

Theorem. Let p be a symmetric log-concave distribution on the whole numbers with

    2 log p(k) - log p(k-1) - log p(k+1)  <=  1/s^2 - 1/(12 s^4)      for all k.

A vector of whole numbers that one unit moves by at most L in l2, plus independent noise p in every entry, is then no
less private than N(0, s^2) noise on it, in any dimension: under composition and sampling it costs at most
Gaussian(noise=s/L).

Proof. Let z_k be the standard normal quantile of P(K <= k). If z_k - z_(k-1) <= 1/s for all k, then a shift by v has
z_k - z_(k-v) <= v/s; tests against log-concave noise are thresholds, so the corners of the trade-off curve lie on or
above that of a Gaussian of deviation s, which is convex, hence all of it does; and trade-offs of independent entries
multiply, for Gaussians to the l2 norm [DRS22]. For the step: round N(c, s^2) to whole numbers, to masses g, with c such
that g(k) / g(k-1) = p(k) / p(k-1). The second derivative of log g in c is -1/s^2 + V/s^4, where V, the variance of a
log-concave density on an interval of length 1, is at most 1/12: so ratios of neighbours fall faster for g than for p,
and p has, beside k-1 and k, more mass on both sides. With I the density of the normal distribution at its quantiles,
which is concave and 0 at 0 and 1, z_k - z_(k-1) is the integral of 1/I from P(K <= k-1) to P(K <= k), and concavity
bounds it by the same integral for g, where it is 1/s. []

Skellam noise of variance m has p(k) = e^-m I_k(m), with Bessel's I. y = m I_k'(m) / I_k(m) solves m y' = S^2 - y^2
with S^2 = m^2 + k^2, and I_(k-1) I_(k+1) / I_k^2 = (y^2 - k^2) / m^2. The function S - m^2/2S^2 - m^2/4S^3 starts below
y and grows more slowly than the equation wants wherever S >= 2.2, so it stays below; hence for m >= 3 and all k
1 - I_(k-1) I_(k+1) / I_k^2 <= 1/m + 1/2m^2. In short: s^2 is about m - 1.1.

Sums of n discrete Gaussians of scale s1. By Poisson's summation formula those of variances j s1^2 and s1^2 add up to
one of variance (j+1) s1^2 with masses times 1 + 2 sum_i r^(i^2) cos(2 pi i c), r = e^(-2 pi^2 s1^2 j/(j+1)), where c
depends on the place [KLS21]. So the log of the ratio to one discrete Gaussian varies by no more than t, the sum over
j < n of log (1+2R)/(1-2R) with R = r / (1 - r^3), and the second difference is at most 1/(n s1^2) + 2t.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from terrine.errors import UnsupportedEvent
from terrine.events import (
    Composed,
    Event,
    Gaussian,
    Neighbours,
    PoissonSampled,
    Repeated,
    Reproducible,
    Skellam,
    SummedDiscreteGaussian,
)

_LEAST_VARIANCE = 4.0
_LEAST_SHARE = 1.0
_MOST_SHARES = 1000
"""For more shares, the least of those that were looked at stands for all others."""


def as_gaussian(event: Skellam | SummedDiscreteGaussian) -> Gaussian:
    """The Gaussian that costs no less.

    Raises:
        UnsupportedEvent: the noise is narrower than what is proven here.
    """
    variance = (event.noise * event.sensitivity) ** 2
    if isinstance(event, Skellam):
        if variance < _LEAST_VARIANCE:
            raise _narrow(event, f"a variance of at least {_LEAST_VARIANCE:g}")
        falls = -math.log1p(-(1 + 0.5 / variance) / variance)
    else:
        if variance < _LEAST_SHARE**2:
            raise _narrow(event, f"a scale of at least {_LEAST_SHARE:g}")
        falls = 1 / variance + 2 * unevenness(event)
    falls *= 1 + 1e-13
    like = (1 + math.sqrt(1 - falls / 3)) / (2 * falls)  # the larger s^2 with 1/s^2 - 1/(12 s^4) = falls
    noise = math.sqrt(like) / event.sensitivity * (1 - 1e-13)
    return Gaussian(noise=noise, neighbours=event.neighbours, unit=event.unit)


def reduced(event: Event) -> Event:
    """`event` with these Gaussians in place of noise in shares: what it costs, the event does not exceed."""
    match event:
        case Skellam() | SummedDiscreteGaussian():
            return as_gaussian(event)
        case Composed(parts=parts):
            return Composed(reduced(part) for part in parts)
        case Repeated(event=inner) | Reproducible(event=inner):
            return replace(event, event=reduced(inner))
        case PoissonSampled(event=inner, neighbours=Neighbours.ADD_REMOVE):
            return replace(event, event=reduced(inner))
        case _:
            return event


def unevenness(event: SummedDiscreteGaussian) -> float:
    """How far the log of the noise's mass over that of one discrete Gaussian varies: t above."""
    share = event.noise * event.sensitivity / math.sqrt(event.shares)
    if event.shares == 1:
        return 0.0
    if share < _LEAST_SHARE:
        raise _narrow(event, f"shares of scale {_LEAST_SHARE:g} or more, not {share:g}")
    j = np.arange(1, min(event.shares, _MOST_SHARES), dtype=np.float64)
    ratio = np.exp(-2 * math.pi**2 * share**2 * j / (j + 1) * (1 - 1e-14))
    varies = np.log1p(2 * ratio / (1 - ratio**3)) - np.log1p(-2 * ratio / (1 - ratio**3))
    rest = event.shares - 1 - len(j)
    return (math.fsum(varies.tolist()) + rest * float(varies[-1])) * (1 + 1e-12) + 1e-300


def _narrow(event: Event, wanted: str) -> UnsupportedEvent:
    hint = f"its noise is narrow, in grid steps: want {wanted}; use a finer grid"
    return UnsupportedEvent(event, by="accounting", hint=hint)

"""Releasing the vote-dependent bill itself: Gaussian noise scaled to its smooth sensitivity [PSM18] [NRS07].

With S a b-smooth bound on the sensitivity of f, f(D) + s S(D) N(0, 1) is compared with the same on a neighbour: two
Gaussians whose means differ by at most the smaller S and whose deviations differ by a factor r between e^-b and e^b.
Their divergence at order a is, with V = 1 - a + a r^2 > 0,

    a min(1, r)^2 / (2 s^2 V) + (2 a log r - log V) / (2 (a - 1)),

and grows as r leaves 1 on either side, so its two ends bound it. (The published form, a e^(2b)/s^2 + ..., is smaller
than this near a = 1/(2b), where V comes close to 0; what is charged here is the divergence itself.)

Noise can push the number below the truth, so what is printed is shifted up first: f + c S has sensitivity at most
(1 + c (e^b - 1)) S =: S', itself b-smooth, and c S = z s S' makes the printed number too low with probability
Pr[N > z].
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtri

from terrine import check
from terrine.accounting.pate.gaussian_max import Floats
from terrine.accounting.pate.sensitivity import discounted
from terrine.errors import InvalidArgument


def release_curve(order: float, *, beta: float, noise: float) -> float:
    """Renyi cost at `order` of releasing a number with Gaussian noise of deviation `noise` x its smooth sensitivity."""
    check.positive("noise", noise)
    check.positive("beta", beta)
    narrow = 1 - order * -math.expm1(-2 * beta)
    if narrow <= 0:
        raise InvalidArgument(f"beta={beta!r}: want below about 1 / (2 x order) = {0.5 / order:.4g} at order {order!r}")
    wide = 1 + order * math.expm1(2 * beta)
    smaller = order * math.exp(-2 * beta) / (2 * noise**2 * narrow)
    smaller += (-2 * order * beta - math.log(narrow)) / (2 * (order - 1))
    larger = order / (2 * noise**2) + (2 * order * beta - math.log(wide)) / (2 * (order - 1))
    return max(smaller, larger)


def smooth(local: Floats, *, beta: float) -> float:
    """The `beta`-smooth sensitivity of the sum over queries, from (queries, distances) bounds that never fall."""
    return float(discounted(local.sum(axis=0), check.positive("beta", beta)) * (1 + 1e-12))


def shift(noise: float, *, beta: float, failure: float) -> float:
    """c: how many smooth sensitivities to add so that the release is too low with probability at most `failure`.

    Raises:
        InvalidArgument: the noise is so large that no shift can be had.
    """
    quantile = float(-ndtri(check.open_unit("failure", failure)))
    room = 1 - quantile * noise * math.expm1(beta)
    if room <= 0:
        raise InvalidArgument(f"noise={noise!r}: too large to stay above the truth at beta={beta!r}; lower either")
    return max(0.0, quantile * noise / room)


def widened(shifted: float, *, beta: float) -> float:
    """How much larger the smooth sensitivity is after adding `shifted` smooth sensitivities to the number."""
    return 1 + shifted * math.expm1(beta)


def cost_of_shifted(order: float, *, beta: float, noise: float, failure: float) -> tuple[float, float, float]:
    """The release's own Renyi cost, its shift and its deviation, both in smooth sensitivities."""
    moved = shift(noise, beta=beta, failure=failure)
    return release_curve(order, beta=beta, noise=noise), moved, noise * widened(moved, beta=beta)


def best_release(order: float, *, failure: float, sensitivity_guess: float) -> tuple[float, float]:
    """A public choice of (beta, noise) for `order`, best if the smooth sensitivity were `sensitivity_guess`."""
    best = (math.inf, 0.0, 0.0)
    for share in np.linspace(0.02, 0.8, 40):
        beta = float(share) / (2 * order)
        for noise in np.geomspace(0.5, 500, 60):
            try:
                cost, moved, spread = cost_of_shifted(order, beta=beta, noise=float(noise), failure=failure)
            except InvalidArgument:
                continue
            total = cost + sensitivity_guess * (moved + spread)
            best = min(best, (total, beta, float(noise)))
    return best[1], best[2]

"""Noise that people add in shares, as measures of privacy loss for `witness`: from masses, not from Renyi curves.

Lower: of all that the event describes, the unit that moves a single entry by the largest whole number. Skellam masses
come from the continued fraction of Bessel functions, I_k / I_(k-1) = 1 / (2k / x + I_(k+1) / I_k) with x the variance;
its terms are positive, and going down from a k far above the square root of x forgets how it began.
Upper: the published Renyi bounds [AKL21], [KLS21], converted by [Mir17] with half of delta, as (epsilon, delta)-DP.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from terrine.accounting.witness_measure import FLOOR, UNIT, Array, Measure, OutOfReach, Side, given
from terrine.accounting.witness_noise import discrete_gaussian, two_points
from terrine.events import Skellam, SummedDiscreteGaussian

_MOST_POINTS = 400_000
_STRETCHES = 8192
_COARSE = 2 * _MOST_POINTS // _STRETCHES + 8  # roundings in the sum of one
_ORDERS = np.unique(np.geomspace(2, 1e6, 400).round())


def skellam(side: Side, event: Skellam, cut: float) -> Measure:
    """Lower: loss log p(k - m) / p(k) at k, for a move by m."""
    deviation = event.noise * event.sensitivity
    variance = deviation**2
    if side.upper:
        if variance < 4:
            raise OutOfReach
        squared = event.sensitivity**2  # whole numbers: no l1 norm is above the square of the l2 norm
        excess = (2 * _ORDERS + 5) * squared / (4 * variance**2)
        return _from_curve(side, event.noise, np.minimum(excess, 1.5 * squared / variance))
    move = math.floor(event.sensitivity)
    if not move >= 1 or not 1e-3 < variance < 1e14:
        raise OutOfReach
    reach = math.ceil(math.sqrt(-2 * math.log(max(cut, 1e-40))) * (deviation + 8)) + move
    if reach > _MOST_POINTS:
        raise OutOfReach
    half, slop = _log_masses(variance, reach + move)
    logs = np.concatenate([half[:0:-1], half])  # at -reach - move ... reach + move
    first, second = logs[: -2 * move or None][: 2 * reach + 1], logs[move : move + 2 * reach + 1]
    p, q = _coarser(np.exp(first)), _coarser(np.exp(second))
    loss, slop = np.log(p) - np.log(q), slop + _COARSE * UNIT
    order = np.argsort(loss, kind="stable")
    return given(side, p[order], (loss - 2 * slop)[order], slop, 0.0, math.fsum(p.tolist()) - 1 - 4 * slop)


def _coarser(masses: Array) -> Array:
    """The masses of some thousand stretches: who sees a stretch instead of a place sees less, so it is still lower."""
    found: Array = np.add.reduceat(masses, np.arange(0, len(masses), math.ceil(len(masses) / _STRETCHES)))
    return found


def summed_discrete_gaussian(side: Side, event: SummedDiscreteGaussian, cut: float) -> Measure:
    """Lower: one discrete Gaussian of the whole variance, with masses and losses as unsure as [KLS21] says."""
    share = event.noise * event.sensitivity / math.sqrt(event.shares)
    if share < 1 or event.shares > 10**6:
        raise OutOfReach
    k = np.arange(1, event.shares)
    unsure = 10 * float(np.exp(-2 * math.pi**2 * share**2 * (k / (k + 1))).sum()) * (1 + 1e-9) + FLOOR
    if side.upper:  # a move by whole numbers touches no more entries than its square
        entries = event.sensitivity**2
        return _from_curve(side, event.noise, np.full(len(_ORDERS), unsure * entries))
    move = math.floor(event.sensitivity)
    if move < 1 or unsure > 0.01:
        raise OutOfReach
    one = discrete_gaussian(side, event.noise * event.sensitivity / move, move, cut)
    return given(side, one.p, one.loss - unsure, one.slop + 2 * unsure, 0.0, one.excess - 4 * unsure)


def _from_curve(side: Side, noise: float, beside: Array) -> Measure:
    if side.delta < 1e-300:
        raise OutOfReach
    found = _ORDERS / (2 * noise**2) + beside + math.log(2 / side.delta) / (_ORDERS - 1)
    return two_points(side, float(found.min()) * (1 + 1e-12), side.delta / 2)


@lru_cache(maxsize=32)
def _log_masses(variance: float, most: int) -> tuple[Array, float]:
    """log p(0), ..., log p(most), and to what factor they are right."""
    begin = most + math.ceil(8 * math.sqrt(variance)) + 100
    ratio, ratios = 0.0, np.empty(most)
    for k in range(begin, 0, -1):
        ratio = 1 / (2 * k / variance + ratio)
        if k <= most:
            ratios[k - 1] = ratio
    logs = np.concatenate([[0.0], np.cumsum(np.log(ratios))])
    top = 2 * math.fsum(np.exp(logs[1:]).tolist()) + 1
    return logs - math.log(top), (8 * most + 200) * UNIT + 1e-12

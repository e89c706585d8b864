"""The noises that `witness` knows, as measures of privacy loss: `witness_measure` says what upper and lower mean.

Tests against log-concave noise are thresholds, so a shift by s is a chain of s unit shifts [DRS22]: larger shifts
dominate smaller ones and vectors of the same l1 norm. A unit shift of discrete Laplace noise is randomized response,
the worst of its epsilon; so Laplace <= discrete Laplace <= discrete Laplace in fewer, larger steps.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import expit

from terrine.accounting.witness_measure import FLOOR, UNIT, Measure, OutOfReach, Side, given, mixed

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


def two_points(side: Side, epsilon: float, delta: float = 0.0) -> Measure:
    """Randomized response, the worst of (epsilon, 0)-DP; with delta it may fail and show everything [KOV15]."""
    p = (1 - delta) * expit(np.array([-epsilon, epsilon]))
    return given(side, p, [-epsilon, epsilon], 16 * UNIT, delta)._replace(top=delta)


def concentrated(side: Side, noise: float) -> Measure:
    """Concentrated DP is (rho + 2 sqrt(rho log 1/d), d)-DP for every d [CKS20]: here with d = delta / 2."""
    if noise < 1e-100 or side.delta < 1e-300:
        raise OutOfReach
    noise = min(noise, 1e100)  # less of it costs more
    rho = 0.5 / noise**2
    return two_points(side, (rho + 2 * math.sqrt(-rho * math.log(side.delta / 2))) * (1 + 1e-12), side.delta / 2)


def laplace(side: Side, noise: float, steps: int) -> Measure:
    """P mass w at loss e = 1/noise, w e^-e at -e, v e^((l - e) / 2) between.

    Discrete, e = s / scale: l = (2k - s) / scale for 0 < k < s, v = tanh(1 / 2 scale), w = 1 / (1 + e^(-1 / scale)).
    Continuous (0 steps), lower: merged cells of width d have their middles as losses, v = sinh(d / 4), w = 1/2.
    """
    if not 1e-290 < noise < 1e290:
        raise OutOfReach
    e, many = 1 / noise, 16 * side.cells
    if side.upper and (steps == 0 or steps > many):
        block = max(-(-steps // many), 1)
        fewer = -(-steps // block) or many
        e, steps = e * (block * fewer / steps if steps else 1.0) * (1 + 4 * UNIT), fewer
    if 0 < steps <= many:
        part = np.arange(1, steps) / steps
        v, w = math.tanh(e / steps / 2), float(expit(e / steps))
    else:
        part = (np.arange(many) + 0.5) / many
        v, w = math.sinh(min(e / many / 2, 700.0)), 0.5
    p = np.concatenate([[w * math.exp(-e)], v * np.exp(e * (part - 1)), [w]])
    loss = np.concatenate([[-e], e * (2 * part - 1), [e]])
    return given(side, p, loss, (4 * min(e, 750.0) + 64) * UNIT)


def discrete_gaussian(side: Side, noise: float, steps: int, cut: float) -> Measure:
    """Loss (2j/s + 1) / (2 noise^2) at s + j, with P in proportion to e^(-j^2 / 2 scale^2).

    On a fine grid: the integral of the normal density over a unit interval is its value in the middle to a factor
    1 +- (z^2 + 1) / (20 scale^2), and the losses in the interval are those of its middle +- half a step.
    """
    cut = min(max(cut, FLOOR), 1e-20)
    scale, reach = noise * steps, _reach(cut)
    if not 1e-100 < noise < 1e100 or scale > 1e290:
        raise OutOfReach
    if scale * reach > max(16 * side.cells, 4096):
        wide, slop = gaussian(side, 1 / noise, cut), (reach * reach + 1) / (20 * scale * scale)
        loss = wide.loss + side.sign * 0.5001 / noise / scale
        return given(side, wide.p, loss, slop + wide.slop, wide.top, wide.excess)
    j = np.arange(-math.ceil(reach * scale), math.ceil(reach * scale) + 1)
    p, slop = np.exp(-((j / scale) ** 2) / 2), (2 * reach * reach + len(j) + 64) * UNIT + 2 * cut
    loss = (2 * j / steps + 1) / noise / noise / 2
    return given(side, p / p.sum(), loss, slop, 2 * cut * side.upper, 2 * cut * side.sign)


def gaussian(side: Side, s: float, cut: float) -> Measure:
    """Under P the loss is s z + s^2 / 2, z standard normal, s = 1 / noise."""
    if s > 1e100 and side.upper:
        raise OutOfReach
    s = min(max(s, 1e-100 * side.upper) * (1 + side.sign * 1e-14), 1e100)
    return _normal(side, lambda z: np.exp(-z * z / 2), lambda z: (s * z, -s * s / 2), [0.0], cut)


def replaced_gaussian(side: Side, s: float, rate: float, cut: float) -> Measure:
    """(1-r) N(0) + r N(s) against (1-r) N(0) + r N(-s)."""
    if s > 1e3 and side.upper:
        raise OutOfReach
    s = min(max(s, 1e-100 * side.upper) * (1 + side.sign * 1e-14), 1e3)
    return _normal(
        side,
        lambda z: (1 - rate) * np.exp(-z * z / 2) + rate * np.exp(-((z - s) ** 2) / 2),
        lambda z: (mixed(rate, s * z - s * s / 2), mixed(rate, -s * z - s * s / 2)),
        [0.0, s],
        cut,
    )


def _reach(cut: float) -> float:
    """A normal variable, discrete or not, lies beyond +-reach with probability at most 2 max(cut, FLOOR)."""
    return math.sqrt(-2 * math.log(min(max(cut, FLOOR), 0.1)))


def _normal(side: Side, density: Any, logs: Any, centres: list[float], cut: float) -> Measure:
    """A mixture of unit normals whose loss, the difference of two `logs`, rises with z; by quadrature on panels.

    A panel keeps p and g = p - e^a q, a being the loss at its lower end. 8 Gauss points are right to a factor
    1 +- 2e-23 (width (8 + reach))^16 in p and e^a q. Where a panel is too wide for that, or too steep, or too flat for
    the loss to be told from its rounding, all of its mass goes to the outer end.
    """
    reach, panels, missing = _reach(cut), max(8 * side.cells, 2048), 2 * max(cut, FLOOR)
    z = np.unique(np.concatenate([centre + np.linspace(-reach, reach, panels + 1) for centre in centres]))
    first, second = logs(z)
    ends, wrong = first - second, 32 * UNIT * (np.abs(first) + np.abs(second))
    half, rise, wrong = np.diff(z)[:, None] / 2, np.diff(ends), np.maximum(wrong[1:], wrong[:-1])
    z = z[:-1, None] + half * (1 + _NODES)
    first, second = logs(z)
    mass = density(z) * (half * _WEIGHTS / math.sqrt(2 * math.pi))
    p, g = mass.sum(axis=1), (mass * -np.expm1(np.minimum(ends[:-1, None] - (first - second), 0.0))).sum(axis=1)
    slop = (2 * reach * (reach + max(centres)) + 100) * UNIT
    rough = (rise > 2) | (half[:, 0] * (8 + reach) > 1) | (rise < 4 * wrong)
    if side.upper:
        up = (g * (1 + 1e-11) + wrong * p) / -np.expm1(-np.maximum(rise - 2 * wrong, 1e-300))
        up = np.where(rough, p, np.minimum(up, p))
        loss = np.maximum.accumulate(np.append(ends[0] + wrong[0], ends[1:] + wrong))
        return given(side, np.append(p - up, 0.0) + np.append(0.0, up), loss, slop, missing, missing)
    y = np.clip(np.where(rough, 0.0, g * (1 - 1e-11) / np.maximum(p, FLOOR) - wrong), 0.0, 1 - 2 * UNIT)
    return given(side, p, ends[:-1] - wrong - np.log1p(-y), slop, 0.0, -missing)

"""The Renyi cost of one noisy maximum over Laplace noise, given its votes [PAE17], and its sensitivity.

With Laplace noise of scale 1/g on every count, one vote moves two counts: the answer is (2g, 0)-DP. At order a it costs
the least of ([PAE17] Theorems 2 and 3, with l = a - 1 and e = 2g)

    e^2 a / 2,     e,     1/l log( (1-q) ((1-q) / (1 - e^e q))^l + q e^(e l) )   where q < 1 / (1 + e^e),

with q <= sum over i != * of (2 + g d_i) / (4 e^(g d_i)), d_i = n* - n_i (its Lemma 4). The condition on q is
(e^(2g) - 1) / (e^(4g) - 1); outside it the third bound is not a bound.

The bill rises with q: the derivative of the bracket is at least e^(el) - A^l >= 0 under the condition. One person moves
q by at most a factor e^(2g) either way, so its sensitivity follows from the bill's rise, without further conditions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from terrine import check
from terrine.accounting.pate.gaussian_max import LEAST, Floats, Integers, checked_orders, counts
from terrine.accounting.pate.sensitivity import teachers_of

_CELLS = 8
"""Cells to the factor by which one person can move q."""


def laplace_max_rdp(
    votes: ArrayLike, *, noise: float, orders: Sequence[float] | Floats | float, slack: float = 0.0
) -> Floats:
    """Renyi divergence bounds (queries, orders) of the noisy maximum with Laplace noise of scale `noise`.

    `slack` is taken off every gap between counts: one grid step for noise that is rounded to a grid.
    """
    scale = check.positive("noise", noise)
    return _bill(log_wrong(counts(votes), scale, slack)[:, None], 2 / scale, checked_orders(orders))


def laplace_max_sensitivity(votes: ArrayLike, *, noise: float, order: float, slack: float = 0.0) -> Floats:
    """Bounds (queries, distances) on the local sensitivity of `laplace_max_rdp` at `order`.

    The line of log q is cut into fixed cells, each with the furthest that one person can move the bill from anywhere in
    it; a row at distance d takes the largest over the cells that d people can reach.
    """
    scale = check.positive("noise", noise)
    falling = counts(votes)
    teachers = teachers_of(falling)
    start = log_wrong(falling, scale, slack)
    cell = 2 / scale / _CELLS
    lowest = math.floor((start.min() - 2 / scale * teachers) / cell)
    edges = np.arange(lowest - _CELLS, _CELLS + 2) * cell  # from one person's reach below to one above q = 1
    bills = _bill(edges[:, None], 2 / scale, checked_orders(order))[:, 0]
    rises = bills[_CELLS + 1 :] - bills[: -_CELLS - 1]
    furthest = np.maximum(rises[_CELLS:], rises[:-_CELLS])  # cell by cell from `lowest`: moved up, moved down
    place = np.floor(start / cell).astype(np.int64) - lowest
    reach = np.arange(teachers) * _CELLS
    found = np.empty((len(falling), teachers))
    for row, centre in enumerate(place.tolist()):
        up = np.maximum.accumulate(furthest[centre:])
        down = np.maximum.accumulate(furthest[centre::-1])
        found[row] = np.maximum(up[np.minimum(reach, up.size - 1)], down[np.minimum(reach, down.size - 1)])
    return found


def log_wrong(falling: Integers, scale: float, slack: float = 0.0) -> Floats:
    """log q for each row of falling counts, at most log(1 - 1/classes)."""
    gaps = np.maximum((falling[:, :1] - falling[:, 1:]) - slack, 0.0) / scale
    logs = np.log(2 + gaps) - math.log(4) - gaps
    top = logs.max(axis=1, keepdims=True)
    union: Floats = top[:, 0] + np.log(np.exp(logs - top).sum(axis=1))
    return np.minimum(union, math.log1p(-1 / falling.shape[1]))


def _bill(log_q: Floats, pure: float, orders: Floats) -> Floats:
    moment = orders - 1
    known = np.minimum(pure**2 * orders / 2, pure)
    valid = log_q < -np.logaddexp(0.0, pure)
    safe = np.where(valid, log_q, -np.logaddexp(0.0, pure) - 1.0)
    often = orders * np.log1p(-np.exp(safe)) - moment * np.log1p(-np.exp(safe + pure))
    with np.errstate(over="ignore"):
        small = np.expm1(often) + np.exp(safe + pure * moment)
    found: Floats = np.where(valid, np.minimum(known, np.maximum(np.log1p(small) / moment, LEAST)), known)
    return found

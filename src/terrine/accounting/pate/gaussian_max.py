"""The Renyi cost of one noisy maximum over Gaussian noise, given its votes [PSM18].

With n* the largest count, the answer is not the plurality with probability at most

    q = 1/2 sum over i != * of erfc((n* - n_i) / (2 sigma)),

and a mechanism with a likely answer is cheaper than its worst case: if it is (mu1, e1)- and (mu2, e2)-Renyi DP and q
is small enough, its divergence at an order a <= mu1 is at most 1/(a-1) log S with ([PSM18] Theorem 6)

    S = (1-q) A^(a-1) + q B^(a-1),   A = (1-q) / (1 - (q e^e2)^(1-1/mu2)),   B = e^e1 / q^(1/(mu1-1)).

mu2 = sigma sqrt(log 1/q), mu1 = mu2 + 1 are the published choice (its Proposition 10). One vote moves two counts, so
e = mu / sigma^2. The test "largest count + noise >= threshold" is the same with one moving count and two outcomes.

Guarantee: everything here depends on the votes. It is private data, to be sealed or sanitised, never shown.
All in log space: no bound is 0, whatever underflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr

from terrine import check
from terrine.errors import InvalidArgument

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

LEAST = float(np.finfo(np.float64).tiny)
"""What a bound too small for a float is rounded up to."""


def gaussian_max_rdp(
    votes: ArrayLike, *, noise: float, orders: Sequence[float] | Floats | float, slack: float = 0.0
) -> Floats:
    """Renyi divergence bounds (queries, orders) of the noisy maximum with Gaussian noise of deviation `noise`.

    `slack` is taken off every gap between counts: one grid step for noise drawn on a grid instead of the real line.
    """
    sigma = check.positive("noise", noise)
    return _dependent(log_wrong(counts(votes), sigma, slack), sigma, checked_orders(orders))


def threshold_rdp(
    votes: ArrayLike, *, threshold: float, noise: float, orders: Sequence[float] | Floats | float, slack: float = 0.0
) -> Floats:
    """Renyi divergence bounds (queries, orders) of asking whether the largest count passes a noisy threshold."""
    sigma = check.positive("noise", noise)
    largest = counts(votes).max(axis=1)
    rare = log_rare(largest, check.number("threshold", threshold), sigma, slack)
    return _dependent(rare, math.sqrt(2) * sigma, checked_orders(orders))


def counts(votes: ArrayLike) -> Integers:
    """`votes` as (queries, classes), each row in falling order.

    Raises:
        InvalidArgument: not whole numbers, negative, or fewer than two classes.
    """
    table = np.asarray(votes)
    if table.ndim == 1:
        table = table[None, :]
    if table.ndim != 2 or table.shape[1] < 2:
        raise InvalidArgument(f"votes has shape {table.shape}: want (queries, classes) with at least 2 classes")
    if table.dtype.kind not in "iu":
        if table.dtype.kind != "f" or not np.all(np.isfinite(table)) or np.any(table != np.rint(table)):
            raise InvalidArgument("votes holds values that are not whole: want the number of teachers for each class")
        table = table.astype(np.int64)
    if table.size and table.min() < 0:
        raise InvalidArgument(f"votes holds {table.min()}: want counts >= 0")
    return np.ascontiguousarray(np.sort(table.astype(np.int64), axis=1)[:, ::-1])


def checked_orders(orders: Sequence[float] | Floats | float) -> Floats:
    """`orders` as an array, all above 1."""
    array = np.atleast_1d(np.asarray(orders, dtype=float))
    if array.ndim != 1 or not np.all(array > 1) or not np.all(np.isfinite(array)):
        raise InvalidArgument(f"orders={orders!r}: want finite numbers > 1")
    return array


def log_wrong(falling: Integers, sigma: float, slack: float = 0.0) -> Floats:
    """log q for each row of falling counts, at most log(1 - 1/classes). [PSM18] Proposition 7."""
    gaps = falling[:, :1] - falling[:, 1:]
    table = log_beaten(int(gaps.max(initial=0)), sigma, slack)
    logs = table[gaps]
    top = logs[:, :1]
    union: Floats = top[:, 0] + np.log(np.exp(logs - top).sum(axis=1))
    return np.minimum(union, math.log1p(-1 / falling.shape[1]))


def log_beaten(largest_gap: int, sigma: float, slack: float = 0.0) -> Floats:
    """log Pr[a class that trails by g votes wins against the leader], for g = 0 .. largest_gap."""
    found: Floats = log_ndtr(-(np.arange(largest_gap + 1) - slack) / (math.sqrt(2) * sigma))
    return found


def log_rare(largest: Integers, threshold: float, sigma: float, slack: float = 0.0) -> Floats:
    """log Pr of the less likely outcome of the threshold test, for each largest count."""
    ahead = (largest - threshold) / sigma
    rare: Floats = log_ndtr(-np.abs(ahead) + slack / sigma)
    return np.minimum(rare, math.log(0.5))


def bound(log_q: Floats, sigma: float, order: Floats | float) -> Floats:
    """[PSM18] Theorem 6 with the published mu1 and mu2, as if its condition held; log_q < 0."""
    mu2 = sigma * np.sqrt(-log_q)
    cost1, cost2 = (mu2 + 1) / sigma**2, mu2 / sigma**2
    log_right = np.log1p(-np.exp(log_q))
    log_kept = np.log1p(-np.exp(np.minimum((log_q + cost2) * (1 - 1 / mu2), 0.0)))
    often = order * log_right - (order - 1) * log_kept
    seldom = log_q + (order - 1) * (cost1 - log_q / mu2)
    # S - 1 rather than S: near consensus S is 1 + 1e-200, and only the small part counts.
    with np.errstate(over="ignore"):
        found: Floats = np.log1p(np.expm1(often) + np.exp(seldom)) / (order - 1)
    return np.maximum(found, LEAST)


def holds(log_q: Floats, sigma: float) -> NDArray[np.bool_]:
    """Whether q is small enough for the theorem, leaving its condition on the order aside."""
    mu2 = sigma * np.sqrt(-log_q)
    with np.errstate(divide="ignore", invalid="ignore"):
        limit = (mu2 - 1) * mu2 / sigma**2 - mu2 * (np.log1p(1 / mu2) + np.log1p(1 / (mu2 - 1)))
        met: NDArray[np.bool_] = (mu2 > 1) & (log_q <= limit) & (-log_q > mu2 / sigma**2)
    return met


def _dependent(log_q: Floats, sigma: float, orders: Floats) -> Floats:
    found = np.broadcast_to(orders / sigma**2, (log_q.size, orders.size)).copy()  # [PSM18] Proposition 8
    met = np.flatnonzero(holds(log_q, sigma))
    if met.size:
        inside = log_q[met, None]
        cheaper = np.where(sigma * np.sqrt(-inside) + 1 > orders, bound(inside, sigma, orders), np.inf)
        found[met] = np.minimum(found[met], cheaper)
    return found

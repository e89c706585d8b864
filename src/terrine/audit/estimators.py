"""Estimates of a privacy curve from runs on two neighbours: for plots and for finding where to look; not proofs.

With outcomes cut into bins, and p, q the shares of runs in each bin under the two inputs,

    histogram      max over bins of |ln(p / q)|                        the epsilon of pure DP
    hockey_stick   max(sum (p - e^epsilon q)+, sum (q - e^epsilon p)+)  the delta at epsilon    [BBG18]

`lower_bound` proves; these do not: bins with few runs make the first too large or too small.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from terrine import check
from terrine.audit.bounds import at_least, at_most
from terrine.audit.scores import Floats, checked


def histogram(first: ArrayLike, second: ArrayLike, *, bins: int = 64, fewest: int = 50) -> float:
    """An estimate of the pure epsilon, from bins that at least `fewest` runs of both inputs fell into."""
    p, q, sizes = _shares(first, second, bins)
    used = (p * sizes[0] >= fewest) & (q * sizes[1] >= fewest)
    return float(np.abs(np.log(p[used] / q[used])).max()) if used.any() else 0.0


def hockey_stick(first: ArrayLike, second: ArrayLike, *, epsilon: float, bins: int = 64) -> float:
    """An estimate of the least delta at `epsilon`."""
    grow = math.exp(check.not_negative("epsilon", epsilon))
    p, q, _ = _shares(first, second, bins)
    return float(max(np.maximum(p - grow * q, 0).sum(), np.maximum(q - grow * p, 0).sum()))


def hockey_stick_bound(
    first: ArrayLike, second: ArrayLike, *, epsilon: float, confidence: float = 0.95, bins: int = 64
) -> float:
    """A lower bound on the delta at `epsilon`: the set of bins is chosen on half of the runs, counted on the other."""
    grow = math.exp(check.not_negative("epsilon", epsilon))
    chance = (1 - check.open_unit("confidence", confidence)) / 4
    one, two = checked("first", first), checked("second", second)
    halves = [(side[: side.size // 2], side[side.size // 2 :]) for side in (one, two)]
    edges = _edges(halves[0][0], halves[1][0], bins)
    p, q = (_counts(half[0], edges) / max(1, half[0].size) for half in halves)
    counted = [_counts(half[1], edges) for half in halves]
    best = 0.0
    for chosen, mine, yours in ((p > grow * q, 0, 1), (q > grow * p, 1, 0)):
        hits, alarms = int(counted[mine][chosen].sum()), int(counted[yours][chosen].sum())
        low = float(at_least(hits, int(counted[mine].sum()), chance))
        best = max(best, low - grow * float(at_most(alarms, int(counted[yours].sum()), chance)))
    return best


def _shares(first: ArrayLike, second: ArrayLike, bins: int) -> tuple[Floats, Floats, tuple[int, int]]:
    one, two = checked("first", first), checked("second", second)
    edges = _edges(one, two, bins)
    return _counts(one, edges) / one.size, _counts(two, edges) / two.size, (one.size, two.size)


def _edges(one: Floats, two: Floats, bins: int) -> Floats:
    seen = np.concatenate([one, two])
    levels = np.unique(seen)
    if levels.size > check.whole("bins", bins, at_least=2):
        levels = np.unique(np.quantile(seen, np.linspace(0, 1, bins), method="lower"))
    return levels


def _counts(values: Floats, edges: Floats) -> Floats:
    return np.bincount(np.searchsorted(edges, values, side="right"), minlength=edges.size + 1).astype(np.float64)

"""Many quantiles at one price: a noisy tree of counts over public bins, of which every quantile is a reading.

The bounds are cut into BINS bins, and the bins are counted at LEVELS levels, each node BRANCHES times as fine as its
parent. A person's rows weigh at most k in all, so each level moves by at most k: l1 LEVELS k, l2 sqrt(LEVELS) k. The
counts are made consistent by least squares (Hay, Rastogi, Miklau, Suciu 2010): parents equal the sums of their
children, and every rank is estimated with the least variance. All after the noise: any number of quantiles, in any
group, costs the same.

Half-widths in the value's own unit. The noise moves no rank by more than h with probability 95%, where h is REACH noise
scales (found by simulation, checked in the tests). So the true quantile lies between the noisy quantiles at ranks q n -
h and q n + h: both are readings of the released tree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from terrine.mechanisms.lattice import Shape

BRANCHES, LEVELS = 8, 3
BINS = BRANCHES**LEVELS
NODES = sum(BRANCHES**level for level in range(1, LEVELS + 1))
REACH = {Shape.LAPLACE: 9.0, Shape.GAUSSIAN: 6.4}
"""Noise scales within which rank - q total stays with probability 95%, for every q and the worst rank."""

Floats = NDArray[np.float64]


def nodes_of(bins: NDArray[np.int64]) -> NDArray[np.int64]:
    """All nodes of the trees whose leaves are the last axis of `bins`, level by level from the coarsest."""
    levels = [bins.reshape(*bins.shape[:-1], BRANCHES**level, -1).sum(axis=-1) for level in range(1, LEVELS + 1)]
    return np.concatenate(levels, axis=-1)


def ranks_of(nodes: Floats) -> Floats:
    """Noisy nodes in; out, the estimated number below each bin's lower edge, and at the end the total."""
    leaves = consistent(nodes)
    zero = np.zeros((*leaves.shape[:-1], 1))
    return np.concatenate([zero, np.cumsum(leaves, axis=-1)], axis=-1)


def consistent(nodes: Floats) -> Floats:
    """Leaves of the least-squares tree: averages from below, then differences spread from above."""
    starts = np.cumsum([0, *(BRANCHES**level for level in range(1, LEVELS + 1))])
    found = [nodes[..., starts[i] : starts[i + 1]] for i in range(LEVELS)]
    for i in range(LEVELS - 2, -1, -1):
        height = LEVELS - i  # of these nodes, with leaves at height 1
        own = (BRANCHES**height - BRANCHES ** (height - 1)) / (BRANCHES**height - 1)
        found[i] = own * found[i] + (1 - own) * _children(found[i + 1]).sum(axis=-1)
    level = found[0]
    for i in range(1, LEVELS):
        children = _children(found[i])
        missing = (level - children.sum(axis=-1)) / BRANCHES
        level = (children + missing[..., None]).reshape(*children.shape[:-2], -1)
    return level


def read(ranks: Floats, q: float, reach: float, lower: float, upper: float) -> tuple[float, float]:
    """The q-quantile and its half-width at 95%, from one group's noisy ranks; the bounds where there is nobody."""
    rising = np.maximum.accumulate(ranks)
    falling = np.minimum.accumulate(ranks[::-1])[::-1]
    total = ranks[-1]
    if total <= 0:
        return (lower + upper) / 2, (upper - lower) / 2
    target = q * total
    edges = np.linspace(lower, upper, BINS + 1)
    middle = (rising + falling) / 2
    answer = float(np.interp(target, middle, edges)) if middle[-1] > middle[0] else (lower + upper) / 2
    below = int(np.searchsorted(rising, target - reach, side="left"))
    above = int(np.searchsorted(falling, target + reach, side="right"))
    low, high = edges[max(0, below - 1)], edges[min(BINS, above)]
    return answer, max(answer - low, high - answer)


def _children(level: Floats) -> Floats:
    return level.reshape(*level.shape[:-1], -1, BRANCHES)

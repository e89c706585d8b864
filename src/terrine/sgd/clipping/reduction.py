"""Mean or sum? Found out, not asked: two examples alone against the same two in one lot.

A mean over n examples gives each example's gradient divided by n, a sum gives it whole; anything else, such as a
loss that compares examples, mixes them, and no clipping of it is private.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from terrine.errors import InvalidArgument
from terrine.sgd.clipping.examples import Criterion, Lot
from terrine.sgd.clipping.result import Clipped
from terrine.sgd.reduction import MIXED, Reduction, close, of_criterion


def reduction_scale(alone: tuple[Clipped, Clipped], together: Clipped, *, tolerance: float = 1e-3) -> str:
    """Tell "mean" from "sum" by two examples alone against the same two in one lot (all unclipped, scale 1).

    Raises: InvalidArgument where neither explains the lot: the model or the loss mixes examples.
    """
    norms = torch.cat([alone[0].norms, alone[1].norms])
    for reduction, scale in (("sum", 1.0), ("mean", 2.0)):
        pairs = [(together.sums[n] * scale, alone[0].sums[n] + alone[1].sums[n]) for n in together.sums]
        if all(close(a, b, tolerance) for a, b in [(together.norms * scale, norms), *pairs]):
            return reduction
    raise InvalidArgument(MIXED)


def is_mean(criterion: Criterion, output: Any, y: Lot, size: int) -> bool:
    """Whether the criterion is a mean over the lot, tried once on a lot of at least two examples.

    Raises: InvalidArgument where it is neither a mean nor a sum.
    """
    key = getattr(criterion, "reduction", None)
    try:
        known = _seen.setdefault(criterion, {})
    except TypeError:  # what cannot be weakly referenced is tried every time
        known = {}
    if key not in known:
        known[key] = of_criterion(criterion, output, y, size) is Reduction.MEAN
    return known[key]


_seen: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()

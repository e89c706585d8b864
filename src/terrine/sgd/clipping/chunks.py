"""How many examples at a time: few enough to stay near the processor, enough to be worth a pass.

A part costs a fixed amount (the tape, and one pass over the parameters' sums), so its activations should be
several times as large as the parameters; beyond some megabytes they only leave the caches. What one example
takes is measured on the first lot of a model and remembered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrine.sgd.clipping.examples import Lot, chunks, trained

FIRST = 16  # examples in the part that is measured
TARGET = 16 << 20  # bytes
PARAMETERS = 4  # how many times the parameters

_seen: weakref.WeakKeyDictionary[nn.Module, dict[Any, int]] = weakref.WeakKeyDictionary()


def stops(model: nn.Module, x: Lot, size: int, chunk: int | None, measured: Callable[[], float]) -> Iterator[int]:
    """Where each part of the lot ends; `measured()` tells the bytes one example took, after a part has run."""
    start = 0
    if chunk is None:
        known = _seen.setdefault(model, {})
        key = tuple(tuple(leaf.shape[1:]) for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor))
        if key not in known:
            start = min(size, FIRST)
            yield start
            known[key] = fitting(measured() + _bytes(x) / max(size, 1), sum(p.numel() for p in trained(model).values()) * 4)
        chunk = known[key]
    parts = -(-(size - start) // chunk)
    yield from (start + stop for _, stop in chunks(size - start, -(-(size - start) // max(parts, 1)) or 1))


def fitting(example: float, parameters: float) -> int:
    """Examples whose bytes meet the target."""
    return max(1, int(max(TARGET, PARAMETERS * parameters) / max(example, 1.0)))


def _bytes(x: Lot) -> float:
    return float(sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)))

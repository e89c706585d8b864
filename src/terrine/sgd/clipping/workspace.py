"""Memory that is used again: fresh pages are the dearest thing on a CPU.

The sums of a lot lie in memory that the same parameters' next lot takes up again, once nobody holds it any more.
Per-example gradients live from a layer's backward pass to the end of their part of the lot. Inside `reused` they
lie in blocks that the model's next part, and its next lot, will use again; elsewhere in memory of their own.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_blocks: weakref.WeakKeyDictionary[nn.Module, list[Tensor]] = weakref.WeakKeyDictionary()
_here = threading.local()

_SMALL = 1 << 18  # numbers; less is not worth keeping


@contextmanager
def reused(model: nn.Module) -> Iterator[None]:
    """Within, `empty` takes from the model's blocks; afterwards all of them are free again."""
    if getattr(_here, "free", None) is not None:
        yield
        return
    _here.free, _here.taken = _blocks.pop(model, []), []
    try:
        yield
        _blocks[model] = _here.taken  # what this part did not need is given up
    finally:
        _here.free = _here.taken = None


def empty(rows: int, width: int, like: Tensor) -> Tensor:
    """An uninitialised matrix of the type of `like`."""
    free: list[Tensor] | None = getattr(_here, "free", None)
    size = rows * width
    if free is None or size < _SMALL or like.device.type != "cpu":
        return like.new_empty(rows, width)
    fitting = [i for i, block in enumerate(free) if size <= block.numel() <= 2 * size and block.dtype == like.dtype]
    best = min(fitting, key=lambda i: free[i].numel(), default=None)
    if best is None and free:
        del free[0]  # what no longer fits makes room
    block = free.pop(best) if best is not None else torch.empty(size, dtype=like.dtype)
    _here.taken.append(block)
    return block[:size].view(rows, width)


def limit(room: float) -> None:
    """From now on `fits` says whether so many bytes of per-example gradients may be kept, in this thread."""
    _here.room = room


def fits(size: int, like: Tensor) -> bool:
    """Whether there is room to keep `size` more numbers of the type of `like`."""
    room: float = getattr(_here, "room", math.inf)
    return size * like.element_size() <= room


def sum_of(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory for a sum as large as `parameter`: the last lot's, where that is nobody's any more."""
    if parameter.numel() < _LARGE or parameter.device.type != "cpu":
        return torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
    kept: Tensor | None = _sums.get(parameter)
    if kept is None or kept.dtype != dtype or kept.shape != parameter.shape or _holders(kept) != _ALONE:
        kept = _sums[parameter] = torch.empty(parameter.shape, dtype=dtype)
    return kept.view(kept.shape)


def _holders(tensor: Tensor) -> float:
    """How many tensors, arrays and the like share its memory; nan, which equals nothing, if torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return math.nan if count is None else float(count(tensor.untyped_storage()._cdata))


_LARGE = 1 << 14  # numbers; malloc itself keeps what is smaller
_sums: WeakIdKeyDictionary = WeakIdKeyDictionary()
_ALONE = _holders(torch.empty(1))

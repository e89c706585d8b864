"""Memory that is used again: fresh pages are the dearest thing on a CPU.

The sums of a lot lie in memory that the same parameters' next lot takes up again, once nobody holds it any more.
Per-example gradients live from a layer's backward pass to the end of their part of the lot. Inside `reused` and
`using` they lie in blocks that the next part, and the next lot, will use again; elsewhere in memory of their own.
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


class Blocks:
    """Memory that is lent out piece by piece, and all of it free again at once."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: list[Tensor] = []

    def lend(self, size: int, dtype: torch.dtype) -> Tensor:
        """A free block of at least `size` numbers."""
        free = self._free
        fitting = [i for i, block in enumerate(free) if size <= block.numel() <= 2 * size and block.dtype == dtype]
        best = min(fitting, key=lambda i: free[i].numel(), default=None)
        if best is None and free:
            del free[0]  # what no longer fits makes room
        spare = size // 3  # for the next lot, which may be larger; pages that nobody touches cost nothing
        self._lent.append(free.pop(best) if best is not None else torch.empty(size + spare, dtype=dtype))
        return self._lent[-1]

    def release(self) -> None:
        """Nobody needs what was lent; what was not needed this time is given up."""
        if self._lent:
            self._free, self._lent = self._lent, []


_kept: weakref.WeakKeyDictionary[nn.Module, Blocks] = weakref.WeakKeyDictionary()
_here = threading.local()

_SMALL = 1 << 18  # numbers; less is not worth keeping


@contextmanager
def using(blocks: Blocks) -> Iterator[None]:
    """Within, `empty` takes from these blocks, unless it takes from others already."""
    if getattr(_here, "blocks", None) is not None:
        yield
        return
    _here.blocks = blocks
    try:
        yield
    finally:
        _here.blocks = None


@contextmanager
def reused(model: nn.Module) -> Iterator[None]:
    """Within, `empty` takes from the model's blocks; afterwards all of them are free again."""
    blocks = _kept.pop(model, None) or Blocks()
    with using(blocks):
        yield
    blocks.release()
    _kept[model] = blocks


def empty(rows: int, width: int, like: Tensor) -> Tensor:
    """An uninitialised matrix of the type of `like`."""
    blocks: Blocks | None = getattr(_here, "blocks", None)
    size = rows * width
    if blocks is None or size < _SMALL or like.device.type != "cpu":
        return like.new_empty(rows, width)
    return blocks.lend(size, like.dtype)[:size].view(rows, width)


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

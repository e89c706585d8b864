"""Pages that stay with the process: what one step gives back to malloc, the next one finds there.

By default glibc returns what is freed at the end of its heap to the system as soon as it is a few times the largest
block freed so far, and a step of training asks for the same pages again, one fault each: an eighth of the step of a
small network. Whoever has set malloc's thresholds by the environment has had a reason, and keeps them.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

TRIM, MMAP = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h."""
FREE = 512 << 20
"""Bytes at the end of the heap that may lie free."""
BLOCK = 32 << 20
"""Bytes from which on a block is the system's own affair, the most that glibc takes."""


SMALL = 64 << 10
"""The same, for what will not come again."""
MODEST, SPARE = 1 << 14, 64
"""Numbers of a block from which on its place matters, and that it has more than were asked for."""


@lru_cache(maxsize=1)
def keep() -> bool:
    """Have malloc keep what is freed, for as long as the process lives; whether there was something to tell."""
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")):
        return False
    return _told(TRIM, FREE) and _told(MMAP, BLOCK)


@contextmanager
def aside() -> Iterator[None]:
    """Within, memory comes from the system and goes back to it: what is needed once leaves no holes behind."""
    if not keep():
        yield
        return
    _told(MMAP, SMALL)
    try:
        yield
    finally:
        _told(MMAP, BLOCK)


def block(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory of the processor whose place, once it is free, has room for a block of the same size.

    torch wants its blocks to begin at whole lines of the cache. glibc before 2.38 looks for some more bytes then, and
    passes over a hole that a block of that very size has left: memory would grow with every step.
    """
    size = math.prod(shape)
    if size < MODEST:
        return torch.empty(shape, dtype=dtype)
    return torch.empty(size + SPARE, dtype=dtype).resize_(shape)


def _told(setting: int, value: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    return mallopt is not None and bool(mallopt(setting, value))

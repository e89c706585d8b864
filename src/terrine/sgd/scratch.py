"""Memory for what lives only until the next call of its kind: one buffer for each purpose, kept by each thread.

Patches of a few examples are laid out, multiplied and forgotten, thousands of times in a step, and kernels need room
to work in. In fresh memory most of the time would go into pages that the system has to clear; in one buffer they stay
in the processor's cache.
"""

from __future__ import annotations

import threading
from math import prod
from typing import Any

from torch import Tensor

_buffers = threading.local()

_MOST = 8 << 20  # numbers; more is not kept
_SHAPES = 64  # of a buffer that are remembered: lots differ in size


class _Buffer(dict[tuple[int, ...], Tensor]):
    """Memory for one purpose, by the shapes that it was asked for."""

    def __init__(self, block: Tensor) -> None:
        super().__init__()
        self.block = block


def scratch(purpose: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor of the type of `like`, overwritten by the next call for the same purpose."""
    if like.device.type != "cpu":
        return like.new_empty(shape)
    kept: dict[Any, _Buffer] = _buffers.__dict__
    buffer = kept.get((purpose, like.dtype))
    if buffer is not None and (made := buffer.get(shape)) is not None:
        return made
    size = prod(shape)
    if size > _MOST:
        return like.new_empty(shape)
    if buffer is None or buffer.block.numel() < size:
        buffer = kept[purpose, like.dtype] = _Buffer(like.new_empty(size))
    if len(buffer) >= _SHAPES:
        buffer.clear()
    made = buffer[shape] = buffer.block[:size].view(shape)
    return made


def scratch_like(purpose: str, tensor: Tensor) -> Tensor:
    """The same with the shape of `tensor`, and its order of dimensions in memory."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    made = scratch(purpose, tuple(tensor.shape[axis] for axis in order), tensor)
    return made.permute([order.index(axis) for axis in range(tensor.dim())])

"""Memory for what lives only until the next call of its kind: one buffer for each purpose, kept by each thread.

Patches of a few examples are laid out, multiplied and forgotten, thousands of times in a step, and kernels need room
to work in. In fresh memory most of the time would go into pages that the system has to clear; in one buffer they stay
in the processor's cache.
"""

from __future__ import annotations

import threading
from math import prod

from torch import Tensor

_buffers = threading.local()

_MOST = 8 << 20  # numbers; more is not kept


def scratch(purpose: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor of the type of `like`, overwritten by the next call for the same purpose."""
    size = prod(shape)
    if like.device.type != "cpu" or size > _MOST:
        return like.new_empty(shape)
    kept: dict[str, Tensor] = _buffers.__dict__
    key = f"{purpose} {like.dtype}"
    block = kept.get(key)
    if block is None or block.numel() < size:
        block = kept[key] = like.new_empty(size)
    return block[:size].view(shape)


def scratch_like(purpose: str, tensor: Tensor) -> Tensor:
    """The same with the shape of `tensor`, and its order of dimensions in memory."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    made = scratch(purpose, tuple(tensor.shape[axis] for axis in order), tensor)
    return made.permute([order.index(axis) for axis in range(tensor.dim())])

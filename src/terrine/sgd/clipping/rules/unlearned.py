"""Operations without parameters that kernels do faster than the library: the same numbers, up to rounding."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from terrine.sgd import kernels
from terrine.sgd.clipping.patches import channels_last, each
from terrine.sgd.clipping.tape import FASTER

_WORTH = 1 << 14
"""Numbers from which on a kernel pays for being called."""


def tanh(inputs: Tensor, **others: Any) -> Tensor | None:
    """The hyperbolic tangent, for which the library takes several times as long as for a sigmoid."""
    if others or not _is_taken(inputs) or not _is_dense(inputs):
        return None
    return _Tanh.apply(inputs)  # type: ignore[no-any-return, no-untyped-call]


class _Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        out: Tensor = kernels.bending().bent(inputs, torch.empty_like(inputs))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.ops.aten.tanh_backward(gradients[0], *ctx.saved_tensors)  # type: ignore[no-any-return]


FASTER.update({torch.tanh: tanh, Tensor.tanh: tanh, functional.tanh: tanh})


def max_pool2d(
    inputs: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """The largest of every window, channels last."""
    if inputs.dim() != 4 or ceil_mode or return_indices or not _is_taken(inputs):
        return None
    step = kernel_size if stride in (None, []) else stride
    return _largest(inputs, *(each(one, 2) for one in (kernel_size, step, padding, dilation)))


def max_pool1d(
    inputs: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """The same along a line, an image of one row."""
    if inputs.dim() != 3 or ceil_mode or return_indices or not _is_taken(inputs):
        return None
    step = kernel_size if stride in (None, []) else stride
    kernel, across, border, apart = (each(one, 1)[0] for one in (kernel_size, step, padding, dilation))
    out = _largest(inputs.unsqueeze(2), (1, kernel), (1, across), (0, border), (1, apart))
    return None if out is None else out.squeeze(2)


def _largest(image: Tensor, *sizes: tuple[int, ...]) -> Tensor | None:
    windows = _windows(image.shape[2:], sizes)
    if windows is None:
        return None  # where something is wrong with them, the library says what
    return _Largest.apply(image, windows)  # type: ignore[no-any-return, no-untyped-call]


@lru_cache(maxsize=256)
def _windows(image: tuple[int, ...], sizes: tuple[tuple[int, ...], ...]) -> Any:
    """The windows of these sizes, if they fit an image of that size."""
    windows = kernels.windows().Windows(*sizes)
    return windows if windows.fit(*image) else None


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, windows: Any) -> Tensor:
        n, channels, *sizes = inputs.shape
        shape = n, channels, *windows.counts(*sizes)
        out = torch.empty(shape, memory_format=torch.channels_last)  # and no view: it may be changed in place
        ctx.windows, ctx.sizes = windows, sizes
        ctx.save_for_backward(kernels.windows().largest(channels_last(inputs), windows, out.movedim(1, -1)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        n, channels, *_ = gradients[0].shape
        shape = torch.Size((n, *ctx.sizes, channels))
        return kernels.windows().back(channels_last(gradients[0]), places, shape, ctx.windows).movedim(-1, 1), None


FASTER.update(dict.fromkeys((functional.max_pool2d, torch.max_pool2d), max_pool2d))
FASTER.update(dict.fromkeys((functional.max_pool1d, torch.max_pool1d), max_pool1d))


def _is_taken(inputs: Tensor) -> bool:
    return inputs.dtype is torch.float32 and inputs.device.type == "cpu" and inputs.numel() >= _WORTH


def _is_dense(inputs: Tensor) -> bool:
    """Whether the numbers lie in memory without gaps, each once, and another tensor can be laid out alike."""
    return inputs.is_contiguous() or (inputs.dim() == 4 and inputs.is_contiguous(memory_format=torch.channels_last))

"""A convolution's forward pass and its input's gradient, where there is a faster way than the library's.

Few channels come in and the stride divides the kernel: the input's gradient is s^d images, one for each phase of the
stride, that one convolution without stride gives as channels.

Nothing flows back to weight or bias: the tape has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.patches import Geometry

_NARROW = 16  # channels up to which the library's gradient of a strided convolution leaves much of a register empty


def convolve(image: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor | None:
    """The convolution of `image` (n, channels, *sizes) for one group; None where the library is faster."""
    if image.requires_grad and image.shape[1] <= _NARROW and _has_phases(geometry):
        return _Phases.apply(image, weight, bias, geometry)  # type: ignore[no-any-return, no-untyped-call]
    return None


class _Phases(torch.autograd.Function):
    """The library's convolution, and the input's gradient phase by phase."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.geometry, ctx.shape = geometry, image.shape
        ctx.save_for_backward(weight)
        return _library(image, weight, bias, geometry.stride, [low for low, _ in geometry.padding])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,), geometry, (n, channels, *sizes) = ctx.saved_tensors, ctx.geometry, ctx.shape
        stride, dims = geometry.stride, len(sizes)
        taps = [k // s for k, s in zip(geometry.kernel, stride, strict=True)]
        split = weight.reshape(*weight.shape[:2], *(size for pair in zip(taps, stride, strict=True) for size in pair))
        order = [*range(3, 3 + 2 * dims, 2), 1, 0, *range(2, 2 + 2 * dims, 2)]
        turned = split.permute(order).reshape(-1, len(weight), *taps).flip(*range(2, 2 + dims))
        phases = _library(gradients[0], turned, None, (1,) * dims, [tap - 1 for tap in taps]).movedim(1, -1)
        lines = phases.shape[1:-1]
        apart = phases.reshape(n, *lines, *stride, channels)
        order = [0, *(axis for i in range(dims) for axis in (1 + i, 1 + dims + i)), 1 + 2 * dims]
        full = apart.permute(order).reshape(n, *(m * s for m, s in zip(lines, stride, strict=True)), channels)
        borders = zip(geometry.padding, sizes, full.shape[1:-1], strict=True)
        cut = [(-low, size + low - have) for (low, _), size, have in borders]
        sides = [side for pair in reversed(cut) for side in pair]
        image = functional.pad(full, [0, 0, *sides]) if any(sides) else full
        return image.movedim(-1, 1), None, None, None


def _has_phases(geometry: Geometry) -> bool:
    symmetric = all(low == high for low, high in geometry.padding)
    whole = all(k % s == 0 for k, s in zip(geometry.kernel, geometry.stride, strict=True))
    return symmetric and whole and max(geometry.stride) > 1 == max(geometry.dilation)


def _library(image: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any) -> Tensor:
    kind = (functional.conv1d, functional.conv2d, functional.conv3d)[weight.dim() - 3]
    return kind(image, weight, bias, stride, padding)

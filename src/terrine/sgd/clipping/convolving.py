"""A convolution's forward pass and its input's gradient, where there is a faster way than the library's.

    product   few patches meet a large weight, which the library would spend its time on rearranging: the patches
              are laid out for one product of matrices, and the gradient's are added up where they lie
    phases    few channels come in and the stride divides the kernel: the input's gradient is s^d images, one for each
              phase of the stride, that one convolution without stride gives as channels

Nothing flows back to weight or bias: the tape has them.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.convolved import few
from terrine.sgd.clipping.patches import Geometry, patches, turned
from terrine.sgd.scratch import scratch

_NARROW = 16  # channels up to which the library's gradient of a strided convolution leaves much of a register empty


def convolve(image: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor | None:
    """The convolution of `image` (n, channels, *sizes) for one group; None where the library is faster."""
    if few(len(image) * prod(geometry.places(image.movedim(1, -1))), len(weight)):
        return _Product.apply(image, weight, bias, geometry)  # type: ignore[no-any-return, no-untyped-call]
    if image.requires_grad and image.shape[1] <= _NARROW and _has_phases(geometry):
        return _Phases.apply(image, weight, bias, geometry)  # type: ignore[no-any-return, no-untyped-call]
    return None


class _Product(torch.autograd.Function):
    """A convolution as one product of its patches with its weight; nothing flows back to the weight."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        last, width = image.movedim(1, -1), len(weight)
        ctx.geometry, ctx.like = geometry, last.detach()
        ctx.save_for_backward(weight)
        places = geometry.places(last)
        steps = [prod(places[axis:]) * width for axis in range(len(places) + 1)]
        out = image.new_empty_strided((len(image), width, *places), (steps[0], 1, *steps[1:]))
        laid, rows = patches(geometry, last, len(last))(0, len(last)), out.movedim(1, -1).view(-1, width)
        laid = laid.flatten(0, 2)
        turn = _turns(rows, weight)
        laid, matrix = (turned(laid, last.shape[-1]), weight.flatten(1)) if turn else (laid, _matrix(weight))
        if bias is None:
            torch.mm(laid, matrix.t(), out=rows)
        else:
            torch.addmm(bias, laid, matrix.t(), out=rows)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,), last = ctx.saved_tensors, gradients[0].movedim(1, -1)
        out = last.flatten(0, -2)
        turn = _turns(out, weight)
        places, channels, kernel = last.shape[:-1], weight.shape[1], weight.shape[2:]
        matrix = weight.flatten(1) if turn else _matrix(weight)
        columns = torch.mm(out, matrix, out=scratch("patches", (len(out), matrix.shape[1]), matrix))
        if turn:
            laid = columns.view(*places, channels, *kernel).movedim(len(places), -1)
        else:
            laid = columns.view(*places, *kernel, channels)
        return ctx.geometry.scattered(laid, ctx.like).contiguous().movedim(-1, 1), None, None, None


def _turns(rows: Tensor, weight: Tensor) -> bool:
    """Whether patches, fewer than output channels, are to be rearranged rather than the weight."""
    return rows.shape[0] < rows.shape[1] and weight.is_contiguous() and weight[0, 0].numel() > 1


def _matrix(weight: Tensor) -> Tensor:
    """(outputs, kernel * channels) of a weight (outputs, channels, *kernel)."""
    last = weight.movedim(1, -1)
    if not last.is_contiguous():
        last = scratch("weight", tuple(last.shape), weight).copy_(last)
    return last.flatten(1)


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

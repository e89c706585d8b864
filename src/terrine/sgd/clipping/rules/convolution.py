"""Convolutions: a linear map applied to every patch, so g_W = sum over patches l of y'_l patch_l^T.

A transposed convolution is the same with input and output gradient exchanged. The forward pass runs with channels
last in memory, where convolutions are fastest, unless the weight, which lies otherwise, is much larger than the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.axis import folded
from terrine.sgd.clipping.contribution import Contribution, Dense, wide
from terrine.sgd.clipping.convolved import Convolved
from terrine.sgd.clipping.patches import Geometry, channels_last, each
from terrine.sgd.clipping.piece import Piece
from terrine.sgd.clipping.single import vector
from terrine.sgd.clipping.tape import COMPUTE, PREPARE, Use, rule_for

Found = list[tuple[Piece, Contribution]]


@rule_for(functional.conv1d, functional.conv2d, functional.conv3d)
def convolution(use: Use, gradient: Tensor) -> Found:
    """A convolution's weight and bias."""
    weight, bias = use.piece(1, "weight"), use.piece(2, "bias")
    image = use.argument(0, "input").detach()
    geometry = _geometry(
        use.argument(1, "weight"),
        use.argument(3, "stride", 1),
        use.argument(4, "padding", 0),
        use.argument(5, "dilation", 1),
        use.argument(6, "groups", 1),
    )
    return _found(use, image, gradient, gradient, geometry, weight, bias)


@rule_for(functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
def transposed(use: Use, gradient: Tensor) -> Found:
    """A transposed convolution: its output gradient is the image, its input lies at the patches."""
    weight, bias = use.piece(1, "weight"), use.piece(2, "bias")
    geometry = _geometry(
        use.argument(1, "weight"),
        use.argument(3, "stride", 1),
        use.argument(4, "padding", 0),
        use.argument(7, "dilation", 1),
        use.argument(6, "groups", 1),
    )
    out = use.argument(0, "input").detach()
    image, geometry = _cropped(gradient, out, geometry)
    return _found(use, image, out, gradient, geometry, weight, bias)


def _cropped(image: Tensor, out: Tensor, geometry: Geometry) -> tuple[Tensor, Geometry]:
    """The image without what no patch of `out` reaches, where a patch more would fit in (output_padding >= stride)."""
    sides = []
    for axis, (low, high) in enumerate(geometry.padding, start=2):
        kernel, stride, dilation = geometry.kernel[axis - 2], geometry.stride[axis - 2], geometry.dilation[axis - 2]
        rest = low + image.shape[axis] + high - ((out.shape[axis] - 1) * stride + dilation * (kernel - 1) + 1)
        if rest >= stride:
            image = image.narrow(axis, 0, image.shape[axis] - max(rest - high, 0))
            high = max(high - rest, 0)
        sides.append((low, high))
    return image, replace(geometry, padding=tuple(sides))


def _found(
    use: Use, image: Tensor, out: Tensor, gradient: Tensor, geometry: Geometry, weight: Piece | None, bias: Piece | None
) -> Found:
    fold = folded(gradient.shape, use.where, use.examples, "convolution")
    found: Found = []
    sums = None
    if weight is not None:
        shape = tuple(weight.value.shape)
        part: Any = Convolved(channels_last(image), channels_last(out), geometry, shape)
        if bias is not None and weight.simple and out is gradient:
            sums = part.out_sums()
        found.append((weight, part if fold == 1 else Dense(part.dense().reshape(-1, fold, *shape).sum(1))))
    if bias is not None:
        sums = wide(gradient).movedim(1, -1).flatten(1, -2).sum(1) if sums is None else sums
        found.append((bias, vector(bias, sums if fold == 1 else sums.reshape(-1, fold, sums.shape[1]).sum(1))))
    return found


def _laid_out(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments with the image as convolutions are fastest: its channels last, or as the weight is."""
    image, weight, *others = args
    if image.dim() not in (4, 5) or image.device.type != "cpu":
        return args
    return (image.contiguous() if _is_heavy(weight, image) else _last(image), weight, *others)


def _laid_out_for_columns(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same, but one channel is never said to lie last where a stride leaves one column of the output.

    The library reads beyond such an image.
    """
    image, weight, *others = args
    if image.dim() not in (4, 5) or image.shape[1] > 1 or not _may_leave_one_column(image, weight, *others):
        return _laid_out(args)
    return (image.contiguous().squeeze(1).unsqueeze(1), weight, *others)


def _may_leave_one_column(
    image: Tensor,
    weight: Tensor,
    _bias: Any = None,
    stride: Any = None,
    padding: Any = None,
    dilation: Any = 1,
    *_: Any,
) -> bool:
    if stride is None or padding is None:
        return True  # they may be among the arguments given by name
    geometry = _geometry(weight, stride, padding, dilation, 1)
    return geometry.stride[-1] > 1 and geometry.places(image.movedim(1, -1))[-1] <= 1


def _is_heavy(weight: Tensor, image: Tensor) -> bool:
    """Whether to rearrange the weight would cost more than all that channels last would save."""
    return weight.is_contiguous() and weight.numel() >= HEAVY * image.numel()


HEAVY = 2


def _last(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous(memory_format=_layout(tensor))
    if tensor.shape[1] > 1 or tensor.requires_grad:
        return tensor
    steps = [prod(tensor.shape[axis + 1 :]) for axis in range(2, tensor.dim())]
    return tensor.as_strided(tensor.shape, (prod(tensor.shape[1:]), 1, *steps))  # one channel: say which layout it is


def _layout(tensor: Tensor) -> torch.memory_format:
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


PREPARE.update(dict.fromkeys((functional.conv2d, functional.conv3d), _laid_out_for_columns))
PREPARE.update(dict.fromkeys((functional.conv_transpose2d, functional.conv_transpose3d), _laid_out))


def _computed(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, None] | None:
    """The convolution with the weight laid out once: the library would do it on the way there and on the way back."""
    if groups > 1 or image.dim() != weight.dim() or image.dtype != weight.dtype or torch.is_autocast_enabled("cpu"):
        return None
    if weight.device.type != "cpu" or _is_heavy(weight, image):
        return None
    library = functional.conv2d if weight.dim() == 4 else functional.conv3d
    return library(image, weight.contiguous(memory_format=_layout(weight)), bias, stride, padding, dilation), None


COMPUTE.update(dict.fromkeys((functional.conv2d, functional.conv3d), _computed))


def _geometry(weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Geometry:
    kernel = tuple(weight.shape[2:])
    dilation = each(dilation, len(kernel))
    return Geometry(kernel, each(stride, len(kernel)), _sides(padding, kernel, dilation), dilation, groups)


def _sides(
    value: int | str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    if value == "valid":
        return ((0, 0),) * len(kernel)
    if value == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((side, side) for side in each(value, len(kernel)))  # type: ignore[arg-type]

"""Convolutions: a linear map applied to every patch, so g_W = sum over patches l of y'_l patch_l^T.

A transposed convolution is the same with input and output gradient exchanged. The forward pass runs with channels
last in memory, where convolutions are fastest on a processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.axis import folded
from terrine.sgd.clipping.contribution import Contribution, Dense
from terrine.sgd.clipping.convolved import Geometry, convolution
from terrine.sgd.clipping.ghost import wide
from terrine.sgd.clipping.parameter_view import ParameterView
from terrine.sgd.clipping.tape import COMPUTE, Use, rule_for

Found = list[tuple[ParameterView, Contribution]]


@rule_for(functional.conv1d, functional.conv2d, functional.conv3d)
def direct(use: Use, gradient: Tensor) -> Found:
    """A convolution's weight and bias."""
    weight, bias = use.parameter(1, "weight"), use.parameter(2, "bias")
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
    weight, bias = use.parameter(1, "weight"), use.parameter(2, "bias")
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
    use: Use,
    image: Tensor,
    out: Tensor,
    gradient: Tensor,
    geometry: Geometry,
    weight: ParameterView | None,
    bias: ParameterView | None,
) -> Found:
    fold = folded(gradient.shape, use.where, use.examples, "convolution")
    found: Found = []
    if weight is not None:
        shape = tuple(weight.value.shape)
        part = convolution(_channels_last(image), _channels_last(out), geometry, shape)
        found.append((weight, part if fold == 1 else Dense(part.dense().reshape(-1, fold, *shape).sum(1))))
    if bias is not None:
        sums = wide(gradient).flatten(2).sum(2)
        found.append((bias, Dense(sums if fold == 1 else sums.reshape(-1, fold, sums.shape[1]).sum(1))))
    return found


def _channels_last(tensor: Tensor) -> Tensor:
    """An image (n, channels, *sizes) as (n, *sizes, channels), contiguous, in single precision or wider."""
    return wide(tensor).movedim(1, -1).contiguous()


def _computed(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """The function with channels last in memory, where a processor's convolutions and poolings are fastest."""

    def compute(image: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        if image.dim() not in (4, 5) or image.device.type != "cpu":
            return function(image, *args, **kwargs), None
        layout = torch.channels_last if image.dim() == 4 else torch.channels_last_3d
        out = function(image.contiguous(memory_format=layout), *args, **kwargs)
        return out.contiguous(memory_format=layout), None

    return compute


for _function in (functional.conv2d, functional.conv3d, functional.conv_transpose2d, functional.conv_transpose3d):
    COMPUTE[_function] = _computed(_function)


def _geometry(weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Geometry:
    kernel = tuple(weight.shape[2:])
    dilation = _each(dilation, len(kernel))
    return Geometry(kernel, _each(stride, len(kernel)), _sides(padding, kernel, dilation), dilation, groups)


def _sides(
    value: int | str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    if value == "valid":
        return ((0, 0),) * len(kernel)
    if value == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((side, side) for side in _each(value, len(kernel)))  # type: ignore[arg-type]


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """One number for each dimension, as torch reads one for all."""
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims if len(value) == 1 else 1)

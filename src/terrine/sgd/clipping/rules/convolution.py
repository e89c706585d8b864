"""Convolutions: a linear map applied to every patch, so g_W = sum over patches l of y'_l patch_l^T.

A transposed convolution is the same with input and output gradient exchanged. The forward pass runs with channels
last in memory, where convolutions are fastest on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.contribution import Dense
from terrine.sgd.clipping.convolved import Geometry, convolution, is_much_larger
from terrine.sgd.clipping.ghost import wide
from terrine.sgd.clipping.parameter_view import ParameterView
from terrine.sgd.clipping.use import Found, Use, call, rule_for


def _images(use: Use) -> Tensor:
    """The output for images (n * m, channels, *sizes), where every example has m, channels last in memory on a CPU."""
    name = "input" if "input" in use.kwargs else 0
    image: Tensor = use.argument(0, "input")
    if image.dim() == use.argument(1, "weight").dim() + 1:
        image, use.folded = image.flatten(0, 1), True
    layout = torch.channels_last if image.dim() == 4 else torch.channels_last_3d
    on_cpu = image.dim() > 3 and image.device.type == "cpu"
    if channels_last := on_cpu and not is_much_larger(use.argument(1, "weight"), image):
        image = image.contiguous(memory_format=layout)
    elif on_cpu:
        image = image.flatten(1).view(image.shape)  # as laid out anew: one pixel is contiguous in every layout
    if isinstance(name, str):
        use.kwargs[name] = image
    else:
        use.args = (image, *use.args[1:])
    out = call(use)
    return out.contiguous(memory_format=layout) if channels_last else out


@rule_for(functional.conv1d, functional.conv2d, functional.conv3d, forward=_images)
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


@rule_for(functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d, forward=_images)
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
    found: Found = []
    if weight is not None:
        shape = tuple(weight.value.shape)
        found.append((weight, convolution(_channels_last(image), _channels_last(out), geometry, shape, use.units)))
    if bias is not None:
        found.append((bias, Dense(wide(gradient).flatten(2).sum(2)).of_units(use.units)))
    return found


def _channels_last(tensor: Tensor) -> Tensor:
    """An image (n, channels, *sizes) as (n, *sizes, channels), contiguous, in single precision or wider."""
    return wide(tensor).movedim(1, -1).contiguous()


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

"""Convolutions: a linear map applied to every patch, so g_W = sum over patches l of y'_l patch_l^T.

Channels lie last in memory, so that a patch is a few long runs. Either patches of a few examples at a time are
laid out (im2col) in memory that stays in cache, and give the gradients themselves, which are kept until their
weighted sum is one more pass over them; or all patches are laid out once, for the ghost norm and for the
weighted sum; whichever is cheaper for the layer's shape. A transposed convolution is the same with input and
output gradient exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping import workspace
from terrine.sgd.clipping.axis import folded
from terrine.sgd.clipping.contribution import Contribution, Dense, Outer, prefers_direct, squared_rows
from terrine.sgd.clipping.piece import Piece
from terrine.sgd.clipping.rules.linear import wide
from terrine.sgd.clipping.tape import PREPARE, Use, rule_for

Found = list[tuple[Piece, Contribution]]

_CACHE = 3 << 19  # bytes of patches laid out at once


@dataclass(frozen=True)
class Geometry:
    """How patches lie on an image: one number for each spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def patches(self, image: Tensor) -> Tensor:
        """(n * groups, positions, kernel * channels / groups) of an image (n, *sizes, channels)."""
        if any(low or high for low, high in self.padding):
            image = functional.pad(image, [0, 0, *(side for pair in reversed(self.padding) for side in pair)])
        n, *sizes, channels = image.shape
        each = channels // self.groups
        span = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        places = [(s - w) // st + 1 for s, w, st in zip(sizes, span, self.stride, strict=True)]
        example, *steps, channel = image.stride()
        inside = [step * d for step, d in zip(steps, self.dilation, strict=True)]
        between = [step * s for step, s in zip(steps, self.stride, strict=True)]
        view = image.as_strided(
            (n, self.groups, *places, *self.kernel, each),
            (example, channel * each, *between, *inside, channel),
        )
        return view.reshape(n * self.groups, prod(places), prod(self.kernel) * each)


class Patches:
    """g_i = sum_l out_il patch_il^T for every group: `image` (n, *sizes, c), `out` (n, *places, e)."""

    def __init__(self, image: Tensor, out: Tensor, geometry: Geometry, shape: tuple[int, ...]) -> None:
        self.image, self.out, self.geometry, self.shape = image, out, geometry, shape
        self._rows: Tensor | None = None
        self._outer: Outer | None = None

    def squares(self) -> Tensor:
        groups, positions = self.geometry.groups, prod(self.out.shape[1:-1])
        width, height = prod(self.shape[1:]), self.out.shape[-1] // groups
        if groups > 1 or prefers_direct(positions, width, height):
            return squared_rows(self._direct())
        patches = self.geometry.patches(self.image)
        self._outer = Outer(patches, self._outs(0, len(self.image)), (height, width))
        return self._outer.ghost()

    def add_to(self, total: Tensor, factor: Tensor, fresh: bool = False) -> None:
        last = total.new_empty(self.shape[0], *self.shape[2:], self.shape[1])
        part = Dense(self._direct()) if self._outer is None else self._outer
        part.add_to(last, factor, True)
        if fresh:
            total.copy_(last.movedim(-1, 1))
        else:
            total.add_(last.movedim(-1, 1))

    def dense(self) -> Tensor:
        rows = self._direct().view(-1, self.shape[0], *self.shape[2:], self.shape[1])
        return rows.movedim(-1, 2)

    def drop(self, examples: Tensor) -> Patches:
        mask = examples.view(-1, *[1] * (self.out.dim() - 1))
        rest = Patches(self.image.masked_fill(mask, 0.0), self.out.masked_fill(mask, 0.0), self.geometry, self.shape)
        rest._outer = None if self._outer is None else self._outer.drop(examples)
        return rest

    def _parts(self) -> list[tuple[int, int]]:
        n = len(self.image)
        one = prod(self.shape[1:]) * self.geometry.groups * prod(self.out.shape[1:-1]) * self.image.element_size()
        step = max(1, min(n, _CACHE // one))
        return [(start, min(start + step, n)) for start in range(0, n, step)]

    def _outs(self, start: int, stop: int) -> Tensor:
        """(n * groups, positions, outputs / groups)."""
        groups = self.geometry.groups
        out = self.out[start:stop].flatten(1, -2)
        if groups == 1:
            return out
        return out.reshape(*out.shape[:2], groups, -1).transpose(1, 2).flatten(0, 1)

    def _direct(self) -> Tensor:
        if self._rows is None:
            rows = workspace.empty(len(self.image), prod(self.shape), self.out)
            for start, stop in self._parts():
                patches = self.geometry.patches(self.image[start:stop])
                outs = self._outs(start, stop)
                target = rows[start:stop].view(len(outs), outs.shape[2], patches.shape[2])
                torch.bmm(outs.transpose(1, 2), patches, out=target)
            self._rows = rows
        return self._rows


@rule_for(functional.conv1d, functional.conv2d, functional.conv3d)
def convolution(use: Use, gradient: Tensor) -> Found:
    """A convolution's weight and bias."""
    weight, bias = use.piece(1, "weight"), use.piece(2, "bias")
    image = use.argument(0, "input").detach()
    kernel = tuple(use.argument(1, "weight").shape[2:])
    dims = len(kernel)
    stride, dilation = _each(use.argument(3, "stride", 1), dims), _each(use.argument(5, "dilation", 1), dims)
    padding = _sides(use.argument(4, "padding", 0), kernel, dilation)
    geometry = Geometry(kernel, stride, padding, dilation, use.argument(6, "groups", 1))
    return _found(use, image, gradient, gradient, geometry, weight, bias)


@rule_for(functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
def transposed(use: Use, gradient: Tensor) -> Found:
    """A transposed convolution: its output gradient is the image, its input lies at the patches."""
    weight, bias = use.piece(1, "weight"), use.piece(2, "bias")
    kernel = tuple(use.argument(1, "weight").shape[2:])
    dims = len(kernel)
    stride, dilation = _each(use.argument(3, "stride", 1), dims), _each(use.argument(7, "dilation", 1), dims)
    padding = _sides(use.argument(4, "padding", 0), kernel, dilation)
    geometry = Geometry(kernel, stride, padding, dilation, use.argument(6, "groups", 1))
    return _found(use, gradient, use.argument(0, "input").detach(), gradient, geometry, weight, bias)


def _found(
    use: Use, image: Tensor, out: Tensor, gradient: Tensor, geometry: Geometry, weight: Piece | None, bias: Piece | None
) -> Found:
    fold = folded(gradient.shape, use.where, use.examples, "convolution")
    found: Found = []
    if weight is not None:
        shape = tuple(weight.value.shape)
        part: Any = Patches(wide(image).movedim(1, -1), wide(out).movedim(1, -1), geometry, shape)
        found.append((weight, part if fold == 1 else Dense(part.dense().reshape(-1, fold, *shape).sum(1))))
    if bias is not None:
        sums = wide(gradient).movedim(1, -1).flatten(1, -2).sum(1)
        found.append((bias, Dense(sums if fold == 1 else sums.reshape(-1, fold, sums.shape[1]).sum(1))))
    return found


def _channels_last(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments with channels last in memory, where convolutions are fastest."""
    if args[0].dim() not in (4, 5) or args[0].device.type != "cpu":
        return args
    return (*(_last(tensor) for tensor in args[:2]), *args[2:])


def _last(tensor: Tensor) -> Tensor:
    layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    tensor = tensor.contiguous(memory_format=layout)
    if tensor.shape[1] > 1 or tensor.requires_grad:
        return tensor
    steps = [prod(tensor.shape[axis + 1 :]) for axis in range(2, tensor.dim())]
    return tensor.as_strided(tensor.shape, (prod(tensor.shape[1:]), 1, *steps))  # one channel: say which layout it is


PREPARE.update(dict.fromkeys((functional.conv2d, functional.conv3d), _channels_last))


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims if len(value) == 1 else 1)


def _sides(
    value: int | str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    if value == "valid":
        return ((0, 0),) * len(kernel)
    if value == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((side, side) for side in _each(value, len(kernel)))  # type: ignore[arg-type]

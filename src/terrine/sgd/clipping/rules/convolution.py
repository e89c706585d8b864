"""Convolutions: a linear map applied to every patch, so g_W = sum over patches l of y'_l patch_l^T.

Patches are laid out (im2col) for a few examples at a time in memory that stays in cache. Then, by whichever
is cheaper for the layer's shape, either the gradients themselves (they are then kept, and their weighted sum is
one more pass over them), or the ghost norm, and the weighted sum by the ordinary weight gradient of scaled
output gradients. A transposed convolution is the same with input and output gradient exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from terrine.sgd.clipping.contribution import Contribution, Dense, prefers_direct, squared_rows
from terrine.sgd.clipping.piece import Piece
from terrine.sgd.clipping.rules.linear import wide
from terrine.sgd.clipping.tape import Unfollowed, Use, rule_for

Found = list[tuple[Piece, Contribution]]

_CACHE = 1 << 20  # bytes of patches laid out at once


@dataclass(frozen=True)
class Geometry:
    """How patches lie on an image: one number for each spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def patches(self, image: Tensor) -> Tensor:
        """(n * groups, channels / groups * kernel, positions)."""
        if any(low or high for low, high in self.padding):
            image = F.pad(image, [side for pair in reversed(self.padding) for side in pair])
        n, channels, *sizes = image.shape
        span = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        places = [(s - w) // st + 1 for s, w, st in zip(sizes, span, self.stride, strict=True)]
        batch, channel, *steps = image.stride()
        inside = [step * d for step, d in zip(steps, self.dilation, strict=True)]
        between = [step * s for step, s in zip(steps, self.stride, strict=True)]
        view = image.as_strided(
            (n, self.groups, channels // self.groups, *self.kernel, *places),
            (batch, channel * (channels // self.groups), channel, *inside, *between),
            image.storage_offset(),
        )
        return view.reshape(n * self.groups, channels // self.groups * _product(self.kernel), -1)


class Patches:
    """g_i = sum_l out_il patch_il^T for every group: `image` (n, c, ...), `out` (n, e, ...)."""

    def __init__(self, image: Tensor, out: Tensor, geometry: Geometry, shape: tuple[int, ...]) -> None:
        self.image, self.out, self.geometry, self.shape = image, out, geometry, shape
        self._rows: Tensor | None = None

    def squares(self) -> Tensor:
        positions = _product(self.out.shape[2:])
        width = _product(self.shape[1:])
        if prefers_direct(positions, width, self.out.shape[1] // self.geometry.groups):
            return squared_rows(self._direct())
        return torch.cat([self._ghost(start, stop) for start, stop in self._parts()])

    def add_to(self, total: Tensor, factor: Tensor) -> None:
        if self._rows is not None:
            Dense(self._rows).add_to(total, factor)
            return
        scaled = self.out * factor.to(self.out.dtype).view(-1, *[1] * (self.out.dim() - 1))
        total.add_(self._weight_gradient(scaled))

    def dense(self) -> Tensor:
        return self._direct().view(-1, *self.shape)

    def drop(self, examples: Tensor) -> Patches:
        mask = examples.view(-1, *[1] * (self.out.dim() - 1))
        return Patches(self.image.masked_fill(mask, 0.0), self.out.masked_fill(mask, 0.0), self.geometry, self.shape)

    def _parts(self) -> list[tuple[int, int]]:
        n = len(self.image)
        one = _product(self.shape[1:]) * self.geometry.groups * _product(self.out.shape[2:]) * self.image.element_size()
        step = max(1, min(n, _CACHE // one))
        return [(start, min(start + step, n)) for start in range(0, n, step)]

    def _outs(self, start: int, stop: int) -> Tensor:
        groups = self.geometry.groups
        out = self.out[start:stop]
        return out.reshape((stop - start) * groups, out.shape[1] // groups, -1)

    def _direct(self) -> Tensor:
        if self._rows is None:
            rows = self.out.new_empty(len(self.image), _product(self.shape))
            for start, stop in self._parts():
                patches = self.geometry.patches(self.image[start:stop])
                outs = self._outs(start, stop)
                target = rows[start:stop].view(len(outs), outs.shape[1], patches.shape[1])
                torch.bmm(outs, patches.transpose(1, 2), out=target)
            self._rows = rows
        return self._rows

    def _ghost(self, start: int, stop: int) -> Tensor:
        patches, outs = self.geometry.patches(self.image[start:stop]), self._outs(start, stop)
        inner = torch.bmm(patches.transpose(1, 2), patches)
        outer = torch.bmm(outs.transpose(1, 2), outs)
        return (inner.mul_(outer)).view(stop - start, -1).sum(1)

    def _weight_gradient(self, out: Tensor) -> Tensor:
        g = self.geometry
        low = [pair[0] for pair in g.padding]
        image = self.image
        if any(pair[0] != pair[1] for pair in g.padding):
            image = F.pad(image, [side for pair in reversed(g.padding) for side in pair])
            low = [0] * len(low)
        weight = out.new_empty(self.shape)
        _, gradient, _ = torch.ops.aten.convolution_backward(
            out, image, weight, None, g.stride, low, g.dilation, False, [0] * len(low), g.groups, (False, True, False)
        )
        return gradient  # type: ignore[no-any-return]


@rule_for(F.conv1d, F.conv2d, F.conv3d)
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


@rule_for(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
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
    n = use.examples
    if use.where.axis != 0 or use.where.inner * n != gradient.shape[0]:
        raise Unfollowed("convolution: examples are not the first dimension")
    found: Found = []
    if weight is not None:
        part = Patches(wide(image), wide(out), geometry, tuple(weight.value.shape))
        merged = part if use.where.inner == 1 else Dense(part.dense().view(n, use.where.inner, *part.shape).sum(1))
        found.append((weight, merged))
    if bias is not None:
        found.append((bias, Dense(wide(gradient).flatten(2).sum(2).view(n, use.where.inner, -1).sum(1))))
    return found


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


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result

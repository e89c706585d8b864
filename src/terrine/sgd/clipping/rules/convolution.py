"""Convolutions: a linear map applied to every patch, so g_W = sum over patches l of y'_l patch_l^T.

Channels lie last in memory, so that a patch is a few long runs. Whichever is cheaper for the layer's shape:

    direct   patches of a few examples at a time are laid out in memory that stays in cache, and give the gradients
             themselves, which are kept until their weighted sum is one more pass over them
    ghost    norms by Gram matrices: <patch_l, patch_m> is a sum over the kernel of <pixel, pixel>, so the Gram
             matrix of the pixels is all that is multiplied; the weighted sum is one product of large matrices

A transposed convolution is the same with input and output gradient exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping import workspace
from terrine.sgd.clipping.axis import folded
from terrine.sgd.clipping.contribution import TRAFFIC, Contribution, Dense, squared_rows
from terrine.sgd.clipping.piece import Piece
from terrine.sgd.clipping.rules.linear import wide
from terrine.sgd.clipping.tape import PREPARE, Use, rule_for

Found = list[tuple[Piece, Contribution]]

_CACHE = 3 << 19  # bytes of patches laid out at once
_GATHERED = 80.0  # multiply-adds in the time of adding up one number out of short runs
_SLOWER = 0.2  # what many products of small matrices cost more than one of large ones
_LARGE = 32 << 20  # bytes of patches laid out for one product of large matrices
_BANDED = 128  # positions from which on several smaller products pay for laying out less


@dataclass(frozen=True)
class Geometry:
    """How patches lie on an image: one number for each spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def padded(self, image: Tensor) -> Tensor:
        """An image (n, *sizes, channels) with its border."""
        if not any(low or high for low, high in self.padding):
            return image
        return functional.pad(image, [0, 0, *(side for pair in reversed(self.padding) for side in pair)])

    def places(self, padded: Tensor) -> list[int]:
        """How many patches lie along each dimension."""
        span = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        return [(s - w) // st + 1 for s, w, st in zip(padded.shape[1:-1], span, self.stride, strict=True)]

    def patches(self, image: Tensor) -> Tensor:
        """(n * groups, positions, kernel * channels / groups) of an image (n, *sizes, channels)."""
        image = self.padded(image)
        n, each, places = len(image), image.shape[-1] // self.groups, self.places(image)
        example, *steps, channel = image.stride()
        inside = [step * d for step, d in zip(steps, self.dilation, strict=True)]
        between = [step * s for step, s in zip(steps, self.stride, strict=True)]
        view = image.as_strided(
            (n, self.groups, *places, *self.kernel, each),
            (example, channel * each, *between, *inside, channel),
            image.storage_offset(),
        )
        return view.reshape(n * self.groups, prod(places), prod(self.kernel) * each)

    def bands(self, image: Tensor) -> list[Tensor]:
        """The patches cut along the kernel's first dimension, (n, positions, rest of the kernel * channels) each.

        Bands overlap in memory: only the other dimensions are laid out, which writes less. One group only.
        """
        image = self.padded(image)
        step, places, border = self.stride[0], self.places(image), ((0, 0),) * len(self.kernel)
        lines = functional.pad(image, [*[0, 0] * (image.dim() - 2), 0, -image.shape[1] % step])
        lines = lines.unflatten(1, (-1, step))  # line i of the image is i // step of phase i % step
        others = Geometry((1, *self.kernel[1:]), (1, *self.stride[1:]), border, (1, *self.dilation[1:]), 1)
        laid: dict[int, Tensor] = {}
        found = []
        for row in range(self.kernel[0]):
            first, phase = divmod(row * self.dilation[0], step)
            if phase not in laid:
                laid[phase] = others.patches(lines[:, :, phase]).unflatten(1, (lines.shape[1], -1))
            found.append(laid[phase][:, first : first + places[0]].flatten(1, 2))
        return found

    def products(self, image: Tensor) -> Tensor:
        """<patch_l, patch_m> of every example, (n, positions, positions), from its pixels' products. One group only."""
        image = self.padded(image)
        n, places, pixels = len(image), self.places(image), image.flatten(1, -2)
        gram = torch.bmm(pixels, pixels.transpose(1, 2))
        size = gram.shape[1]
        steps = [prod(image.shape[axis + 2 : -1]) for axis in range(len(places))]
        between = [step * stride for step, stride in zip(steps, self.stride, strict=True)]
        strides = (size * size, *(step * size for step in between), *between)
        total: Tensor | None = None
        for place in product(*map(range, self.kernel)):
            first = sum(k * d * step for k, d, step in zip(place, self.dilation, steps, strict=True))
            part = gram.as_strided((n, *places, *places), strides, first * (size + 1))
            total = part.clone(memory_format=torch.contiguous_format) if total is None else total.add_(part)
        assert total is not None
        return total.view(n, prod(places), prod(places))


class Patches:
    """g_i = sum_l out_il patch_il^T for every group: `image` (n, *sizes, c), `out` (n, *places, e)."""

    def __init__(self, image: Tensor, out: Tensor, geometry: Geometry, shape: tuple[int, ...]) -> None:
        self.image, self.out, self.geometry, self.shape = image, out, geometry, shape
        self._rows: Tensor | None = None  # (bands, n, outputs * the rest)
        self._squares: Tensor | None = None
        self._banded = geometry.groups == 1 and 1 < geometry.kernel[0] <= 16 and prod(out.shape[1:-1]) >= _BANDED

    def squares(self) -> Tensor:
        if self.geometry.groups > 1:
            return self._direct()[1]
        positions, numbers, channels = prod(self.out.shape[1:-1]), prod(self.shape), self.shape[1]
        pixels = prod(
            size + low + high for size, (low, high) in zip(self.image.shape[1:-1], self.geometry.padding, strict=True)
        )
        pairs = prod(self.geometry.kernel) * positions**2
        by_pixels = pixels**2 * channels + _GATHERED * pairs
        by_patches = pairs * (channels + TRAFFIC * channels / positions)
        if (TRAFFIC + _SLOWER * positions) * numbers <= positions**2 * self.shape[0] + min(by_pixels, by_patches):
            return self._direct()[1]
        if by_pixels <= by_patches:
            inner = self.geometry.products(self.image)
        else:
            patches = self.geometry.patches(self.image)
            inner = torch.bmm(patches, patches.transpose(1, 2))
        outs = self._outs(0, len(self.out))
        outer = torch.bmm(outs, outs.transpose(1, 2))
        return torch.bmm(inner.view(len(inner), 1, -1), outer.view(len(outer), -1, 1)).view(-1)

    def add_to(self, total: Tensor, factor: Tensor, fresh: bool = False) -> None:
        if self._rows is None and self.geometry.groups == 1:
            made = self._placed(self._summed(factor), 1)
        else:
            rows, _ = self._direct()
            made = torch.stack([torch.mv(band.t(), factor.to(band.dtype)) for band in rows]).unsqueeze(1)
            made = self._placed(made, len(rows))
        made = made.squeeze(0)
        if fresh:
            total.copy_(made)
        else:
            total.add_(made)

    def dense(self) -> Tensor:
        rows, _ = self._direct()
        return self._placed(rows, len(rows))

    def drop(self, examples: Tensor) -> Patches:
        mask = examples.view(-1, *[1] * (self.out.dim() - 1))
        return Patches(self.image.masked_fill(mask, 0.0), self.out.masked_fill(mask, 0.0), self.geometry, self.shape)

    def _summed(self, factor: Tensor) -> Tensor:
        """The weighted sum, (1, 1, outputs * the rest), for one group."""
        scale = factor.to(self.out.dtype).view(-1, 1, 1)
        total = self.out.new_empty(self.shape[0], prod(self.shape[1:]))
        for start, stop in self._parts(_LARGE):
            outs = self._outs(start, stop) * scale[start:stop]
            patches = self.geometry.patches(self.image[start:stop])
            total.addmm_(outs.flatten(0, 1).t(), patches.flatten(0, 1), beta=float(start > 0))
        return total.view(1, 1, -1)

    def _direct(self) -> tuple[Tensor, Tensor]:
        """The gradients, (bands, n, outputs * the rest), and their squared norms while each is still in cache."""
        if self._rows is None or self._squares is None:
            n, bands = len(self.image), self.shape[2] if self._banded else 1
            rows = workspace.empty(bands, n * prod(self.shape) // bands, self.out).view(bands, n, -1)
            squares = self.out.new_zeros(n)
            for start, stop in self._parts(_CACHE * bands):
                image, outs = self.image[start:stop], self._outs(start, stop).transpose(1, 2)
                patches = self.geometry.bands(image) if self._banded else [self.geometry.patches(image)]
                for band, target in zip(patches, rows[:, start:stop], strict=True):
                    torch.bmm(outs, band, out=target.view(len(outs), outs.shape[1], band.shape[2]))
                    squares[start:stop] += squared_rows(target)
            self._rows, self._squares = rows, squares
        return self._rows, self._squares

    def _placed(self, rows: Tensor, bands: int) -> Tensor:
        """Gradients as `_direct` keeps them, as (n, *shape)."""
        outputs, channels, *kernel = self.shape
        if bands > 1:
            return rows.view(bands, -1, outputs, *kernel[1:], channels).movedim(0, 2).movedim(-1, 2)
        return rows.view(-1, outputs, *kernel, channels).movedim(-1, 2)

    def _parts(self, limit: int) -> list[tuple[int, int]]:
        """Runs of examples whose patches take at most `limit` bytes."""
        n, numbers = len(self.image), prod(self.shape[1:]) * self.geometry.groups * prod(self.out.shape[1:-1])
        step = max(1, min(n, limit // (numbers * self.image.element_size())))
        return [(start, min(start + step, n)) for start in range(0, n, step)]

    def _outs(self, start: int, stop: int) -> Tensor:
        """(n * groups, positions, outputs / groups)."""
        groups = self.geometry.groups
        out = self.out[start:stop].flatten(1, -2)
        if groups == 1:
            return out
        return out.reshape(*out.shape[:2], groups, -1).transpose(1, 2).flatten(0, 1)


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

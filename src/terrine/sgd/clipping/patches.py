"""How the patches of a convolution lie on an image, and how they are laid out in memory for products of matrices.

Images are (n, *sizes, channels): channels lie last, so that a patch is a few long runs. What is laid out lies in
scratch memory, and the next layout overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from terrine.sgd.clipping.contribution import wide
from terrine.sgd.scratch import scratch


def channels_last(tensor: Tensor) -> Tensor:
    """An image (n, channels, *sizes) as (n, *sizes, channels), contiguous, in single precision or wider."""
    return wide(tensor).movedim(1, -1).contiguous()


def each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """One number for each dimension, as torch reads one for all."""
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims if len(value) == 1 else 1)


@dataclass(frozen=True)
class Geometry:
    """One number for each spatial dimension; padding on both sides."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def pads(self) -> bool:
        """Whether there is a border at all."""
        return any(low or high for low, high in self.padding)

    def sizes(self, image: Tensor) -> list[int]:
        """The sizes of an image with its border."""
        return [size + low + high for size, (low, high) in zip(image.shape[1:-1], self.padding, strict=True)]

    def places(self, image: Tensor) -> list[int]:
        """How many patches lie along each dimension of an image and its border."""
        span = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        return [(s - w) // st + 1 for s, w, st in zip(self.sizes(image), span, self.stride, strict=True)]

    def inside(self, padded: Tensor, sizes: Sequence[int]) -> Tensor:
        """What lies within the border."""
        for axis, ((low, _), size) in enumerate(zip(self.padding, sizes, strict=True)):
            padded = padded.narrow(axis + 1, low, size)
        return padded

    def steps(self, image: Tensor) -> tuple[list[int], list[int]]:
        """How far apart in memory neighbouring patches lie, and neighbours within a patch."""
        steps = image.stride()[1:-1]
        between = [step * s for step, s in zip(steps, self.stride, strict=True)]
        return between, [step * d for step, d in zip(steps, self.dilation, strict=True)]

    def under(self, padded: Tensor, place: Sequence[int], places: Sequence[int]) -> Tensor:
        """What lies under one place of the kernel, for every patch of an image with its border."""
        steps = zip(place, self.dilation, self.stride, places, strict=True)
        return padded[(slice(None), *(slice(k * d, k * d + s * (count - 1) + 1, s) for k, d, s, count in steps))]


Layout = Callable[[int, int], Tensor]  # from, to: the patches of these examples


def patches(geometry: Geometry, image: Tensor, most: int) -> Layout:
    """(n, groups, positions, kernel * channels / groups), at most so many examples at a time."""
    border = Border(geometry, image, most)
    base, places, groups = border.base, geometry.places(image), geometry.groups
    each = base.shape[-1] // groups
    between, inside = geometry.steps(base)
    shape = (groups, *places, *geometry.kernel, each)
    copy = _copy("patches", base, shape, (base.stride(-1) * each, *between, *inside, base.stride(-1)), most)
    return lambda start, stop: copy(border(start, stop)).view(stop - start, groups, prod(places), -1)


def turned(laid: Tensor, channels: int) -> Tensor:
    """Patches (..., kernel * channels) of one group as (..., channels * kernel), a weight's own order."""
    if channels == laid.shape[-1]:
        return laid
    apart = laid.unflatten(-1, (-1, channels)).transpose(-1, -2)
    return scratch("turned patches", tuple(apart.shape), laid).copy_(apart).flatten(-2)


def products(geometry: Geometry, image: Tensor, most: int) -> Callable[[int, int], Tensor]:
    """<patch_l, patch_m> of every example, (n, positions, positions). One group.

    Each is a sum over the kernel of the products of two pixels, taken one dimension after the other. No border is
    needed but, for the last dimension, enough zeros between one line and the next.
    """
    places, last = geometry.places(image), len(geometry.kernel) - 1
    between = 0
    if geometry.stride[last] == 1:
        between = max(*geometry.padding[last], places[last] - image.shape[-2])
    border = Border(replace(geometry, padding=((0, 0),) * last + ((0, between),)), image, most)
    sizes = [*image.shape[1:-2], image.shape[-2] + between]

    def multiply(start: int, stop: int) -> Tensor:
        pixels = border.base[border(start, stop)].flatten(1, -2)
        gram = scratch("gram", (len(pixels), *[pixels.shape[1]] * 2), pixels)
        torch.bmm(pixels, pixels.transpose(1, 2), out=gram)
        before = 1
        for axis, (size, place, stride) in enumerate(zip(sizes, places, geometry.stride, strict=True)):
            low, dilation = geometry.padding[axis][0], geometry.dilation[axis]
            shifts = [k * dilation - low for k in range(geometry.kernel[axis])]
            if axis == last and stride == 1:
                return _along_lines(gram, shifts, before, size, place)
            gram = _along(gram, f"summed {axis}", shifts, before, size, place, stride)
            before *= place
        return gram

    return multiply


class Border:
    """An image with its border, a few examples at a time: the examples asked for lie at a slice of `base`."""

    def __init__(self, geometry: Geometry, image: Tensor, most: int) -> None:
        self.image, self.base, self._inside = image, image, None
        if geometry.pads:
            self.base = scratch("padded", (most, *geometry.sizes(image), image.shape[-1]), image).zero_()
            self._inside = geometry.inside(self.base, image.shape[1:-1])

    def __call__(self, start: int, stop: int) -> slice:
        if self._inside is None:
            return slice(start, stop)
        self._inside[: stop - start].copy_(self.image[start:stop])
        return slice(0, stop - start)


def _copy(
    purpose: str, base: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], most: int
) -> Callable[[slice], Tensor]:
    """Copies examples of a strided view of `base` into scratch memory; no copy where they are contiguous."""
    source = base.as_strided((len(base), *shape), (base.stride(0), *strides), base.storage_offset())
    if source.is_contiguous():
        return lambda here: source[here]
    target = scratch(purpose, (most, *shape), base)
    return lambda here: target[: here.stop - here.start].copy_(source[here])


def _along(gram: Tensor, purpose: str, shifts: list[int], before: int, size: int, place: int, stride: int) -> Tensor:
    """(n, before * size * after, the same) summed along one dimension of the kernel: `place` where `size` was."""
    n, after = len(gram), gram.shape[1] // (before * size)
    source = gram.view(n, *(before, size, after) * 2)
    total = scratch(purpose, (n, *(before, place, after) * 2), gram)
    parts = []
    for shift in shifts:
        first, stop = max(0, -(shift // stride)), min(place, (size - 1 - shift) // stride + 1)
        if first < stop:
            at = slice(first * stride + shift, (stop - 1) * stride + shift + 1, stride)
            here = slice(first, stop)
            parts.append((total[:, :, here, :, :, here], source[:, :, at, :, :, at]))
    _add_up(total, parts)
    return total.view(n, before * place * after, -1)


def _along_lines(gram: Tensor, shifts: list[int], before: int, size: int, place: int) -> Tensor:
    """The same for the last dimension and stride 1: a shift along whole lines, between which there are zeros."""
    n, long = gram.shape[:2]
    total = scratch("summed lines", (n, long, long), gram)
    parts = []
    for shift in shifts:
        here = slice(max(0, -shift), long - max(0, shift))
        at = slice(here.start + shift, here.stop + shift)
        parts.append((total[:, here, here], gram[:, at, at]))
    _add_up(total, parts)
    shape, strides = (before, place, before, place), (size * long, long, size, 1)
    return _copy("summed", total, shape, strides, n)(slice(0, n)).view(n, before * place, -1)


def _add_up(total: Tensor, parts: list[tuple[Tensor, Tensor]]) -> None:
    """Fill `total` with the sum of these parts of it."""
    parts.sort(key=lambda part: part[0].numel(), reverse=True)
    if parts and parts[0][0].numel() == total.numel():
        total.copy_(parts.pop(0)[1])
    else:
        total.zero_()
    for target, source in parts:
        target.add_(source)

"""How the patches of a convolution lie on an image, and the ways to lay them out in memory for products of matrices.

Images are (n, *sizes, channels): channels lie last, so that a patch is a few long runs. What is laid out lies in
scratch memory, and the next image's overwrites it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from terrine.sgd.clipping.scratch import scratch

_SHORT = 32  # numbers: a shorter run is not worth a copy of its own


@dataclass(frozen=True)
class Geometry:
    """One number for each spatial dimension; padding on both sides."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def sizes(self, image: Tensor) -> list[int]:
        """The sizes of an image with its border."""
        return [size + low + high for size, (low, high) in zip(image.shape[1:-1], self.padding, strict=True)]

    def places(self, image: Tensor) -> list[int]:
        """How many patches lie along each dimension of an image and its border."""
        span = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        return [(s - w) // st + 1 for s, w, st in zip(self.sizes(image), span, self.stride, strict=True)]

    def padded(self, image: Tensor) -> Tensor:
        """An image with its border."""
        if not any(low or high for low, high in self.padding):
            return image
        made = scratch("padded", (len(image), *self.sizes(image), image.shape[-1]), image).zero_()
        self._inside(made, image.shape[1:-1]).copy_(image)
        return made

    def patches(self, image: Tensor) -> Tensor:
        """(n * groups, positions, kernel * channels / groups)."""
        places, image = self.places(image), self.padded(image)
        n, each = len(image), image.shape[-1] // self.groups
        between, inside = self._steps(image)
        example, channel = image.stride(0), image.stride(-1)
        shape = (n, self.groups, *places, *self.kernel, each)
        laid = _laid("patches", image, shape, (example, channel * each, *between, *inside, channel))
        return laid.view(n * self.groups, prod(places), prod(self.kernel) * each)

    def unrolled(self, image: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Patches, and `out` (n, *places, e) as (n * groups, positions, e / groups), positions in the same order."""
        run = prod(self.kernel[1:]) * image.shape[-1]
        if self.groups == 1 and len(self.kernel) > 1 and self.kernel[0] > 1 == self.dilation[0] and run < _SHORT:
            turned = scratch("outs", (len(out), *out.shape[2:-1], out.shape[1], out.shape[-1]), out)
            return self._columns(image), turned.copy_(out.movedim(1, -2)).flatten(1, -2)
        outs = out.flatten(1, -2)
        if self.groups > 1:
            outs = outs.unflatten(2, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
        return self.patches(image), outs

    def bands(self, image: Tensor) -> list[Tensor]:
        """The patches cut along the kernel's first dimension, (n, positions, rest of the kernel * channels) each.

        Bands overlap in memory: only the other dimensions are laid out, which writes less. One group only.
        """
        places, image = self.places(image), self.padded(image)
        between, inside = self._steps(image)
        n, lines, step = len(image), image.shape[1], self.stride[0]
        laid: dict[int, Tensor] = {}
        found = []
        for row in range(self.kernel[0]):
            first, phase = divmod(row * self.dilation[0], step)  # line i is i // step of phase i % step
            if phase not in laid:
                shape = (n, -(-(lines - phase) // step), *places[1:], *self.kernel[1:], image.shape[-1])
                strides = (image.stride(0), *between, *inside[1:], image.stride(-1))
                made = _laid(f"bands {phase}", image, shape, strides, phase * image.stride(1))
                laid[phase] = made.view(n, shape[1], prod(places[1:]), -1)
            found.append(laid[phase][:, first : first + places[0]].flatten(1, 2))
        return found

    def products(self, image: Tensor) -> Tensor:
        """<patch_l, patch_m> of every example, (n, positions, positions). One group only.

        Each is a sum over the kernel of the products of two pixels, so it is taken one dimension after the other.
        """
        places, image = self.places(image), self.padded(image)
        n, pixels = len(image), image.flatten(1, -2)
        gram = torch.bmm(pixels, pixels.transpose(1, 2), out=scratch("gram", (n, *[pixels.shape[1]] * 2), image))
        before, last = 1, len(places) - 1
        for axis, (size, place) in enumerate(zip(image.shape[1:-1], places, strict=True)):
            if axis == last and self.stride[axis] == 1:
                return self._along_rows(gram, before, size, place)
            gram = self._along(gram, axis, before, size, place, prod(image.shape[axis + 2 : -1]))
            before *= place
        return gram

    def scattered(self, columns: Tensor, like: Tensor) -> Tensor:
        """The adjoint of `patches` for one group: every patch added to where it lies on an image shaped like `like`."""
        places = self.places(like)
        patches = columns.view(len(like), *places, *self.kernel, like.shape[-1])
        padded = like.new_zeros(len(like), *self.sizes(like), like.shape[-1])
        for place in product(*map(range, self.kernel)):
            target, part = padded, patches
            for axis, (k, d, s, count) in enumerate(zip(place, self.dilation, self.stride, places, strict=True)):
                target = target[(slice(None),) * (axis + 1) + (slice(k * d, k * d + s * (count - 1) + 1, s),)]
                part = part.select(len(places) + 1, k)
            target.add_(part)
        return self._inside(padded, like.shape[1:-1])

    def _inside(self, padded: Tensor, sizes: Sequence[int]) -> Tensor:
        for axis, ((low, _), size) in enumerate(zip(self.padding, sizes, strict=True)):
            padded = padded.narrow(axis + 1, low, size)
        return padded

    def _steps(self, image: Tensor) -> tuple[list[int], list[int]]:
        """How far apart in memory neighbouring patches lie, and neighbours within a patch."""
        steps = image.stride()[1:-1]
        between = [step * s for step, s in zip(steps, self.stride, strict=True)]
        return between, [step * d for step, d in zip(steps, self.dilation, strict=True)]

    def _columns(self, image: Tensor) -> Tensor:
        """Patches with the first dimension's positions last: once the others are laid out, a patch is one run."""
        places, image = self.places(image), self.padded(image)
        between, inside = self._steps(image)
        shape = (len(image), *places[1:], image.shape[1], *self.kernel[1:], image.shape[-1])
        strides = (image.stride(0), *between[1:], image.stride(1), *inside[1:], image.stride(-1))
        lines = _laid("lines", image, shape, strides)
        rest, run = prod(places[1:]), prod(self.kernel[1:]) * image.shape[-1]
        line = image.shape[1] * run
        size, steps = (len(image), rest, places[0], self.kernel[0] * run), (rest * line, line, self.stride[0] * run, 1)
        return _laid("patches", lines, size, steps).flatten(1, 2)

    def _along(self, gram: Tensor, axis: int, before: int, size: int, place: int, after: int) -> Tensor:
        """(n, before * size * after, the same) summed along the kernel's `axis`: `place` where `size` was."""
        stride, dilation = self.stride[axis], self.dilation[axis]
        row = before * size * after
        steps = (size * after, stride * after, 1)
        shape = (len(gram), *(before, place, after) * 2)
        strides = (row * row, *(step * row for step in steps), *steps)
        total = scratch(f"summed {axis}", shape, gram)
        _add_up(gram, shape, strides, [k * dilation * after * (row + 1) for k in range(self.kernel[axis])], total)
        return total.view(len(gram), before * place * after, -1)

    def _along_rows(self, gram: Tensor, before: int, size: int, place: int) -> Tensor:
        """The same for the last dimension and stride 1: a shift along whole rows, and what crosses lines left out."""
        n, row = len(gram), before * size
        long = row - (size - place)
        total = scratch("summed rows", (n, long, long), gram)
        starts = [k * self.dilation[-1] * (row + 1) for k in range(self.kernel[-1])]
        _add_up(gram, (n, long, long), (row * row, row, 1), starts, total)
        shape, strides = (n, before, place, before, place), (long * long, size * long, long, size, 1)
        return _laid("summed", total, shape, strides).view(n, before * place, -1)


def _laid(purpose: str, tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0) -> Tensor:
    """A strided view of `tensor`'s memory, copied unless it is contiguous already."""
    view = tensor.as_strided(shape, strides, tensor.storage_offset() + start)
    return view if view.is_contiguous() else scratch(purpose, shape, tensor).copy_(view)


def _add_up(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], starts: list[int], total: Tensor) -> None:
    """total = the sum of views of `tensor` that start at these offsets."""
    first, *others = (tensor.as_strided(shape, strides, tensor.storage_offset() + start) for start in starts)
    if not others:
        total.copy_(first)
        return
    torch.add(first, others[0], out=total)
    for other in others[1:]:
        total.add_(other)

"""A convolution's gradients by units: g_i = sum over the patches l of its images of out_il patch_il^T.

The cheaper of two ways for the layer's shape, with the patches of a few examples in memory at a time:

    direct   the gradients themselves
    ghost    norms by Gram matrices of patches and of output gradients; the weighted sum of the gradients is the
             convolution's own weight gradient, of output gradients times their examples' factors   [BMX22]

Of several groups the gradients themselves are the weight gradient of one image whose groups of channels are those of
all images   [RMT19]. Of a depthwise convolution on small maps, where that is slow, each entry of the kernel is a sum
of products: the output gradient's channel times the image's, moved by the entry's place.

Images are (n, *sizes, channels): channels lie last, so that a patch is a few long runs of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.nn import functional, grad

from terrine.sgd.clipping.contribution import Contribution, Dense, prefers_direct, without
from terrine.sgd.clipping.ghost import ghost_squares

_FOLDED = 1 << 19  # numbers of images folded at a time
_AT_ONCE = 1 << 18  # numbers of patches in memory at a time: few enough for a processor's cache
_PRODUCTS = 1 << 16  # numbers multiplied and added up at a time
_FEW = 64  # positions of all images whose patches are cheaper than the library's weight gradient
_TINY = 4  # positions of an image at which groups are multiplied one by one
_LARGE = 12  # times as many numbers as the image: a weight that is not worth laying out anew
_WEIGHT_GRADIENT = {1: grad.conv1d_weight, 2: grad.conv2d_weight, 3: grad.conv3d_weight}


@dataclass(frozen=True)
class Geometry:
    """How patches lie on an image: one number for each spatial dimension; padding on both sides."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def padded(self, image: Tensor) -> Tensor:
        """An image (n, *sizes, channels) with its border of zeros."""
        sides = [side for pair in reversed(self.padding) for side in pair]
        return functional.pad(image, [0, 0, *sides]) if any(sides) else image

    def patches(self, image: Tensor, *, channels_first: bool = False) -> Tensor:
        """(n, positions, kernel * channels), or (n, positions, channels * kernel)."""
        windows, dims = self.padded(image), len(self.kernel)
        for axis, (k, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            windows = windows.unfold(axis + 1, dilation * (k - 1) + 1, stride)[..., ::dilation]
        windows = windows if channels_first else windows.movedim(dims + 1, -1)
        patches: Tensor = windows.flatten(dims + 1).flatten(1, -2)
        return patches


def convolution(image: Tensor, out: Tensor, geometry: Geometry, shape: tuple[int, ...], units: int) -> Contribution:
    """The contribution of `image` (n, *sizes, c) and output gradients `out` (n, *places, e); the weight's shape."""
    images = len(out) // units
    positions, (outputs, channels, *kernel) = images * prod(out.shape[1:-1]), shape
    width = channels * prod(kernel)
    activations = images * (image[0].numel() + out[0].numel())
    found = Convolved(image, out, geometry, shape, images)
    direct = geometry.groups > 1 or prefers_direct(positions, width, outputs, activations)
    return Dense(found.dense()) if direct else found


@dataclass
class Convolved:
    """`image` (n, *sizes, c), `out` (n, *places, e); the parameter has the given shape, (e, c / groups, *kernel).

    Every unit has so many `images`, one after the other. Ghost norms are for one group.
    """

    image: Tensor
    out: Tensor
    geometry: Geometry
    shape: tuple[int, ...]
    images: int = 1

    def squares(self) -> Tensor:
        return torch.cat([ghost_squares(patches, out) for patches, out in zip(*self._parts(), strict=True)])

    def weighted_sum(self, factor: Tensor) -> Tensor:
        factor = factor.to(self.out.dtype).repeat_interleave(self.images)
        scaled = self.out * factor.view(-1, *[1] * (self.out.dim() - 1))
        if prod(scaled.shape[:-1]) <= _FEW and self.geometry.groups == 1:
            patches = self.geometry.patches(self.image, channels_first=True).flatten(0, 1)
            return torch.mm(scaled.flatten(0, -2).t(), patches).view(self.shape)
        return _weight_gradient(self.image.movedim(-1, 1), scaled.movedim(-1, 1), self.geometry, self.shape)

    def dense(self) -> Tensor:
        if self.geometry.groups > 1:
            if self._is_small_depthwise():
                return self._by_places()
            return self._by_groups() if prod(self.out.shape[1:-1]) <= _TINY else self._folded()
        outputs, channels, *kernel = self.shape
        rows = self.out.new_empty(len(self.out) // self.images, outputs, prod(self.shape[1:]))
        for patches, out, target in zip(*self._parts(), rows.split(self._step), strict=True):
            torch.bmm(out.mT, patches, out=target)
        return rows.view(-1, outputs, *kernel, channels).movedim(-1, 2)

    def _is_small_depthwise(self) -> bool:
        """Whether every group has one channel, and the library has no fast kernel of so many groups for its shape."""
        kernel, places = self.geometry.kernel, self.out.shape[1:-1]
        is_fast = all(size == 3 for size in kernel) and min(places) > 3
        return self.shape[1] == 1 and prod(places) <= 1024 and not is_fast

    def _by_groups(self) -> Tensor:
        """A product of patches and output gradients for every image and group."""
        groups = self.geometry.groups
        patches = self.geometry.patches(self.image, channels_first=True).unflatten(-1, (groups, -1)).transpose(1, 2)
        out = self.out.flatten(1, -2).unflatten(-1, (groups, -1)).permute(0, 2, 3, 1)
        rows = torch.matmul(out, patches).view(-1, *self.shape)
        return Dense(rows).of_units(len(self.out) // self.images).rows

    def _by_places(self) -> Tensor:
        """Every entry of the kernel as a sum of products over the output's places."""
        geometry, places = self.geometry, self.out.shape[1:-1]
        rows, step = [], max(1, _PRODUCTS // self.out[0].numel())
        for image, out in zip(self.image.split(step), self.out.split(step), strict=True):
            image = geometry.padded(image).unsqueeze(-1)
            out = out.unflatten(-1, (image.shape[-2], -1))  # the outputs of every channel
            entries = []
            for entry in product(*map(range, geometry.kernel)):
                window = image
                for axis, at in enumerate(entry):
                    first, stride = at * geometry.dilation[axis], geometry.stride[axis]
                    last = first + stride * (places[axis] - 1)
                    window = window[(slice(None),) * (axis + 1) + (slice(first, last + 1, stride),)]
                entries.append((window * out).sum(tuple(range(1, len(places) + 1))).flatten(1))
            rows.append(torch.stack(entries, -1))
        return Dense(torch.cat(rows).view(-1, *self.shape)).of_units(len(self.out) // self.images).rows

    def _folded(self) -> Tensor:
        """The weight gradient of one image whose groups of channels are those of all images."""
        n, step = len(self.out), max(1, _FOLDED // self.image[0].numel())
        rows = []
        for image, out in zip(self.image.split(step), self.out.split(step), strict=True):
            geometry = replace(self.geometry, groups=len(out) * self.geometry.groups)
            shape = (len(out) * self.shape[0], *self.shape[1:])
            rows.append(_weight_gradient(_as_channels(image), _as_channels(out), geometry, shape))
        return Dense(torch.cat(rows).view(n, *self.shape)).of_units(n // self.images).rows

    def drop(self, units: Tensor) -> Convolved:
        those = units.repeat_interleave(self.images)
        return replace(self, image=without(self.image, those), out=without(self.out, those))

    def _parts(self) -> tuple[Iterator[Tensor], Sequence[Tensor]]:
        """Patches (m, positions, width) and output gradients (m, positions, e) of a few units at a time."""
        some = self.image.split(self._step * self.images)
        patches = (self._by_units(self.geometry.patches(image)) for image in some)
        return patches, self._by_units(self.out.flatten(1, -2)).split(self._step)

    def _by_units(self, tensor: Tensor) -> Tensor:
        """(n, positions, width) of images as those of units."""
        return tensor if self.images == 1 else tensor.reshape(len(tensor) // self.images, -1, tensor.shape[-1])

    @property
    def _step(self) -> int:
        """Units at a time."""
        return max(1, _AT_ONCE // (self.images * prod(self.out.shape[1:-1]) * prod(self.shape[1:])))


def is_much_larger(weight: Tensor | Sequence[int], image: Tensor) -> bool:
    """Whether a weight, or one of this shape, takes longer to lay out with channels last than the layout saves."""
    return prod(weight.shape if isinstance(weight, Tensor) else weight) > _LARGE * image.numel()


def _weight_gradient(image: Tensor, out: Tensor, geometry: Geometry, shape: tuple[int, ...]) -> Tensor:
    """The gradient of a convolution's weight, of `image` (n, c, *sizes) and output gradients (n, e, *places)."""
    if is_much_larger(shape, image):  # laid out as the parameter is: the images are copied, not the result
        image, out = image.contiguous(), out.contiguous()
    padding = [low for low, _ in geometry.padding]
    if any(low != high for low, high in geometry.padding):
        image, padding = geometry.padded(image.movedim(1, -1)).movedim(-1, 1), [0] * len(padding)
    library = _WEIGHT_GRADIENT[len(padding)]
    made: Tensor = library(image, shape, out, geometry.stride, padding, geometry.dilation, geometry.groups)  # type: ignore[no-untyped-call]
    return made.contiguous()


def _as_channels(images: Tensor) -> Tensor:
    """(n, *sizes, channels) as one image (1, n * channels, *sizes), channels last in memory."""
    return images.movedim(0, -2).flatten(-2).unsqueeze(0).movedim(-1, 1)

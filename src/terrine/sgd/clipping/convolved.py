"""A convolution's per-example gradients: g_i = sum over patches l of out_il patch_il^T.

The cheaper of two ways for the layer's shape, with the patches of a few examples in memory at a time:

    direct   the gradients themselves
    ghost    norms by Gram matrices of patches and of output gradients; the weighted sum of the gradients is the
             convolution's own weight gradient, of output gradients times their examples' factors   [BMX22]

Of several groups, as in a depthwise convolution, the gradients themselves are the weight gradient of one image whose
groups of channels are those of all examples   [RMT19].

Images are (n, *sizes, channels): channels lie last, so that a patch is a few long runs of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional, grad

from terrine.sgd.clipping.contribution import Contribution, Dense, prefers_direct, without
from terrine.sgd.clipping.ghost import ghost_squares

_FOLDED = 1 << 19  # numbers of images folded at a time
_AT_ONCE = 1 << 18  # numbers of patches in memory at a time: few enough for a processor's cache
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

    def patches(self, image: Tensor) -> Tensor:
        """(n, positions, kernel * channels)."""
        windows, dims = self.padded(image), len(self.kernel)
        for axis, (k, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            windows = windows.unfold(axis + 1, dilation * (k - 1) + 1, stride)[..., ::dilation]
        patches: Tensor = windows.movedim(dims + 1, -1).flatten(dims + 1).flatten(1, -2)
        return patches


def convolution(image: Tensor, out: Tensor, geometry: Geometry, shape: tuple[int, ...]) -> Contribution:
    """The contribution of `image` (n, *sizes, c) and output gradients `out` (n, *places, e); the weight's shape."""
    positions, (outputs, channels, *kernel) = prod(out.shape[1:-1]), shape
    width = channels * prod(kernel)
    activations = image[0].numel() + out[0].numel()
    if geometry.groups > 1 or prefers_direct(positions, width, outputs, activations):
        return Dense(Convolved(image, out, geometry, shape).dense())
    return Convolved(image, out, geometry, shape)


@dataclass
class Convolved:
    """`image` (n, *sizes, c), `out` (n, *places, e); the parameter has the given shape, (e, c / groups, *kernel).

    Ghost norms are for one group.
    """

    image: Tensor
    out: Tensor
    geometry: Geometry
    shape: tuple[int, ...]

    def squares(self) -> Tensor:
        return torch.cat([ghost_squares(patches, out) for patches, out in zip(*self._parts(), strict=True)])

    def weighted_sum(self, factor: Tensor) -> Tensor:
        scaled = self.out * factor.to(self.out.dtype).view(-1, *[1] * (self.out.dim() - 1))
        return _weight_gradient(self.image.movedim(-1, 1), scaled.movedim(-1, 1), self.geometry, self.shape)

    def dense(self) -> Tensor:
        if self.geometry.groups > 1:
            return self._folded()
        outputs, channels, *kernel = self.shape
        rows = self.out.new_empty(len(self.out), outputs, prod(self.shape[1:]))
        for patches, out, target in zip(*self._parts(), rows.split(self._step), strict=True):
            torch.bmm(out.mT, patches, out=target)
        return rows.view(-1, outputs, *kernel, channels).movedim(-1, 2)

    def _folded(self) -> Tensor:
        """The weight gradient of one image whose groups of channels are those of all examples."""
        n, step = len(self.out), max(1, _FOLDED // self.image[0].numel())
        rows = []
        for image, out in zip(self.image.split(step), self.out.split(step), strict=True):
            geometry = replace(self.geometry, groups=len(out) * self.geometry.groups)
            shape = (len(out) * self.shape[0], *self.shape[1:])
            rows.append(_weight_gradient(_as_channels(image), _as_channels(out), geometry, shape))
        return torch.cat(rows).view(n, *self.shape)

    def drop(self, examples: Tensor) -> Convolved:
        return Convolved(without(self.image, examples), without(self.out, examples), self.geometry, self.shape)

    def _parts(self) -> tuple[Iterator[Tensor], Sequence[Tensor]]:
        """Patches (m, positions, width) and output gradients (m, positions, e) of a few examples at a time."""
        patches = (self.geometry.patches(image) for image in self.image.split(self._step))
        return patches, self.out.flatten(1, -2).split(self._step)

    @property
    def _step(self) -> int:
        return max(1, _AT_ONCE // (prod(self.out.shape[1:-1]) * prod(self.shape[1:])))


def _weight_gradient(image: Tensor, out: Tensor, geometry: Geometry, shape: tuple[int, ...]) -> Tensor:
    """The gradient of a convolution's weight, of `image` (n, c, *sizes) and output gradients (n, e, *places)."""
    padding = [low for low, _ in geometry.padding]
    if any(low != high for low, high in geometry.padding):
        image, padding = geometry.padded(image.movedim(1, -1)).movedim(-1, 1), [0] * len(padding)
    library = _WEIGHT_GRADIENT[len(padding)]
    made: Tensor = library(image, shape, out, geometry.stride, padding, geometry.dilation, geometry.groups)  # type: ignore[no-untyped-call]
    return made.contiguous()


def _as_channels(images: Tensor) -> Tensor:
    """(n, *sizes, channels) as one image (1, n * channels, *sizes), channels last in memory."""
    return images.movedim(0, -2).flatten(-2).unsqueeze(0).movedim(-1, 1)

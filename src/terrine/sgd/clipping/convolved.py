"""A convolution's per-example gradients: g_i = sum over patches l of out_il patch_il^T.

The cheaper of two ways for the layer's shape, with the patches of a few examples in memory at a time:

    direct   the gradients themselves
    ghost    norms by Gram matrices of patches and of output gradients; the weighted sum of the gradients is the
             convolution's own weight gradient, of output gradients times their examples' factors   [BMX22]

Images are (n, *sizes, channels): channels lie last, so that a patch is a few long runs of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional, grad

from terrine.sgd.clipping.contribution import Contribution, Dense, prefers_direct, without
from terrine.sgd.clipping.ghost import ghost_squares

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
        """(n, groups, positions, kernel * channels / groups)."""
        windows, dims = self.padded(image), len(self.kernel)
        for axis, (k, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            windows = windows.unfold(axis + 1, dilation * (k - 1) + 1, stride)[..., ::dilation]
        windows = windows.unflatten(dims + 1, (self.groups, -1))  # (n, *places, groups, channels / groups, *kernel)
        windows = windows.movedim(dims + 1, 1).movedim(dims + 2, -1)
        patches: Tensor = windows.flatten(dims + 2).flatten(2, -2)
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
        return torch.cat([ghost_squares(patches.squeeze(1), out) for patches, out in zip(*self._parts(), strict=True)])

    def weighted_sum(self, factor: Tensor) -> Tensor:
        geometry, image, padding = self.geometry, self.image, [low for low, _ in self.geometry.padding]
        if any(low != high for low, high in geometry.padding):
            image, padding = geometry.padded(image), [0] * len(padding)
        scaled = self.out * factor.to(self.out.dtype).view(-1, *[1] * (self.out.dim() - 1))
        sizes = self.shape, scaled.movedim(-1, 1), geometry.stride, padding, geometry.dilation, geometry.groups
        made: Tensor = _WEIGHT_GRADIENT[len(padding)](image.movedim(-1, 1), *sizes)  # type: ignore[no-untyped-call]
        return made.contiguous()

    def dense(self) -> Tensor:
        (outputs, channels, *kernel), groups = self.shape, self.geometry.groups
        rows = self.out.new_empty(len(self.out), groups, outputs // groups, prod(self.shape[1:]))
        for patches, out, target in zip(*self._parts(), rows.split(self._step), strict=True):
            left = out.unflatten(2, (groups, -1)).movedim(1, -1)
            torch.bmm(left.flatten(0, 1), patches.flatten(0, 1), out=target.flatten(0, 1))
        return rows.view(-1, outputs, *kernel, channels).movedim(-1, 2)

    def drop(self, examples: Tensor) -> Convolved:
        return Convolved(without(self.image, examples), without(self.out, examples), self.geometry, self.shape)

    def _parts(self) -> tuple[Iterator[Tensor], Sequence[Tensor]]:
        """Patches (m, groups, positions, width) and output gradients (m, positions, e) of a few examples at a time."""
        patches = (self.geometry.patches(image) for image in self.image.split(self._step))
        return patches, self.out.flatten(1, -2).split(self._step)

    @property
    def _step(self) -> int:
        numbers = prod(self.out.shape[1:-1]) * prod(self.shape[1:]) * self.geometry.groups
        return max(1, _AT_ONCE // numbers)

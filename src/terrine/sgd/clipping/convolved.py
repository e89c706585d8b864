"""A convolution's per-example gradients: g_i = sum over patches l of out_il patch_il^T.

Whichever is cheaper for the layer's shape:

    direct   patches of a few examples at a time are laid out in memory that stays in cache, and give the gradients
             themselves, which are kept until their weighted sum is one more pass over them
    ghost    norms by Gram matrices: <patch_l, patch_m> is a sum over the kernel of <pixel, pixel>, so the Gram
             matrix of the pixels is all that is multiplied; the weighted sum is one more convolution
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from terrine.sgd.clipping import patches, workspace
from terrine.sgd.clipping.contribution import Contribution, Dense, squared_rows
from terrine.sgd.clipping.depthwise import gradients, is_depthwise
from terrine.sgd.clipping.examples import chunks
from terrine.sgd.clipping.patches import Geometry, Layout
from terrine.sgd.clipping.scratch import scratch

_CACHE = 2 << 20  # bytes laid out at once, for each thread
_LARGE = 16 << 20  # bytes of patches laid out for one product of large matrices
_KEPT = 60.0  # multiply-adds in the time one number of a gradient takes to memory and back
_GATHERED = 120.0  # multiply-adds in the time it takes to add up one entry of a Gram matrix
_WIDE, _LONG = 48, 64  # columns and positions from which on a product for each band pays for laying out less
_FEW = 2  # patches to an output channel up to which a product of matrices beats the library's convolution


def few(patches: int, outputs: int) -> bool:
    """Whether so few patches meet so large a weight that rearranging the weight is what the library spends time on."""
    return patches <= _FEW * outputs


class Convolved:
    """`image` (n, *sizes, c), `out` (n, *places, e); the parameter has the given shape, (e, c / groups, *kernel)."""

    def __init__(self, image: Tensor, out: Tensor, geometry: Geometry, shape: tuple[int, ...]) -> None:
        self.image, self.out, self.geometry, self.shape = image, out, geometry, shape
        self._rows: Tensor | None = None  # (bands, n, outputs * the rest)
        self._squares: Tensor | None = None

    def squares(self) -> Tensor:
        if self._squares is None:
            self._squares = self._direct()[1] if self._prefers_direct() else self._ghost()
        return self._squares

    def add_to(self, total: Tensor, factor: Tensor, fresh: bool = False) -> None:
        made = self._summed(factor.to(self.out.dtype))
        if fresh:
            total.copy_(made)
        else:
            total.add_(made)

    def dense(self) -> Tensor:
        return self._placed(self._direct()[0])

    def drop(self, examples: Tensor) -> Contribution:
        if self._rows is not None:
            return Dense(self.dense()).drop(examples)
        mask = examples.view(-1, *[1] * (self.out.dim() - 1))
        return Convolved(self.image.masked_fill(mask, 0.0), self.out.masked_fill(mask, 0.0), self.geometry, self.shape)

    def _prefers_direct(self) -> bool:
        if self.geometry.groups > 1:
            return True
        pixels, positions = prod(self.image.shape[1:-1]), prod(self.out.shape[1:-1])
        ghost = pixels**2 * (self.image.shape[-1] + _GATHERED) + positions**2 * self.out.shape[-1]
        return _KEPT * prod(self.shape) <= ghost

    def _ghost(self) -> Tensor:
        """Squared norms: sum over l, m of <patch_l, patch_m> <out_l, out_m>."""
        outs = self.out.flatten(1, -2)
        squares = outs.new_empty(len(outs))
        step = self._step(_CACHE, prod(self.image.shape[1:-1]) ** 2)
        inner = patches.products(self.geometry, self.image, step)
        outer = scratch("outer", (step, outs.shape[1], outs.shape[1]), outs)
        for start, stop in chunks(len(outs), step):
            part, gram = outs[start:stop], outer[: stop - start]
            torch.bmm(part, part.transpose(1, 2), out=gram)
            torch.linalg.vecdot(inner(start, stop).flatten(1), gram.flatten(1), out=squares[start:stop])
        return squares

    def _direct(self) -> tuple[Tensor, Tensor]:
        """The gradients, (bands, n, outputs * the rest), and their squared norms while each is still in cache."""
        if (self._rows is None or self._squares is None) and is_depthwise(self.geometry, self.image):
            rows = gradients(self.geometry, self.image, self.out)
            self._rows, self._squares = rows.unsqueeze(0), squared_rows(rows)
        if self._rows is None or self._squares is None:
            n, bands, groups = len(self.image), self._bands(), self.geometry.groups
            step = self._step(_CACHE, self._patch_numbers() if bands == 1 else self._numbers_at_once(bands))
            layout, outs = self._layout(bands, step)
            left = outs.transpose(-1, -2)
            rows = workspace.empty(bands, n * prod(self.shape) // bands, self.out).view(
                bands, n, groups, left.shape[2], -1
            )
            norms, flat = self.out.new_empty(bands, n), rows.flatten(2)
            for start, stop in chunks(n, step):
                here = left[start:stop].flatten(0, 1)
                for laid, target in zip(layout(start, stop), rows[:, start:stop].unbind(0), strict=True):
                    torch.bmm(here, laid.flatten(0, 1), out=target.flatten(0, 1))
                torch.linalg.vector_norm(flat[:, start:stop], dim=2, out=norms[:, start:stop])
            self._rows, self._squares = flat, norms.square_().sum(0)
            self.image = self.out = self.out[:0]  # all that is needed of them is in the rows
        return self._rows, self._squares

    def _bands(self) -> int:
        lines, width = self.geometry.kernel[0], prod(self.geometry.kernel[1:]) * self.shape[1]
        large = width >= _WIDE and prod(self.out.shape[1:-1]) >= _LONG
        return lines if self.geometry.groups == 1 and 1 < lines <= 16 and large else 1

    def _layout(self, bands: int, step: int) -> tuple[Layout, Tensor]:
        """Patches, and `out` as (n, groups, positions, outputs / groups)."""
        if bands > 1:
            return patches.bands(self.geometry, self.image, step), self.out.flatten(1, -2).unsqueeze(1)
        if patches.is_short(self.geometry, self.image.shape[-1]):
            return patches.columns(self.geometry, self.image, step), self.out.flatten(1, -2).unsqueeze(1)
        outs = self.out.flatten(1, -2).unflatten(2, (self.geometry.groups, -1)).transpose(1, 2)
        return patches.patches(self.geometry, self.image, step), outs

    def _summed(self, factor: Tensor) -> Tensor:
        """The weighted sum, shaped as the parameter."""
        if self._rows is not None or self.geometry.groups > 1:
            sums = torch.stack([torch.mv(band.t(), factor) for band in self._direct()[0]])
            return self._placed(sums.unsqueeze(1)).squeeze(0)
        scale = factor.view(-1, *[1] * (self.out.dim() - 1))
        scaled = torch.mul(self.out, scale, out=scratch("scaled", tuple(self.out.shape), self.out))
        by_library = all(low == high for low, high in self.geometry.padding)
        if by_library and not few(self.out.shape[:-1].numel(), self.out.shape[-1]):
            return self._by_library(scaled)
        total = scratch("weight", (1, 1, prod(self.shape)), self.out)
        step = self._step(_LARGE, self._patch_numbers())
        layout = patches.patches(self.geometry, self.image, step)
        turn = scaled.shape[:-1].numel() < self.shape[0] and prod(self.geometry.kernel) > 1
        for start, stop in chunks(len(scaled), step):
            right, left = layout(start, stop)[0].flatten(0, 2), scaled[start:stop].flatten(0, -2).t()
            right = patches.turned(right, self.shape[1]) if turn else right
            total.view(self.shape[0], -1).addmm_(left, right, beta=float(start > 0))
        return total.view(self.shape) if turn else self._placed(total).squeeze(0)

    def _by_library(self, scaled: Tensor) -> Tensor:
        geometry, dims = self.geometry, len(self.geometry.kernel)
        weight = scaled.new_empty(self.shape[0], *self.shape[2:], self.shape[1]).movedim(-1, 1)
        made: Tensor = torch.ops.aten.convolution_backward(
            scaled.movedim(-1, 1), self.image.movedim(-1, 1), weight, None, geometry.stride,
            [low for low, _ in geometry.padding], geometry.dilation, False, [0] * dims, 1, [False, True, False],
        )[1]  # fmt: skip
        return made

    def _placed(self, rows: Tensor) -> Tensor:
        """Gradients as `_direct` keeps them, as (n, *shape)."""
        outputs, channels, *kernel = self.shape
        if len(rows) > 1:
            return rows.view(len(rows), -1, outputs, *kernel[1:], channels).movedim(0, 2).movedim(-1, 2)
        return rows.view(-1, outputs, *kernel, channels).movedim(-1, 2)

    def _patch_numbers(self) -> int:
        return prod(self.shape[1:]) * self.geometry.groups * prod(self.out.shape[1:-1])

    def _numbers_at_once(self, bands: int) -> int:
        """What one example's gradients are made of and become, with the patches laid out in bands."""
        return self._patch_numbers() // bands + prod(self.shape) + self.out[0].numel() + self.image[0].numel()

    def _step(self, limit: int, numbers: int) -> int:
        """How many examples of so many numbers each take at most `limit` bytes for each thread."""
        most = limit * torch.get_num_threads() // (numbers * self.image.element_size())
        return max(1, min(len(self.image), most))

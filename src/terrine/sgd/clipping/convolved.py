"""A convolution's per-example gradients: g_i = sum over patches l of out_il patch_il^T.

Whichever is cheaper for the layer's shape:

    direct   the gradients themselves, which are kept until their weighted sum is one more pass over them
    ghost    norms by Gram matrices: sum over l, m of <patch_l, patch_m> <out_l, out_m>; the weighted sum is one more
             convolution

Compiled kernels read patches where they lie, or from channels that they have laid out in slices. For what they do not
know (groups, three dimensions, other types than float32) patches of a few examples at a time are laid out in memory
that stays in cache, and a Gram matrix of patches is summed up from that of the pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from terrine.sgd import kernels
from terrine.sgd.clipping import patches
from terrine.sgd.clipping.contribution import Contribution, Dense, Outer, squared_rows
from terrine.sgd.clipping.depthwise import gradients, is_depthwise
from terrine.sgd.clipping.examples import chunks
from terrine.sgd.clipping.patches import Geometry
from terrine.sgd.kernels import Image, cancelling
from terrine.sgd.scratch import scratch

_CACHE = 2 << 20  # bytes laid out at once, for each thread
_LARGE = 16 << 20  # bytes of patches laid out for one product of large matrices
_KEPT = 60.0  # multiply-adds in the time one number of a gradient takes to memory and back
_GATHERED = 120.0  # multiply-adds in the time it takes to add up one entry of a Gram matrix
_MODEST = 1 << 28  # multiply-adds up to which kernels that read patches where they lie beat the library's convolution
_FEW = 1  # patches to an output channel up to which a product of matrices beats the library's convolution


class Convolved:
    """`image` (n, *sizes, c), `out` (n, *places, e); the parameter has the given shape, (e, c / groups, *kernel)."""

    def __init__(self, image: Tensor, out: Tensor, geometry: Geometry, shape: tuple[int, ...]) -> None:
        self.image, self.out, self.geometry, self.shape = image, out, geometry, shape
        self._rows: Tensor | None = None  # (n, outputs * the rest), or (n, the rest * outputs) if turned
        self._turned = False
        self._squares: Tensor | None = None
        self._sums: Tensor | None = None
        self._compiled = _known(image, out, geometry)  # the image for compiled kernels, if they know it

    def squares(self) -> Tensor:
        if self._squares is None:
            self._squares = self._direct()[1] if self._prefers_direct() else self._ghost()
        return self._squares

    def out_sums(self) -> Tensor:
        """sum_l out_il, (n, e), which kernels make along with the norms."""
        if self._compiled is not None:
            self.squares()
        return self.out.flatten(1, -2).sum(1) if self._sums is None else self._sums

    def made(self, factor: Tensor) -> Tensor | None:
        """The weighted sum in memory of its own, where one product of matrices makes it."""
        if not self._is_product() or self._step(_LARGE, self._patch_numbers()) < len(self.out):
            return None
        ((product, _),) = self._products()
        made = product.made(factor)
        if made is None:
            made = self.out.new_empty(self.shape)
            product.add_to(made, factor, fresh=True)
        return made

    def add_to(self, total: Tensor, factor: Tensor, fresh: bool = False) -> None:
        if self._is_product():
            for product, some in self._products():
                product.add_to(total, factor[some], fresh and some.start == 0)
            return
        made = self._summed(factor.to(self.out.dtype))
        _ = total.copy_(made) if fresh else total.add_(made)

    def dense(self) -> Tensor:
        return self._placed(self._direct()[0], self._turned)

    def drop(self, examples: Tensor) -> Contribution:
        if self._rows is not None:
            return Dense(self.dense()).drop(examples)
        mask = examples.view(-1, *[1] * (self.out.dim() - 1))
        return Convolved(self.image.masked_fill(mask, 0.0), self.out.masked_fill(mask, 0.0), self.geometry, self.shape)

    def _prefers_direct(self) -> bool:
        if self.geometry.groups > 1:
            return True
        pixels, positions, outputs = prod(self.image.shape[1:-1]), prod(self.out.shape[1:-1]), self.out.shape[-1]
        if self._compiled is not None:
            return kernels.prefers_direct(positions, prod(self.shape[1:]), outputs)
        ghost = pixels**2 * (self.image.shape[-1] + _GATHERED) + positions**2 * outputs
        return _KEPT * prod(self.shape) <= ghost

    def _ghost(self) -> Tensor:
        """Squared norms: sum over l, m of <patch_l, patch_m> <out_l, out_m>."""
        outs, compiled = self.out.flatten(1, -2), self._compiled
        if compiled is not None:
            squares, self._sums = compiled.squares(outs)
            return squares
        squares, alone = outs.new_empty(2, len(outs))
        step = self._step(_CACHE, prod(self.image.shape[1:-1]) ** 2)
        inner = patches.products(self.geometry, self.image, step)
        outer = scratch("outer", (step, outs.shape[1], outs.shape[1]), outs)
        for start, stop in chunks(len(outs), step):
            part, gram = outs[start:stop], outer[: stop - start]
            torch.bmm(part, part.transpose(1, 2), out=gram)
            squares[start:stop], alone[start:stop] = cancelling.summed(inner(start, stop), gram)
        steps, numbers = prod(self.shape[1:]) + outs.shape[2], prod(self.shape)
        return cancelling.settled(squares, alone, steps, outs.shape[1], numbers, self._some_squares)

    def _some_squares(self, examples: Tensor) -> Tensor:
        part = Convolved(self.image[examples], self.out[examples], self.geometry, self.shape)
        return part._laid_out(scratch("cancelling", (len(examples), prod(self.shape)), self.out))

    def _direct(self) -> tuple[Tensor, Tensor]:
        """The gradients, and their squared norms."""
        if self._rows is None or self._squares is None:
            compiled = self._compiled
            if is_depthwise(self.geometry, self.image):
                rows = gradients(self.geometry, self.image, self.out)
                self._rows, self._squares = rows, squared_rows(rows)
            elif compiled is not None:
                self._rows = self.out.new_empty(len(self.out), prod(self.shape))
                self._turned, self._squares, self._sums = compiled.gradients(self.out.flatten(1, -2), self._rows)
            else:
                self._rows = self.out.new_empty(len(self.out), prod(self.shape))
                self._squares = self._laid_out(self._rows)
            self.image = self.out = self.out[:0]  # all that is needed of them is in the rows
            self._compiled = None
        return self._rows, self._squares

    def _laid_out(self, rows: Tensor) -> Tensor:
        """Fill `rows` from patches of a few examples at a time, and square each while it is still in cache."""
        n, groups = len(self.image), self.geometry.groups
        step = self._step(_CACHE, self._patch_numbers())
        layout = patches.patches(self.geometry, self.image, step)
        left = self.out.flatten(1, -2).unflatten(2, (groups, -1)).movedim(1, -1)
        norms = self.out.new_empty(n)
        for start, stop in chunks(n, step):
            target = rows[start:stop].view((stop - start) * groups, left.shape[2], -1)
            torch.bmm(left[start:stop].flatten(0, 1), layout(start, stop).flatten(0, 1), out=target)
            torch.linalg.vector_norm(rows[start:stop], dim=1, out=norms[start:stop])
        return norms.square_()

    def _summed(self, factor: Tensor) -> Tensor:
        """The weighted sum, shaped as the parameter."""
        if self._rows is not None or self.geometry.groups > 1:
            total = scratch("weight", (1, prod(self.shape)), self.out)
            Dense(self._direct()[0]).add_to(total, factor, fresh=True)
            return self._placed(total, self._turned).squeeze(0)
        compiled = self._compiled
        if compiled is not None and compiled.prefers_slices(self.shape[0]):
            return self._placed(compiled.weighted(self.out.flatten(1, -2), factor), turned=False).squeeze(0)
        scale = factor.view(-1, *[1] * (self.out.dim() - 1))
        scaled = torch.mul(self.out, scale, out=scratch("scaled", tuple(self.out.shape), self.out))
        if compiled is None or compiled.framed or self.out.numel() * prod(self.shape[1:]) > _MODEST:
            return self._by_library(scaled)
        turned, numbers = compiled.summed(scaled.flatten(1, -2))
        return self._placed(numbers.unsqueeze(0), turned).squeeze(0)

    def _is_product(self) -> bool:
        """Whether the weighted sum is better had as a product of matrices than by the library or a kernel.

        So few patches meet so large a weight that rearranging it is what the library would spend its time on.
        """
        if self._rows is not None or self.geometry.groups > 1:
            return False
        if self._compiled is not None and self._compiled.prefers_slices(self.shape[0]):
            return False
        few = self.out.shape[:-1].numel() <= _FEW * self.shape[0]
        return few or any(low != high for low, high in self.geometry.padding)

    def _products(self) -> Iterator[tuple[Outer, slice]]:
        """Patches that are laid out in the order of the weight, a part of the lot at a time."""
        step = self._step(_LARGE, self._patch_numbers())
        layout, outs = patches.patches(self.geometry, self.image, step), self.out.flatten(1, -2)
        for start, stop in chunks(len(outs), step):
            laid = patches.turned(layout(start, stop).squeeze(1), self.shape[1])
            yield Outer(laid, outs[start:stop], self.shape), slice(start, stop)

    def _by_library(self, scaled: Tensor) -> Tensor:
        geometry, dims = self.geometry, len(self.geometry.kernel)
        weight = scaled.new_empty(self.shape[0], *self.shape[2:], self.shape[1]).movedim(-1, 1)
        made: Tensor = torch.ops.aten.convolution_backward(
            scaled.movedim(-1, 1), self.image.movedim(-1, 1), weight, None, geometry.stride,
            [low for low, _ in geometry.padding], geometry.dilation, False, [0] * dims, 1, [False, True, False],
        )[1]  # fmt: skip
        return made

    def _placed(self, rows: Tensor, turned: bool) -> Tensor:
        """Gradients as kernels make them, as (n, *shape)."""
        outputs, channels, *kernel = self.shape
        if turned:
            return rows.view(-1, *kernel, channels, outputs).movedim(-1, 1).movedim(-1, 2)
        return rows.view(-1, outputs, *kernel, channels).movedim(-1, 2)

    def _patch_numbers(self) -> int:
        return prod(self.shape[1:]) * self.geometry.groups * prod(self.out.shape[1:-1])

    def _step(self, limit: int, numbers: int) -> int:
        """How many examples of so many numbers each take at most `limit` bytes for each thread."""
        most = limit * torch.get_num_threads() // (numbers * self.image.element_size())
        return max(1, min(len(self.image), most))


def _known(image: Tensor, out: Tensor, geometry: Geometry) -> Image | None:
    """The image for compiled kernels, if they know such a convolution."""
    known = geometry.groups == 1 and len(geometry.kernel) < 3 and 1 in (geometry.kernel[-1], geometry.dilation[-1])
    if not known or not kernels.take(image, out):
        return None
    if len(geometry.kernel) == 1:
        sides = ((0, 0), geometry.padding[0])
        return Image(image.unsqueeze(1), (1, geometry.kernel[0]), (1, geometry.stride[0]), sides, 1)
    (high, wide), (down, along), (lines, columns) = geometry.kernel, geometry.stride, geometry.padding
    return Image(image, (high, wide), (down, along), (lines, columns), geometry.dilation[0])

"""What one use of a parameter adds to its per-example gradients, kept in the cheapest exact form.

    Outer    g_i = sum_t out_it in_it^T         a linear map used at T positions (a convolution's are its patches)
    Lookup   g_i = sum_t e_{token_it} grad_it^T a table read at T tokens, never as large as the table
    Dense    g_i as it is                       small parameters, and whatever has no other form

Each knows its squared norms (n,) and its weighted sum over the examples. An Outer with T = 1 has norm
|out| |in|; with more positions it is the smaller of two costs: the gradients themselves ("direct", O(T d e)
work, n d e memory) or sum_ts (in_t . in_s)(out_t . out_s) ("ghost", O(T^2 (d + e)) work)   [LTL22].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd import kernels, products
from terrine.sgd.clipping.room import fits
from terrine.sgd.kernels import Image, cancelling


class Contribution(Protocol):
    """One use of one parameter, over n examples."""

    def squares(self) -> Tensor:
        """The squared norm of every example's gradient."""
        ...

    def add_to(self, total: Tensor, factor: Tensor, fresh: bool = False) -> None:
        """total += sum_i factor_i g_i; total is contiguous, and where it is fresh it holds nothing yet, not even 0."""
        ...

    def dense(self) -> Tensor:
        """The gradients themselves, (n, *shape)."""
        ...

    def drop(self, examples: Tensor) -> Contribution:
        """The same with nothing from these examples, whatever they held (nan as well)."""
        ...


@dataclass
class Dense:
    """The gradients themselves, (n, *shape)."""

    rows: Tensor
    known: Tensor | None = None  # |g_i|^2 where another contribution needed it already

    def squares(self) -> Tensor:
        if self.known is not None:
            return self.known
        rows = self.rows.reshape(len(self.rows), -1)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        return squared_rows(rows)

    def add_to(self, total: Tensor, factor: Tensor, fresh: bool = False) -> None:
        rows = self.rows.flatten(1) if self.rows.dim() > 1 else self.rows.unsqueeze(1)
        if rows.shape[1] >= WIDE and kernels.take(rows, factor, total) and rows.is_contiguous():
            kernels.add_weighted(total, rows, factor, fresh)
        elif rows.dtype is total.dtype is factor.dtype:
            total.view(-1).addmv_(rows.t(), factor, beta=float(not fresh))
        else:
            total.view(-1).addmv_(rows.t().to(total.dtype), factor.to(total.dtype), beta=float(not fresh))

    def dense(self) -> Tensor:
        return self.rows

    def drop(self, examples: Tensor) -> Dense:
        return Dense(without(self.rows, examples))


@dataclass
class Outer:
    """g_i = sum_t out_it in_it^T: `inputs` (n, T, d), `gradients` (n, T, e); the parameter has e * d entries."""

    inputs: Tensor
    gradients: Tensor
    shape: tuple[int, ...]
    input_lengths: Tensor | None = None  # |in_i| where it is known already
    gradient_lengths: Tensor | None = None  # |out_i|
    _rows: Tensor | None = field(default=None, repr=False)
    _turned: bool = field(default=False, repr=False)  # rows are (d, e), not (e, d)
    _squares: Tensor | None = field(default=None, repr=False)
    _sums: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.inputs.shape[1] > 1:
            self.inputs, self.gradients = _side_by_side(self.inputs), _side_by_side(self.gradients)

    def squares(self) -> Tensor:
        if self._squares is None:
            self._squares = self._norms()
        return self._squares

    def out_sums(self) -> Tensor:
        """sum_t out_it, (n, e), which kernels make along with the norms."""
        if self.inputs.shape[1] > 1 and kernels.take(self.inputs, self.gradients):
            self.squares()
        return self.gradients.sum(1) if self._sums is None else self._sums

    def _norms(self) -> Tensor:
        n, positions, width = self.inputs.shape
        height = self.gradients.shape[2]
        if positions == 1:
            inputs, gradients = self.input_lengths, self.gradient_lengths
            inputs = lengths(self.inputs.flatten(1)) if inputs is None else inputs
            gradients = lengths(self.gradients.flatten(1)) if gradients is None else gradients
            return (inputs * gradients).square_()
        compiled = kernels.take(self.inputs, self.gradients)
        prefers = kernels.prefers_direct if compiled else prefers_direct
        if prefers(positions, width, height) and fits(n * width * height, self.gradients):
            return self._direct_squares()
        return self.ghost()

    def ghost(self) -> Tensor:
        """The squared norms by Gram matrices."""
        if kernels.take(self.inputs, self.gradients):
            squares, self._sums = Image(self.inputs.unsqueeze(1)).squares(self.gradients)
            return squares
        inner = torch.bmm(self.inputs, self.inputs.transpose(1, 2))
        outer = torch.bmm(self.gradients, self.gradients.transpose(1, 2))
        (_, positions, width), height = self.inputs.shape, self.gradients.shape[2]
        squares, alone = cancelling.summed(inner, outer)
        return cancelling.settled(squares, alone, self.steps(), positions, width * height, self._some_squares)

    def steps(self) -> int:
        """As many roundings as an entry of a Gram matrix takes, see `cancelling.py`."""
        width, height = self.inputs.shape[2], self.gradients.shape[2]
        return kernels.steps(width, height) if kernels.take(self.inputs, self.gradients) else width + height

    def made(self, factor: Tensor) -> Tensor | None:
        """The weighted sum in memory of its own, where that is faster."""
        return None if self._rows is not None else products.weighted(self.gradients, self.inputs, factor)

    def add_to(self, total: Tensor, factor: Tensor, fresh: bool = False) -> None:
        inputs, gradients = self.inputs, self.gradients
        flat = total.view(gradients.shape[2], inputs.shape[2])
        if self._rows is not None:
            if self._turned:
                turned = total.new_empty(inputs.shape[2], len(flat))
                Dense(self._rows).add_to(turned, factor, fresh=True)
                _ = flat.copy_(turned.t()) if fresh else flat.add_(turned.t())
            else:
                Dense(self._rows).add_to(total, factor, fresh)
            return
        if products.add_weighted(flat, gradients, inputs, factor, fresh):
            return
        made = self.made(factor) if total.dtype is gradients.dtype else None
        if made is not None:
            _ = flat.copy_(made) if fresh else flat.add_(made)
            return
        left, right, scale = products.flattened(gradients, inputs, factor)
        scale = scale.to(right.dtype).unsqueeze(1)
        if right.shape[1] < left.shape[1]:
            left, right = left.t(), right * scale
        else:
            left = (left * scale).t()
        if total.dtype is not right.dtype:
            left, right = left.to(total.dtype), right.to(total.dtype)
        flat.addmm_(left, right, beta=float(not fresh))

    def dense(self) -> Tensor:
        if self._rows is None:
            self._direct_squares()
        assert self._rows is not None
        rows = self._rows
        if self._turned:
            rows = rows.view(len(rows), self.inputs.shape[2], -1).transpose(1, 2)
        return rows.reshape(-1, *self.shape)

    def drop(self, examples: Tensor) -> Outer:
        return Outer(without(self.inputs, examples), without(self.gradients, examples), self.shape)

    def _some_squares(self, examples: Tensor) -> Tensor:
        rows = torch.bmm(self.gradients[examples].transpose(1, 2), self.inputs[examples])
        return squared_rows(rows.flatten(1))

    def _direct_squares(self) -> Tensor:
        """The gradients themselves, and their squared norms."""
        n, _, width = self.inputs.shape
        height = self.gradients.shape[2]
        rows = self._rows = self.gradients.new_empty(n, height * width)
        if kernels.take(self.inputs, self.gradients):
            self._turned, squares, self._sums = Image(self.inputs.unsqueeze(1)).gradients(self.gradients, rows)
            return squares
        torch.bmm(self.gradients.transpose(1, 2), self.inputs, out=rows.view(n, height, width))
        return squared_rows(rows)


@dataclass
class Lookup:
    """g_i has the rows grad_it at tokens (n, T), added up: `tokens` (n, T), `gradients` (n, T, d).

    One order by (token, example) serves both the norm and the sum: places of equal rows lie side by side.
    """

    tokens: Tensor
    gradients: Tensor
    shape: tuple[int, ...]

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        """Where in (n T) the tokens lie, in their order, and where each token ends there."""
        return by_token(self.tokens.reshape(-1), self.shape[0])

    def squares(self) -> Tensor:
        """Rows of equal (example, token) are added first: sum over unique pairs of |sum of their rows|^2."""
        n, positions, _ = self.gradients.shape
        if positions == 1:
            return squared_rows(self.gradients.flatten(1))
        place, _ = self._sorted
        token, example = self.tokens.reshape(-1)[place], place // positions
        again = (token[1:] == token[:-1]).logical_and_(example[1:] == example[:-1])
        if not again.any():
            return squared_rows(self.gradients.flatten(1))
        rows, none = self._rows, again.new_zeros(1)
        members = torch.cat([none, again]).logical_or_(torch.cat([again, none])).nonzero().flatten()
        starts = (~torch.cat([none, again])[members]).nonzero().flatten()
        place = place[members]
        sums = functional.embedding_bag(place, rows, starts, mode="sum")
        alone = squared_rows(rows).index_fill_(0, place, 0.0).view(n, positions).sum(1)
        return alone.index_add_(0, example[members][starts], squared_rows(sums))

    def add_to(self, total: Tensor, factor: Tensor, fresh: bool = False) -> None:
        place, ends = self._sorted
        rows = self._rows
        add_by_token(total, rows, place, factor.to(rows.dtype)[place // self.gradients.shape[1]], ends, fresh)

    @property
    def _rows(self) -> Tensor:
        return wide(self.gradients.flatten(0, 1))

    def dense(self) -> Tensor:
        n, _, width = self.gradients.shape
        order = torch.arange(n, device=self.tokens.device).view(-1, 1) * self.shape[0]
        rows = self._rows
        table = rows.new_zeros(n * self.shape[0], width)
        table.index_add_(0, (self.tokens + order).flatten(), rows)
        return table.view(n, *self.shape)

    def drop(self, examples: Tensor) -> Lookup:
        return Lookup(self.tokens, without(self.gradients, examples), self.shape)


def by_token(tokens: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """The places of tokens below `many` in the order of the tokens, equal ones as they come; where each token ends."""
    if tokens.device.type == "cpu":
        return kernels.in_order(tokens.long(), many)
    return torch.sort(tokens, stable=True).indices, torch.bincount(tokens, minlength=many).cumsum(0)


def add_by_token(total: Tensor, rows: Tensor, place: Tensor, weight: Tensor, ends: Tensor, fresh: bool) -> None:
    """total_t += sum of weight_j rows_(place_j) over all j of token t, which end before ends_t; = where it is fresh."""
    if fresh or 4 * len(place) >= len(total):
        if not kernels.add_gathered(total, rows, place, weight, ends, fresh):
            sums = _bags(rows, place, weight, ends)
            _ = total.copy_(sums) if fresh else total.add_(sums)
        return
    found = torch.diff(ends, prepend=ends.new_zeros(1)).nonzero().flatten()
    total.index_add_(0, found, _bags(rows, place, weight, ends[found]).to(total.dtype))


def _bags(rows: Tensor, place: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    starts = torch.cat([ends.new_zeros(1), ends[:-1]]).to(place.dtype)
    return functional.embedding_bag(place, rows, starts, mode="sum", per_sample_weights=weight)


def kept(part: Contribution) -> int:
    """The bytes of the per-example gradients a contribution keeps, if it does."""
    rows = getattr(part, "_rows", None)
    return 0 if rows is None else rows.numel() * rows.element_size()


def wide(tensor: Tensor) -> Tensor:
    """At least float32: norms and sums are never taken in half precision."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def squared_rows(rows: Tensor) -> Tensor:
    """|row|^2 of every row, in float32 or wider."""
    norms: Tensor = torch.linalg.vector_norm(wide(rows), dim=1)
    return norms.square_()


def lengths(rows: Tensor) -> Tensor:
    """|row| of every row, in float32 or wider, for products: one may be as small as another is large."""
    norms: Tensor = torch.linalg.vector_norm(wide(rows), dim=1)
    return rounded_up(norms, rows.shape[1])


def rounded_up(norms: Tensor, width: int) -> Tensor:
    """Norms of so many numbers, in place, with all that squares can lose below the smallest number there is."""
    return norms.add_(math.sqrt(width * torch.finfo(norms.dtype).tiny))


def prefers_direct(positions: int, width: int, height: int) -> bool:
    """Whether the gradients themselves are cheaper than the two Gram matrices.

    Direct: the products that the sum needs anyway, then written and read twice. Ghost: its products come on top.
    """
    ghost = positions * positions * (width + height + 64)
    direct = TRAFFIC * width * height
    return direct <= ghost


TRAFFIC = 24.0  # multiply-adds that fit into the time one number takes to memory and back, twice


WIDE = 1 << 12  # numbers of a gradient from which on the library's sums of rows are slow

CACHED = 1 << 18  # numbers that stay in a core's cache from one operation to the next


def _side_by_side(rows: Tensor) -> Tensor:
    """The same with the last dimension's numbers side by side, as kernels want them."""
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def without(tensor: Tensor, examples: Tensor) -> Tensor:
    """`tensor` (n, ...) with zeros for these examples."""
    return tensor.masked_fill(examples.view(-1, *[1] * (tensor.dim() - 1)), 0.0)

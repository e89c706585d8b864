"""What one use of a parameter adds to the gradients of every unit, kept in the cheapest exact form.

A unit is what is clipped as one: an example, or all rows of a person, whose positions are then those of all its rows.

    Dense    g_i as it is                       small parameters, and whatever has no other form
    Outer    g_i = sum_t out_it in_it^T         a linear map used at T positions
    Lookup   g_i = sum_t e_{token_it} grad_it^T a table read at T tokens, never as large as the table

Each knows its squared norms (n,) and its weighted sum over the examples. An Outer with T = 1 has norm |out| |in|;
with more positions it takes the cheaper of two ways: the gradients themselves ("direct", O(T d e) work, n d e
memory) or ghost norms (O(T^2 (d + e)) work)   [LTL22] [BMX22].

Several uses of one parameter as one: the norm of their sum needs its cross terms.

Most have them in a common form. A table may be looked up in and multiplied with, as the first and the last layer of a
language model share it:

    A_i = sum_t out_t in_t^T,   B_i = the rows r_s, added up at their tokens k_s
    |A_i + B_i|^2 = |A_i|^2 + |B_i|^2 + 2 sum over s, t of out_t[k_s] <in_t, r_s>

so that no example's gradient has to be as large as the table. It is a ghost norm over the positions of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.ghost import (
    certain,
    ghost_squares,
    is_asynchronous,
    norms_rounded_up,
    squared_norms,
    wide,
    widest,
)


class Contribution(Protocol):
    """One use of one parameter, over n units."""

    def squares(self) -> Tensor:
        """The squared norm of every unit's gradient."""
        ...

    def weighted_sum(self, factor: Tensor) -> Tensor:
        """sum_i factor_i g_i, in the parameter's shape and in float32 or wider."""
        ...

    def dense(self) -> Tensor:
        """The gradients themselves, (n, *shape)."""
        ...

    def drop(self, units: Tensor) -> Contribution:
        """The same with nothing from these units, whatever they held (nan as well)."""
        ...


@dataclass
class Dense:
    """The gradients themselves, (n, *shape)."""

    rows: Tensor

    def squares(self) -> Tensor:
        return squared_norms(self.rows)

    def weighted_sum(self, factor: Tensor) -> Tensor:
        rows = wide(self.rows)
        order = sorted(range(1, rows.dim()), key=rows.stride, reverse=True)  # as they lie in memory: nothing is copied
        laid = rows.permute(0, *order)
        total = torch.mv(laid.reshape(len(laid), -1).t(), factor.to(rows.dtype)).view(laid.shape[1:])
        return total.permute([order.index(axis) for axis in range(1, rows.dim())])

    def dense(self) -> Tensor:
        return self.rows

    def drop(self, units: Tensor) -> Dense:
        return Dense(without(self.rows, units))

    def of_units(self, units: int) -> Dense:
        """The gradients of `units` units, each the sum of as many rows that follow each other."""
        return self if units == len(self.rows) else Dense(self.rows.unflatten(0, (units, -1)).sum(1))


def outer(inputs: Tensor, gradients: Tensor, shape: tuple[int, ...]) -> Contribution:
    """g_i = sum_t out_it in_it^T of `inputs` (n, T, d) and `gradients` (n, T, e), in the cheaper form."""
    _, positions, width = inputs.shape
    height = gradients.shape[2]
    if positions > 1 and prefers_direct(positions, width, height, positions * (width + height)):
        return Dense(torch.bmm(gradients.mT, inputs).view(-1, *shape))
    return Outer(inputs, gradients, shape)


@dataclass
class Outer:
    """g_i = sum_t out_it in_it^T: `inputs` (n, T, d), `gradients` (n, T, e); the parameter has e * d entries."""

    inputs: Tensor
    gradients: Tensor
    shape: tuple[int, ...]

    def squares(self) -> Tensor:
        if self.inputs.shape[1] == 1:
            return (norms_rounded_up(self.inputs) * norms_rounded_up(self.gradients)).square_().squeeze(1)
        return ghost_squares(self.inputs, self.gradients)

    def weighted_sum(self, factor: Tensor) -> Tensor:
        inputs, gradients = self.inputs, self.gradients
        scale = factor.to(inputs.dtype).view(-1, 1, 1)
        if inputs.shape[2] < gradients.shape[2]:
            inputs = inputs * scale
        else:
            gradients = gradients * scale
        return torch.mm(gradients.flatten(0, 1).t(), inputs.flatten(0, 1)).view(self.shape)

    def dense(self) -> Tensor:
        return torch.bmm(self.gradients.mT, self.inputs).view(-1, *self.shape)

    def drop(self, units: Tensor) -> Outer:
        return Outer(without(self.inputs, units), without(self.gradients, units), self.shape)


@dataclass
class Lookup:
    """g_i has the rows grad_it at tokens (n, T), added up: `tokens` (n, T), `gradients` (n, T, d)."""

    tokens: Tensor
    gradients: Tensor
    shape: tuple[int, ...]

    def squares(self) -> Tensor:
        """Rows of one token of one unit are added first: sum over unique (unit, token) of |sum of rows|^2."""
        n, positions, _ = self.gradients.shape
        token, order = self.tokens.sort(dim=1)
        first = torch.ones_like(token, dtype=torch.bool)
        first[:, 1:] = token[:, 1:] != token[:, :-1]
        if is_asynchronous(token):  # nothing that a GPU would have to be waited for
            sums = torch.zeros_like(self.gradients)
            run = (first.cumsum(1) - 1).unsqueeze(2).expand_as(sums)
            sums.scatter_add_(1, run, self.gradients.gather(1, order.unsqueeze(2).expand_as(sums)))
            return squared_norms(sums)
        if first.all():
            return squared_norms(self.gradients.flatten(1))
        place = order + torch.arange(n, device=order.device).unsqueeze(1) * positions
        starts = first.flatten().nonzero().flatten()
        unique = functional.embedding_bag(place.flatten(), self._flat, starts, mode="sum")
        return self.gradients.new_zeros(n).index_add_(0, starts // positions, squared_norms(unique))

    def weighted_sum(self, factor: Tensor) -> Tensor:
        n, positions, _ = self.gradients.shape
        weight = factor.to(self.gradients.dtype).repeat_interleave(positions)
        place = torch.arange(n * positions, device=self.tokens.device)
        return summed_by_token(self.tokens.flatten(), self._flat, place, weight, self.shape[0])

    @property
    def _flat(self) -> Tensor:
        return self.gradients.flatten(0, 1)

    def dense(self) -> Tensor:
        n = len(self.tokens)
        table = self.gradients.new_zeros(n * self.shape[0], self.shape[1])
        first = torch.arange(n, device=self.tokens.device).unsqueeze(1) * self.shape[0]
        return table.index_add_(0, (self.tokens + first).flatten(), self._flat).view(n, *self.shape)

    def drop(self, units: Tensor) -> Lookup:
        return Lookup(self.tokens, without(self.gradients, units), self.shape)


def summed_by_token(
    tokens: Tensor, rows: Tensor, place: Tensor, weight: Tensor, vocabulary: int, order: Tensor | None = None
) -> Tensor:
    """(vocabulary, d): for every token, the sum of weight_j rows_(place_j) over all j that have it.

    Places in the order of their tokens are bags, one for each token: their sum reads every row once, and adds up in
    the same order on every device. `order` is that of the tokens, where it is known.
    """
    order = tokens.argsort(stable=True) if order is None else order
    if is_asynchronous(tokens):  # bincount would wait for the largest token
        counts = tokens.new_zeros(vocabulary).index_add_(0, tokens, torch.ones_like(tokens))
    else:
        counts = torch.bincount(tokens, minlength=vocabulary)
    ends = counts.cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]]).to(place.dtype)
    return functional.embedding_bag(place[order], rows, starts, mode="sum", per_sample_weights=weight[order])


def prefers_direct(positions: int, width: int, height: int, activations: int) -> bool:
    """Whether to compute the gradients themselves, width * height numbers for a unit with so many positions.

    Their products are those that the weighted sum needs anyway, then written and read twice; ghost norms come on top
    of it. The gradients stay in memory until they are clipped, so they may be a few times as many as the activations.
    """
    size = width * height
    return _TRAFFIC * size <= positions**2 * (width + height + 64) and size <= _KEPT * activations


_TRAFFIC = 24  # multiply-adds in the time one number takes to memory and back, twice
_KEPT = 4  # times the activations that per-example gradients may take


def kept_bytes(part: Contribution) -> int:
    """The bytes of the per-example gradients a contribution keeps."""
    return part.rows.numel() * part.rows.element_size() if isinstance(part, Dense) else 0


def without(tensor: Tensor, units: Tensor) -> Tensor:
    """`tensor` (n, ...) with zeros for these units."""
    return tensor.masked_fill(units.view(-1, *[1] * (tensor.dim() - 1)), 0.0)


def combined(parts: Sequence[Contribution]) -> Contribution:
    """What several uses of one parameter contribute in all.

    Linear maps are merged into one of all their positions before anything becomes dense.
    """
    if len(parts) == 1:
        return parts[0]
    outers = [part for part in parts if isinstance(part, Outer)]
    lookups = [part for part in parts if isinstance(part, Lookup)]
    if outers and lookups and len(outers) + len(lookups) == len(parts):
        product, lookup = _outer(outers), _lookup(lookups)
        if product.shape == lookup.shape == (product.gradients.shape[2], product.inputs.shape[2]):
            return Tied(product, lookup)
    merged: list[Contribution] = [part for part in parts if not isinstance(part, Outer | Lookup)]
    if outers:
        whole = _outer(outers)
        merged.append(outer(whole.inputs, whole.gradients, whole.shape))
    if lookups:
        merged.append(_lookup(lookups))
    if len(merged) == 1:
        return merged[0]
    total = wide(merged[0].dense()).clone()
    for part in merged[1:]:
        total += part.dense()
    return Dense(total)


def _outer(parts: list[Outer]) -> Outer:
    if len(parts) == 1:
        return parts[0]
    inputs, gradients = torch.cat([part.inputs for part in parts], 1), torch.cat([part.gradients for part in parts], 1)
    return Outer(inputs, gradients, parts[0].shape)


def _lookup(parts: list[Lookup]) -> Lookup:
    tokens, gradients = torch.cat([part.tokens for part in parts], 1), torch.cat([part.gradients for part in parts], 1)
    return Lookup(tokens, gradients, parts[0].shape)


@dataclass
class Tied:
    """The table's uses as the weight of a linear map and by its tokens."""

    outer: Outer
    lookup: Lookup

    def squares(self) -> Tensor:
        inputs, gradients, rows = self.outer.inputs, self.outer.gradients, self.lookup.gradients
        tokens = self.lookup.tokens.unsqueeze(1).expand(-1, gradients.shape[1], -1)
        cross = (torch.bmm(inputs, rows.mT) * gradients.gather(2, tokens)).sum((1, 2), dtype=widest(rows))
        squares = (self.outer.squares() + self.lookup.squares() + 2.0 * cross).to(rows.dtype)
        reach = (norms_rounded_up(inputs) * norms_rounded_up(gradients)).sum(1) + norms_rounded_up(rows).sum(1)
        positions, (height, width) = gradients.shape[1] + rows.shape[1], self.outer.shape
        exact = cross.dtype is torch.float64
        roundings = width + height + positions + (0 if exact else positions**2)
        return certain(squares, reach, roundings, positions, height * width, self._direct)

    def weighted_sum(self, factor: Tensor) -> Tensor:
        return self.outer.weighted_sum(factor) + self.lookup.weighted_sum(factor)

    def dense(self) -> Tensor:
        return self.outer.dense() + self.lookup.dense()

    def drop(self, units: Tensor) -> Tied:
        return Tied(self.outer.drop(units), self.lookup.drop(units))

    def _direct(self, some: Tensor) -> Tensor:
        outer = Outer(self.outer.inputs[some], self.outer.gradients[some], self.outer.shape)
        lookup = Lookup(self.lookup.tokens[some], self.lookup.gradients[some], self.lookup.shape)
        return squared_norms(Tied(outer, lookup).dense())

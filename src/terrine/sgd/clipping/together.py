"""Several uses of one parameter as one: the norm of their sum needs its cross terms.

Most have them in a common form. A table may be looked up in and multiplied with, as the first and the last layer of a
language model share it:

    A_i = sum_t out_t in_t^T,   B_i = the rows r_s, added up at their tokens k_s
    |A_i + B_i|^2 = |A_i|^2 + |B_i|^2 + 2 sum over s, t of out_t[k_s] <in_t, r_s>

so that no example's gradient has to be as large as the table. It is the sum that `cancelling.py` is about, over the
positions of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from terrine.sgd.clipping.contribution import Contribution, Dense, Lookup, Outer, squared_rows, wide
from terrine.sgd.kernels import cancelling


def together(parts: list[Contribution]) -> Contribution:
    """What the parts contribute in all."""
    if len(parts) == 1:
        return parts[0]
    outers = [part for part in parts if isinstance(part, Outer)]
    lookups = [part for part in parts if isinstance(part, Lookup)]
    if len(outers) + len(lookups) == len(parts):
        outer, lookup = _outer(outers), _lookup(lookups)
        if outer is None or lookup is None:
            return outer or lookup or parts[0]
        if outer.shape == lookup.shape == (outer.gradients.shape[2], outer.inputs.shape[2]):
            return Tied(outer, lookup)
    total = wide(parts[0].dense()).clone()
    for part in parts[1:]:
        total += part.dense()
    return Dense(total)


def _outer(parts: list[Outer]) -> Outer | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    inputs, gradients = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("inputs", "gradients"))
    return Outer(inputs, gradients, parts[0].shape)


def _lookup(parts: list[Lookup]) -> Lookup | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    tokens, gradients = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("tokens", "gradients"))
    return Lookup(tokens, gradients, parts[0].shape)


@dataclass
class Tied:
    """The table's uses as the weight of a linear map and by its tokens."""

    outer: Outer
    lookup: Lookup

    def squares(self) -> Tensor:
        inputs, gradients, rows = wide(self.outer.inputs), wide(self.outer.gradients), wide(self.lookup.gradients)
        tokens = self.lookup.tokens.unsqueeze(1).expand(-1, gradients.shape[1], -1)
        cross = torch.bmm(inputs, rows.mT).mul_(gradients.gather(2, tokens)).sum((1, 2), dtype=torch.float64)
        exact = replace(self.lookup, gradients=rows.double()).squares()
        squares = (self.outer.squares() + exact + 2.0 * cross).to(rows.dtype)
        alone = (_lengths(inputs) * _lengths(gradients)).sum(1) + _lengths(rows).sum(1)
        positions, (height, width) = gradients.shape[1] + rows.shape[1], self.outer.shape
        steps = max(self.outer.steps(), width)  # the library may add up <in_t, r_s> one number after the other
        return cancelling.settled(squares, alone, steps, positions, height * width, self._some_squares)

    def add_to(self, total: Tensor, factor: Tensor, fresh: bool = False) -> None:
        self.outer.add_to(total, factor, fresh)
        self.lookup.add_to(total, factor)

    def dense(self) -> Tensor:
        return self.outer.dense() + self.lookup.dense()

    def drop(self, examples: Tensor) -> Tied:
        return Tied(self.outer.drop(examples), self.lookup.drop(examples))

    def _some_squares(self, examples: Tensor) -> Tensor:
        outer = Outer(self.outer.inputs[examples], self.outer.gradients[examples], self.outer.shape)
        lookup = Lookup(self.lookup.tokens[examples], self.lookup.gradients[examples], self.lookup.shape)
        return squared_rows(Tied(outer, lookup).dense().flatten(1))


def _lengths(rows: Tensor) -> Tensor:
    """|row| of rows (n, positions, width), rounded up as `cancelling.py` wants it."""
    squares = squared_rows(rows.flatten(0, 1)).view(rows.shape[:2])
    return squares.add_(cancelling.lost(squares.dtype)).sqrt_()

"""Several uses of one parameter as one: the norm of their sum needs its cross terms.

Most have them in a common form. A table may be looked up in and multiplied with, as the first and the last layer of a
language model share it:

    A_i = sum_t out_t in_t^T,   B_i = the rows r_s, added up at their tokens k_s
    |A_i + B_i|^2 = |A_i|^2 + |B_i|^2 + 2 sum over s, t of out_t[k_s] <in_t, r_s>

so that no example's gradient has to be as large as the table. It is a ghost norm over the positions of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terrine.sgd.clipping.contribution import Contribution, Dense, Lookup, Outer
from terrine.sgd.clipping.contribution import outer as cheaper
from terrine.sgd.clipping.ghost import certain, norms_rounded_up, squared_norms, wide, widest


def combined(parts: Sequence[Contribution]) -> Contribution:
    """What several uses of one parameter contribute in all.

    Linear maps are merged into one of all their positions before anything becomes dense.
    """
    if len(parts) == 1:
        return parts[0]
    outers = [part for part in parts if isinstance(part, Outer)]
    lookups = [part for part in parts if isinstance(part, Lookup)]
    if outers and lookups and len(outers) + len(lookups) == len(parts):
        outer, lookup = _outer(outers), _lookup(lookups)
        if outer.shape == lookup.shape == (outer.gradients.shape[2], outer.inputs.shape[2]):
            return Tied(outer, lookup)
    merged: list[Contribution] = [part for part in parts if not isinstance(part, Outer | Lookup)]
    if outers:
        whole = _outer(outers)
        merged.append(cheaper(whole.inputs, whole.gradients, whole.shape))
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

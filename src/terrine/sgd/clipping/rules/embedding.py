"""Tables: a row read at a token receives that position's output gradient.

EmbeddingBag adds up (or averages) the rows of a bag, so every token of a bag receives the bag's gradient,
weighted; in the form with offsets a bag is a run of the flat token list.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.axis import Unfollowed, by_example
from terrine.sgd.clipping.contribution import Contribution, Lookup, squared_rows
from terrine.sgd.clipping.piece import Piece
from terrine.sgd.clipping.rules.linear import wide
from terrine.sgd.clipping.tape import Use, rule_for

Found = list[tuple[Piece, Contribution]]


@rule_for(functional.embedding)
def embedding(use: Use, gradient: Tensor) -> Found:
    """`functional.embedding(tokens, table)`; the padding token has no gradient."""
    table = use.piece(1, "weight")
    tokens: Tensor = use.argument(0, "input")
    if table is None or use.argument(6, "sparse", False) or use.argument(5, "scale_grad_by_freq", False):
        raise Unfollowed("embedding: sparse gradients and scale_grad_by_freq mix examples or hide them")
    rows = wide(by_example(gradient, use.where, use.examples, 1))
    kept = by_example(tokens, use.where, use.examples, 0)
    padding = use.argument(2, "padding_idx")
    if padding is not None:
        padding = padding % table.value.shape[0]
        rows = rows * (kept != padding).unsqueeze(-1)
    return [(table, Lookup(kept, rows, tuple(table.value.shape)))]


@rule_for(functional.embedding_bag)
def embedding_bag(use: Use, gradient: Tensor) -> Found:
    """`functional.embedding_bag`, modes sum and mean, bags as rows of a matrix or as runs between offsets."""
    table = use.piece(1, "weight")
    mode = use.argument(6, "mode", "mean")
    weights = use.argument(8, "per_sample_weights")
    hidden = use.argument(7, "sparse", False) or use.argument(5, "scale_grad_by_freq", False)
    if table is None or len(use.pieces) > 1 or hidden or mode == "max" or use.examples != gradient.shape[0]:
        raise Unfollowed(f"embedding_bag: mode={mode!r}, sparse, scale_grad_by_freq or trained weights have no rule")
    tokens, bags = _runs(use)
    share = torch.ones_like(tokens, dtype=gradient.dtype) if weights is None else weights.detach().flatten()
    padding = use.argument(10, "padding_idx")
    if padding is not None:
        share = share * (tokens != padding % table.value.shape[0])
    if mode == "mean":
        counted = share if padding is not None else torch.ones_like(share)
        size = counted.new_zeros(use.examples).index_add_(0, bags, counted)
        share = share / size[bags]
    return [(table, Bags(tokens, bags, wide(share), wide(gradient), tuple(table.value.shape)))]


class Bags:
    """g_i has the row share_j grad_i at every token j of bag i; a bag's norm is closed form.

    |g_i|^2 = |grad_i|^2 sum over the bag's unique tokens of (the sum of their shares)^2. One sort by (token, bag)
    serves both the norm and the sum.
    """

    def __init__(self, tokens: Tensor, bags: Tensor, share: Tensor, gradients: Tensor, shape: tuple[int, ...]) -> None:
        self.tokens, self.bags, self.share, self.gradients, self.shape = tokens, bags, share, gradients, shape

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, bags and shares in the order of (token, bag)."""
        n, size = len(self.gradients), len(self.tokens)
        key = self.tokens * n + self.bags
        if key.device.type == "cpu" and self.shape[0] * n * size < 1 << 62:  # with the position inside: much faster
            packed = torch.from_numpy(np.sort(key.mul_(size).add_(torch.arange(size)).numpy()))
            key = torch.div(packed, size, rounding_mode="floor")
            order = packed - key * size
        else:
            key, order = torch.sort(key)
        tokens = torch.div(key, n, rounding_mode="floor")
        return tokens, key - tokens * n, self.share[order]

    def squares(self) -> Tensor:
        tokens, bags, share = self._sorted
        n = len(self.gradients)
        first = torch.ones_like(tokens, dtype=torch.bool)
        torch.logical_or(tokens[1:] != tokens[:-1], bags[1:] != bags[:-1], out=first[1:])
        pairs = share
        if not bool(first.all()):
            pair = first.cumsum(0) - 1
            pairs = share.new_zeros(int(pair[-1]) + 1).index_add_(0, pair, share)
            bags = bags[first]
        shape = share.new_zeros(n).index_add_(0, bags, pairs.square())
        return shape * squared_rows(self.gradients)

    def add_to(self, total: Tensor, factor: Tensor, fresh: bool = False) -> None:
        made = self.made(factor).to(total.dtype)
        if fresh:
            total.copy_(made)
        else:
            total.add_(made)

    def made(self, factor: Tensor) -> Tensor:
        """The weighted sum in memory of its own: the bags of each token, added up, are a bag again."""
        tokens, bags, share = self._sorted
        counts = torch.bincount(tokens, minlength=self.shape[0])
        scaled = self.gradients * factor.to(self.gradients.dtype).unsqueeze(1)
        return functional.embedding_bag(bags, scaled, counts.cumsum(0) - counts, mode="sum", per_sample_weights=share)

    def dense(self) -> Tensor:
        n = len(self.gradients)
        table = self.gradients.new_zeros(n * self.shape[0], self.shape[1])
        rows = self.gradients[self.bags] * self.share.unsqueeze(1)
        table.index_add_(0, self.bags * self.shape[0] + self.tokens, rows)
        return table.view(n, *self.shape)

    def drop(self, examples: Tensor) -> Bags:
        gradients = self.gradients.masked_fill(examples.unsqueeze(1), 0.0)
        share = self.share.masked_fill(examples[self.bags], 0.0)
        return Bags(self.tokens, self.bags, share, gradients, self.shape)


def _runs(use: Use) -> tuple[Tensor, Tensor]:
    """The flat tokens, and the bag of each."""
    tokens: Tensor = use.argument(0, "input")
    offsets: Tensor | None = use.argument(2, "offsets")
    each = torch.arange(use.examples, device=tokens.device)
    if tokens.dim() == 2:
        return tokens.flatten(), each.repeat_interleave(tokens.shape[1])
    if offsets is None:
        raise Unfollowed("embedding_bag: a flat list of tokens without offsets")
    starts = offsets[: use.examples]
    ends = torch.cat([starts[1:], starts.new_tensor([len(tokens)])])
    if use.argument(9, "include_last_offset", False):
        ends = offsets[1 : use.examples + 1]
    return tokens[: int(ends[-1])], each.repeat_interleave(ends - starts)

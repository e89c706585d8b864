"""Tables: a row read at a token receives that position's output gradient.

EmbeddingBag adds up (or averages) the rows of a bag, so every token of a bag receives the bag's gradient,
weighted; in the form with offsets a bag is a run of the flat token list.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.contribution import Lookup, summed_by_token, without
from terrine.sgd.clipping.ghost import norms_rounded_up, wide
from terrine.sgd.clipping.use import Found, Unfollowed, Use, call, rule_for


def _looked_up(use: Use) -> Tensor:
    if use.argument(6, "sparse", False) or use.argument(5, "scale_grad_by_freq", False):
        raise Unfollowed("embedding: sparse gradients and scale_grad_by_freq mix examples or hide them")
    return call(use)


@rule_for(functional.embedding, forward=_looked_up)
def embedding(use: Use, gradient: Tensor) -> Found:
    """`functional.embedding(tokens, table)`; the padding token has no gradient."""
    table, tokens = use.parameter(1, "weight"), use.argument(0, "input").reshape(use.units, -1)
    assert table is not None
    rows = wide(gradient).reshape(*tokens.shape, -1)
    padding = use.argument(2, "padding_idx")
    if padding is not None:
        rows = rows * (tokens != padding % table.value.shape[0]).unsqueeze(-1)
    return [(table, Lookup(tokens, rows, tuple(table.value.shape)))]


def _bags(use: Use) -> Tensor:
    """The bags of all examples: rows of (n, m, T), or runs of (n, T) between offsets (n, m)."""
    tokens, offsets = use.argument(0, "input"), use.argument(2, "offsets")
    weights, mode = use.argument(8, "per_sample_weights"), use.argument(6, "mode", "mean")
    hidden = use.argument(7, "sparse", False) or use.argument(5, "scale_grad_by_freq", False)
    if hidden or mode == "max" or len(use.params) > 1:
        raise Unfollowed(f"embedding_bag: mode={mode!r}, sparse, scale_grad_by_freq or trained weights have no rule")
    n, length = len(tokens), tokens.shape[-1]
    bags = tokens.shape[1] if offsets is None else offsets.shape[-1]
    if offsets is None:
        starts = torch.arange(n * bags, device=tokens.device) * length
    else:
        starts = offsets.expand(n, -1)
        if use.argument(9, "include_last_offset", False):
            starts, bags = starts[:, :-1], bags - 1
        starts = (starts + torch.arange(n, device=tokens.device).unsqueeze(1) * length).flatten()
    own = {"mode": mode, "padding_idx": use.argument(10, "padding_idx")}
    own["per_sample_weights"] = None if weights is None else weights.expand(tokens.shape).reshape(-1)
    use.args, use.kwargs, use.folded = (tokens.flatten(), use.argument(1, "weight"), starts.to(tokens.dtype)), own, True
    return call(use)


@rule_for(functional.embedding_bag, data=(0, "input", 2, "offsets", 8, "per_sample_weights"), forward=_bags)
def embedding_bag(use: Use, gradient: Tensor) -> Found:
    """`functional.embedding_bag`, modes sum and mean, bags as rows of a matrix or as runs between offsets."""
    tokens, starts = use.args[0].long(), use.args[2].long()
    ((_, table),) = use.params.items()
    ends = torch.cat([starts[1:], starts.new_full((1,), len(tokens))])
    bags = torch.arange(len(starts), device=tokens.device)
    runs = bags.repeat_interleave(ends - starts, output_size=len(tokens))
    weights, padding, rows = use.kwargs["per_sample_weights"], use.kwargs["padding_idx"], wide(gradient)
    share = torch.ones_like(tokens, dtype=rows.dtype) if weights is None else wide(weights.detach())
    if padding is not None:
        share = share * (tokens != padding % table.value.shape[0])
    if use.kwargs["mode"] == "mean":
        counted = share if padding is not None else torch.ones_like(share)
        size = counted.new_zeros(len(starts)).index_add_(0, runs, counted)
        share = share / size.clamp_(min=1)[runs]  # a bag of padding alone has none
    shape, fold = tuple(table.value.shape), len(starts) // use.units
    if fold == 1:
        return [(table, Bags(tokens, runs, share, rows, shape))]
    each = (rows[runs] * share.unsqueeze(1)).reshape(use.units, -1, shape[1])
    return [(table, Lookup(tokens.reshape(use.units, -1), each, shape))]


@dataclass
class Bags:
    """g_i has the row share_j grad_i at every token j of bag i.

    |g_i|^2 = |grad_i|^2 sum over the bag's unique tokens of (the sum of their shares)^2.
    """

    tokens: Tensor  # of all bags, one after the other
    bags: Tensor  # the bag of each
    share: Tensor
    gradients: Tensor
    shape: tuple[int, ...]

    def squares(self) -> Tensor:
        token, bags, order = self.tokens[self._order], self.bags[self._order], self._order
        first = torch.ones_like(bags, dtype=torch.bool)
        first[1:] = (token[1:] != token[:-1]) | (bags[1:] != bags[:-1])
        pair = first.cumsum(0) - 1
        shares = torch.zeros_like(self.share).index_add_(0, pair, self.share[order])
        squares = torch.where(first, shares[pair].square_(), 0.0)  # each pair once
        sums = self.share.new_zeros(len(self.gradients)).index_add_(0, bags, squares)
        return (norms_rounded_up(self.gradients) * sums.sqrt_()).square_()

    def weighted_sum(self, factor: Tensor) -> Tensor:
        weight = factor.to(self.share.dtype)[self.bags] * self.share
        return summed_by_token(self.tokens, self.gradients, self.bags, weight, self.shape[0], self._order)

    @cached_property
    def _order(self) -> Tensor:
        """The order of the tokens, those of one bag that are alike side by side."""
        return self.tokens.argsort(stable=True)

    def dense(self) -> Tensor:
        n = len(self.gradients)
        table = self.gradients.new_zeros(n * self.shape[0], self.shape[1])
        rows = self.gradients[self.bags] * self.share.unsqueeze(1)
        return table.index_add_(0, self.bags * self.shape[0] + self.tokens, rows).view(n, *self.shape)

    def drop(self, units: Tensor) -> Bags:
        share = self.share.masked_fill(units[self.bags], 0.0)
        return Bags(self.tokens, self.bags, share, without(self.gradients, units), self.shape)

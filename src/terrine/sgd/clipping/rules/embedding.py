"""Tables: a row read at a token receives that position's output gradient.

EmbeddingBag adds up (or averages) the rows of a bag, so every token of a bag receives the bag's gradient,
weighted; in the form with offsets a bag is a run of the flat token list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.axis import Unfollowed, by_example
from terrine.sgd.clipping.contribution import Contribution, Lookup, summed_by_token, without
from terrine.sgd.clipping.ghost import norms_rounded_up, wide
from terrine.sgd.clipping.parameter_view import ParameterView
from terrine.sgd.clipping.tape import Use, rule_for

Found = list[tuple[ParameterView, Contribution]]


@rule_for(functional.embedding)
def embedding(use: Use, gradient: Tensor) -> Found:
    """`functional.embedding(tokens, table)`; the padding token has no gradient."""
    table = use.parameter(1, "weight")
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
    table = use.parameter(1, "weight")
    mode = use.argument(6, "mode", "mean")
    weights = use.argument(8, "per_sample_weights")
    hidden = use.argument(7, "sparse", False) or use.argument(5, "scale_grad_by_freq", False)
    if table is None or len(use.params) > 1 or hidden or mode == "max" or use.examples != gradient.shape[0]:
        raise Unfollowed(f"embedding_bag: mode={mode!r}, sparse, scale_grad_by_freq or trained weights have no rule")
    tokens, bags = _runs(use)
    padding = use.argument(10, "padding_idx")
    rows = wide(gradient)
    share = torch.ones_like(tokens, dtype=rows.dtype) if weights is None else wide(weights.detach().flatten())
    if padding is not None:
        share = share * (tokens != padding % table.value.shape[0])
    if mode == "mean":
        counted = share if padding is not None else torch.ones_like(share)
        size = counted.new_zeros(use.examples).index_add_(0, bags, counted)
        share = share / size.clamp_(min=1)[bags]  # a bag of padding alone has none
    return [(table, Bags(tokens, bags, share, rows, tuple(table.value.shape)))]


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
        token, order = self.tokens.sort(stable=True)
        bags = self.bags[order]
        first = torch.ones_like(bags, dtype=torch.bool)
        first[1:] = (token[1:] != token[:-1]) | (bags[1:] != bags[:-1])
        pair = first.cumsum(0) - 1
        shares = self.share.new_zeros(int(first.sum())).index_add_(0, pair, self.share[order])
        sums = self.share.new_zeros(len(self.gradients)).index_add_(0, bags[first], shares.square_())
        return (norms_rounded_up(self.gradients) * sums.sqrt_()).square_()

    def weighted_sum(self, factor: Tensor) -> Tensor:
        weight = factor.to(self.share.dtype)[self.bags] * self.share
        return summed_by_token(self.tokens, self.gradients, self.bags, weight, self.shape[0])

    def dense(self) -> Tensor:
        n = len(self.gradients)
        table = self.gradients.new_zeros(n * self.shape[0], self.shape[1])
        rows = self.gradients[self.bags] * self.share.unsqueeze(1)
        return table.index_add_(0, self.bags * self.shape[0] + self.tokens, rows).view(n, *self.shape)

    def drop(self, examples: Tensor) -> Bags:
        share = self.share.masked_fill(examples[self.bags], 0.0)
        return Bags(self.tokens, self.bags, share, without(self.gradients, examples), self.shape)


def _runs(use: Use) -> tuple[Tensor, Tensor]:
    """The flat tokens, and the bag of each."""
    tokens: Tensor = use.argument(0, "input")
    offsets: Tensor | None = use.argument(2, "offsets")
    each = torch.arange(use.examples, device=tokens.device)
    tokens = tokens.long()
    if tokens.dim() == 2:
        return tokens.flatten(), each.repeat_interleave(tokens.shape[1])
    if offsets is None:
        raise Unfollowed("embedding_bag: a flat list of tokens without offsets")
    starts = offsets[: use.examples]
    ends = torch.cat([starts[1:], starts.new_tensor([len(tokens)])])
    if use.argument(9, "include_last_offset", False):
        ends = offsets[1 : use.examples + 1]
    return tokens[: int(ends[-1])], each.repeat_interleave(ends - starts)

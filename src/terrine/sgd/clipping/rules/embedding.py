"""Tables: a row read at a token receives that position's output gradient.

EmbeddingBag adds up (or averages) the rows of a bag, so every token of a bag receives the bag's gradient,
weighted; in the form with offsets a bag is a run of the flat token list.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd import kernels
from terrine.sgd.clipping.axis import Unfollowed, by_example
from terrine.sgd.clipping.contribution import Contribution, Lookup, add_by_token, by_token, lengths, wide
from terrine.sgd.clipping.piece import Piece
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
    padding = use.argument(10, "padding_idx")
    if weights is None and padding is None:  # every token of a bag has the same share
        rows = wide(gradient)
        if mode == "mean":
            rows = rows / torch.bincount(bags, minlength=use.examples).clamp_(min=1).unsqueeze(1)
        return [(table, Bags(tokens, bags, None, rows, tuple(table.value.shape)))]
    rows = wide(gradient)
    share = torch.ones_like(tokens, dtype=rows.dtype) if weights is None else wide(weights.detach().flatten())
    if padding is not None:
        share = share * (tokens != padding % table.value.shape[0])
    if mode == "mean":
        counted = share if padding is not None else torch.ones_like(share)
        size = counted.new_zeros(use.examples).index_add_(0, bags, counted)
        share = share / size.clamp_(min=1)[bags]  # a bag of padding alone has none
    return [(table, Bags(tokens, bags, share, rows, tuple(table.value.shape)))]


class Bags:
    """g_i has the row share_j grad_i at every token j of bag i (no share: 1); a bag's norm is closed form.

    |g_i|^2 = |grad_i|^2 sum over the bag's unique tokens of (the sum of their shares)^2. One order by (token, bag)
    serves both the norm and the sum.
    """

    def __init__(
        self, tokens: Tensor, bags: Tensor, share: Tensor | None, gradients: Tensor, shape: tuple[int, ...]
    ) -> None:
        self.tokens, self.bags, self.share, self.gradients, self.shape = tokens, bags, share, gradients, shape

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        """The places of the tokens in their order, and where each token ends there."""
        return by_token(self.tokens, self.shape[0])

    def squares(self) -> Tensor:
        order, _ = self._sorted
        examples = len(self.gradients)
        if self.share is None and self.tokens.device.type == "cpu":
            shape = kernels.squared_counts(self.tokens, order, self.bags, examples)
        else:
            shape = self._shared(order, examples)
        return lengths(self.gradients).mul_(shape.double().sqrt_()).square_()

    def _shared(self, order: Tensor, examples: int) -> Tensor:
        """The squared sums of the shares of one token in one bag, added up by bag."""
        tokens, bags = self.tokens[order], self.bags[order]
        share = torch.ones_like(bags, dtype=torch.float64) if self.share is None else self.share[order]
        first = torch.ones_like(bags, dtype=torch.bool)
        first[1:] = (tokens[1:] != tokens[:-1]) | (bags[1:] != bags[:-1])
        pairs = torch.bincount(first.cumsum(0) - 1, share).to(torch.float64)
        return torch.bincount(bags[first], pairs.square_(), minlength=examples)

    def add_to(self, total: Tensor, factor: Tensor, fresh: bool = False) -> None:
        order, ends = self._sorted
        bags = self.bags[order]
        weight = factor.to(self.gradients.dtype)[bags]
        weight = weight if self.share is None else weight * self.share[order]
        add_by_token(total, self.gradients, bags, weight, ends, fresh)

    def dense(self) -> Tensor:
        n = len(self.gradients)
        table = self.gradients.new_zeros(n * self.shape[0], self.shape[1])
        rows = self.gradients[self.bags]
        rows = rows if self.share is None else rows * self.share.unsqueeze(1)
        table.index_add_(0, self.bags * self.shape[0] + self.tokens, rows)
        return table.view(n, *self.shape)

    def drop(self, examples: Tensor) -> Bags:
        gradients = self.gradients.masked_fill(examples.unsqueeze(1), 0.0)
        share = None if self.share is None else self.share.masked_fill(examples[self.bags], 0.0)
        return Bags(self.tokens, self.bags, share, gradients, self.shape)


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

"""Several uses of one parameter: what they contribute in all, with their cross terms."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from terrine.sgd import clipped_sum
from terrine.sgd.clipping.contribution import Dense, Lookup, Outer, Tied, combined

from .helpers import Criterion
from .oracle import assert_same, loop

WORDS, WIDTH = 13, 6


def uses(n, positions, tokens, dtype=torch.float64):
    """A table as the weight of a linear map, and rows of it by tokens, some of them several times."""
    outer = Outer(torch.randn(n, positions, WIDTH, dtype=dtype), torch.randn(n, positions, WORDS, dtype=dtype), SHAPE)
    return outer, Lookup(torch.randint(WORDS, (n, tokens)), torch.randn(n, tokens, WIDTH, dtype=dtype), SHAPE)


SHAPE = (WORDS, WIDTH)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 30), st.integers(1, 2), st.booleans())
def test_a_table_that_is_tied_is_the_sum_of_its_uses(n, positions, tokens, times, double):
    torch.manual_seed(n + tokens)
    dtype = torch.float64 if double else torch.float32
    parts = [part for _ in range(times) for part in uses(n, positions, tokens, dtype)]
    dense = sum(part.dense() for part in parts).double()
    tied, factor = combined(parts), torch.rand(n)
    assert isinstance(tied, Tied)
    total = tied.weighted_sum(factor)
    wanted = torch.einsum("n,nvd->vd", factor.double(), dense)
    for found, truth in ((tied.squares(), dense.square().sum((1, 2))), (total, wanted), (tied.dense(), dense)):
        torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-4)


def test_uses_that_cancel_keep_their_norm():
    """One use is nearly minus the other: what is left of them is far below the rounding of either."""
    torch.manual_seed(0)
    outer, lookup = uses(3, 4, 4, torch.float32)
    outer.gradients = functional.one_hot(lookup.tokens, WORDS).float()
    lookup.gradients = -outer.inputs * (1 + 1e-5)
    norms = (outer.dense().double() + lookup.dense().double()).flatten(1).norm(dim=1)
    found = Tied(outer, lookup).squares().double().sqrt()
    assert (found >= norms).all()
    torch.testing.assert_close(found, norms, rtol=0.3, atol=0.0)


def test_an_example_that_is_not_finite_is_dropped_from_both():
    outer, lookup = uses(3, 4, 5)
    outer.inputs[1, 0, 0], lookup.gradients[1, 2, 3] = float("nan"), float("inf")
    tied = Tied(outer, lookup)
    assert tied.squares().isfinite().tolist() == [True, False, True]
    dropped = tied.drop(torch.tensor([False, True, False]))
    total = dropped.weighted_sum(torch.tensor([1.0, 0.0, 1.0]))
    torch.testing.assert_close(total, tied.dense()[[0, 2]].sum(0))


def test_a_table_used_in_any_other_way_is_made():
    outer, lookup = uses(2, 3, 4)
    turned = Outer(outer.gradients, outer.inputs, (WIDTH, WORDS))
    for parts in ([outer, lookup, Dense(torch.ones(2, *SHAPE))], [turned, turned]):
        made = combined(parts)
        assert not isinstance(made, Tied)
        torch.testing.assert_close(made.dense().double(), sum(part.dense() for part in parts).double())


class Language(nn.Module):
    """A language model whose two ends share a table."""

    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(WORDS, WIDTH, padding_idx=2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return functional.linear(torch.tanh(self.mix(self.table(x))), self.table.weight).movedim(-1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_language_model_with_tied_ends(dtype):
    torch.manual_seed(0)
    model, text = Language().to(dtype), torch.randint(WORDS, (7, 10))
    criterion = Criterion(lambda out, y: functional.cross_entropy(out, y, reduction="none").mean(1))
    found = clipped_sum(model, criterion, (text[:, :-1], text[:, 1:]), clip=0.3)
    assert_same(
        found, loop(model, criterion, (text[:, :-1], text[:, 1:]), 0.3), 1e-4 if dtype is torch.float32 else 1e-9
    )


def test_inner_products_by_the_library_count_all_their_roundings():
    """The bound that decides whether norms are looked at again knows the widths of both ways to multiply."""
    outer = Outer(torch.randn(2, 3, 900), torch.randn(2, 3, 8), (8, 900))
    lookup = Lookup(torch.randint(8, (2, 4)), torch.randn(2, 4, 900), (8, 900))
    with mock.patch("terrine.sgd.clipping.contribution.certain") as certain:
        Tied(outer, lookup).squares()
    assert certain.call_args.args[2] >= 900

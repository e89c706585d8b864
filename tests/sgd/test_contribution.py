"""Every form of a per-example gradient against the gradients themselves: norms, weighted sums, examples left out."""

from __future__ import annotations

import pytest
import torch

from terrine.sgd.clipping.contribution import Dense, Lookup, Outer, Tied, combined, outer
from terrine.sgd.clipping.convolved import Convolved, Geometry
from terrine.sgd.clipping.parameter_view import DisjointViews
from terrine.sgd.clipping.rules.embedding import Bags

N = 5


def rand(*shape):
    return torch.randn(N, *shape, dtype=torch.float64)


def tokens(*shape):
    return torch.randint(7, (N, *shape))


def views():
    places = [((2, 3), (3, 1), 0), ((2, 3), (1, 2), 6)]
    return DisjointViews([Dense(rand(2, 3)), Dense(rand(2, 3))], places, (4, 3))


FORMS = {
    "dense": lambda: Dense(rand(3, 4)),
    "dense, otherwise in memory": lambda: Dense(rand(3, 2, 4).permute(0, 2, 3, 1)),
    "dense, one number": lambda: Dense(rand()),
    "outer, one position": lambda: Outer(rand(1, 4), rand(1, 3), (3, 4)),
    "outer, tall": lambda: Outer(rand(2, 4), rand(2, 9), (9, 4)),
    "outer, broad": lambda: Outer(rand(2, 9), rand(2, 4), (4, 9)),
    "outer, many positions": lambda: outer(rand(50, 3), rand(50, 4), (4, 3)),
    "lookup": lambda: Lookup(tokens(9), rand(9, 4), (7, 4)),
    "lookup, no token twice": lambda: Lookup(torch.arange(3).expand(N, 3), rand(3, 4), (7, 4)),
    "bags": lambda: Bags(
        tokens(6).flatten(), torch.arange(N).repeat_interleave(6), torch.rand(6 * N).double(), rand(4), (7, 4)
    ),
    "tied": lambda: Tied(Outer(rand(3, 4), rand(3, 7), (7, 4)), Lookup(tokens(5), rand(5, 4), (7, 4))),
    "several of all kinds": lambda: combined(
        [Outer(rand(3, 4), rand(3, 7), (7, 4)), Lookup(tokens(5), rand(5, 4), (7, 4)), Dense(rand(7, 4))]
    ),
    "convolution": lambda: Convolved(
        rand(5, 6, 2), rand(3, 2, 3), Geometry((3, 2), (2, 3), ((1, 1), (0, 1)), (1, 1)), (3, 2, 3, 2)
    ),
    "views": views,
}


@pytest.mark.parametrize("name", FORMS)
def test_norms_and_sums_are_those_of_the_gradients(name):
    torch.manual_seed(0)
    part = FORMS[name]()
    rows, factor = part.dense(), torch.rand(N, dtype=torch.float64)
    torch.testing.assert_close(part.squares(), rows.reshape(N, -1).square().sum(1))
    torch.testing.assert_close(part.weighted_sum(factor), torch.einsum("n,n...->...", factor, rows))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", FORMS)
def test_examples_that_are_left_out_add_nothing_whatever_they_held(name, bad):
    torch.manual_seed(0)
    part = FORMS[name]()
    rows = part.dense().clone()
    spoil(part, bad)
    kept = part.drop(torch.arange(N) == 2)
    rows[2] = 0.0
    torch.testing.assert_close(kept.weighted_sum(torch.ones(N, dtype=torch.float64)), rows.sum(0))
    assert kept.squares()[2] < 1e-20


def spoil(part, bad):
    """Make example 2 of everything a contribution holds `bad`."""
    for value in vars(part).values():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and len(value) == N:
            value[2] = bad
        for inner in value if isinstance(value, list) else [value]:
            if hasattr(inner, "drop"):
                spoil(inner, bad)

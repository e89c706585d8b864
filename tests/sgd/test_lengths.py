"""Norms of linear layers and the factors that clip, in one pass each, against the obvious formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrine.sgd import kernels
from terrine.sgd.clipping import Automatic, Flat, PerLayer
from terrine.sgd.clipping.contribution import Dense
from terrine.sgd.clipping.summing import Sums, clipped
from terrine.sgd.kernels import lengths
from terrine.sgd.kernels.vectors import LANES

WIDTHS = st.sampled_from([1, 2, LANES - 1, LANES, 5 * LANES + 3])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), WIDTHS, WIDTHS, st.booleans(), st.sampled_from([1, 64, lengths.BLOCK]))
def test_squares_of_a_linear_layer(n, width, height, apart, block):
    inputs = torch.randn(n, width + apart)[:, :width]
    outs = torch.randn(n, height + apart)[:, :height]
    kept, lengths.BLOCK = lengths.BLOCK, block
    try:
        weight, bias = kernels.linear_squares(inputs, outs)
    finally:
        lengths.BLOCK = kept
    out = outs.double().square().sum(1)
    torch.testing.assert_close(weight.double(), inputs.double().square().sum(1) * out, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(bias.double(), out, rtol=1e-5, atol=0.0)


def test_squares_below_the_smallest_number_are_not_lost():
    weight, _ = kernels.linear_squares(torch.full((1, 9), 1e-24), torch.full((1, 4), 1e24))
    assert float(weight) >= 36.0  # |in|^2 is 0 in single precision


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 50), st.integers(1, 7), st.sampled_from([1.0, 128.0, 0.25]), st.floats(1e-3, 1e3))
def test_norms_and_factors(n, parts, scale, bound):
    squares = {str(i): torch.rand(n) * 10.0 ** (i - 2) for i in range(parts)}
    norms, factors, finite = clipped(squares, Flat(bound), scale)
    wanted = sum(one.double() for one in squares.values()).sqrt() * scale
    assert finite
    torch.testing.assert_close(norms.double(), wanted, rtol=1e-5, atol=0.0)
    for factor in factors.values():
        torch.testing.assert_close(factor.double(), (bound / wanted).clamp(max=1.0) * scale, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("bound", [1.0, math.inf, 1e300])
def test_an_example_without_a_gradient_is_left_as_it_is(bound):
    norms, factors, finite = clipped({"weight": torch.zeros(3)}, Flat(bound), 2.0)
    assert finite
    assert norms.tolist() == [0.0] * 3
    assert factors["weight"].tolist() == [2.0] * 3


def test_vectors_of_other_lengths_are_never_read():
    with pytest.raises(ValueError, match=r"want \(3,\) all of them"):
        clipped({"a": torch.ones(3), "b": torch.ones(2)}, Flat(1.0), 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 4])
def test_one_norm_that_is_not_finite_is_noticed(value, place):
    squares = torch.ones(5)
    squares[place] = value
    assert not clipped({"a": torch.ones(5), "b": squares}, Flat(1.0), 1.0)[2]


@pytest.mark.parametrize("rule", [Flat(0.7), Automatic(0.7), PerLayer({"a": 0.5, "b": 0.4})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rule_times_a_scale(rule, dtype):
    rows = {name: torch.randn(6, 4).to(dtype) for name in "ab"}
    parameters = {name: torch.nn.Parameter(torch.zeros(4, dtype=dtype)) for name in rows}
    larger, scaled = Sums(parameters), Sums(parameters)
    larger.add_rows({name: row * 3 for name, row in rows.items()}, rule)
    made = {name: Dense(row) for name, row in rows.items()}
    scaled.add(made, {name: one.squares() for name, one in made.items()}, rule, 3.0)
    for name, total in larger.totals().items():
        torch.testing.assert_close(scaled.totals()[name], total)

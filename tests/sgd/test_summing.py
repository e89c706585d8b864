"""Norms over all parameters and the factors that clip, against the obvious formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrine.sgd.clipping import Automatic, Flat, PerLayer
from terrine.sgd.clipping.contribution import Dense
from terrine.sgd.clipping.sums import ClippedSums, clipped


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 50), st.integers(1, 7), st.sampled_from([1.0, 128.0, 0.25]), st.floats(1e-3, 1e3))
def test_norms_and_factors(n, parts, scale, bound):
    squares = {str(i): torch.rand(n) * 10.0 ** (i - 2) for i in range(parts)}
    norms, factors = clipped(squares, Flat(bound), scale)
    wanted = sum(one.double() for one in squares.values()).sqrt() * scale
    torch.testing.assert_close(norms.double(), wanted, rtol=1e-5, atol=0.0)
    for factor in factors.values():
        torch.testing.assert_close(factor.double(), (bound / wanted).clamp(max=1.0) * scale, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("bound", [1.0, math.inf, 1e12])
def test_an_example_without_a_gradient_is_left_as_it_is(bound):
    norms, factors = clipped({"weight": torch.zeros(3)}, Flat(bound), 2.0)
    assert norms.tolist() == [0.0] * 3
    assert factors["weight"].tolist() == [2.0] * 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_example_that_is_not_finite_adds_nothing(value):
    rows = torch.ones(5, 2)
    rows[4, 1] = value
    sums = ClippedSums({"a": torch.nn.Parameter(torch.zeros(2))})
    norms = sums.add_rows({"a": rows}, Flat(1.0))
    assert norms.isfinite().tolist() == [True] * 4 + [False]
    torch.testing.assert_close(sums.totals()["a"], torch.full((2,), 4 / math.sqrt(2)))


@pytest.mark.parametrize("rule", [Flat(0.7), Automatic(0.7), PerLayer({"a": 0.5, "b": 0.4})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rule_times_a_scale(rule, dtype):
    rows = {name: torch.randn(6, 4).to(dtype) for name in "ab"}
    parameters = {name: torch.nn.Parameter(torch.zeros(4, dtype=dtype)) for name in rows}
    larger, scaled = ClippedSums(parameters), ClippedSums(parameters)
    larger.add_rows({name: row * 3 for name, row in rows.items()}, rule)
    made = {name: Dense(row) for name, row in rows.items()}
    scaled.add(made, {name: one.squares() for name, one in made.items()}, rule, 3.0)
    for name, total in larger.totals().items():
        torch.testing.assert_close(scaled.totals()[name], total)

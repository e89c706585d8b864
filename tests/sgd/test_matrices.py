"""Products of matrices by our kernel against the obvious ones in float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same, loop
from torch import nn

from terrine.sgd import clipped_sum, products
from terrine.sgd.kernels import matrices
from terrine.sgd.kernels.matrices import HIGH, LONG

SIZES = st.sampled_from([1, 2, HIGH - 1, HIGH, HIGH + 1, LONG - 1, LONG, LONG + 1, 5 * HIGH + 2, 3 * LONG + 3, 100])
LAYOUTS = st.sampled_from(["rows", "columns", "apart", "columns apart"])

PARTS = [{"LAID": matrices.LAID}, {"LAID": 7 * LONG, "DEEP": 3}, {"LAID": 90 * LONG, "DEEP": 32}]
"""How much is laid out at a time, which decides how many rounds there are."""


@pytest.fixture
def always_ours(monkeypatch):
    """No product is too small for our kernel."""
    for least in ("OURS", "FEW", "HIGH", "DEEP", "BROAD"):
        monkeypatch.setattr(products, least, 0)


def laid_out(rows, columns, how):
    """A matrix of random numbers whose rows, or columns, lie side by side; or a part of a larger one."""
    if how.startswith("columns"):
        return laid_out(columns, rows, how[8:] or "rows").t()
    return torch.randn(rows, columns) if how == "rows" else torch.randn(rows, columns + 5)[:, 3:-2]


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(SIZES, SIZES, SIZES), LAYOUTS, LAYOUTS, st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from([1, 2, 3]), st.sampled_from(PARTS), st.integers(0, 9),
)  # fmt: skip
def test_products_of_every_matrix(sizes, one, other, is_scaled, is_shifted, more, threads, parts, seed):
    """Whatever their sizes and layouts, and in whatever parts: every number, and nothing beside them."""
    torch.manual_seed(seed)
    m, n, k = sizes
    left, right = laid_out(m, k, one), laid_out(n, k, other)
    is_scaled = is_scaled and (left.stride(0) == 1 or m == 1)
    factor, bias = torch.rand(k) if is_scaled else None, torch.randn(n) if is_shifted else None
    room = torch.randn(m + 2, n + 9)
    before, target = room.clone(), room[1:-1, 4 : 4 + n]
    wanted = (left.double() * (1.0 if factor is None else factor.double())) @ right.double().t()
    wanted += (0.0 if bias is None else bias.double()) + (target.double() if more else 0.0)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with mock.patch.multiple(matrices, **parts):
            matrices.multiply(left, right, target, factor=factor, bias=bias, more=more)
    finally:
        torch.set_num_threads(threads_before)
    torch.testing.assert_close(target.double(), wanted, rtol=1e-4, atol=1e-4)
    room[1:-1, 4 : 4 + n] = before[1:-1, 4 : 4 + n]
    assert torch.equal(room, before)


def test_a_product_is_the_same_whoever_makes_it():
    """To the last bit: a run that is resumed with other threads goes on as it was."""
    torch.manual_seed(0)
    left, right, made = torch.randn(500, 900), torch.randn(300, 900), []
    before = torch.get_num_threads()
    for threads in (1, 2, 3, 2, 2, 2):
        torch.set_num_threads(threads)
        made.append(matrices.multiply(left, right, torch.empty(500, 300)))
    torch.set_num_threads(before)
    assert all(torch.equal(one, made[0]) for one in made)


def test_numbers_that_are_none_stay_in_their_rows_and_columns():
    left, right = torch.randn(130, 70), torch.randn(50, 70)
    left[7, 3], right[49, 69] = torch.nan, torch.inf
    made = matrices.multiply(left, right, torch.empty(130, 50))
    assert torch.equal(torch.isfinite(made), torch.isfinite(left @ right.t()))


@pytest.mark.parametrize(
    ("left", "right", "target", "others"),
    [
        (torch.ones(3, 4), torch.ones(5, 3), torch.ones(3, 5), {}),
        (torch.ones(3, 4), torch.ones(5, 4), torch.ones(5, 3), {}),
        (torch.ones(3, 4), torch.ones(5, 4), torch.ones(5, 3).t(), {}),
        (torch.ones(3, 0), torch.ones(5, 0), torch.ones(3, 5), {}),
        (torch.ones(6, 8)[::2, ::2], torch.ones(5, 4), torch.ones(3, 5), {}),
        (torch.ones(3, 4), torch.ones(5, 4), torch.ones(3, 5), {"factor": torch.ones(4)}),
        (torch.ones(4, 3).t(), torch.ones(5, 4), torch.ones(3, 5), {"factor": torch.ones(3)}),
        (torch.ones(3, 4), torch.ones(5, 4), torch.ones(3, 5), {"bias": torch.ones(10)[::2]}),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_never_multiplied(left, right, target, others):
    with pytest.raises(ValueError, match="want"):
        matrices.multiply(left, right, target, **others)


@pytest.mark.parametrize("width", [9, 400])
def test_layers_by_our_products(width, always_ours):
    """Outputs, gradients of the input and weighted sums: at one position and at several, of small and large weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 40), nn.Tanh(), nn.Linear(40, 700), nn.Tanh(), nn.Linear(700, 7, bias=False))
    for x in (torch.randn(5, width), torch.randn(5, 3, width), torch.randn(3, 5, 2 * width)[..., ::2].transpose(0, 1)):
        given = model, lambda o, y: (o * y).flatten(1).sum(1), x, torch.randn(*x.shape[:-1], 7)
        with mock.patch.object(matrices, "multiply", wraps=matrices.multiply) as ours:
            found = clipped_sum(*given, clip=0.5)
        assert ours.called
        assert_same(found, loop(*given, 0.5), 1e-4)


@pytest.mark.parametrize("criterion", [lambda o, _: o.sum(), lambda o, _: o.flatten(1)[:, 0]])
@pytest.mark.parametrize("positions", [(), (3,)])
def test_gradients_that_lie_in_memory_once_for_all(criterion, positions, always_ours):
    """As those of a sum do, whose numbers are all the same."""
    torch.manual_seed(0)
    given = nn.Linear(9, 7), criterion, torch.randn(5, *positions, 9), torch.zeros(5)
    assert_same(clipped_sum(*given, clip=0.5), loop(*given, 0.5), 1e-4)


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        (torch.ones(7, 9), torch.ones(1)),
        (torch.ones(7, 9), torch.ones(14)[::2]),
        (torch.ones(14, 18)[::2, ::2], torch.ones(7)),
        (torch.ones(9, 7).t(), None),
        (torch.ones(9), None),
    ],
)
def test_linear_maps_are_torchs_whatever_they_are_given(weight, bias, always_ours):
    x = torch.randn(5, 9)
    made = products.linear(x, weight, bias)
    if made is not None:
        torch.testing.assert_close(made, nn.functional.linear(x, weight, bias))
    assert products.linear(x, torch.ones(7, 9), torch.ones(7, dtype=torch.float64)) is None
    assert products.linear(x, torch.ones(7, 8)) is None

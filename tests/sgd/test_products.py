"""Sums and products by another way than the obvious one: few patches, heavy weights, large matrices."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same, loop
from torch import nn

from terrine.sgd import clipped_sum, products
from terrine.sgd.clipping.convolved import Convolved
from terrine.sgd.clipping.patches import Geometry


@pytest.mark.parametrize("outputs", [4, 64])
@pytest.mark.parametrize("kernel", [1, 3])
def test_sums_of_few_patches(kernel, outputs, monkeypatch):
    """The weighted sum by one product, more and fewer patches than outputs, is that of the gradients themselves."""
    torch.manual_seed(0)
    geometry = Geometry((kernel, kernel), (1, 1), ((1, 1), (1, 1)), (1, 1))
    image = torch.randn(3, 3, 3, 5, dtype=torch.float64)
    out = torch.randn(3, *geometry.places(image), outputs, dtype=torch.float64)
    factor = torch.rand(3, dtype=torch.float64)
    shape = (outputs, 5, kernel, kernel)
    monkeypatch.setattr(Convolved, "_is_product", lambda self: True)
    monkeypatch.setattr(Convolved, "_prefers_direct", lambda self: False)
    part, rows = Convolved(image, out, geometry, shape), Convolved(image, out, geometry, shape).dense()
    torch.testing.assert_close(part.squares(), rows.flatten(1).square().sum(1))
    total = torch.empty(shape, dtype=torch.float64)
    part.add_to(total, factor, fresh=True)
    torch.testing.assert_close(total, torch.einsum("n,n...->...", factor, rows))


@pytest.mark.parametrize("convolution", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_weight_much_larger_than_the_image(convolution):
    torch.manual_seed(0)
    model = nn.Sequential(convolution(24, 40, 3, padding=1), nn.Tanh(), convolution(40, 24, 3, padding=1), nn.Flatten())
    x, y = torch.randn(3, 24, 4, 4), torch.randint(5, (3,))
    given = model, nn.CrossEntropyLoss(), x, y
    assert_same(clipped_sum(*given, clip=0.5), loop(*given, 0.5), 1e-4)


def test_large_matrices_by_the_other_library(monkeypatch):
    """Outputs, gradients of the input and weighted sums, narrow and wide, at one position and at several."""
    monkeypatch.setattr(products, "WORTH", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 7, bias=False))
    for x in (torch.randn(5, 9), torch.randn(5, 3, 9), torch.randn(5, 3, 18)[..., ::2]):
        given = model, lambda o, y: (o * y).flatten(1).sum(1), x, torch.randn(*x.shape[:-1], 7)
        assert_same(clipped_sum(*given, clip=0.5), loop(*given, 0.5), 1e-4)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 1, 5, 2), (33, 2, 17, 60), (33, 2, 60, 17), (2, 9, 130, 3)])
def test_weighted_sums_of_outer_products(sizes, monkeypatch):
    monkeypatch.setattr(products, "WORTH", 0)
    _check_weighted(*sizes)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (300, 1, 3, 700), (300, 1, 700, 3), (41, 1, 16, 65), (7, 1, 2, 2)])
def test_weighted_sums_of_few_by_many(sizes, threads, monkeypatch):
    monkeypatch.setattr(products, "WIDE", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _check_weighted(*sizes)
    finally:
        torch.set_num_threads(before)


def test_a_narrow_layer_on_wide_features(monkeypatch):
    monkeypatch.setattr(products, "WIDE", 0)
    torch.manual_seed(0)
    for model, x in ((nn.Linear(90, 3), torch.randn(11, 90)), (nn.Linear(3, 90), torch.randn(11, 3))):
        given = model, lambda o, y: (o * y).sum(1), x, torch.randn(11, model.out_features)
        assert_same(clipped_sum(*given, clip=0.5), loop(*given, 0.5), 1e-5)


def _check_weighted(n, positions, height, width):
    torch.manual_seed(0)
    left, right = torch.randn(n, positions, height + 1)[..., 1:], torch.randn(n, positions, width)
    factor = torch.rand(n)
    made = products.weighted(left, right, factor)
    assert made.is_contiguous()
    wanted = torch.einsum("n,nte,ntd->ed", factor.double(), left.double(), right.double())
    torch.testing.assert_close(made.double(), wanted, rtol=1e-4, atol=1e-4)


def test_reduced_precision_is_not_taken_up():
    torch.set_float32_matmul_precision("medium")
    try:
        assert products.linear(torch.randn(1 << 10, 1 << 10), torch.randn(1 << 10, 1 << 10)) is None
    finally:
        torch.set_float32_matmul_precision("highest")

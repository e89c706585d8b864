"""Norms and sums in single precision, whatever products of single precision are asked to be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from terrine.sgd import precision
from terrine.sgd.clipping import clipped_sum, contribution
from terrine.sgd.clipping.rules import linear

LAX = [
    lambda: torch.set_float32_matmul_precision("medium"),
    lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
]


@pytest.fixture(params=LAX, ids=["everywhere", "products", "convolutions"])
def lax(request):
    """Products of single precision may be rough, as they were asked to be."""
    kinds = torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.cuda.matmul
    before = [kind.fp32_precision for kind in kinds]
    request.param()
    yield
    for kind, value in zip(kinds, before, strict=True):
        kind.fp32_precision = value


def test_it_is_found_out_and_put_back(lax):
    assert not precision.is_exact()
    with precision.exact():
        assert precision.is_exact()
        assert torch.backends.mkldnn.matmul.fp32_precision in precision.EXACT
    assert not precision.is_exact()


def test_rules_and_sums_are_exact_where_products_are_not(lax, monkeypatch):
    """What a rule and a sum are made of is made exactly; the model's own products are the user's affair."""
    seen = []

    def spy(target, name):
        real = getattr(target, name)
        monkeypatch.setattr(target, name, lambda *a, **k: (seen.append(precision.is_exact()), real(*a, **k))[1])

    spy(linear, "_linear")
    spy(contribution.Outer, "weighted_sum")
    spy(contribution.Dense, "weighted_sum")
    model, x, y = nn.Linear(5, 3), torch.randn(4, 5), torch.randint(3, (4,))
    clipped_sum(model, nn.CrossEntropyLoss(), (x, y), clip=1.0)
    assert len(seen) >= 3
    assert all(seen)

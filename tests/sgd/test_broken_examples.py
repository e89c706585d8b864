"""An example whose numbers are none, or too large, moves the sum by the bound at most."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from terrine.sgd import clipped_sum

from .helpers import Criterion, distance


class Outputs(nn.Module):
    """A layer's first output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


LAYERS = {
    "linear": (lambda: nn.Linear(300, 200), (300,)),
    "wide features": (lambda: nn.Linear(4_000, 10), (4_000,)),
    "linear, few positions": (lambda: nn.Linear(300, 300), (6, 300)),
    "linear, many positions": (lambda: nn.Linear(64, 300), (40, 64)),
    "linear, panels": (lambda: nn.Linear(32, 1_024), (200, 32)),
    "convolution": (lambda: nn.Conv2d(3, 16, 3, padding=1), (3, 12, 12)),
    "convolution, slices": (lambda: nn.Conv2d(64, 64, 3, padding=1), (64, 8, 8)),
    "convolution, Gram matrices": (lambda: nn.Conv2d(256, 256, 3, padding=1), (256, 8, 8)),
    "depthwise": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32), (32, 8, 8)),
    "one dimension": (lambda: nn.Conv1d(8, 64, 7, padding=3), (8, 64)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 16, 3, 2), (8, 5, 5)),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 32, 3), nn.GroupNorm(8, 32)), (3, 10, 10)),
    "pooling": (lambda: nn.Sequential(nn.Conv2d(1, 16, 5), nn.Tanh(), nn.MaxPool2d(2)), (1, 12, 12)),
    "LSTM": (lambda: Outputs(nn.LSTM(16, 32, batch_first=True)), (9, 16)),
    "GRU": (lambda: Outputs(nn.GRU(16, 32, batch_first=True)), (9, 16)),
    "transformer": (lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), (40, 64)),
}


CRITERION = Criterion(lambda out, y: (out.flatten(1) * y).sum())


def lot(made, shape):
    torch.manual_seed(0)
    model, x = made(), torch.randn(3, *shape)
    return model, x, torch.randn(3, model(x)[0].numel())


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38, 1e-40])
@pytest.mark.parametrize(("made", "shape"), LAYERS.values(), ids=LAYERS)
def test_it_moves_the_sum_by_the_bound_at_most(made, shape, bad):
    model, x, y = lot(made, shape)
    x[1].view(-1)[0] = bad
    with_it, without = (
        clipped_sum(model, CRITERION, (x, y), clip=1.0),
        clipped_sum(model, CRITERION, (x[::2], y[::2]), clip=1.0),
    )
    assert distance(with_it, without) <= 1.002


@pytest.mark.parametrize(("made", "shape"), LAYERS.values(), ids=LAYERS)
def test_a_whole_lot_of_them_adds_up_to_nothing(made, shape):
    model, x, y = lot(made, shape)
    found = clipped_sum(model, CRITERION, (torch.full_like(x, math.nan), y), clip=1.0)
    assert all(not total.any() for total in found.sums.values())

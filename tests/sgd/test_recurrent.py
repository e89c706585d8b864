"""Recurrent layers over time: the library's own outputs, and its gradients, whatever part of the layer is trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from terrine.sgd import clipped_sum

from .oracle import assert_same, loop

WIDTH = 4


class Recurrent(nn.Module):
    """A recurrent layer and a linear one; the first state comes from the lot, from a parameter, or is zero."""

    def __init__(self, layer, state=None):
        super().__init__()
        self.layer, self.state = layer, state
        ways = 2 if layer.bidirectional else 1
        self.first = nn.Parameter(torch.randn(layer.num_layers * ways, 1, WIDTH)) if state == "trained" else None
        self.out = nn.Linear(layer.hidden_size * ways, 2)

    def forward(self, x):
        state = None
        if self.state == "trained":
            state = self.first.expand(-1, len(x), -1).contiguous()
        elif self.state == "lot":
            state = x[:, 0, :WIDTH].unsqueeze(0)
        if state is not None and isinstance(self.layer, nn.LSTM):
            state = (state, state)
        return self.out(self.layer(x, state)[0].sum(1))


MODELS = {
    "lstm": lambda: Recurrent(nn.LSTM(6, WIDTH, batch_first=True)),
    "lstm, no bias, both ways": lambda: Recurrent(
        nn.LSTM(6, WIDTH, 2, bias=False, batch_first=True, bidirectional=True)
    ),
    "gru": lambda: Recurrent(nn.GRU(6, WIDTH, batch_first=True)),
    "gru, both ways": lambda: Recurrent(nn.GRU(6, WIDTH, 2, batch_first=True, bidirectional=True)),
    "tanh": lambda: Recurrent(nn.RNN(6, WIDTH, 2, batch_first=True)),
    "lstm, state from the lot": lambda: Recurrent(nn.LSTM(6, WIDTH, batch_first=True), "lot"),
    "gru, state from the lot": lambda: Recurrent(nn.GRU(6, WIDTH, batch_first=True), "lot"),
    "lstm, trained state": lambda: Recurrent(nn.LSTM(6, WIDTH, batch_first=True), "trained"),
    "gru, trained state": lambda: Recurrent(nn.GRU(6, WIDTH, batch_first=True), "trained"),
}
FROZEN = [(), ("weight_ih_l0", "bias_ih_l0"), ("weight_hh_l0",), ("weight_hh_l0", "bias_hh_l0"), ("bias_hh_l0",)]


@pytest.mark.parametrize("name", MODELS)
def test_clipped_sums_are_the_loop(name):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x, y = torch.randn(4, 5, 6, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    criterion = nn.MSELoss(reduction="sum")
    assert_same(clipped_sum(model, criterion, (x, y), clip=0.5), loop(model, criterion, (x, y), 0.5))


@pytest.mark.parametrize("frozen", FROZEN, ids=", ".join)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_parts_of_a_layer_are_frozen(kind, frozen):
    torch.manual_seed(0)
    model = Recurrent(kind(6, WIDTH, batch_first=True)).double()
    for name in frozen:
        getattr(model.layer, name).requires_grad_(False)
    x, y = torch.randn(4, 5, 6, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    criterion = nn.MSELoss(reduction="sum")
    assert_same(clipped_sum(model, criterion, (x, y), clip=0.5), loop(model, criterion, (x, y), 0.5))


def test_what_is_not_a_number_stays_with_its_example():
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM(6, WIDTH, batch_first=True)).double()
    x, y = torch.randn(4, 5, 6, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    x[2, 1, 3] = float("nan")
    criterion, others = nn.MSELoss(reduction="sum"), [0, 1, 3]
    found = clipped_sum(model, criterion, (x, y), clip=0.5)
    wanted = loop(model, criterion, (x[others], y[others]), 0.5)
    assert not found.norms[2].isfinite()
    assert_same(found._replace(norms=found.norms[others]), wanted)

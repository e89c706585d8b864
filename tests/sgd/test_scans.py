"""Recurrent layers over time: the library's own outputs, and its gradients, whatever part of the layer is trained."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from terrine.sgd import clipped_sum
from terrine.sgd.clipping.scans import scan
from tests.sgd.oracle import assert_same, loop

TIME, N, WIDTH = 5, 3, 4
LAYERS = {
    "lstm": (4, lambda size, bias: nn.LSTM(size, WIDTH, bias=bias)),
    "gru": (3, lambda size, bias: nn.GRU(size, WIDTH, bias=bias)),
    "tanh": (1, lambda size, bias: nn.RNN(size, WIDTH, bias=bias)),
    "relu": (1, lambda size, bias: nn.RNN(size, WIDTH, nonlinearity="relu", bias=bias)),
}


def layer_on_its_gates(kind, bias):
    """A layer of the library whose input projection is the identity, in double precision."""
    gates, make = LAYERS[kind]
    torch.manual_seed(0)
    layer = make(gates * WIDTH, bias).double()
    layer.weight_ih_l0.data = torch.eye(gates * WIDTH, dtype=torch.float64)
    if bias:
        layer.bias_ih_l0.data.zero_()
    inputs = torch.randn(TIME, N, gates * WIDTH, dtype=torch.float64, requires_grad=True)
    first = [torch.randn(N, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(1 + (kind == "lstm"))]
    return layer, inputs, first


def loss_of(outputs, last):
    """Depends on every output and on the last state, each entry with a weight of its own."""
    return sum((t * torch.arange(1.0, t.numel() + 1, dtype=t.dtype).view(t.shape)).sum() for t in (outputs, *last))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_scan_is_the_library(kind, bias):
    layer, inputs, first = layer_on_its_gates(kind, bias)
    weight, shift = layer.weight_hh_l0, layer.bias_hh_l0 if bias else None
    state = tuple(part.unsqueeze(0) for part in first)
    outputs, last = layer(inputs, state if kind == "lstm" else state[0])
    last = [part.squeeze(0) for part in (last if kind == "lstm" else (last,))]
    trained = [inputs, *first, weight, *([shift] if bias else [])]
    wanted = torch.autograd.grad(loss_of(outputs, last), trained)

    hidden: list[torch.Tensor] = []
    given = (inputs * 1.0, tuple(first), weight.detach(), None if shift is None else shift.detach(), hidden)
    made, final, before = scan(kind, *given)
    got = list(torch.autograd.grad(loss_of(made, final), [inputs, *first]))
    (flow,) = hidden
    got += [torch.einsum("tng,tnh->gh", flow, before), *([flow.sum((0, 1))] if bias else [])]
    for one, two in zip([outputs, *last, *wanted], [made, *final, *got], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_may_be_changed_in_place(kind):
    layer, inputs, first = layer_on_its_gates(kind, False)
    found = []
    for change in (lambda outputs: outputs * -2.0, lambda outputs: outputs.mul_(-2.0)):
        outputs, last, before = scan(kind, inputs * 1.0, tuple(first), layer.weight_hh_l0.detach(), None, hidden := [])
        made = torch.autograd.grad(loss_of(change(outputs), last), [inputs, *first])
        found.append([*made, before, *hidden])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0.0, atol=0.0)


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
    assert_same(clipped_sum(model, criterion, x, y, clip=0.5), loop(model, criterion, x, y, 0.5))


@pytest.mark.parametrize("frozen", FROZEN, ids=", ".join)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_parts_of_a_layer_are_frozen(kind, frozen):
    torch.manual_seed(0)
    model = Recurrent(kind(6, WIDTH, batch_first=True)).double()
    for name in frozen:
        getattr(model.layer, name).requires_grad_(False)
    x, y = torch.randn(4, 5, 6, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    criterion = nn.MSELoss(reduction="sum")
    assert_same(clipped_sum(model, criterion, x, y, clip=0.5), loop(model, criterion, x, y, 0.5))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 19), st.integers(1, 70), st.floats(0.01, 60.0))
def test_compiled_steps_are_the_slow_ones(time, n, width, size):
    """In single precision, gates from tiny to saturated, every gradient and the state that goes on."""
    torch.manual_seed(n)
    inputs, weight = size * torch.randn(time, n, 4 * width), torch.randn(4 * width, width) / width**0.5
    first = [torch.randn(n, width) for _ in range(2)]

    def everything(dtype):
        given = [one.to(dtype).requires_grad_() for one in (inputs, *first)]
        hidden: list[torch.Tensor] = []
        made, final, _ = scan("lstm", given[0] * 1.0, tuple(given[1:]), weight.to(dtype), None, hidden)
        weights = torch.linspace(-1, 1, time * n * width, dtype=dtype).view(made.shape)
        loss = (made * weights).sum() + (final[0] - 2 * final[1]).sum()
        return [made, *final, *torch.autograd.grad(loss, given), *hidden]

    for found, truth in zip(everything(torch.float32), everything(torch.float64), strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-5)


def test_what_is_not_a_number_stays_so_and_with_its_example():
    inputs, weight, first = torch.randn(3, 9, 20), torch.randn(20, 5), [torch.randn(9, 5) for _ in range(2)]
    inputs[1, 4, [0, 6, 12, 18]] = float("nan")
    outputs, last, _ = scan("lstm", inputs, tuple(first), weight, None, [])
    finite = [t.isfinite().all(-1) for t in (outputs[2], *last)]
    assert outputs[0].isfinite().all()
    assert all(one.tolist() == [i != 4 for i in range(9)] for one in finite)

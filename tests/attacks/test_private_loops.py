"""What a hostile reader did to ordinary models: each held, refused, or exact."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from terrine.errors import InvalidArgument
from terrine.sgd import clipped_sum
from tests.sgd.helpers import distance, flatten, released_sum
from tests.sgd.oracle import assert_same, loop

N, C = 9, 1.0
CRITERION = nn.CrossEntropyLoss()


def data(n=N):
    torch.manual_seed(1)
    x = torch.randn(N, 4).double()
    x[-1] *= 50.0
    return x[:n], torch.arange(n) % 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Counting(nn.Module):
    """Turns its sign at every other call, from the seventh on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        h = self.layer(x)
        return -h if self.calls > 6 and self.calls % 2 else h


@pytest.mark.parametrize("microbatch", [None, 1, 4])
def test_a_counter_is_the_same_for_all_examples_or_refused(microbatch):
    """How many calls there are is as private as the size of a lot."""
    try:
        sums = [
            clipped_sum(Counting(), CRITERION, tuple(rows[first:] for rows in data()), clip=C, microbatch=microbatch)
            for first in (0, 1)
        ]
    except InvalidArgument as refusal:
        assert "model.calls" in str(refusal)  # noqa: PT017
        return
    assert distance(*sums) <= C * 1.0001


class Remembering(nn.Module):
    """Sets a flag once it has seen an extreme example."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.seen = nn.Linear(4, 3).double(), False

    def forward(self, x):
        if x.abs().max() > 100:
            self.seen = True
        return self.layer(x) * (5.0 if self.seen else 1.0)


def test_a_flag_that_an_example_sets_is_refused():
    x, y = data()
    x[-1] *= 100
    with pytest.raises(InvalidArgument, match=r"model\.seen changed"):
        clipped_sum(Remembering(), CRITERION, (x, y), clip=C)
    with pytest.raises(InvalidArgument, match=r"model\.seen changed"):
        released_sum(Remembering(), (x, y), CRITERION)


class Reentrant(nn.Module):
    def __init__(self, reentrant=True):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.a, self.b, self.c = nn.Linear(4, 5).double(), nn.Linear(5, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x):
        return self.c(checkpoint(lambda h: self.b(h).tanh(), self.a(x), use_reentrant=self.reentrant))


def test_reentrant_checkpointing_goes_the_slow_way():
    expected = loop(Reentrant(False), CRITERION, data(), C)
    assert_same(clipped_sum(Reentrant(), CRITERION, data(), clip=C), expected)
    torch.testing.assert_close(released_sum(Reentrant(), data(), CRITERION), flatten(expected[0]))


def test_a_backward_hook_of_a_module_is_honoured():
    def make():
        model = net()
        model[0].register_full_backward_hook(lambda module, given, out: tuple(g if g is None else g / 2 for g in given))
        model[2].register_full_backward_hook(lambda module, given, out: tuple(0.1 * g for g in given))
        return model

    expected = loop(make(), CRITERION, data(), C)
    assert_same(clipped_sum(make(), CRITERION, data(), clip=C), expected)
    torch.testing.assert_close(released_sum(make(), data(), CRITERION), flatten(expected[0]))


class LayerDrop(nn.Module):
    """Draws one number for everybody, by Python's own generator."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x):
        return self.b(self.a(x).tanh() if random.random() < 0.5 else x)


class InPlace(nn.Linear):
    def forward(self, x):
        return super().forward(x.sub_(0.5).div_(0.25))


def test_a_coin_of_pythons_is_refused_as_several_examples_would_share_it():
    with pytest.raises(InvalidArgument, match=r"torch\.rand"):
        clipped_sum(LayerDrop(), CRITERION, data(), clip=C)
    with pytest.raises(InvalidArgument, match=r"torch\.rand"):
        released_sum(LayerDrop(), data(), CRITERION)


def test_a_model_that_writes_to_its_input_is_the_loop():
    x, y = data()
    model = InPlace(4, 3).double()
    expected = loop(model, CRITERION, (x.clone(), y), C)
    torch.testing.assert_close(released_sum(model, (x.clone(), y), CRITERION), flatten(expected[0]))
    assert_same(clipped_sum(model, CRITERION, (x.clone(), y), clip=C), expected)


@pytest.mark.parametrize("microbatch", [None, 1])
def test_a_gradient_per_example_cannot_be_had_by_backward(microbatch):
    def loss(model, batch):
        value = functional.cross_entropy(model(batch[0]), batch[1])
        value.backward(retain_graph=True)
        return value

    model = net()
    with pytest.raises(InvalidArgument, match=r"test_private_loops\.py:\d+: backward\(\)"):
        clipped_sum(model, loss, data(), clip=C, microbatch=microbatch)
    assert all(one.grad is None for one in model.parameters())

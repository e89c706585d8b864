"""Constants that a model makes: whose they are is told by the trial, not by lengths."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same, loop
from torch import nn

from terrine import sgd
from terrine.sgd.clipping import clipped_sum, lot
from terrine.sgd.clipping.constants import Constant, told_apart

MADE = {
    "zeros": lambda x, size: torch.zeros(len(x), size, dtype=x.dtype),
    "ones": lambda x, size: torch.ones((len(x), size), dtype=x.dtype),
    "full": lambda x, size: torch.full((len(x), size), 0.3, dtype=x.dtype),
    "new_zeros": lambda x, size: x.new_zeros(len(x), size),
    "new_full": lambda x, size: x.new_full((x.size(0), size), 0.3),
}


class ByHand(nn.Module):
    """A recurrence over (n, steps, 4) whose first state is made on the spot."""

    def __init__(self, made, size):
        super().__init__()
        self.inner, self.across, self.out = nn.Linear(4, size), nn.Linear(size, size), nn.Linear(size, 3)
        self.made, self.size = made, size

    def forward(self, x):
        state = self.made(x, self.size)
        for step in range(x.shape[1]):
            state = torch.tanh(self.inner(x[:, step]) + self.across(state))
        return self.out(state)


class Shared(nn.Module):
    """What all examples share is made from a constant that happens to be as long as the lot."""

    def __init__(self, steps):
        super().__init__()
        self.steps, self.places, self.out = steps, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out((x + self.places(torch.ones(self.steps, 4, dtype=x.dtype))).tanh().mean(1))


def fast(monkeypatch):
    monkeypatch.setattr(lot, "_say", lambda *_: pytest.fail("by vmap, example by example"))


@pytest.mark.parametrize("size", [5, 6, 9])  # 6 are tried together
@pytest.mark.parametrize("n", [2, 5, 6, 9, 12])
@pytest.mark.parametrize("name", MADE)
def test_a_recurrence_by_hand_is_followed_whatever_the_lengths(name, n, size, monkeypatch):
    fast(monkeypatch)
    torch.manual_seed(0)
    model, criterion = ByHand(MADE[name], size).double(), nn.CrossEntropyLoss()
    clipped_sum(model, criterion, torch.randn(7, 9, 4).double(), torch.randint(3, (7,)), clip=0.5)
    x, y = torch.randn(n, 9, 4).double(), torch.randint(3, (n,))
    assert_same(clipped_sum(model, criterion, x, y, clip=0.5), loop(model, criterion, x, y, 0.5))


def test_an_ordinary_loop_over_lots_of_all_sizes():
    torch.manual_seed(0)
    model = ByHand(MADE["zeros"], 6)
    plan = sgd.Plan(examples=60, lot=9, steps=40, clip=1.0, noise=1.0, delta=1e-5, seed=3)
    data = torch.randn(60, 9, 4), torch.randint(3, (60,))
    model, optimizer, lots = sgd.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, plan)
    sizes = []
    for x, y in lots:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        sizes.append(len(x))
    assert {6, 9} <= set(sizes)


def test_two_passes_over_one_lot():
    torch.manual_seed(0)
    model = ByHand(MADE["zeros"], 6)
    plan = sgd.Plan(examples=40, lot=9, steps=6, clip=1.0, noise=1.0, delta=1e-5, seed=3)
    data = torch.randn(40, 9, 4), torch.randint(3, (40,))
    model, optimizer, lots = sgd.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, plan,
                                              criterion=nn.CrossEntropyLoss())  # fmt: skip
    for x, y in lots:
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), y) + nn.functional.cross_entropy(model(x + 0.1), y)).backward()
        optimizer.step()
    assert lots.run.step.taken == 6


@pytest.mark.parametrize("steps", [5, 6, 7])
@pytest.mark.parametrize("n", [5, 6, 7])
def test_what_all_examples_share_is_no_example(n, steps):
    torch.manual_seed(0)
    model, criterion = Shared(steps).double(), nn.CrossEntropyLoss()
    x, y = torch.randn(n, steps, 4).double(), torch.randint(3, (n,))
    assert_same(clipped_sum(model, criterion, x, y, clip=0.5), loop(model, criterion, x, y, 0.5))


class Branching(nn.Module):
    """Makes a shared constant where the trial saw one with a row for every example."""

    def __init__(self):
        super().__init__()
        self.layer, self.out, self.other = nn.Linear(4, 4), nn.Linear(4, 3), False

    def forward(self, x):
        shape = (x.shape[1], 4) if self.other else (len(x), 4)
        made = self.layer(torch.ones(*shape, dtype=x.dtype))
        made = made if self.other else made.unsqueeze(1)
        return self.out((x + made).tanh().mean(1))


@pytest.mark.parametrize("n", [5, 7, 8])
def test_another_way_through_the_model_is_told_nothing(n):
    torch.manual_seed(0)
    model, criterion = Branching().double(), nn.CrossEntropyLoss()
    x, y = torch.randn(n, 7, 4).double(), torch.randint(3, (n,))
    assert_same(clipped_sum(model, criterion, x, y, clip=0.5), loop(model, criterion, x, y, 0.5))
    model.other = True
    assert_same(clipped_sum(model, criterion, x, y, clip=0.5), loop(model, criterion, x, y, 0.5))


def test_calls_are_told_apart_as_far_as_they_agree():
    company = [Constant("zeros", (6, 5)), Constant("ones", (6, 6)), Constant("full", (2, 6)), Constant("zeros", (12,))]
    alone = [Constant("zeros", (1, 5)), Constant("ones", (6, 6)), Constant("full", (2, 1)), Constant("zeros", (2,))]
    assert [one.axis for one in told_apart(company, alone, 6)] == [0, None, 1]
    assert told_apart(company, [Constant("ones", (1, 5))], 6) == ()
    assert len(told_apart(company, alone[:1], 6)) == 1

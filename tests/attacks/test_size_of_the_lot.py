"""The size of a lot is private: what is not linear in a backward pass must not see it, as 1/n of a mean loss."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine.sgd import clipped_sum
from tests.sgd.helpers import released_sum
from tests.sgd.oracle import assert_same, loop

ROW = torch.randn(1, 4, generator=torch.Generator().manual_seed(1))


class Hooked(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        out.register_hook(self.bend)
        return out


class Clamped(Hooked):
    def bend(self, gradient):
        return gradient.clamp(-0.01, 0.01)


class Dropped(Hooked):
    def bend(self, gradient):
        return torch.where(gradient.abs() < 0.05, 0.0, gradient)


def autocast(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.cross_entropy(model(batch[0]), batch[1])


def own_mean(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none").mean()


def divided(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum") / len(batch[0])


LINEAR = lambda: nn.Linear(4, 3)  # noqa: E731
CASES = {
    "autocast": (LINEAR, 1026, autocast),
    "half": (lambda: LINEAR().bfloat16(), 1013, nn.CrossEntropyLoss()),
    "half, own mean": (lambda: LINEAR().bfloat16(), 1013, own_mean),
    "half, divided": (lambda: LINEAR().bfloat16(), 1013, divided),
    "clamped": (lambda: Clamped(4, 3), 36, nn.CrossEntropyLoss()),
    "dropped": (lambda: Dropped(4, 3), 16, nn.CrossEntropyLoss()),
    "dropped, own mean": (lambda: Dropped(4, 3), 16, own_mean),
    "dropped, divided": (lambda: Dropped(4, 3), 16, divided),
}


def total(make, n, loss):
    """What one lot of n equal examples adds up to."""
    torch.manual_seed(0)
    model = make()
    rows = ROW.repeat(n, 1).to(next(model.parameters()).dtype)
    sums = clipped_sum(model, loss, (rows, torch.zeros(n, dtype=torch.long)), clip=1.0).sums
    return torch.cat([one.double().flatten() for one in sums.values()])


@pytest.mark.parametrize("name", CASES)
def test_one_more_example_moves_the_sum_by_the_bound(name):
    make, n, loss = CASES[name]
    assert float((total(make, n, loss) - total(make, n - 1, loss)).norm()) <= 1.0001


@pytest.mark.parametrize("name", CASES)
def test_so_it_is_in_a_run(name):
    """Small lots: the noisy average of a model in half precision is in half precision as well."""
    make, _, loss = CASES[name]
    sums = []
    for n in (9, 8):
        torch.manual_seed(0)
        model = make()
        rows = ROW.repeat(n, 1).to(next(model.parameters()).dtype)
        sums.append(released_sum(model, (rows, torch.zeros(n, dtype=torch.long)), loss).double())
    assert float((sums[0] - sums[1]).norm()) <= (1.1 if "half" in name else 1.0001)


def in_place(model, batch):
    loss = model(batch[0]).square().mean()
    loss /= 4
    loss += 0.1 * model(batch[0]).mean()
    return loss


def by_steps(model, batch):
    out = model(batch[0])
    out *= 2
    out[:, 0] = 0.0
    loss = 0.0
    loss += out.square().mean()
    return loss


@pytest.mark.parametrize("loss", [in_place, by_steps])
def test_what_is_written_in_place_has_torchs_gradient(loss):
    torch.manual_seed(0)
    x, model = torch.randn(6, 4).double(), nn.Linear(4, 2).double()
    assert_same(clipped_sum(copy.deepcopy(model), loss, (x,), clip=0.3), loop(model, loss, (x,), 0.3))

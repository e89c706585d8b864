"""The size of a lot is private: what is not linear in a backward pass must not see it, as 1/n of a mean loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine import sgd

ROW = torch.randn(1, 4, generator=torch.Generator().manual_seed(1))


def released(make, n, loss=lambda model, x, y: functional.cross_entropy(model(x), y)):
    """The sum of one step on n equal examples, all of them drawn."""
    torch.manual_seed(0)
    model = make()
    plan = sgd.Plan(examples=n, lot=n, steps=1, clip=1.0, noise=0.0, delta=1e-5, seed=0)
    dtype = next(model.parameters()).dtype
    data = ROW.repeat(n, 1).to(dtype), torch.zeros(n, dtype=torch.long)
    model, optimizer, lots = sgd.make_private(model, torch.optim.SGD(model.parameters(), lr=1.0), data, plan)
    for x, y in lots:
        loss(model, x, y).backward()
        optimizer.step()
    return n * torch.cat([one.grad.double().flatten() for one in model.parameters()])


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


def autocast(model, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.cross_entropy(model(x), y)


def own_mean(model, x, y):
    return functional.cross_entropy(model(x), y, reduction="none").mean()


def divided(model, x, y):
    return functional.cross_entropy(model(x), y, reduction="sum") / len(x)


@pytest.mark.parametrize(
    ("make", "n", "loss"),
    [
        (lambda: nn.Linear(4, 3), 1026, autocast),
        (lambda: nn.Linear(4, 3).bfloat16(), 1013, None),
        (lambda: nn.Linear(4, 3).bfloat16(), 1013, own_mean),
        (lambda: nn.Linear(4, 3).bfloat16(), 1013, divided),
        (lambda: Clamped(4, 3), 36, None),
        (lambda: Dropped(4, 3), 16, None),
        (lambda: Dropped(4, 3), 16, own_mean),
        (lambda: Dropped(4, 3), 16, divided),
    ],
    ids=[
        "autocast",
        "half",
        "half, own mean",
        "half, divided",
        "clamped",
        "dropped",
        "dropped, own",
        "dropped, divided",
    ],
)
def test_one_more_example_moves_the_sum_by_the_bound(make, n, loss):
    given = () if loss is None else (loss,)
    assert float((released(make, n, *given) - released(make, n - 1, *given)).norm()) <= 1.01


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: functional.cross_entropy(o, y),
        lambda o, y: functional.cross_entropy(o, y, reduction="none").mean(0, keepdim=True).sum(),
        lambda o, y: functional.mse_loss(o, functional.one_hot(y, 3).float()),
        lambda o, y: functional.kl_div(o.log_softmax(1), functional.one_hot(y, 3).float(), reduction="batchmean"),
        lambda o, y: o.square().mean(),
        lambda o, y: o.square().mean((0, 1)),
        lambda o, y: o.square().mean(0).sum(),
        lambda o, y: o.square().sum() / len(o),
        lambda o, y: 0.5 * functional.cross_entropy(o, y) + 0.1 * o.square().mean(),
    ],
)
def test_means_have_torchs_values_and_the_gradient_of_each_example(loss):
    """A lot whose examples are all short enough: the average is that of the plain step."""
    torch.manual_seed(0)
    x, y, model = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]), nn.Linear(4, 3)
    plain = loss(model(x), y)
    wanted = torch.autograd.grad(plain, list(model.parameters()))
    plan = sgd.Plan(examples=6, lot=6, steps=1, clip=100.0, noise=0.0, delta=1e-5, seed=0)
    model, optimizer, lots = sgd.make_private(model, torch.optim.SGD(model.parameters(), lr=0.0), (x, y), plan)
    for some, labels in lots:
        found = loss(model(some), labels)
        found.backward()
        optimizer.step()
    torch.testing.assert_close(float(found), float(plain))
    for one, other in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(one.grad, other)


def test_sums_of_which_one_is_divided_keep_their_weights():
    torch.manual_seed(0)
    x, y, model = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]), nn.Linear(4, 3)

    def loss(o, y):
        return functional.cross_entropy(o, y, reduction="sum") / 7 + o.square().sum()

    wanted = torch.autograd.grad(loss(model(x), y), list(model.parameters()))
    plan = sgd.Plan(examples=6, lot=6, steps=1, clip=1000.0, noise=0.0, delta=1e-5, seed=0)
    model, optimizer, lots = sgd.make_private(model, torch.optim.SGD(model.parameters(), lr=0.0), (x, y), plan)
    for some, labels in lots:
        loss(model(some), labels).backward()
        optimizer.step()
    for one, other in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(6 * one.grad, other)

"""What an example tells Python must not be kept for the next lot: in buffers, weights, flags, lists, arrays."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine import sgd
from terrine.errors import InvalidArgument, TerrineError


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("state", torch.ones(()))
        self.seen, self.table, self.array = [], {}, np.zeros(1)

    def forward(self, x):
        self.keep(x)
        return self.linear(x)


class RunningMaximum(Stateful):
    def keep(self, x):
        self.state.fill_(max(float(self.state), float(x.abs().max())))


class ByAView(Stateful):
    def keep(self, x):
        if x.abs().max() > 2:
            self.state.view(1)[0] = -1.0


class ByItsData(Stateful):
    def keep(self, x):
        if x.abs().max() > 2:
            self.state.data.neg_()


class Assigned(Stateful):
    def keep(self, x):
        if x.abs().max() > 2:
            self.state = -torch.ones(())


class Weights(Stateful):
    def keep(self, x):
        if x.abs().max() > 2:
            self.linear.weight.data.neg_()


class Flag(Stateful):
    def keep(self, x):
        if x.abs().max() > 2:
            self.eval()


class List(Stateful):
    def keep(self, x):
        self.seen.append(float(x.abs().max()))


class Dictionary(Stateful):
    def keep(self, x):
        self.table["largest"] = x.abs().max().item()


class Array(Stateful):
    def keep(self, x):
        self.array[0] = x.abs().max().item()


class ByItsShape(Stateful):
    def keep(self, x):
        self.seen = [len(x[x > 1])]


class Written(Stateful):
    """Without a word to Python: torch writes an example into a buffer."""

    def keep(self, x):
        torch.max(self.state, x.detach().abs().max(), out=self.state)


KEEPS = [RunningMaximum, ByAView, ByItsData, Assigned, Weights, Flag, List, Dictionary, Array, ByItsShape, Written]


def loop(model, loss=functional.cross_entropy, steps=2, n=12, **options):
    torch.manual_seed(0)
    x, y = torch.randn(n, 4), torch.arange(n) % 3
    plan = sgd.Plan(examples=n, lot=n, steps=steps, clip=1.0, noise=0.0, delta=1e-5, seed=0)
    model, optimizer, lots = sgd.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.0), (x, y), plan, **options
    )
    for some, labels in lots:
        loss(model(some), labels).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KEEPS)
def test_a_loop_refuses_it(kind):
    with pytest.raises(InvalidArgument):
        loop(kind())


@pytest.mark.parametrize("kind", KEEPS)
def test_a_trainer_refuses_it(kind):
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    plan = sgd.Plan(examples=12, lot=12, steps=2, clip=1.0, noise=0.0, delta=1e-5, seed=0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(InvalidArgument):
        sgd.Trainer(model, optimizer, functional.cross_entropy, plan, progress=False).fit((x, y))


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, output, y):
        self.largest.fill_(max(float(self.largest), float(output.abs().max())))
        return functional.cross_entropy(output, y)


def test_a_criterion_is_a_model_too():
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    plan = sgd.Plan(examples=12, lot=12, steps=2, clip=1.0, noise=0.0, delta=1e-5, seed=0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(InvalidArgument, match="buffer"):
        sgd.Trainer(model, optimizer, Remembers(), plan, progress=False).fit((x, y))
    with pytest.raises(InvalidArgument, match="buffer"):
        loop(nn.Linear(4, 3), criterion=Remembers())


class Counter(Stateful):
    def keep(self, x):
        self.state += 1
        self.seen.append(None)
        self.training_steps = getattr(self, "training_steps", 0) + 1


def test_what_is_the_same_for_all_goes_on_from_lot_to_lot():
    model = Counter()
    loop(model, steps=3, n=100)  # several microbatches a lot
    assert (len(model.seen), model.training_steps, int(model.state)) == (3, 3, 1 + 3)


class Asks(Stateful):
    """Reads numbers of its examples, and keeps nothing."""

    def keep(self, x):
        if (x > 100).any():
            raise AssertionError


def test_a_question_alone_is_allowed():
    loop(Asks())


def recalibrated():
    norm = nn.BatchNorm1d(4, affine=False, momentum=1.0)

    def loss(model, x, y):
        norm.train()
        with torch.no_grad():
            norm(x)
        norm.eval()
        return functional.cross_entropy(model(norm(x)), y)

    return loss


def statistics(model, x, y):
    mean, variance = torch.zeros(4), torch.ones(4)
    functional.batch_norm(x, mean, variance, training=True)
    return functional.cross_entropy(model(x - mean), y)


def longest_rows(model, x, y):
    table = torch.ones(3, 4)
    functional.embedding(y, table, max_norm=0.1)
    return functional.cross_entropy(model(x * table[0]), y)


@pytest.mark.parametrize("turn", [recalibrated(), statistics, longest_rows])
def test_nor_does_a_lot_reach_public_tensors_outside_the_model(turn):
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    plan = sgd.Plan(examples=12, lot=12, steps=1, clip=1.0, noise=0.0, delta=1e-5, seed=0)
    model = nn.Linear(4, 3)
    model, _, lots = sgd.make_private(model, torch.optim.SGD(model.parameters(), lr=0.0), (x, y), plan)
    some, labels = next(iter(lots))
    with pytest.raises(TerrineError, match="not of the lot"):
        turn(model, some, labels)

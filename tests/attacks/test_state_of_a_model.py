"""What an example tells Python must not be kept for the next lot: in buffers, weights, flags, lists, arrays."""

from array import array
from collections import Counter, deque

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


class ByAssignedData(Stateful):
    def keep(self, x):
        if x.abs().max() > 2:
            self.linear.weight.data = -self.linear.weight.data


class ByNumpy(Stateful):
    def keep(self, x):
        if x.abs().max() > 2:
            self.state.numpy()[...] = -1.0


class InPlaceFunction(Stateful):
    def keep(self, x):
        if x.abs().max() > 2:
            functional.threshold(self.state.data, 2.0, -1.0, inplace=True)


class PlainTensor(Stateful):
    def keep(self, x):
        self.top = torch.tensor(x.abs().max().item())


class Counted(Stateful):
    def __init__(self):
        super().__init__()
        self.counts, self.number, self.raw = Counter(), np.float64(0.0), bytearray(1)

    def keep(self, x):
        self.counts["large"] += int((x.abs() > 2).sum())


class NumpyNumber(Counted):
    def keep(self, x):
        self.number = np.float64(x.abs().max().item())


class Bytes(Counted):
    def keep(self, x):
        self.raw[0] = int(x.abs().max())


class NewPart(Stateful):
    def keep(self, x):
        if x.abs().max() > 2:
            self.part = nn.Tanh()


class NewHook(Stateful):
    def keep(self, x):
        if x.abs().max() > 2:
            self.linear.register_forward_hook(lambda module, given, out: -out)


class NewFunction(Stateful):
    def keep(self, x):
        if x.abs().max() > 2:
            self.function = torch.tanh


class BySlice(Stateful):
    """Read by a slice, which torch does not show."""

    def keep(self, x):
        self.seen = [len(x[0, : (x > 0).sum()])]


class ByText(Stateful):
    def keep(self, x):
        self.seen = [f"{x.max():.1f}"]


class ByFailing(Stateful):
    def keep(self, x):
        try:
            functional.embedding((x * 3).long().clamp(min=0), torch.ones(4, 2))
        except Exception:
            self.table["failed"] = self.table.get("failed", 0) + 1


class ByAnArray(Stateful):
    def __init__(self):
        super().__init__()
        self.numbers = array("d", [0.0])

    def keep(self, x):
        self.numbers[0] = float(x.abs().max())


class AlwaysAssigned(Stateful):
    """Once for each microbatch: how many there are is private, too."""

    def keep(self, x):
        self.linear.weight.data = -self.linear.weight.data


class Frozen(Stateful):
    def keep(self, x):
        self.state.requires_grad = True


KEEPS = [
    ByAnArray, AlwaysAssigned, Frozen,
    ByAssignedData, ByNumpy, InPlaceFunction, PlainTensor, Counted, NumpyNumber, Bytes, NewPart, NewHook, NewFunction,
    BySlice, ByText, ByFailing,
]  # fmt: skip
KEEPS += [RunningMaximum, ByAView, ByItsData, Assigned, Weights, Flag, List, Dictionary, Array, ByItsShape, Written]


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
    torch.manual_seed(0)
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


class Unconditional(Stateful):
    def keep(self, x):
        self.state += 1
        self.seen.append(None)
        self.training_steps = getattr(self, "training_steps", 0) + 1


def test_what_is_the_same_for_all_goes_on_from_lot_to_lot():
    model = Unconditional()
    loop(model, steps=3, n=100)  # several microbatches a lot
    assert (len(model.seen), model.training_steps, int(model.state)) == (3, 3, 1 + 3)


class Asks(Stateful):
    """Reads numbers of its examples, and keeps nothing."""

    def keep(self, x):
        if (x > 100).any():
            raise AssertionError


def test_a_question_alone_is_allowed():
    loop(Asks())


class Reassigned(Stateful):
    """Reads, and assigns what is equal to what was there."""

    def keep(self, x):
        assert not (x > 100).any()
        self.shape, self.device, self.part, self.options = x.shape, x.device, slice(0, 2), {"a": [1.0, float("nan")]}
        self.table = {"again": torch.arange(3)}


def test_what_is_assigned_anew_and_equal_is_the_same():
    model = Reassigned()
    model.keep(torch.ones(1, 4))
    model.nowhere, model.nested = torch.empty(2, device="meta"), torch.nested.nested_tensor([torch.ones(2)])
    loop(model)


class Nested(Stateful):
    def keep(self, x):
        self.table.setdefault("last", deque(maxlen=2)).append(len(self.table))


def test_what_is_put_back_is_the_same_object():
    model = Nested()
    model.table["last"], model.same = deque([0], maxlen=2), None
    model.same, last = model.table, model.table["last"]
    model.table["itself"] = model.table
    loop(model, steps=5, n=100)
    assert model.same is model.table
    assert model.table["last"] is last
    assert (list(last), last.maxlen) == ([2, 2], 2)


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

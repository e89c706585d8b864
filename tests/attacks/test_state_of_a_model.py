"""What an example tells Python must not be kept for the next lot: in buffers, weights, flags, lists, arrays."""

import copy
from array import array
from collections import Counter, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine import sgd
from terrine.errors import InvalidArgument, TerrineError
from tests.sgd.helpers import distance, make_optimizer, run_loop, whole_lots


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
        self.raw[0] = (self.raw[0] + 1 + int(x.abs().max())) % 256


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
KEEPS += [Assigned, Flag, List, Dictionary, Array, ByItsShape, Written]
PUT_BACK = [RunningMaximum, ByAView, ByItsData, Weights]


def run(model, loss=None, *, steps=2, n=12, **options):
    """A loop of a few steps, of all examples each."""
    torch.manual_seed(0)
    data = torch.randn(n, 4), torch.arange(n) % 3
    run_loop(model, data, whole_lots(n, steps=steps), loss=loss, optimizer=make_optimizer(model, 0.0), **options)


@pytest.mark.parametrize("reads_values", [False, True])
@pytest.mark.parametrize("kind", KEEPS)
def test_a_run_refuses_it(kind, reads_values):
    with pytest.raises(InvalidArgument) as refusal:
        run(kind(), reads_values=reads_values)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", KEEPS)
def test_so_does_the_loss_alone(kind):
    """Kept by the loss, in what it closes over, not by the model."""
    keeper = kind()

    def loss(model, batch):
        keeper.keep(batch[0])
        return functional.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(InvalidArgument):
        run(nn.Linear(4, 3), loss, reads_values=True)


@pytest.mark.parametrize("microbatch", [None, 1, 3])
@pytest.mark.parametrize("kind", PUT_BACK)
def test_what_is_written_into_tensors_is_put_back_before_the_next_example(kind, microbatch):
    torch.manual_seed(0)
    x, y, model = torch.randn(12, 4), torch.arange(12) % 3, kind()
    x[-1] *= 50.0
    before = copy.deepcopy(model.state_dict())
    sums = []
    for n in (12, 11):
        run(model, microbatch=microbatch, reads_values=True)
        options = {"clip": 1.0, "reads_values": True, "microbatch": microbatch}
        sums.append(sgd.clipped_sum(model, nn.CrossEntropyLoss(), (x[:n], y[:n]), **options))
        assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert distance(*sums) <= 1.0001
    keeper = kind()

    def loss(model, batch):
        keeper.keep(batch[0])
        return functional.cross_entropy(model(batch[0]) * keeper.state.clone(), batch[1])

    run(nn.Linear(4, 3), loss, microbatch=microbatch, reads_values=True)
    assert all(torch.equal(before[name], one) for name, one in keeper.state_dict().items() if name == "state")


@pytest.mark.parametrize("kind", [Array, List, Written, Flag])
def test_a_trainer_refuses_it(kind):
    data = torch.randn(12, 4), torch.arange(12) % 3
    model = kind()
    trainer = sgd.Trainer(
        model, make_optimizer(model), nn.CrossEntropyLoss(), whole_lots(12), progress=False, reads_values=True
    )
    with pytest.raises(InvalidArgument):
        trainer.fit(data)


@pytest.mark.parametrize("kind", [List, ByItsShape, Flag])
def test_a_metric_is_a_program_too(kind):
    """What it kept of an example moved the next step's gradients by 37 bounds."""
    keeper = kind()

    def measure(model, batch):
        keeper.keep(batch[0])
        return batch[0].abs().max()

    def loss(model, batch):
        scale = 1e3 if keeper.seen or not keeper.training else 1.0
        return functional.cross_entropy(model(batch[0]) / scale, batch[1])

    model = nn.Linear(4, 3)
    data, plan = (
        (10 * torch.randn(12, 4), torch.arange(12) % 3),
        whole_lots(12, steps=2, metrics=sgd.Metric("largest", 0.0, 1.0, function=measure)),
    )
    with pytest.raises(InvalidArgument, match=r"keeper\.\w+ changed while examples ran"):
        run_loop(model, data, plan, loss=loss, optimizer=make_optimizer(model, 0.0), reads_values=True)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, output, y):
        self.largest.fill_(max(float(self.largest), float(output.abs().max())))
        return functional.cross_entropy(output, y)


def test_a_criterion_is_a_program_too():
    with pytest.raises(InvalidArgument, match=r"float\(\)"):
        run(nn.Linear(4, 3), Remembers())
    criterion = Remembers()
    run(nn.Linear(4, 3), criterion, reads_values=True)
    assert float(criterion.largest) == 0.0


class Asks(Stateful):
    """Asks for truths of its examples, and keeps nothing."""

    def keep(self, x):
        if (x > 100).any():
            raise AssertionError


class Counts(Stateful):
    """Reads numbers of its examples, and keeps nothing."""

    def keep(self, x):
        assert x.abs().max().item() < 100


class Reassigned(Stateful):
    """Assigns what is equal to what was there."""

    def keep(self, x):
        self.training_shape, self.device, self.options = x.shape, x.device, (1.0, "a", None)


class Scratch(Stateful):
    """Writes numbers that are the same for everybody into a buffer, and uses them."""

    def keep(self, x):
        self.state.fill_(2.0).mul_(3.0)


def test_what_keeps_nothing_is_allowed():
    for kind in (Asks, Reassigned, Scratch):
        model = kind()
        model.keep(torch.ones(1, 4))
        run(model, n=40)
    run(Counts(), reads_values=True)


def test_odd_state_that_nobody_touches_is_no_reason_to_refuse():
    model = Asks()
    model.nowhere, model.nested = torch.empty(2, device="meta"), torch.nested.nested_tensor([torch.ones(2)])
    model.sparse, model.table["itself"] = torch.eye(3).to_sparse(), model.table
    model.seen = [deque(maxlen=2), Counter(), np.random.default_rng(0), torch.Generator(), (i for i in range(3))]
    run(model)


def test_what_a_program_writes_is_put_back():
    model = Scratch()
    run(model)
    assert float(model.state) == 1.0


def recalibrated():
    norm = nn.BatchNorm1d(4, affine=False, momentum=1.0)

    def loss(model, batch):
        norm.train()
        with torch.no_grad():
            norm(batch[0])
        norm.eval()
        return functional.cross_entropy(model(norm(batch[0])), batch[1])

    return loss


def statistics(model, batch):
    mean, variance = torch.zeros(4), torch.ones(4)
    functional.batch_norm(batch[0], mean, variance, training=True)
    return functional.cross_entropy(model(batch[0] - mean), batch[1])


def longest_rows(model, batch):
    table = torch.ones(3, 4)
    functional.embedding(batch[1], table, max_norm=0.1)
    return functional.cross_entropy(model(batch[0] * table[0]), batch[1])


@pytest.mark.parametrize("loss", [recalibrated(), statistics, longest_rows])
def test_nor_does_an_example_reach_public_tensors_outside_the_model(loss):
    with pytest.raises(TerrineError, match=r"batch norm|max_norm|batch_norm|one value|more than 1 value"):
        run(nn.Linear(4, 3), loss)

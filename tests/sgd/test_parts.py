"""A recorded lot in parts: the same clipped sum, and less memory on the way."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from oracle import assert_same, loop
from torch import nn
from torch.nn import functional

from terrine import sgd
from terrine.errors import InvalidArgument
from terrine.sgd.clipping import Recorder, recorder
from terrine.sgd.clipping.chunks import evenly, recorded


@pytest.fixture
def lot():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return model, torch.randn(9, 5).double(), torch.randint(3, (9,))


@pytest.fixture
def in_parts(monkeypatch):
    """Every lot is cut into parts of three, whatever it takes."""
    monkeypatch.setattr(recorder, "recorded", lambda activations, size, _: evenly(size, 3 if activations else size))


def watched(model, clip, scale):
    made = Recorder(model, clip=clip)
    made.scale = lambda: scale
    return made


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_parts_give_the_same_sum_and_the_norms_in_order(lot, in_parts, reduction, known):
    model, x, y = lot
    scale = 9.0 if reduction == "mean" else 1.0
    made = watched(model, 0.4, scale if known else None)
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    for _ in range(3):
        criterion(model(x), y).backward()
        assert [part.examples for part in made._lots[-1]] == [3, 3, 3]
        assert [part.norms is not None for part in made._lots[-1]] == [known] * 3
        assert_same(made.collect(scale=scale), loop(model, criterion, x, y, 0.4))


def test_a_part_is_clipped_before_the_next_one_goes_backward(lot, in_parts):
    model, x, y = lot
    made, seen = watched(model, 0.4, 9.0), []
    through = made._through

    def noted(part):
        seen.append([one.norms is not None for one in made._lots[-1]])
        through(part)

    made._through = noted
    nn.CrossEntropyLoss()(model(x), y).backward()
    assert seen == [[False, False, False], [False, False, True], [False, True, True]]


def test_another_scale_than_the_one_that_parts_were_clipped_by_is_refused(lot, in_parts):
    model, x, y = lot
    made = watched(model, 0.4, 9.0)
    nn.CrossEntropyLoss()(model(x), y).backward()
    with pytest.raises(InvalidArgument, match=r"scale=1\.0"):
        made.collect()


def test_an_example_that_is_not_finite_is_left_out_of_its_part_alone(lot, in_parts):
    model, x, y = lot
    x[4] = math.nan
    made = watched(model, 0.4, 1.0)
    nn.CrossEntropyLoss(reduction="sum")(model(x), y).backward()
    sums = made.collect().sums
    others = torch.arange(9) != 4
    expected, _ = loop(model, nn.CrossEntropyLoss(reduction="sum"), x[others], y[others], 0.4)
    for name, total in expected.items():
        torch.testing.assert_close(sums[name], total)


def test_two_views_of_a_lot_are_cut_alike_and_clipped_together(lot, in_parts):
    model, x, y = lot
    made = watched(model, 0.4, 9.0)
    (functional.cross_entropy(model(x), y) + functional.cross_entropy(model(2 * x), y)).backward()
    recorded = made.collect(scale=9.0)
    made.close()

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return torch.stack([self.inner(x), self.inner(2 * x)], 1)

    def both(out, y):
        return functional.cross_entropy(out[:, 0], y) + functional.cross_entropy(out[:, 1], y)

    sums, norms = loop(Twice(), both, x, y, 0.4)
    assert_same(recorded, ({name.removeprefix("inner."): total for name, total in sums.items()}, norms))


class Keeping(nn.Linear):
    """A model whose loss also looks at what it kept of its forward pass."""

    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept


class Totalling(nn.Linear):
    """A model whose output holds something that is not by example."""

    def forward(self, x):
        out = super().forward(x)
        return out, out.shape


class Paired(nn.Linear):
    def forward(self, x, other=None):
        return super().forward(x if other is None else x + other)


class Picky(nn.Linear):
    """A model for lots of nine."""

    def forward(self, x):
        return super().forward(x.view(9, 5))


@pytest.mark.parametrize(
    ("kind", "given"), [(Keeping, 1), (Totalling, 1), (Paired, 2), (Picky, 1)], ids=lambda value: str(value)
)
def test_what_parts_would_change_is_taken_as_a_whole(lot, in_parts, kind, given):
    _, x, _ = lot
    model = kind(5, 3).double()
    made = Recorder(model, clip=0.4)
    model(*[x] * given)
    assert [part.examples for part in made._lots[-1]] == [9]


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_who_looks_at_a_layer_sees_the_lot(lot, in_parts, register):
    model, x, _ = lot
    made, seen = Recorder(model, clip=0.4), []
    getattr(model[1], register)(lambda *given: seen.append(len(given[1][0])))
    model(x)
    assert seen == [9]
    made.close()


def test_outputs_of_any_structure_are_joined(lot, in_parts):
    _, x, _ = lot

    class Two(nn.Linear):
        def forward(self, x):
            return {"out": super().forward(x), "in": (x,)}

    model = Two(5, 3).double()
    expected = model(x)
    made = Recorder(model, clip=0.4)
    found = model(x)
    assert len(made._lots[-1]) == 3
    torch.testing.assert_close(found["out"], expected["out"])
    assert torch.equal(found["in"][0], x)


def test_the_first_lot_is_cut_like_every_other_and_draws_what_it_would_have_drawn(lot, in_parts):
    """A resumed run is the uninterrupted one: its first lot is not special."""
    _, x, _ = lot
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3)).double()
    made, outputs, sizes = Recorder(model, clip=0.4), [], []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(model(x))
        sizes.append([part.examples for part in made._lots[-1]])
        made.discard()
    assert torch.equal(*outputs)
    assert sizes[0] == sizes[1] == [3, 3, 3]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_private_loop_takes_the_same_steps_in_parts(small, monkeypatch, reduction):
    """From the first lot on, in which the loss is only just being understood."""
    x, y = small

    def trained(parts):
        monkeypatch.setattr(recorder, "recorded", lambda _, size, __: evenly(size, parts or size))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(x.shape[1], 6), nn.Tanh(), nn.Linear(6, 10)).double()
        plan = sgd.Plan(examples=len(x), lot=10, steps=3, clip=0.5, noise=1.0, delta=1e-5, seed=7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, lots = sgd.make_private(model, optimizer, (x.double(), y), plan)
        early = []
        for a, b in lots:
            optimizer.zero_grad()
            nn.CrossEntropyLoss(reduction=reduction)(model(a), b).backward()
            early.append(lots.run.recorder._sums is not None)
            optimizer.step()
        assert early == [bool(parts)] * 3
        return [parameter.detach() for parameter in model.parameters()]

    for one, other in zip(trained(3), trained(0), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)  # the noisy sums are rounded to a grid


def test_an_example_counts_once_in_a_lot(small):
    """Two backward passes over the same examples would each be clipped, and together reach twice the bound."""
    x, y = small
    model = nn.Linear(x.shape[1], 10)
    plan = sgd.Plan(examples=len(x), lot=len(x) // 4, steps=3, clip=0.5, noise=1.0, delta=1e-5, seed=7)
    model, optimizer, lots = sgd.make_private(model, torch.optim.SGD(model.parameters(), lr=0.5), (x, y), plan)
    for a, b in lots:
        for _ in range(2):
            nn.CrossEntropyLoss()(model(a), b).backward()
        with pytest.raises(InvalidArgument, match="each may count once"):
            optimizer.step()
        break


@pytest.mark.parametrize("size", [1, 5, 100, 4096])
@pytest.mark.parametrize("activations", [0.0, 1.0, 1e4, 1e6, 1e9])
@pytest.mark.parametrize("parameters", [100, 1_000_000])
def test_parts_hold_all_examples_and_are_worth_a_pass(activations, size, parameters):
    parts = recorded(activations, size, parameters)
    assert sum(parts) == size
    assert min(parts) > 0
    assert all(later <= earlier + 1 for earlier, later in pairwise(parts))  # but for rounding, the last is the smallest
    if activations * size < 40 << 20:
        assert parts == [size]
    total = activations * size
    most = max(8 * parameters + (40 << 20), 0.25 * total)
    modest = total <= 64 << 20 and most < 64 * activations
    assert (len(parts) > 1) == (size > 1 and total > 1.1 * most and not modest)
    assert len(parts) <= 6

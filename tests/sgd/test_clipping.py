"""clipped_sum and the recorder: what they promise, whatever the layers."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from oracle import assert_same, loop
from torch import nn
from torch.nn import functional

from terrine.errors import InvalidArgument
from terrine.sgd.clipping import Automatic, Clipped, Flat, PerLayer, Recorder, clipped_sum, reduction_scale, rule
from terrine.sgd.clipping.registry import forget


@pytest.fixture
def lot():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return model, torch.randn(9, 5).double(), torch.randint(3, (9,))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [None, 1, 2, 4, 9, 100])
def test_every_reduction_and_every_chunk_gives_the_same_sum(lot, reduction, chunk):
    model, x, y = lot
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    assert_same(clipped_sum(model, criterion, x, y, clip=0.4, chunk=chunk), loop(model, criterion, x, y, 0.4))


def test_parameters_and_their_gradients_are_left_alone(lot):
    model, x, y = lot
    before = [p.detach().clone() for p in model.parameters()]
    clipped_sum(model, nn.CrossEntropyLoss(), x, y, clip=1.0)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_infinite_clip_is_the_plain_gradient(lot):
    model, x, y = lot
    criterion = nn.CrossEntropyLoss(reduction="sum")
    criterion(model(x), y).backward()
    sums = clipped_sum(model, criterion, x, y, clip=math.inf).sums
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sums[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_no_example_adds_more_than_the_bound(lot):
    model, x, y = lot
    for i in range(len(x)):
        for clip in (Flat(0.3), Automatic(0.3), PerLayer({"0": 0.1, "2": 0.2})):
            sums = clipped_sum(model, nn.CrossEntropyLoss(), 100 * x[i : i + 1], y[i : i + 1], clip=clip).sums
            assert math.sqrt(sum(float(s.square().sum()) for s in sums.values())) <= clip.bound * (1 + 1e-9)


def test_an_empty_lot_is_zero(lot):
    model, x, y = lot
    sums, norms = clipped_sum(model, nn.CrossEntropyLoss(), x[:0], y[:0], clip=1.0)
    assert norms.shape == (0,)
    assert {name: s.shape for name, s in sums.items()} == {n: p.shape for n, p in model.named_parameters()}
    assert all(not s.any() for s in sums.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize("kind", ["linear", "conv", "ghost conv", "sequence", "bag"])
def test_an_example_without_a_finite_gradient_adds_nothing(bad, kind):
    torch.manual_seed(2)
    model, x = {
        "linear": (nn.Linear(4, 3), torch.randn(5, 4)),
        "conv": (nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten()), torch.randn(5, 2, 6, 6)),
        "ghost conv": (nn.Sequential(nn.Conv2d(20, 30, 2), nn.Flatten()), torch.randn(5, 20, 2, 2)),
        "sequence": (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3), nn.Flatten()), torch.randn(5, 6, 4)),
        "bag": (nn.Linear(4, 3), torch.randn(5, 4)),
    }[kind]
    model, x = model.double(), x.double()
    y = torch.ones(5).double()
    x[2] *= bad

    def criterion(out, y):
        return out.square().sum(1) * y

    sums, norms = clipped_sum(model, criterion, x, y, clip=0.5)
    keep = [0, 1, 3, 4]
    expected = clipped_sum(model, criterion, x[keep], y[keep], clip=0.5)
    assert not math.isfinite(norms[2])
    torch.testing.assert_close(norms[keep], expected.norms)
    for name in sums:
        torch.testing.assert_close(sums[name], expected.sums[name])


def test_per_layer_bounds_clip_each_layer_by_itself(lot):
    model, x, y = lot
    criterion = nn.CrossEntropyLoss()
    together = clipped_sum(model, criterion, x, y, clip=PerLayer({"0": 0.2, "2": 0.3}))
    for layer, bound in (("0", 0.2), ("2", 0.3)):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(layer))
        sums, _ = loop(model, criterion, x, y, bound)
        for name, total in sums.items():
            torch.testing.assert_close(together.sums[name], total)


def test_automatic_clipping_normalises(lot):
    model, x, y = lot
    sums, norms = clipped_sum(model, nn.CrossEntropyLoss(), x[:1], y[:1], clip=Automatic(2.0, stability=0.5))
    length = math.sqrt(sum(float(s.square().sum()) for s in sums.values()))
    assert length == pytest.approx(2.0 * float(norms[0]) / (float(norms[0]) + 0.5))


@pytest.mark.parametrize("clip", [0, -1.0, math.nan, "1"])
def test_a_bound_is_a_positive_number(lot, clip):
    model, x, y = lot
    with pytest.raises(InvalidArgument):
        clipped_sum(model, nn.CrossEntropyLoss(), x, y, clip=Flat(clip))


@pytest.mark.parametrize("clip", ["1", None, [1.0], {"0": 1.0}, Flat, True, 0.0])
def test_what_is_no_clipping_rule_is_refused(lot, clip):
    model, x, y = lot
    with pytest.raises(InvalidArgument, match="clip="):
        clipped_sum(model, nn.CrossEntropyLoss(), x, y, clip=clip)


def test_a_bound_may_be_any_number(lot):
    model, x, y = lot
    wanted = clipped_sum(model, nn.CrossEntropyLoss(), x, y, clip=0.5).sums
    for clip in (np.float32(0.5), torch.tensor(0.5)):
        found = clipped_sum(model, nn.CrossEntropyLoss(), x, y, clip=clip).sums
        assert all(torch.equal(found[name], total) for name, total in wanted.items())


def test_a_layer_without_a_bound_is_named(lot):
    model, x, y = lot
    with pytest.raises(InvalidArgument, match=r"2\.weight"):
        clipped_sum(model, nn.CrossEntropyLoss(), x, y, clip=PerLayer({"0": 1.0}))


def test_a_bound_for_nothing_is_named(lot):
    model, x, y = lot
    with pytest.raises(InvalidArgument, match=r"'2\.wieght', '7' is no"):
        clipped_sum(model, nn.CrossEntropyLoss(), x, y, clip=PerLayer({"0": 1.0, "2": 1.0, "7": 1.0, "2.wieght": 1.0}))


def test_a_loss_that_mixes_examples_is_refused(lot):
    model, x, y = lot

    def contrastive(out, y):
        return (out @ out.T).square().mean()

    with pytest.raises(InvalidArgument, match="neither"):
        clipped_sum(model, contrastive, x, y, clip=1.0)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 9.0]).double())  # divides by the weights of the lot
    with pytest.raises(InvalidArgument, match="mixes examples"):
        clipped_sum(model, weighted, x, torch.arange(9) % 3, clip=1.0)


def test_a_model_that_mixes_examples_is_refused(lot):
    _, x, y = lot

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 3).double()

        def forward(self, x):
            return self.linear(x - x.mean(0))

    model = Centred()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="mixes examples"):
            clipped_sum(model, nn.CrossEntropyLoss(), x, y, clip=1.0)


def test_dropout_is_no_mixing(lot):
    _, x, y = lot
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3)).double()
    torch.manual_seed(5)
    first = clipped_sum(model, nn.CrossEntropyLoss(), x, y, clip=1.0, chunk=9)
    torch.manual_seed(5)
    torch.testing.assert_close(clipped_sum(model, nn.CrossEntropyLoss(), x, y, clip=1.0, chunk=9).norms, first.norms)


def test_half_precision_is_summed_in_single(lot):
    _, x, y = lot
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    exact = clipped_sum(model, nn.CrossEntropyLoss(), x.float(), y, clip=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = clipped_sum(model, nn.CrossEntropyLoss(), x.float(), y, clip=0.5)
    half = clipped_sum(model.bfloat16(), nn.CrossEntropyLoss(), x.bfloat16(), y, clip=0.5)
    for result in (mixed, half):
        assert all(s.dtype == torch.float32 for s in result.sums.values())
        assert result.norms.dtype == torch.float32
        for name, total in exact.sums.items():
            torch.testing.assert_close(result.sums[name], total, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 8), lambda: nn.RMSNorm(8)])
def test_sums_are_not_rounded_to_half_precision(kind, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), kind(), nn.Linear(8, 8), kind()).to(dtype)
    x, y = torch.randn(60, 5).to(dtype), torch.randint(8, (60,))
    for total in clipped_sum(model, nn.CrossEntropyLoss(), x, y, clip=0.5).sums.values():
        assert (total.to(dtype).float() != total).float().mean() > 0.5


def test_what_no_rule_follows_is_exact_by_vmap_and_said_once(caplog):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return torch.stack([x, self.weight.expand_as(x)], 1).prod(1)

    model, x, y = Odd().double(), torch.randn(6, 4).double(), torch.arange(6).double()

    def criterion(out, y):
        return (out.sum(1) - y).square()

    with caplog.at_level(logging.WARNING, "terrine.sgd"):
        assert_same(clipped_sum(model, criterion, x, y, clip=0.5), loop(model, criterion, x, y, 0.5))
        clipped_sum(model, criterion, x, y, clip=0.5)
    assert len([r for r in caplog.records if "vmap" in r.message]) == 1


def test_a_rule_of_ones_own_is_used():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5))

        def forward(self, x):
            return x * self.weight

    calls = []

    @rule(Scale)
    def scale(module, inputs, gradient):
        calls.append(len(gradient))
        return {"weight": gradient * inputs[0]}

    try:
        model = nn.Sequential(nn.Linear(5, 5), Scale(), nn.Linear(5, 3)).double()
        x, y, criterion = torch.randn(6, 5).double(), torch.randint(3, (6,)), nn.CrossEntropyLoss()
        expected = loop(model, criterion, x, y, 0.5)
        assert_same(clipped_sum(model, criterion, x, y, clip=0.5, chunk=6), expected)
        recorder = Recorder(model, clip=0.5)
        criterion(model(x), y).backward()
        assert_same(recorder.collect(scale=6), expected)
        assert calls == [6, 6, 6]  # the trial, and both lots
    finally:
        forget(Scale)


class TestRecorder:
    def test_an_ordinary_loop_gives_the_clipped_sum_and_no_gradients_of_its_own(self, lot):
        model, x, y = lot
        recorder = Recorder(model, clip=0.4)
        for _ in range(3):
            nn.CrossEntropyLoss()(model(x), y).backward()
            assert all(p.grad is None for p in model.parameters())
            assert_same(recorder.collect(scale=9), loop(model, nn.CrossEntropyLoss(), x, y, 0.4))

    def test_the_bound_may_move_between_steps(self, lot):
        model, x, y = lot
        recorder = Recorder(model, clip=9.0)
        recorder.clip = Flat(0.1)
        nn.CrossEntropyLoss(reduction="sum")(model(x), y).backward()
        assert_same(recorder.collect(), loop(model, nn.CrossEntropyLoss(), x, y, 0.1))

    def test_micro_batches_add_up(self, lot):
        model, x, y = lot
        recorder = Recorder(model, clip=0.4)
        for part in (slice(0, 4), slice(4, 9)):
            nn.CrossEntropyLoss(reduction="sum")(model(x[part]), y[part]).backward()
        assert_same(recorder.collect(), loop(model, nn.CrossEntropyLoss(), x, y, 0.4))

    def test_two_forward_passes_before_one_backward_are_the_same_examples(self, lot):
        model, x, y = lot
        recorder = Recorder(model, clip=0.4)
        (functional.cross_entropy(model(x), y) + functional.cross_entropy(model(2 * x), y)).backward()

        class Twice(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                return torch.stack([self.inner(x), self.inner(2 * x)], 1)

        def both(out, y):
            return functional.cross_entropy(out[:, 0], y) + functional.cross_entropy(out[:, 1], y)

        recorded = recorder.collect(scale=9)
        recorder.close()
        sums, norms = loop(Twice(model), both, x, y, 0.4)
        assert_same(recorded, ({name.removeprefix("inner."): s for name, s in sums.items()}, norms))

    def test_evaluation_leaves_no_trace(self, lot):
        model, x, y = lot
        recorder = Recorder(model, clip=0.4)
        with torch.no_grad():
            model(x)
        model(2 * x)  # never followed by a backward pass
        nn.CrossEntropyLoss()(model(x), y).backward()
        assert_same(recorder.collect(scale=9), loop(model, nn.CrossEntropyLoss(), x, y, 0.4))
        assert recorder.collect().norms.shape == (0,)

    def test_a_gradient_around_the_recorder_is_refused(self, lot):
        model, x, y = lot
        recorder = Recorder(model, clip=0.4)
        (nn.CrossEntropyLoss()(model(x), y) + model[0].weight.square().sum()).backward()
        with pytest.raises(InvalidArgument, match=r"0\.weight"):
            recorder.collect(scale=9)

    def test_closed_it_is_gone(self, lot):
        model, x, y = lot
        Recorder(model, clip=0.4).close()
        nn.CrossEntropyLoss()(model(x), y).backward()
        assert all(p.grad is not None for p in model.parameters())


class TestReduction:
    def run(self, reduction, mix=False):
        model = nn.Linear(4, 3).double()
        x, y = torch.randn(2, 4).double(), torch.tensor([0, 2])
        recorder = Recorder(model, clip=math.inf)

        def clipped(index) -> Clipped:
            out = model(x[index])
            loss = nn.CrossEntropyLoss(reduction=reduction)(out - out.mean(0) if mix else out, y[index])
            loss.backward()
            return recorder.collect()

        return reduction_scale((clipped([0]), clipped([1])), clipped([0, 1]))

    def test_mean_is_told_from_sum(self):
        assert self.run("mean") == "mean"
        assert self.run("sum") == "sum"

    def test_mixing_is_refused(self):
        with pytest.raises(InvalidArgument):
            self.run("sum", mix=True)

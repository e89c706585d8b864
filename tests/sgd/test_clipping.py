"""clipped_sum: what it promises, whatever the layers."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine.errors import InvalidArgument
from terrine.sgd.clipping import Automatic, Flat, PerLayer, clipped_sum

from .helpers import Criterion, distance
from .oracle import assert_same, loop


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
    assert_same(clipped_sum(model, criterion, (x, y), clip=0.4, microbatch=chunk), loop(model, criterion, (x, y), 0.4))


def test_parameters_and_their_gradients_are_left_alone(lot):
    model, x, y = lot
    before = [p.detach().clone() for p in model.parameters()]
    clipped_sum(model, nn.CrossEntropyLoss(), (x, y), clip=1.0)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_infinite_clip_is_the_plain_gradient(lot):
    model, x, y = lot
    criterion = nn.CrossEntropyLoss(reduction="sum")
    criterion(model(x), y).backward()
    sums = clipped_sum(model, criterion, (x, y), clip=math.inf).sums
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sums[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_no_example_adds_more_than_the_bound(lot):
    model, x, y = lot
    for i in range(len(x)):
        for clip in (Flat(0.3), Automatic(0.3), PerLayer({"0": 0.1, "2": 0.2})):
            sums = clipped_sum(model, nn.CrossEntropyLoss(), (100 * x[i : i + 1], y[i : i + 1]), clip=clip).sums
            assert math.sqrt(sum(float(s.square().sum()) for s in sums.values())) <= clip.bound * (1 + 1e-9)


def test_an_empty_lot_is_zero(lot):
    model, x, y = lot
    sums, norms = clipped_sum(model, nn.CrossEntropyLoss(), (x[:0], y[:0]), clip=1.0)
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

    criterion = Criterion(lambda out, y: out.square().sum(1) * y)

    sums, norms = clipped_sum(model, criterion, (x, y), clip=0.5)
    keep = [0, 1, 3, 4]
    expected = clipped_sum(model, criterion, (x[keep], y[keep]), clip=0.5)
    assert not math.isfinite(norms[2])
    torch.testing.assert_close(norms[keep], expected.norms)
    for name in sums:
        torch.testing.assert_close(sums[name], expected.sums[name])


def test_per_layer_bounds_clip_each_layer_by_itself(lot):
    model, x, y = lot
    criterion = nn.CrossEntropyLoss()
    together = clipped_sum(model, criterion, (x, y), clip=PerLayer({"0": 0.2, "2": 0.3}))
    for layer, bound in (("0", 0.2), ("2", 0.3)):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(layer))
        sums, _ = loop(model, criterion, (x, y), bound)
        for name, total in sums.items():
            torch.testing.assert_close(together.sums[name], total)


def test_automatic_clipping_normalises(lot):
    model, x, y = lot
    sums, norms = clipped_sum(model, nn.CrossEntropyLoss(), (x[:1], y[:1]), clip=Automatic(2.0, stability=0.5))
    length = math.sqrt(sum(float(s.square().sum()) for s in sums.values()))
    assert length == pytest.approx(2.0 * float(norms[0]) / (float(norms[0]) + 0.5))


@pytest.mark.parametrize("clip", [0, -1.0, math.nan, "1"])
def test_a_bound_is_a_positive_number(lot, clip):
    model, x, y = lot
    with pytest.raises(InvalidArgument):
        clipped_sum(model, nn.CrossEntropyLoss(), (x, y), clip=Flat(clip))


@pytest.mark.parametrize("clip", ["1", None, [1.0], {"0": 1.0}, Flat, True, 0.0])
def test_what_is_no_clipping_rule_is_refused(lot, clip):
    model, x, y = lot
    with pytest.raises(InvalidArgument, match="clip="):
        clipped_sum(model, nn.CrossEntropyLoss(), (x, y), clip=clip)


def test_a_bound_may_be_any_number(lot):
    model, x, y = lot
    wanted = clipped_sum(model, nn.CrossEntropyLoss(), (x, y), clip=0.5).sums
    for clip in (np.float32(0.5), torch.tensor(0.5)):
        found = clipped_sum(model, nn.CrossEntropyLoss(), (x, y), clip=clip).sums
        assert all(torch.equal(found[name], total) for name, total in wanted.items())


def test_a_layer_without_a_bound_is_named(lot):
    model, x, y = lot
    with pytest.raises(InvalidArgument, match=r"2\.weight"):
        clipped_sum(model, nn.CrossEntropyLoss(), (x, y), clip=PerLayer({"0": 1.0}))


def test_a_bound_for_nothing_is_named(lot):
    model, x, y = lot
    with pytest.raises(InvalidArgument, match=r"'2\.wieght', '7' is no"):
        clipped_sum(
            model, nn.CrossEntropyLoss(), (x, y), clip=PerLayer({"0": 1.0, "2": 1.0, "7": 1.0, "2.wieght": 1.0})
        )


def test_dropout_is_no_mixing(lot):
    _, x, y = lot
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3)).double()
    torch.manual_seed(5)
    first = clipped_sum(model, nn.CrossEntropyLoss(), (x, y), clip=1.0, microbatch=9)
    torch.manual_seed(5)
    torch.testing.assert_close(
        clipped_sum(model, nn.CrossEntropyLoss(), (x, y), clip=1.0, microbatch=9).norms, first.norms
    )


def test_half_precision_is_summed_in_single(lot):
    _, x, y = lot
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    exact = clipped_sum(model, nn.CrossEntropyLoss(), (x.float(), y), clip=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = clipped_sum(model, nn.CrossEntropyLoss(), (x.float(), y), clip=0.5)
    half = clipped_sum(model.bfloat16(), nn.CrossEntropyLoss(), (x.bfloat16(), y), clip=0.5)
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
    for total in clipped_sum(model, nn.CrossEntropyLoss(), (x, y), clip=0.5).sums.values():
        assert (total.to(dtype).float() != total).float().mean() > 0.5


class Odd(nn.Module):
    """What vmap can run (0), what it can once tensors belong to each example (1), and what it cannot (2)."""

    def __init__(self, kind):
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.randn(4)), kind

    def forward(self, x):
        if self.kind == 0:
            return torch.stack([x, self.weight.expand_as(x)], 1).prod(1)
        if self.kind == 1:
            out = torch.zeros(len(x), 4, dtype=x.dtype)
            out[:, :3] += (x * self.weight)[:, :3]
            return out
        return torch.stack([row[row.nonzero().flatten()].sum() * self.weight for row in x])


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_what_no_rule_follows_is_exact_and_the_slow_way_is_said_once(caplog, kind):
    model, x, y = Odd(kind).double(), torch.randn(6, 4).double(), torch.arange(6).double()
    criterion = Criterion(lambda out, y: (out.sum(1) - y).square())
    with caplog.at_level(logging.WARNING, "terrine.sgd"):
        for _ in range(2):
            found = clipped_sum(model, criterion, (x, y), clip=0.5)
            assert_same(found, loop(model, criterion, (x, y), 0.5))
    assert len([r for r in caplog.records if "slow" in r.message]) == (kind == 2)


class TestTheLossOfABatchOfOne:
    """Exactly as torch computes it: nothing is divided by how many examples a batch holds."""

    @pytest.mark.parametrize(
        "loss",
        [
            lambda m, b: 0.25 * functional.cross_entropy(m(b[0]), b[1]),
            lambda m, b: functional.cross_entropy(m(b[0]), b[1], reduction="sum") / 64,
            lambda m, b: ((m(b[0]) - 1) ** 2).sum() / b[0].numel(),
            lambda m, b: functional.cross_entropy(m(b[0]), b[1]) + functional.cross_entropy(m(2 * b[0]), b[1]),
            lambda m, b: functional.cross_entropy(m(torch.cat([b[0], 2 * b[0]])), b[1].repeat(2)),
            lambda m, b: functional.cross_entropy(m(b[0]), b[1]) + 0.1 * m[2].weight.square().sum(),
            lambda m, b: functional.cross_entropy(m[1:](m[0](b[0])), b[1]),
            lambda m, b: torch.stack([functional.cross_entropy(m(b[0] + i), b[1]) for i in range(3)]).mean(),
            lambda m, b: m(b[0]).logsumexp(1) - m(b[0])[torch.arange(1), b[1]],
        ],
        ids=["coefficient", "divided", "mean by hand", "two passes", "views", "penalty", "parts", "a list", "index"],
    )
    def test_any_function_is_the_loop(self, lot, loss):
        model, *batch = lot
        assert_same(clipped_sum(model, loss, batch, clip=0.4), loop(model, loss, batch, 0.4))

    def test_what_is_computed_and_not_used_leaves_no_trace(self, lot):
        model, *batch = lot

        def loss(m, batch):
            with torch.no_grad():
                m(batch[0])
            m(2 * batch[0])
            return functional.cross_entropy(m(batch[0]), batch[1])

        assert_same(clipped_sum(model, loss, batch, clip=0.4), loop(model, nn.CrossEntropyLoss(), batch, 0.4))

    def test_class_weights_cancel_in_a_mean_which_is_said(self, lot, caplog):
        model, *batch = lot
        weight = torch.tensor([1.0, 5.0, 9.0]).double()
        with caplog.at_level(logging.WARNING, "terrine.sgd"):
            mean = clipped_sum(model, nn.CrossEntropyLoss(weight=weight), batch, clip=1.0)
        assert "cancel" in caplog.text
        assert_same(mean, loop(model, nn.CrossEntropyLoss(), batch, 1.0))
        caplog.clear()
        kept = nn.CrossEntropyLoss(weight=weight, reduction="sum")
        with caplog.at_level(logging.WARNING, "terrine.sgd"):
            assert_same(clipped_sum(model, kept, batch, clip=1.0), loop(model, kept, batch, 1.0))
        assert not caplog.text

    def test_labels_that_are_ignored_leave_each_examples_own_mean(self):
        model = nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 11)).double()
        x, y = torch.randint(11, (5, 7)), torch.randint(11, (5, 7))
        y[0, 2:], y[1], y[3, 0] = -100, -100, -100
        criterion = Criterion(lambda out, y: functional.cross_entropy(out.flatten(0, 1), y.flatten()))
        sums, norms = loop(model, Criterion(lambda out, y: criterion(out, y).nan_to_num()), (x, y), 0.1)
        norms[1] = 0.0  # nothing is left of its loss
        found = clipped_sum(model, criterion, (x, y), clip=0.1)
        assert_same(found._replace(norms=found.norms.nan_to_num()), (sums, norms))

    @pytest.mark.parametrize(
        "loss",
        [
            lambda m, b: (m(b[0] - b[0].mean(0)) ** 2).sum(),
            lambda m, b: functional.cross_entropy(m(b[0]) - m(b[0]).mean(0), b[1]),
            lambda m, b: (m(b[0]) @ m(b[0]).T).square().mean(),
            lambda m, b: functional.cross_entropy(m(b[0] / b[0].abs().max()), b[1]),
            lambda m, b: functional.cross_entropy(m(b[0]), b[1]) * torch.arange(1, 1 + len(b[0])).sum(),
            lambda m, b: functional.cross_entropy(m(b[0]), b[1], reduction="none")[: len(b[0]) // 2 + 1].sum(),
        ],
        ids=["centred", "outputs centred", "gram", "by the largest", "by place", "the first half"],
    )
    def test_what_would_mix_examples_sees_but_one(self, lot, loss):
        model, x, y = lot
        x[-1] *= 1e3
        whole, rest = (clipped_sum(model, loss, (x[:n], y[:n]), clip=0.3) for n in (9, 8))
        assert distance(whole, rest) <= 0.3 * (1 + 1e-9)
        assert_same(whole, loop(model, loss, (x, y), 0.3))

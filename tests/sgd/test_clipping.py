"""clipped_sum and the recorder: what they promise, whatever the layers."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from oracle import assert_same, loop, recorded
from torch import nn
from torch.nn import functional

from terrine.errors import InvalidArgument
from terrine.sgd.clipping import Automatic, Flat, PerLayer, clipped_sum


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

    with pytest.raises(InvalidArgument, match="mixes examples"):
        clipped_sum(model, contrastive, x, y, clip=1.0)


@pytest.mark.parametrize("looped", [False, True])
def test_class_weights_divide_by_the_number_of_labels(lot, looped):
    model, x, _ = lot
    weight, y = torch.tensor([1.0, 5.0, 9.0]).double(), torch.arange(9) % 3
    weighted = nn.CrossEntropyLoss(weight=weight)
    expected = loop(model, nn.CrossEntropyLoss(weight=weight, reduction="sum"), x, y, 1.0)
    if looped:
        assert_same(recorded(model, lambda m, x, y: weighted(m(x), y), x, y, 1.0), expected)
    else:
        assert_same(clipped_sum(model, weighted, x, y, clip=1.0), expected)


@pytest.mark.parametrize("looped", [False, True])
def test_labels_that_are_ignored_leave_each_examples_own_mean(looped):
    model = nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 11)).double()
    x, y = torch.randint(11, (5, 7)), torch.randint(11, (5, 7))
    y[0, 2:], y[1], y[3, 0] = -100, -100, -100

    def criterion(out, y):
        return functional.cross_entropy(out.flatten(0, 1), y.flatten())

    expected = loop(model, lambda out, y: criterion(out, y).nan_to_num(), x, y, 0.1)
    expected[1][1] = 0.0  # nothing is left of its loss
    if looped:
        assert_same(recorded(model, lambda m, x, y: criterion(m(x), y), x, y, 0.1), expected)
    else:
        found = clipped_sum(model, criterion, x, y, clip=0.1)
        assert_same(found._replace(norms=found.norms.nan_to_num()), expected)


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
@pytest.mark.parametrize("looped", [False, True])
def test_what_no_rule_follows_is_exact_and_the_slow_way_is_said_once(caplog, kind, looped):
    model, x, y = Odd(kind).double(), torch.randn(6, 4).double(), torch.arange(6).double()

    def criterion(out, y):
        return (out.sum(1) - y).square()

    with caplog.at_level(logging.WARNING, "terrine.sgd"):
        for _ in range(2):
            found = (
                recorded(model, lambda m, x, y: criterion(m(x), y).mean(), x, y, 0.5, turns=2)
                if looped
                else clipped_sum(model, criterion, x, y, clip=0.5)
            )
            assert_same(found, loop(model, criterion, x, y, 0.5))
    assert len([r for r in caplog.records if "slow" in r.message]) == (kind == 2)


class TestLoop:
    def test_an_ordinary_loop_gives_the_clipped_sum_and_no_gradients_of_its_own(self, lot):
        model, x, y = lot
        found = recorded(model, lambda m, x, y: nn.CrossEntropyLoss()(m(x), y), x, y, 0.4, turns=3)
        assert_same(found, loop(model, nn.CrossEntropyLoss(), x, y, 0.4))

    def test_a_sum_is_no_mean(self, lot):
        model, x, y = lot
        found = recorded(model, lambda m, x, y: nn.CrossEntropyLoss(reduction="sum")(m(x), y), x, y, 0.1)
        assert_same(found, loop(model, nn.CrossEntropyLoss(), x, y, 0.1))

    @pytest.mark.parametrize("number", [9, 64, 2.0])
    def test_a_sum_over_a_number_is_a_mean_whatever_the_number(self, lot, number):
        """It may be the lot's size, which must not decide how long one example's gradient is."""
        model, x, y = lot
        found = recorded(model, lambda m, x, y: functional.cross_entropy(m(x), y, reduction="sum") / number, x, y, 0.4)
        assert_same(found, loop(model, nn.CrossEntropyLoss(), x, y, 0.4))

    def test_coefficients_are_part_of_the_loss(self, lot):
        model, x, y = lot
        found = recorded(model, lambda m, x, y: 0.25 * functional.cross_entropy(m(x), y), x, y, 0.4)
        assert_same(found, loop(model, lambda o, y: 0.25 * functional.cross_entropy(o, y), x, y, 0.4))

    def test_two_forward_passes_before_one_backward_are_the_same_examples(self, lot):
        model, x, y = lot

        class Twice(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                return torch.stack([self.inner(x), self.inner(2 * x)], 1)

        def both(out, y):
            return functional.cross_entropy(out[:, 0], y) + functional.cross_entropy(out[:, 1], y)

        def twice(m, x, y):
            return functional.cross_entropy(m(x), y) + functional.cross_entropy(m(2 * x), y)

        sums, norms = loop(Twice(model), both, x, y, 0.4)
        found = recorded(model, twice, x, y, 0.4)
        assert_same(found, ({name.removeprefix("inner."): one for name, one in sums.items()}, norms))

    def test_two_views_side_by_side_are_one_example(self, lot):
        model, x, y = lot

        def views(m, x, y):
            first, second = m(torch.cat([x, 2 * x])).chunk(2)
            return functional.cross_entropy(first, y) + functional.cross_entropy(second, y)

        def twice(m, x, y):
            return functional.cross_entropy(m(x), y) + functional.cross_entropy(m(2 * x), y)

        assert_same(recorded(model, views, x, y, 0.4), recorded(model, twice, x, y, 0.4))

    def test_evaluation_leaves_no_trace(self, lot):
        model, x, y = lot

        def loss(m, x, y):
            with torch.no_grad():
                m(x)
            m(2 * x)  # never followed by a backward pass
            return nn.CrossEntropyLoss()(m(x), y)

        assert_same(recorded(model, loss, x, y, 0.4), loop(model, nn.CrossEntropyLoss(), x, y, 0.4))

    def test_a_gradient_around_the_model_is_refused(self, lot):
        model, x, y = lot
        with pytest.raises(InvalidArgument, match="outside the model's forward pass"):
            recorded(model, lambda m, x, y: nn.CrossEntropyLoss()(m(x), y) + m[0].weight.square().sum(), x, y, 0.4)

    def test_closed_it_is_gone(self, lot):
        model, x, y = lot
        recorded(model, lambda m, x, y: nn.CrossEntropyLoss()(m(x), y), x, y, 0.4)
        assert "forward" not in vars(model)
        nn.CrossEntropyLoss()(model(x), y).backward()
        assert all(p.grad is not None for p in model.parameters())

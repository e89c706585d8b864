"""What changes between two steps is noticed by the second: nothing about a model is remembered that may change."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine.errors import InvalidArgument
from terrine.sgd.clipping import clipped_sum
from terrine.sgd.clipping.functions import trained
from terrine.sgd.layers import validate

from .oracle import assert_same, loop

CRITERION = nn.CrossEntropyLoss()


@pytest.fixture
def lot():
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return model, torch.randn(9, 5).double(), torch.randint(3, (9,))


def agree(model, x, y, criterion=CRITERION):
    assert_same(clipped_sum(model, criterion, (x, y), clip=0.4), loop(model, criterion, (x, y), 0.4))


def test_frozen_and_trained_again(lot):
    model, x, y = lot
    agree(model, x, y)
    model[0].weight.requires_grad_(False)
    assert "0.weight" not in clipped_sum(model, CRITERION, (x, y), clip=1.0).sums
    agree(model, x, y)
    model[0].weight.requires_grad_(True)
    assert "0.weight" in clipped_sum(model, CRITERION, (x, y), clip=1.0).sums
    agree(model, x, y)


def test_another_module_in_its_place(lot):
    model, x, y = lot
    agree(model, x, y)
    model[0] = nn.Linear(5, 7, bias=False).double()
    agree(model, x, y)
    model[2].weight = nn.Parameter(torch.randn(3, 7).double())
    agree(model, x, y)
    model[1] = nn.BatchNorm1d(7).double()
    with pytest.raises(InvalidArgument, match="1: BatchNorm1d"):
        clipped_sum(model, CRITERION, (x, y), clip=1.0)


def test_statistics_that_are_frozen_no_more(lot):
    model, x, y = lot
    model.insert(1, nn.BatchNorm1d(7).double().requires_grad_(False).eval())
    agree(model, x, y)
    model.train()
    with pytest.raises(InvalidArgument, match="1: BatchNorm1d"):
        clipped_sum(model, CRITERION, (x, y), clip=1.0)
    model.eval()
    agree(model, x, y)
    model[1].requires_grad_(True)
    agree(model, x, y)  # its scale and shift are parameters as any other


@pytest.mark.parametrize("change", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_a_table_that_begins_to_reach_around_clipping(change):
    model = nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = torch.randint(11, (6, 3)), torch.randint(3, (6,))
    agree(model, x, y)
    for name, value in change.items():
        setattr(model[0], name, value)
    with pytest.raises(InvalidArgument, match="0: Embedding"):
        clipped_sum(model, CRITERION, (x, y), clip=1.0)


def test_a_criterion_with_another_reduction(lot):
    model, x, y = lot
    criterion = nn.CrossEntropyLoss()
    for reduction in ("mean", "sum", "none", "mean"):
        criterion.reduction = reduction
        agree(model, x, y, criterion)


def test_a_lot_that_requires_grad_is_clipped_like_any_other(lot):
    model, x, y = lot
    expected = loop(model, CRITERION, (x, y), 0.4)
    assert_same(clipped_sum(model, CRITERION, (x.clone().requires_grad_(), y), clip=0.4), expected)
    assert_same(clipped_sum(model, CRITERION, ((x.clone().requires_grad_(),), y), clip=0.4), expected)


class Changed(nn.Module):
    """Changes the input of its first or its second layer in place, after use."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.second, self.layer = nn.Linear(5, 5), nn.Linear(5, 3), layer

    def forward(self, x):
        x = x.clone()
        hidden = self.first(x)
        output = self.second(hidden)
        (x if self.layer == 1 else hidden.detach()).add_(1.0)
        return output


@pytest.mark.parametrize("layer", [1, 2])
def test_an_input_that_is_changed_after_its_use_is_noticed(lot, layer):
    _, x, y = lot
    model = Changed(layer).double()
    with pytest.raises(InvalidArgument, match=r"in.?place"):
        clipped_sum(model, CRITERION, (x, y), clip=0.4)


class Renamed(nn.Module):
    """Tells of its parameters in its own way."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    def named_parameters(self, *args, **kwargs):
        return ((f"my.{name}", one) for name, one in super().named_parameters(*args, **kwargs) if "other" in name)


def models():
    shared = nn.Linear(3, 3)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    frozen = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))
    empty = nn.Sequential(nn.Linear(3, 3, bias=False))
    empty.register_module("none", None)
    own = nn.Linear(3, 3)
    own.scale = nn.Parameter(torch.ones(()))
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    nested = nn.Sequential(own, nn.Sequential(shared, nn.Sequential(shared, nn.PReLU())), shared)
    return {
        "shared": nested, "tied": tied, "frozen": frozen, "empty": empty,
        "parametrised": weighted, "encoder": encoder, "renamed": Renamed(),
    }  # fmt: skip


@pytest.mark.parametrize("name", models())
def test_trained_is_named_parameters_in_its_order(name):
    model = models()[name]
    expected = [(name, id(one)) for name, one in model.named_parameters() if one.requires_grad]
    assert [(name, id(one)) for name, one in trained(model).items()] == expected


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        (lambda: nn.LazyLinear(3), "not initialised"),
        (lambda: nn.LazyInstanceNorm1d(affine=True, track_running_stats=False), "not initialised"),
        (lambda: torch.jit.script(nn.Linear(3, 3)), "compiled"),
        (lambda: torch.compile(nn.Linear(3, 3)), "compile"),
        (lambda: nn.DataParallel(nn.Linear(3, 3)), "devices"),
        (lambda: type("Mine", (nn.BatchNorm1d,), {})(3), "mixes"),
    ],
)
def test_what_cannot_be_trained_is_found_at_any_depth(inside, why):
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Identity())))
    validate(model)
    model[1][1][0] = inside()
    with pytest.raises(InvalidArgument, match=rf"1\.1\.0: .*{why}"):
        validate(model)


class Biased(nn.Module):
    """Attention whose mask is trained."""

    def __init__(self, need_weights):
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(8, 2, batch_first=True), need_weights
        self.mask, self.out = nn.Parameter(torch.randn(4, 4)), nn.Linear(8, 3)

    def forward(self, x):
        mixed, weights = self.attention(x, x, x, attn_mask=self.mask, need_weights=self.need_weights)
        found = self.out(mixed.mean(1))
        return found if weights is None else found + weights.mean(1)[:, :3]


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_with_a_trained_mask_stays_watched(need_weights):
    model = Biased(need_weights).double()
    agree(model, torch.randn(5, 4, 8).double(), torch.randint(3, (5,)))


def test_attention_weights_are_followed():
    class Weighted(nn.Module):
        def __init__(self, average):
            super().__init__()
            self.attention, self.average = nn.MultiheadAttention(8, 2, batch_first=True), average
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x):
            mixed, weights = self.attention(x, x, x, average_attn_weights=self.average)
            weights = weights if self.average else weights.mean(1)
            return (weights * self.scale).sum(1)[:, :3] + functional.layer_norm(mixed, (8,)).mean(1)[:, :3]

    for average in (True, False):
        agree(Weighted(average).double(), torch.randn(5, 4, 8).double(), torch.randint(3, (5,)))


@pytest.mark.parametrize("still", [None, "weight", "bias"])
@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=str)
def test_layer_norm_of_any_shape(still, shape):
    norm = nn.LayerNorm(shape)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(nn.Linear(5, 6), nn.Unflatten(-1, shape), norm, nn.Flatten(1), nn.Linear(24, 3)).double()
    if still is not None:
        norm.get_parameter(still).requires_grad_(False)
    agree(model, torch.randn(7, 4, 5).double(), torch.randint(3, (7,)))

"""What the first lot's trial finds: models that mix examples, keep something of them, or are not understood."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same, loop
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from terrine import sgd
from terrine.errors import InvalidArgument
from terrine.sgd.clipping import clipped_sum
from terrine.sgd.clipping.axis import Unfollowed
from terrine.sgd.clipping.registry import forget, rule

CRITERION = nn.CrossEntropyLoss()


class Net(nn.Module):
    """Two linear layers, `a` (d, d) and `b` (d, 3), put together by `forward(self, x)`."""

    def __init__(self, forward, width=6, **others):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, 3)
        for name, one in others.items():
            setattr(self, name, one)
        self.does = forward
        self.double()

    def forward(self, x):
        return self.does(self, x)


def lot(n, *shape):
    torch.manual_seed(n)
    return torch.randn(n, *shape).double(), torch.randint(3, (n,))


def sorted_and_back(net, x):
    order = x[:, 0].argsort()
    return net.b(net.a(x)[order].relu())[order.argsort()]


def selected_and_back(net, x):
    order = x[:, 0].argsort()
    return net.b(net.a(x).index_select(0, order).relu())[order.argsort()]


def flipped_and_back(net, x):
    return net.b(net.a(x).flip(0).tanh()).flip(0)


def gathered_and_back(net, x):
    order = x[:, 0].argsort()
    return net.b(net.a(x).gather(0, order[:, None].expand_as(x)).tanh())[order.argsort()]


@pytest.mark.parametrize("n", [3, 6, 9])
@pytest.mark.parametrize("forward", [sorted_and_back, selected_and_back, flipped_and_back, gathered_and_back])
def test_examples_that_change_places_are_clipped_all_the_same(forward, n):
    given = Net(forward), CRITERION, *lot(n, 6)
    assert_same(clipped_sum(*given, clip=0.3), loop(*given, 0.3))


COINCIDENCES = {
    "squeezed": lambda net, x: net.b(net.a(x[None].tanh().squeeze(0)).tanh()),
    "largest": lambda net, x: net.b(net.a(torch.stack([x, 2 * x]).max(0).values).tanh()),
    "larger of two": lambda net, x: net.b(net.a(torch.max(x, 2 * x)).min(x)),
    "median": lambda net, x: net.b(net.a(torch.stack([x, 2 * x, x.sin()]).median(0)[0]).tanh()),
    "norm": lambda net, x: net.b(net.a(torch.linalg.vector_norm(torch.stack([x, 2 * x]), dim=0)).tanh()),
    "beside": lambda net, x: net.b(net.a(torch.cat([x, x.sin()]))[: len(x)].tanh()),
    "behind": lambda net, x: sum(net.b(net.a(torch.cat([x, x.sin()])).tanh()).chunk(2)),
    "turned": lambda net, x: net.b(net.a(x.T.contiguous().T).tanh()),
    "turned by name": lambda net, x: net.b(torch.transpose(input=net.a(x), dim0=0, dim1=1).tanh().mT),
    "every example, in order": lambda net, x: net.b(net.a(x)[torch.arange(len(x))].tanh()),
    "hidden state": lambda net, x: net.b(net.a(net.rnn(x[:, None].expand(-1, 4, -1))[1][0].squeeze(0)).tanh()),
}


@pytest.mark.parametrize("n", [4, 6, 7])
@pytest.mark.parametrize("forward", COINCIDENCES.values(), ids=COINCIDENCES)
def test_as_many_examples_as_features(forward, n):
    torch.manual_seed(0)
    given = Net(forward, rnn=nn.LSTM(6, 6, batch_first=True)), CRITERION, *lot(n, 6)
    assert_same(clipped_sum(*given, clip=0.3), loop(*given, 0.3))


@pytest.mark.parametrize("n", [5, 8])
def test_letters_tell_where_the_examples_are(n):
    def forward(net, x):
        return torch.einsum("tbd->bd", net.b(torch.einsum("btd->tbd", net.a(x).tanh())))

    given = Net(forward), CRITERION, *lot(n, 5, 6)
    assert_same(clipped_sum(*given, clip=0.3), loop(*given, 0.3))


def test_a_rule_of_ones_own_wants_its_examples_in_front():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x):
            return x * self.weight

    @rule(Scale)
    def scale(module, inputs, gradient):
        return {"weight": (gradient * inputs[0]).sum(1)}

    try:
        given = Net(lambda net, x: net.b(net.c(x.transpose(0, 1)).mean(0)), c=Scale()), CRITERION, *lot(5, 5, 6)
        assert_same(clipped_sum(*given, clip=0.3), loop(*given, 0.3))
    finally:
        forget(Scale)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


def written(net, x):
    buffer = torch.zeros_like(x)
    buffer[:] = net.a(x)
    return net.b(buffer)


OUT_OF_SIGHT = {
    "function of one's own": lambda net, x: net.b(Cubed.apply(net.a(x))),
    "fourier": lambda net, x: net.b(torch.fft.fft(net.a(x)).real),
    "data": lambda net, x: net.b(net.a(x.data)),
    "written into": written,
    "numbers": lambda net, x: net.b(net.a(torch.tensor(x.tolist()).double()).tanh()),
    "recomputed": lambda net, x: net.b(checkpoint(net.a, x.tanh(), use_reentrant=False)),
    "time first": lambda net, x: net.b(net.a(x.transpose(0, 1)).tanh()).mean(0),
}


@pytest.mark.parametrize("forward", OUT_OF_SIGHT.values(), ids=OUT_OF_SIGHT)
def test_what_the_tape_does_not_see_is_clipped_all_the_same(forward):
    shape = (4, 6) if forward is OUT_OF_SIGHT["time first"] else (6,)
    given = Net(forward), CRITERION, *lot(5, *shape)
    if forward is OUT_OF_SIGHT["numbers"]:  # which vmap cannot follow either
        assert clipped_sum(*given, clip=0.3).norms.min() > 0
    assert_same(clipped_sum(*given, clip=0.3), loop(*given, 0.3))


def in_training(net, x):
    h = net.a(x)
    return net.b(h - h.mean(0) if net.training else h)


def where_gradients_are(net, x):
    h = net.a(x)
    return net.b(h - h.mean(0) if torch.is_grad_enabled() else h)


def after_dropout(net, x):
    return net.b(functional.dropout(net.a(x - x.mean(0)), 0.5, net.training))


MIXERS = {
    "in training": in_training,
    "where gradients are": where_gradients_are,
    "after dropout": after_dropout,
    "in the backward pass alone": lambda net, x: net.b(net.a(x) + (h := net.a(x).mean(0)) - h.detach()),
}


@pytest.mark.parametrize("forward", MIXERS.values(), ids=MIXERS)
def test_a_model_that_mixes_is_refused_by_both_doors(forward):
    x, y = lot(9, 6)
    with pytest.raises(InvalidArgument, match="mixes examples"):
        clipped_sum(Net(forward), CRITERION, x, y, clip=1.0)
    with pytest.raises(InvalidArgument, match="mixes examples"):
        first_lot(Net(forward), x, y)


def first_lot(model, x, y, criterion=CRITERION, before=lambda x: x, absent=1):
    plan = sgd.Plan(examples=len(x), lot=len(x) - absent, steps=2, clip=1.0, noise=1.0, delta=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, lots = sgd.make_private(model, optimizer, (x, y), plan)
    for some, labels in lots:
        loss = criterion(model(before(some)), labels)
        loss.backward(torch.ones_like(loss))
        optimizer.step()


def test_a_model_seen_in_one_mode_is_tried_again_in_the_other():
    model, (x, y) = Net(in_training), lot(9, 6)
    clipped_sum(model.eval(), CRITERION, x, y, clip=1.0)
    with pytest.raises(InvalidArgument, match="mixes examples"):
        clipped_sum(model.train(), CRITERION, x, y, clip=1.0)


def test_the_first_two_of_a_lot_may_be_twins():
    x, y = lot(9, 6)
    x[1], y[1] = x[0], y[0]
    with pytest.raises(InvalidArgument, match="mixes examples"):
        clipped_sum(Net(lambda net, x: net.b(net.a(x) * x.std(0))), CRITERION, x, y, clip=1.0)


def test_an_input_that_all_share_hides_no_mixing():
    x, y = lot(9, 6)
    model = Net(None)
    model.forward = lambda x, places: model.b(model.a(x) - model.a(x).mean(0))
    with pytest.raises(InvalidArgument, match="mixes examples"):
        clipped_sum(model, CRITERION, (x, torch.arange(3)), y, clip=1.0)


def test_rounding_is_no_mixing():
    """Outputs that are small differences of large numbers change by rounding, in company or not."""
    torch.manual_seed(0)
    model = Net(lambda net, x: net.b((h := net.a(x)) - h.mean(1, keepdim=True))).float()
    x, y = lot(9, 6)
    found = clipped_sum(model, CRITERION, (x + 1e4).float(), y, clip=1.0)
    assert_same(found, loop(model, CRITERION, (x + 1e4).float(), y, 1.0), 1e-2)


def test_dropout_is_no_mixing_and_no_draw_is_lost():
    model, (x, y) = Net(lambda net, x: net.b(functional.dropout(net.a(x), 0.5))), lot(9, 6)
    torch.manual_seed(3)
    clipped_sum(model, CRITERION, x, y, clip=1.0)
    after = torch.rand(1)
    torch.manual_seed(3)
    clipped_sum(model, CRITERION, x, y, clip=1.0)
    assert torch.equal(after, torch.rand(1))


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3).double()
        self.register_buffer("mean", torch.zeros(6).double())

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.layer(x)


def test_a_buffer_that_keeps_something_of_the_examples_is_refused():
    x, y = lot(9, 6)
    for refused in (lambda m: clipped_sum(m, CRITERION, x, y, clip=1.0), lambda m: first_lot(m, x, y)):
        model = Keeping()
        with pytest.raises(InvalidArgument, match="mean: a buffer"):
            refused(model)
        assert not model.mean.any()


def test_buffers_that_depend_on_weights_alone_may_change():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)).double()
    x, y = lot(9, 6)
    assert clipped_sum(layer, CRITERION, x, y, clip=1.0).norms.min() > 0


LOSSES = {
    "compared": lambda o, y: functional.cross_entropy(o @ o.T, torch.arange(len(o)), reduction="none"),
    "worst": lambda o, y: functional.cross_entropy(o, y, reduction="none").max(),
    "relative": lambda o, y: (one := functional.cross_entropy(o, y, reduction="none")) / one.detach().sum(),
}


@pytest.mark.parametrize("criterion", LOSSES.values(), ids=LOSSES)
def test_a_loss_that_mixes_is_refused_by_both_doors(criterion):
    x, y = lot(9, 6)
    for refused in (
        lambda: clipped_sum(nn.Linear(6, 3).double(), criterion, x, y, clip=1.0),
        lambda: first_lot(nn.Linear(6, 3).double(), x, y, criterion),
    ):
        with pytest.raises(InvalidArgument, match="mixes examples"):
            refused()


def test_weights_of_classes_are_refused_though_no_label_shows_it():
    x, _ = lot(9, 6)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 1000.0]).double())
    with pytest.raises(InvalidArgument, match="weights of the whole lot's labels"):
        clipped_sum(nn.Linear(6, 3).double(), weighted, x, torch.zeros(9, dtype=torch.long), clip=1.0)


def test_labels_that_are_ignored_are_refused_in_a_mean_whenever_they_come():
    model, (x, y) = nn.Linear(6, 3).double(), lot(9, 6)
    clipped_sum(model, CRITERION, x, y, clip=1.0)
    y[4] = -100
    with pytest.raises(InvalidArgument, match="ignore_index=-100"):
        clipped_sum(model, CRITERION, x, y, clip=1.0)
    by_sum = nn.CrossEntropyLoss(reduction="sum")
    assert_same(clipped_sum(model, by_sum, x, y, clip=0.3), loop(model, by_sum, x, y, 0.3))


def test_an_output_without_the_examples_is_refused():
    x, y = lot(9, 6)
    with pytest.raises(InvalidArgument, match="first dimension"):
        clipped_sum(Net(lambda net, x: net.a(x)[:, :4].mean(0)), lambda o, y: o.square().sum(), x, y, clip=1.0)


def test_a_mean_may_have_a_dimension():
    model, (x, y) = nn.Linear(6, 3).double(), lot(9, 6)
    found = clipped_sum(model, lambda o, y: CRITERION(o, y).reshape(1), x, y, clip=0.3)
    assert_same(found, loop(model, CRITERION, x, y, 0.3))


def test_the_loop_refuses_what_it_cannot_follow():
    x, y = lot(9, 6)
    with pytest.raises(Unfollowed, match=r"sgd\.clipped_sum"):
        first_lot(Net(OUT_OF_SIGHT["function of one's own"]), x, y)


BEFORE = {
    "neighbours": lambda x: x + 0.5 * x.flip(0),
    "centred": lambda x: x - x.mean(0),
    "mixed up": lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))],
}


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_what_mixes_a_lot_before_the_model_is_refused(before):
    with pytest.raises(InvalidArgument, match="mixes examples"):
        first_lot(nn.Linear(6, 3).double(), *lot(9, 6), before=before)


APART = {
    "flattened": lambda x: x.view(len(x), -1).sin(),
    "noisy": lambda x: x + torch.randn_like(x),
    "in place": lambda x: x.mul_(0.5).cos(),
    "normalised": lambda x: (x - x.mean(1, keepdim=True)) / 2,
}


@pytest.mark.parametrize("before", APART.values(), ids=APART)
def test_what_is_done_to_every_example_before_the_model_is_free(before):
    first_lot(nn.Linear(6, 3).double(), *lot(9, 6), before=before)


SQUARE = {
    "the rest": lambda x: x.view(len(x), -1).sin(),
    "both": lambda x: x.reshape(len(x), 6).sin(),
    "neither": lambda x: x.view(-1, 6).sin(),
}


@pytest.mark.parametrize("before", SQUARE.values(), ids=SQUARE)
def test_a_shape_may_name_a_size_that_is_also_the_lot_s(before):
    first_lot(nn.Linear(6, 3).double(), *lot(6, 6), before=before, absent=0)
    with pytest.raises(InvalidArgument, match="mixes examples"):
        first_lot(nn.Linear(6, 3).double(), *lot(6, 6), before=lambda x: before(x.flip(0)), absent=0)

"""Ordinary code that would let examples meet: it has but one, so one example moves the clipped sum by C at most."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine import sgd
from terrine.errors import TerrineError
from terrine.sgd import clipped_sum
from tests.sgd.helpers import Criterion, distance

C = 1.0


def data(n=9, width=4):
    torch.manual_seed(1)
    x = torch.randn(n, width)
    x[-1] *= 50.0
    return x, torch.tensor([0, 1] * (n // 2) + [2] * (n % 2))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(2, 4)

    def forward(self, x):
        mu, logs = self.a(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * logs.exp()
        return self.b(z - z.mean(0))


WEIGHTS = torch.tensor([1.0, 1.0, 1000.0])
TABLE = torch.randn(9, 4)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


def hooked(model, x, y):
    out = model(x)
    out.register_hook(lambda gradient: gradient - 0.5 * gradient.mean(0))
    return functional.cross_entropy(out, y)


def hooked_node(model, x, y):
    loss = functional.cross_entropy(model(x), y, reduction="none")
    loss.grad_fn.register_prehook(lambda gradients: (2 * gradients[0] - gradients[0].mean(),))
    return loss.mean()


def written(model, x, y):
    buffer = torch.zeros(4)
    alias = buffer.view(4)
    buffer.copy_(x.mean(0))
    return functional.cross_entropy(model(x - 0.5 * alias), y)


def saved_by_the_largest(model, x, y):
    def pack(tensor):
        return tensor, tensor.abs().max()

    def unpack(kept):
        return (kept[0] / kept[1] * 8).round() / 8 * kept[1] if kept[0].is_floating_point() else kept[0]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return functional.cross_entropy(model(x).tanh().square(), y)


def contrasted(model, x, y):
    h = model(x)
    return functional.cross_entropy(h @ h.T - 1, torch.arange(len(x))) + h.square().mean()


PROGRAMS = {
    "weights of classes": lambda m, x, y: functional.cross_entropy(m(x), y, weight=WEIGHTS),
    "a label that is ignored": lambda m, x, y: functional.cross_entropy(m(x), y, ignore_index=2),
    "a penalty over the batch": lambda m, x, y: functional.cross_entropy(m(x), y) + m(x).var(0, correction=0).sum(),
    "the hardest half": lambda m, x, y: (
        functional.cross_entropy(m(x), y, reduction="none").topk(-(-len(x) // 2))[0].mean()
    ),
    "a table as long as the batch": lambda m, x, y: functional.cross_entropy(m(x * TABLE[: len(x)]), y),
    "weights by place": lambda m, x, y: (
        functional.cross_entropy(m(x), y, reduction="none") * torch.arange(9)[-len(x) :]
    ).sum(),
    "shifted": lambda m, x, y: functional.cross_entropy(m(x + x.roll(1, 0)), y),
    "mixed up": lambda m, x, y: functional.cross_entropy(m(0.7 * x + 0.3 * x[torch.randperm(len(x))]), y),
    "a backward pass of one's own": lambda m, x, y: functional.cross_entropy(Own.apply(2 * m(x)) + m(x), y),
    "a hook": hooked,
    "a hook on a node": hooked_node,
    "hooks on what is saved": saved_by_the_largest,
    "written to an alias": written,
    "contrasted": contrasted,
    "broadcast by mistake": lambda m, x, y: functional.mse_loss(m(x)[:, :1], y.float()),
    "divided by the largest": lambda m, x, y: functional.cross_entropy(m(x / x.abs().max()), y),
    "a softmax over the batch": lambda m, x, y: (m(x).softmax(0) * m(x) * functional.one_hot(y, 3)).sum(),
    "squared total": lambda m, x, y: functional.cross_entropy(m(x), y).square(),
    "einsum over two": lambda m, x, y: torch.einsum("nd,md->", (h := m(x)), h),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("index", [0, 8])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_example_moves_the_sum_by_the_bound(name, index):
    x, y = data()

    def loss(model, batch):
        return PROGRAMS[name](model, *batch)

    rest = torch.arange(9) != index
    with_it, without = (clipped_sum(net(), loss, rows, clip=C) for rows in ((x, y), (x[rest], y[rest])))
    assert distance(with_it, without) <= C * 1.0001
    assert float(with_it.norms.nan_to_num().sum()) > 0


def test_a_vae_that_centres_sees_one_example():
    x, _ = data()
    model = Vae()
    norms = clipped_sum(model, lambda m, x: functional.mse_loss(m(x), x), x, clip=C).norms
    assert bool(norms.isfinite().all())


COPIED = {
    "a shallow copy": lambda model, x: model(x - copy.copy(x).mean(0)).sum(),
    "pickled": lambda model, x: model(x - pickle.loads(pickle.dumps(x)).mean()).sum(),
}


@pytest.mark.parametrize("name", COPIED)
def test_an_example_that_is_pickled_is_refused(name):
    """What becomes of it nobody can follow; `clone` and `deepcopy` are torch's own."""
    with pytest.raises(TerrineError):
        clipped_sum(net(), COPIED[name], data()[0], clip=C)
    clipped_sum(net(), lambda model, x: model(x - copy.deepcopy(x).mean(0)).sum(), data()[0], clip=C)


class Context(nn.Module):
    """Looks at the whole batch by another way than its arguments."""

    def __init__(self, context):
        super().__init__()
        self.layer, self.context = nn.Linear(4, 3), context

    def forward(self, x):
        return self.layer(x - self.context[0].mean(0))


def test_what_a_program_keeps_for_the_next_is_refused():
    kept = [torch.zeros(1, 4)]

    def loss(model, batch):
        kept[0] = batch[0]
        return functional.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(TerrineError, match=r"earlier|changed|kept"):
        clipped_sum(Context(kept), loss, data(), clip=C)


class Vector(nn.Module):
    """`use(w, x)` of a weight as wide as the examples, then a small head."""

    def __init__(self, use, *shape):
        super().__init__()
        self.w, self.use = nn.Parameter(torch.randn(*shape)), use
        self.head = nn.Linear(1, 3)

    def forward(self, x):
        return self.head(self.use(self.w, x).reshape(len(x), -1).mean(1, keepdim=True))


def attended(w, x):
    return functional.scaled_dot_product_attention(w.expand(len(x), 1, 4), x[:, None].sin(), x[:, None])


BROKEN = {
    "einsum": (lambda w, x: torch.einsum("nd,d->n", x, w), 4),
    "vector": (lambda w, x: x @ w, 4),
    "tensordot": (lambda w, x: torch.tensordot(x, w, dims=1), 4),
    "bmm": (lambda w, x: torch.bmm(x[:, None], w.expand(len(x), 4, 2)), 4, 2),
    "cosine": (lambda w, x: functional.cosine_similarity(x, w[None]), 4),
    "attention": (attended, 1, 4),
    "product": (lambda w, x: x * w, 4),
    "outer": (lambda w, x: torch.einsum("nd,ne,de->n", x, x, w), 4, 4),
    "linear": (lambda w, x: functional.linear(x, w), 2, 4),
    "layer norm": (lambda w, x: functional.layer_norm(x, (4,), w), 4),
    "fourier": (lambda w, x: torch.fft.rfft(x * w).abs(), 4),
}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("given", BROKEN.values(), ids=BROKEN)
def test_a_row_that_is_not_finite_erases_nobody(given, bad):
    torch.manual_seed(0)
    model = Vector(*given)
    x, y = torch.randn(9, 4), torch.randint(3, (9,))
    x[4, 1] = bad
    rest = torch.arange(9) != 4
    criterion = Criterion(lambda out, y: 100 * functional.cross_entropy(out, y))
    with_it, without = (clipped_sum(model, criterion, rows, clip=C) for rows in ((x, y), (x[rest], y[rest])))
    assert distance(with_it, without) <= C * 1.0001


def test_complex_parameters_are_refused():
    model = nn.Linear(4, 3, dtype=torch.complex64)
    with pytest.raises(TerrineError, match="complex"):
        clipped_sum(model, lambda m, b: m(b.to(torch.complex64)).abs().sum(), data()[0], clip=C)
    with pytest.raises(TerrineError, match="complex"):
        sgd.validate(model)

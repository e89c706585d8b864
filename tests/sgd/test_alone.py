"""Every example alone: what vmap runs, what it does not, what Python asks, and what a model must not keep."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from terrine.errors import InvalidArgument
from terrine.sgd import clipped_sum

from .helpers import Criterion
from .oracle import assert_same, loop

N, CLIP = 6, 0.4
CRITERION = nn.CrossEntropyLoss()


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.run = nn.Linear(4, 5), nn.Linear(5, 3), forward

    def forward(self, x):
        return self.run(self, x)


class Doubled(torch.autograd.Function):
    """A function with a backward pass of its own, of which vmap knows nothing."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def asked(s, x):
    """A short way where nothing has to be masked, as transformers have it."""
    return s.b(s.a(x)) if (x > -1).all() else s.b(s.a(x * (x > -1)) + s.a(x * (x <= -1)) - s.a.bias)


def counted(s, x):
    """Steps that change nothing, as many as an example asks for."""
    h = s.a(x)
    for _ in range(int(x[:, 0].abs().max().clamp(max=3).item())):
        h = h + 0.0 * s.a(x)
    return s.b(h)


def chosen(s, x):
    """Shapes that depend on the example's numbers."""
    return s.b(torch.stack([s.a(row[None])[0] + row[row > 0].sum() for row in x]))


def made_here(s, x):
    h = torch.zeros(len(x), 5, dtype=x.dtype)
    for place in range(4):
        h[:, place] += s.a(x)[:, place]
    return s.b(h)


FORWARDS = {
    "asked": asked,
    "counted": counted,
    "chosen": chosen,
    "made here": made_here,
    "checkpointed": lambda s, x: s.b(checkpoint(lambda x: s.a(x).tanh(), x, use_reentrant=False)),
    "reentrant": lambda s, x: s.b(checkpoint(lambda x: s.a(x).tanh(), x.requires_grad_(), use_reentrant=True)),
    "a function of its own": lambda s, x: s.b(Doubled.apply(s.a(x)).tanh()),
    "a hook": lambda s, x: s.b(hooked(s.a(x))),
    "vmap inside": lambda s, x: s.b(torch.vmap(lambda row: s.a(row).tanh())(x)),
    "a gradient inside": lambda s, x: s.b(s.a(x) + score(s, x)),
    "detached": lambda s, x: s.b(s.a(x).tanh() + s.a(x).detach()),
    "without gradients": lambda s, x: s.b(s.a(x).tanh() + silent(s, x)),
    "squeezed": lambda s, x: s.b(s.a(x).unsqueeze(1).squeeze(1)),
    "batch of zeros": lambda s, x: s.b(s.a(x) + torch.zeros(x.shape[0], 5, dtype=x.dtype)),
    "its own size": lambda s, x: s.b(s.a(x.view(x.size(0), -1)).reshape(len(x), 5)),
}


def hooked(h):
    if h.requires_grad:
        h.register_hook(lambda gradient: 3 * gradient)
    return h.tanh()


def score(s, x):
    return torch.func.grad(lambda z: s.a(z).square().sum())(x).sum(1, keepdim=True)


@torch.no_grad()
def silent(s, x):
    return s.a(x).sigmoid()


@pytest.mark.parametrize("name", FORWARDS)
def test_any_forward_pass_is_the_loop(name):
    torch.manual_seed(0)
    model = Net(FORWARDS[name]).double()
    batch = torch.randn(N, 4).double(), torch.randint(3, (N,))
    found = clipped_sum(model, CRITERION, batch, clip=CLIP, reads_values=name == "counted")
    assert_same(found, loop(model, CRITERION, batch, CLIP))


@pytest.mark.parametrize("name", ["asked", "counted", "made here", "checkpointed"])
def test_the_fast_way_is_taken(name, caplog):
    model = Net(FORWARDS[name]).double()
    with caplog.at_level(logging.WARNING, "terrine.sgd"):
        batch = torch.randn(N, 4).double(), torch.randint(3, (N,))
        clipped_sum(model, CRITERION, batch, clip=CLIP, reads_values=name == "counted")
    assert not [record for record in caplog.records if "slow" in record.message]


class Keeping(nn.Module):
    """Keeps something of its examples, in one way or another."""

    def __init__(self, way):
        super().__init__()
        self.layer, self.way, self.kept = nn.Linear(4, 3), way, None
        self.register_buffer("seen", torch.zeros(3).double())

    def forward(self, x):
        h = self.layer(x)
        if self.way == "attribute":
            before, self.kept = self.kept, h.detach()
            return h if before is None else h + before.mean(0)
        if self.way == "list":
            self.kept = [*(self.kept or []), h.detach()]
            return h + self.kept[0].mean(0)
        if self.way == "buffer":
            self.seen.mul_(0.9).add_(h.detach().mean(0))
        if self.way == "index":
            self.seen[0] = h.detach().mean()
        return h - self.seen


@pytest.mark.parametrize("way", ["attribute", "list", "buffer", "index"])
def test_what_a_model_keeps_of_an_example_is_refused(way):
    model = Keeping(way).double()
    with pytest.raises(InvalidArgument, match=r"earlier batch|outlives|changed while examples ran"):
        clipped_sum(model, CRITERION, (torch.randn(N, 4).double(), torch.randint(3, (N,))), clip=CLIP)
    assert not model.seen.any()


def test_randomness_is_every_examples_own():
    """One draw for all examples would make them alike."""

    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.randn(4, dtype=x.dtype))

    torch.manual_seed(0)
    model, x = Noisy(4, 3).double(), torch.zeros(N, 4).double()
    found = clipped_sum(model, CRITERION, (x, torch.zeros(N, dtype=torch.long)), clip=CLIP)
    assert len(set(found.norms.tolist())) == N


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_a_model_of_peft_comes_out_as_it_went_in(kind):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.GPT2Config(vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    settings = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    chosen = peft.PromptTuningConfig(**settings) if kind == "prompt" else peft.PrefixTuningConfig(**settings)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), chosen).eval()
    before = {name: (value.dtype, value.clone()) for name, value in model.state_dict().items()}
    x = torch.randint(37, (4, 7))
    criterion = Criterion(lambda out, y: functional.cross_entropy(out.logits[:, -1], y))

    found = clipped_sum(model, criterion, ({"input_ids": x}, x[:, 0]), clip=CLIP)
    sums, norms = loop(model, criterion, ({"input_ids": x}, x[:, 0]), CLIP)
    torch.testing.assert_close(found.norms.double(), norms, rtol=1e-3, atol=1e-4)
    assert all(torch.allclose(found.sums[name], sums[name], atol=1e-4) for name in sums)
    after = model.state_dict()
    assert all(after[name].dtype is kept[0] and torch.equal(after[name], kept[1]) for name, kept in before.items())

"""The table of operations against vmap: where it says Rows, every example alone gives the same; and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine.sgd.isolation import Isolation, Mixed, Rows, Total

N = 5
W, V, TABLE = torch.randn(3, 6).double(), torch.randn(6).double(), torch.randn(7, 6).double()


def followed(function, *given):
    isolation = Isolation(len(given[0]))
    isolation.mark(given)
    try:
        with isolation:
            out = function(*given)
        return out, isolation.status(out)
    finally:
        isolation.unmark()


def lot(*shape):
    torch.manual_seed(0)
    return torch.randn(N, *shape).double()


def written(x):
    buffer = torch.zeros(len(x), 6).double()
    buffer[:, 0] = x[:, 1]
    return buffer


def masked(x):
    x = x.clone()
    x[x > 0] = 0.0
    return x


KEEPS = {
    "arithmetic": (lambda x: (x * 2 - V) / (x.square() + 1), (6,)),
    "linear": (lambda x: functional.linear(x, W), (6,)),
    "matmul": (lambda x: x @ W.T, (6,)),
    "vector": (lambda x: x @ V, (6,)),
    "matmul from the left": (lambda x: W @ x.mT, (4, 6)),
    "batched": (lambda x: x @ x.mT, (4, 6)),
    "bmm": (lambda x: torch.bmm(x, W.T.expand(len(x), 6, 3)), (4, 6)),
    "baddbmm": (lambda x: torch.baddbmm(x[:, :, :3], x, W.T.expand(len(x), 6, 3)), (4, 6)),
    "addmm": (lambda x: torch.addmm(V[:3], x, W.T), (6,)),
    "einsum": (lambda x: torch.einsum("ntd,kd->nkt", x, W), (4, 6)),
    "einsum, ellipsis": (lambda x: torch.einsum("...d,kd->...k", x, W), (4, 6)),
    "tensordot": (lambda x: torch.tensordot(x, V, dims=1), (6,)),
    "sum": (lambda x: x.sum((1, 2)), (4, 6)),
    "max": (lambda x: x.max(1).values, (4, 6)),
    "logsumexp": (lambda x: x.logsumexp(-1, keepdim=True), (4, 6)),
    "norm": (lambda x: x.norm(dim=1), (6,)),
    "softmax": (lambda x: x.softmax(-1), (6,)),
    "layer norm": (lambda x: functional.layer_norm(x, (6,)), (4, 6)),
    "group norm": (lambda x: functional.group_norm(x, 2), (4, 3, 3)),
    "normalize": (lambda x: functional.normalize(x, dim=-1), (6,)),
    "transposed and back": (lambda x: x.transpose(0, 1).sin().permute(1, 0, 2), (4, 6)),
    "flattened and back": (lambda x: functional.linear(x.reshape(-1, 6), W).view(len(x), 4, 3), (4, 6)),
    "cat": (lambda x: torch.cat([x, x.sin(), torch.zeros(len(x), 2).double()], 1), (6,)),
    "stack": (lambda x: torch.stack([x, x.sin()], 1), (6,)),
    "chunk": (lambda x: x.chunk(2, 1)[1], (6,)),
    "lots behind each other": (lambda x: sum(torch.cat([x, x.sin()]).chunk(2)), (6,)),
    "index": (lambda x: x[:, 1:, None, 2], (4, 6)),
    "counted": (lambda x: x[torch.arange(len(x)), 2], (6,)),
    "gather": (lambda x: x.gather(1, x.argsort(1)), (6,)),
    "index_select": (lambda x: x.index_select(1, torch.tensor([3, 1])), (6,)),
    "lookup": (lambda x: functional.embedding(x.abs().long().clamp(max=6), TABLE), (6,)),
    "table": (lambda x: TABLE[x[:, 0].abs().long().clamp(max=6)], (6,)),
    "one hot": (lambda x: functional.one_hot((x > 0).long().sum(1), 7).double(), (6,)),
    "pad": (lambda x: functional.pad(x, (1, 2)), (6,)),
    "conv": (lambda x: functional.conv2d(x, W.view(2, 3, 3, 1)), (3, 5, 5)),
    "pool": (lambda x: functional.max_pool2d(x, 2), (3, 4, 4)),
    "attention": (lambda x: functional.scaled_dot_product_attention(x, x.sin(), x, is_causal=True), (2, 4, 6)),
    "cosine": (lambda x: functional.cosine_similarity(x, V[None]), (6,)),
    "triangle": (lambda x: x.tril(), (4, 4)),
    "glu": (functional.glu, (6,)),
    "expand": (lambda x: x[:, None].expand(-1, 3, -1) + 1, (6,)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), (6,)),
    "cumsum": (lambda x: x.cumsum(1), (6,)),
    "written": (written, (6,)),
    "masked": (masked, (6,)),
    "losses": (lambda x: functional.cross_entropy(x, x.argmin(1), reduction="none"), (6,)),
    "unknown, by vmap": (lambda x: torch.fft.fft(x).real, (6,)),
    "distances": (lambda x: torch.cdist(x, TABLE), (6,)),
}


@pytest.mark.parametrize(("function", "shape"), KEEPS.values(), ids=KEEPS)
def test_every_example_alone_gives_the_same(function, shape):
    x = lot(*shape)
    out, status = followed(function, x)
    assert status == Rows(0)
    alone = torch.cat([function(x[index : index + 1]) for index in range(N)])
    torch.testing.assert_close(out, alone)


VMAPPED = [name for name in KEEPS if name not in ("written", "masked", "counted", "one hot", "lots behind each other")]


@pytest.mark.parametrize("name", VMAPPED)
def test_vmap_over_the_examples_gives_the_same(name):
    function, shape = KEEPS[name]
    x = lot(*shape)
    by_vmap = torch.vmap(lambda row: function(row[None])[0])(x)
    torch.testing.assert_close(followed(function, x)[0], by_vmap)


MIXES = {
    "centred": lambda x: x - x.mean(0),
    "gram": lambda x: x @ x.T,
    "contracted": lambda x: torch.ones(len(x)).double() @ x,
    "softmax": lambda x: x.softmax(0),
    "sorted": lambda x: x.sort(0).values,
    "flipped": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1),
    "cumulated": lambda x: x.cumsum(0),
    "some": lambda x: x[1:],
    "every other": lambda x: x[::2],
    "one": lambda x: x[0],
    "chosen": lambda x: x[x[:, 0] > 0],
    "another order": lambda x: x[torch.randperm(len(x))],
    "by place": lambda x: x * torch.arange(len(x))[:, None],
    "reshaped": lambda x: x.reshape(2, -1),
    "turned against itself": lambda x: x[:, :N] + x[:, :N].T,
    "outer": lambda x: x[:, None] * x[None],
    "variance": lambda x: x.var(0),
    "statistics": lambda x: functional.batch_norm(x, None, None, training=True),
    "einsum": lambda x: torch.einsum("nd,md->nm", x, x),
    "nonlinear": lambda x: x.sum().exp(),
    "unbound": lambda x: torch.stack(x.unbind()[::-1]),
    "triangle": lambda x: x.tril(),
    "padded": lambda x: functional.pad(x, (0, 0, 1, 0))[:-1],
}


@pytest.mark.parametrize("function", MIXES.values(), ids=MIXES)
def test_what_lets_examples_meet_is_mixed(function):
    assert isinstance(followed(function, lot(6))[1], Mixed)


TOTALS = {
    "sum": (lambda x: x.sum(), False),
    "mean": (lambda x: x.mean(), True),
    "by hand": (lambda x: x.square().sum(1).mean() * 0.5 + 1.0, True),
    "combined": (lambda x: x.mean() + 0.1 * x.square().mean(), True),
    "stacked": (lambda x: torch.stack([x.sum(), x.sin().sum()]).sum(), False),
    "mse": (lambda x: functional.mse_loss(x, x.sin()), True),
    "einsum": (lambda x: torch.einsum("nd,nd->", x, x), False),
}


@pytest.mark.parametrize(("function", "mean"), TOTALS.values(), ids=TOTALS)
def test_sums_and_means_are_totals(function, mean):
    status = followed(function, lot(6))[1]
    assert isinstance(status, Total)
    assert status.mean is mean


MODELS = {
    "lstm": lambda x: nn.LSTM(6, 4, batch_first=True).double()(x)[0],
    "gru, positions first": lambda x: nn.GRU(6, 4).double()(x.transpose(0, 1))[0].transpose(0, 1),
    "attention": lambda x: nn.MultiheadAttention(6, 2, batch_first=True).double()(x, x, x)[0],
    "encoder": lambda x: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).double()(x),
}


@pytest.mark.parametrize("function", MODELS.values(), ids=MODELS)
def test_layers_keep_examples_apart(function):
    assert followed(function, lot(4, 6))[1] == Rows(0)

"""Every layer's rule against a per-example autograd loop in float64."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from terrine.errors import InvalidArgument
from terrine.sgd.clipping import Clipper, Flat, clipped_sum, contribution, convolved
from terrine.sgd.clipping.contribution import Lookup

from .helpers import Criterion
from .oracle import assert_same, loop

N = 5
CLIP = 0.7


class Net(nn.Module):
    """Any forward pass over any parts."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


class Adapter(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


attend = functional.scaled_dot_product_attention


def heads(x):
    """Queries, keys and values for two heads."""
    return x.view(len(x), -1, 3, 2, x.shape[-1] // 6).permute(2, 0, 3, 1, 4)


def raw(*shape):
    return nn.Parameter(0.3 * torch.randn(shape))


def words(*shape):
    return torch.randint(11, shape)


@Criterion
def criterion(out, y):
    """One loss for each example, curved, and no two examples alike."""
    flat = out.flatten(1)
    weights = torch.linspace(-1, 1, flat.shape[1], dtype=out.dtype)
    return (flat * weights).sum(1).tanh() * (1 + y) + flat.square().mean(1)


def _chain(w, use):
    """A use of every link of a chain in which each link is made from all before."""
    centred = w - w.mean()
    scaled = centred / centred.norm() + w
    return use(w) + use(centred).tanh() + use(scaled * centred)


R = torch.randn
CASES = {
    # linear maps
    "mlp": lambda: (nn.Sequential(nn.Linear(6, 7), nn.ReLU(inplace=True), nn.Linear(7, 3, bias=False)), R(N, 6)),
    "sequence": lambda: (nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)), R(N, 4, 6)),
    "sequence as long as the lot": lambda: (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5)), R(N, N, 6)),
    "long sequence": lambda: (nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), R(N, 40, 2)),
    "wide features": lambda: (nn.Linear(4_500, 2), R(1_000, 4_500)),
    "bilinear": lambda: (Net(lambda s, x: s.b(x, x.tanh()), b=nn.Bilinear(6, 6, 3)), R(N, 6)),
    "matmul": lambda: (Net(lambda s, x: (x @ s.w).tanh() @ s.w.T, w=raw(6, 3)), R(N, 4, 6)),
    "addmm": lambda: (
        Net(lambda s, x: torch.addmm(s.b, x.view(-1, 6), s.w).view(-1, 4, 3), w=raw(6, 3), b=raw(3)),
        R(N, 4, 6),
    ),
    "einsum, no rule": lambda: (Net(lambda s, x: torch.einsum("btd,de->bte", x, s.w), w=raw(6, 3)), R(N, 4, 6)),
    # convolutions
    "conv, groups, dilation": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 6, 3, stride=2, groups=2, dilation=2)),
        R(N, 3, 9, 9),
    ),
    "conv, same and circular": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 4, padding="same"), nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular")),
        R(N, 3, 9, 8),
    ),
    "conv, one channel, view": lambda: (
        Net(lambda s, x: s.l(s.c(x).view(x.shape[0], -1)), c=nn.Conv2d(1, 4, 3), l=nn.Linear(64, 3)),
        R(N, 1, 6, 6),
    ),
    "conv, deep": lambda: (nn.Sequential(nn.Conv2d(24, 40, 2), nn.Tanh(), nn.Conv2d(40, 30, 1)), R(N, 24, 3, 3)),
    "conv on one pixel": lambda: (
        nn.Sequential(nn.Conv2d(3, 16, 1), nn.Tanh(), nn.Conv2d(16, 8, 1, stride=(4, 7), padding=(1, 0))),
        R(N, 3, 1, 1),
    ),
    "conv1d": lambda: (
        nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 2, 3, stride=2)),
        R(N, 3, 9),
    ),
    "conv3d": lambda: (nn.Sequential(nn.Conv3d(2, 4, 2, padding=1), nn.Tanh(), nn.Conv3d(4, 2, 2)), R(N, 2, 4, 4, 3)),
    "transposed conv": lambda: (
        nn.Sequential(
            nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2), nn.Tanh(), nn.ConvTranspose2d(6, 2, 2)
        ),
        R(N, 4, 4, 5),
    ),
    "transposed conv1d": lambda: (nn.ConvTranspose1d(4, 6, 3, stride=2, dilation=2), R(N, 4, 4)),
    "transposed conv3d": lambda: (nn.ConvTranspose3d(2, 3, 2, stride=2), R(N, 2, 2, 3, 2)),
    "transposed conv, a stride or more left over": lambda: (
        nn.Sequential(
            nn.ConvTranspose2d(3, 4, 2, padding=1, dilation=(3, 2), output_padding=(2, 1)),
            nn.Tanh(),
            nn.ConvTranspose2d(4, 4, 2, dilation=3, output_padding=2, groups=2),
        ),
        R(N, 3, 4, 5),
    ),
    "conv on folded examples": lambda: (
        Net(lambda s, x: s.c(x.reshape(-1, 1, 5, 5)).reshape(x.shape[0], -1), c=nn.Conv2d(1, 2, 3)),
        R(N, 3, 5, 5),
    ),
    "conv used twice": lambda: (Net(lambda s, x: s.c(s.c(x).tanh()), c=nn.Conv2d(2, 2, 3, padding=1)), R(N, 2, 5, 5)),
    # tables
    "embedding": lambda: (nn.Sequential(nn.Embedding(11, 6, padding_idx=2), nn.Linear(6, 3)), words(N, 7)),
    "embedding, one token": lambda: (nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 3)), words(N)),
    "bag, mean": lambda: (nn.Sequential(nn.EmbeddingBag(11, 6), nn.Linear(6, 3)), words(N, 7)),
    "bag, sum, the same words again": lambda: (
        nn.Sequential(nn.EmbeddingBag(11, 6, mode="sum"), nn.Linear(6, 3)),
        words(N, 30) % 4,
    ),
    "bag, sum and padding": lambda: (
        nn.Sequential(nn.EmbeddingBag(11, 6, mode="sum", padding_idx=1), nn.Linear(6, 3)),
        words(N, 7),
    ),
    "bag, mean and padding": lambda: (
        nn.EmbeddingBag(11, 6, padding_idx=1),
        torch.cat([words(N, 5), torch.full((N, 1), 3)], 1),
    ),
    "bag, mean, one of padding alone": lambda: (
        nn.EmbeddingBag(11, 6, padding_idx=1),
        torch.cat([words(N - 1, 5), torch.ones(1, 5, dtype=torch.long)]),
    ),
    "positions by table": lambda: (
        Net(lambda s, x: s.l(x + s.p(torch.arange(x.shape[1]))), l=nn.Linear(6, 3), p=nn.Embedding(9, 6)),
        R(N, N, 6),
    ),
    "fixed kinds for every example": lambda: (
        Net(
            lambda s, x: s.e(x) + s.k(torch.zeros(1, 7, dtype=torch.long).expand(x.shape[0], -1)),
            e=nn.Embedding(11, 6),
            k=nn.Embedding(2, 6),
        ),
        words(N, 7),
    ),
    "tied to the output": lambda: (
        Net(lambda s, x: functional.linear(s.e(x).tanh(), s.e.weight), e=nn.Embedding(11, 6)),
        words(N, 7),
    ),
    # normalisations
    "group and instance norm, prelu": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.PReLU(4), nn.PReLU()
        ),
        R(N, 3, 6, 6),
    ),
    "layer and rms norm": lambda: (nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.RMSNorm(8)), R(N, 4, 6)),
    "layer norm over two dimensions": lambda: (nn.LayerNorm((4, 6)), R(N, 4, 6)),
    "layer norm without bias": lambda: (nn.LayerNorm(6, bias=False), R(N, 6)),
    # attention
    "attention": lambda: (
        Net(lambda s, x: s.m(x, x, x)[0], m=nn.MultiheadAttention(8, 2, batch_first=True)),
        R(N, 4, 8),
    ),
    "attention, positions first": lambda: (
        Net(
            lambda s, x: s.m(*[x.transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1),
            m=nn.MultiheadAttention(8, 2),
        ),
        R(N, N, 8),
    ),
    "attention across, bias and zero keys": lambda: (
        Net(
            lambda s, x: s.m(x[:, :2], x, x)[0],
            m=nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True),
        ),
        R(N, 4, 8),
    ),
    "attention, other widths": lambda: (
        Net(
            lambda s, x: s.m(x, x[:, :, :5], x[:, :, :3], need_weights=False)[0],
            m=nn.MultiheadAttention(8, 2, kdim=5, vdim=3, batch_first=True),
        ),
        R(N, 4, 8),
    ),
    "attention, masked": lambda: (
        Net(
            lambda s, x: s.m(
                x, x, x, key_padding_mask=x[:, :, 0] > 1, attn_mask=torch.ones(4, 4, dtype=torch.bool).triu(2)
            )[0],
            m=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        R(N, 4, 8).clamp(max=1),
    ),
    "encoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2),
        R(N, N, 8),
    ),
    "encoder in evaluation mode": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2).eval(),
        R(N, 4, 8),
    ),
    "encoder, positions first": lambda: (
        Net(lambda s, x: s.t(x.transpose(0, 1)).transpose(0, 1), t=nn.TransformerEncoderLayer(8, 2, 16, 0.0)),
        R(N, N, 8),
    ),
    "encoder and decoder": lambda: (
        Net(lambda s, x: s.t(x, x[:, :3]), t=nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)),
        R(N, 4, 8),
    ),
    # recurrent
    "lstm, two layers, both ways": lambda: (
        Net(lambda s, x: s.r(x)[0], r=nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)),
        R(N, 4, 6),
    ),
    "lstm, last state": lambda: (Net(lambda s, x: s.r(x)[1][0][-1], r=nn.LSTM(6, 5, 2, batch_first=True)), R(N, N, 6)),
    "lstm, projection": lambda: (
        Net(lambda s, x: s.r(x.transpose(0, 1))[0].transpose(0, 1), r=nn.LSTM(6, 5, proj_size=3)),
        R(N, N, 6),
    ),
    "gru": lambda: (Net(lambda s, x: s.r(x)[0], r=nn.GRU(6, 5, batch_first=True, bias=False)), R(N, 4, 6)),
    "rnn": lambda: (Net(lambda s, x: s.r(x)[0], r=nn.RNN(6, 5, batch_first=True, nonlinearity="relu")), R(N, 4, 6)),
    "gru cell": lambda: (Net(lambda s, x: s.r(x[:, 1], s.r(x[:, 0])), r=nn.GRUCell(6, 5)), R(N, 4, 6)),
    "lstm cell": lambda: (Net(lambda s, x: s.r(x[:, 1], s.r(x[:, 0]))[0], r=nn.LSTMCell(6, 5)), R(N, 4, 6)),
    "lstm cell, begun at zeros, sequences as long as the lot": lambda: (
        Net(lambda s, x: s.r(x[:, 0], (x.new_zeros(len(x), 5), x.new_ones(len(x), 5)))[0], r=nn.LSTMCell(6, 5)),
        R(N, N, 6),
    ),
    "attention, a bias for every head": lambda: (
        Net(lambda s, x: attend(*heads(s.l(x)), attn_mask=s.b), l=nn.Linear(6, 18), b=raw(2, 4, 4)),
        R(N, 4, 6),
    ),
    "attention, one bias": lambda: (
        Net(lambda s, x: attend(*heads(s.l(x)), s.b), l=nn.Linear(6, 18), b=raw(1, 4)),
        R(N, 4, 6),
    ),
    "attention, latents": lambda: (
        Net(
            lambda s, x: attend(s.q.expand(len(x), -1, -1, -1), *heads(s.l(x))[1:]),
            l=nn.Linear(6, 18),
            q=raw(1, 2, 5, 3),
        ),
        R(N, 4, 6),
    ),
    "attention, keys and values of all": lambda: (
        Net(lambda s, x: attend(heads(s.l(x))[0], s.k, s.v), l=nn.Linear(6, 18), k=raw(1, 2, 5, 3), v=raw(1, 2, 5, 2)),
        R(N, 4, 6),
    ),
    # raw parameters
    "class token and positions": lambda: (
        Net(
            lambda s, x: s.l(torch.cat([s.c.expand(x.shape[0], -1, -1), x], 1) + s.p),
            l=nn.Linear(6, 3),
            c=raw(1, 1, 6),
            p=raw(1, 5, 6),
        ),
        R(N, 4, 6),
    ),
    "repeated token, sliced positions": lambda: (
        Net(
            lambda s, x: s.l(torch.cat([s.c.repeat(x.shape[0], 1, 1), x], 1) + s.p[:, :5]),
            l=nn.Linear(6, 3),
            c=raw(1, 1, 6),
            p=raw(1, 9, 6),
        ),
        R(N, 4, 6),
    ),
    "scale and shift": lambda: (Net(lambda s, x: s.l(x) * s.g + s.b, l=nn.Linear(6, 6), g=raw(6), b=raw()), R(N, N, 6)),
    "temperature": lambda: (Net(lambda s, x: s.l(x) * s.t.exp(), l=nn.Linear(6, 3), t=raw()), R(N, 6)),
    "channel scale": lambda: (
        Net(lambda s, x: s.c(x) / (1 + s.g.view(1, -1, 1, 1).square()), c=nn.Conv2d(2, 3, 2), g=raw(3)),
        R(N, 2, 4, 4),
    ),
    "weight norm": lambda: (torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), R(N, 6)),
    "weight from which its mean is taken": lambda: (
        Net(lambda s, x: functional.linear(x, s.w - s.w.mean(1, keepdim=True)), w=raw(3, 6)),
        R(N, 6),
    ),
    "weight over its deviation": lambda: (Net(lambda s, x: x @ (s.w / s.w.std()), w=raw(6, 3)), R(N, 4, 6)),
    "weight over its norm": lambda: (Net(lambda s, x: functional.linear(x, s.w / s.w.norm()), w=raw(3, 6)), R(N, 6)),
    "weight with a gate": lambda: (
        Net(lambda s, x: functional.linear(x, s.w * s.w.sigmoid()) + x @ s.w.T, w=raw(3, 6)),
        R(N, 6),
    ),
    "weight through a view twice": lambda: (
        Net(lambda s, x: functional.linear(x, s.w[:3] * s.w[3:].tanh() + s.w[:3]), w=raw(6, 6)),
        R(N, 6),
    ),
    "weight changed in place": lambda: (
        Net(lambda s, x: functional.linear(x, s.w.sin().mul_(s.w)), w=raw(3, 6)),
        R(N, 6),
    ),
    "standardised convolution": lambda: (
        Net(
            lambda s, x: functional.conv2d(
                x, (s.w - s.w.mean((1, 2, 3), keepdim=True)) / s.w.std((1, 2, 3), keepdim=True)
            ),
            w=raw(3, 2, 3, 3),
        ),
        R(N, 2, 5, 5),
    ),
    "spectral norm": lambda: (
        torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)).eval(),
        R(N, 6),
    ),
    "chain over its own parts": lambda: (
        Net(lambda s, x: _chain(s.w, lambda w: functional.linear(x, w)), w=raw(3, 6)),
        R(N, 6),
    ),
    # sharing and freezing
    "used twice": lambda: (Net(lambda s, x: s.l(s.l(x).tanh()), l=nn.Linear(6, 6)), R(N, 6)),
    "two views of one example": lambda: (Net(lambda s, x: s.l(x[:, 0]) * s.l(x[:, 1]), l=nn.Linear(6, 3)), R(N, 2, 6)),
    "two inputs": lambda: (Net(lambda s, a, b: s.l(a) + s.l(b), l=nn.Linear(6, 3)), (R(N, 6), R(N, 6))),
    "adapter": lambda: (Adapter(), R(N, 6)),
    "unused": lambda: (Net(lambda s, x: s.l(x), l=nn.Linear(6, 3), u=nn.Linear(3, 3)), R(N, 6)),
    "residual": lambda: (Net(lambda s, x: s.a(x) + s.b(x) + x, a=nn.Linear(6, 6), b=nn.Linear(6, 6)), R(N, 6)),
}


def prepared(case):
    torch.manual_seed(3)
    model, x = case()
    x = x if isinstance(x, tuple) else (x,)
    x = tuple(t.double() if t.is_floating_point() else t for t in x)
    y = torch.linspace(0, 1, len(x[0])).double()
    return model.double(), x if len(x) > 1 else x[0], y


@pytest.mark.parametrize("name", CASES)
def test_the_rule_is_the_loop(name, caplog):
    model, x, y = prepared(CASES[name])
    expected = loop(model, criterion, (x, y), CLIP)
    with caplog.at_level(logging.WARNING, "terrine.sgd"):
        assert_same(clipped_sum(model, criterion, (x, y), clip=CLIP), expected)
        assert_same(clipped_sum(model, criterion, (x, y), clip=CLIP, microbatch=2 if len(y) < 10 else 300), expected)
    assert not [record for record in caplog.records if "slow" in record.message], "took the slow way"


def _unfollowed(s, x):
    """x * w in a way that no rule follows."""
    return torch.stack([x, s.w.expand_as(x)], 1).prod(1)


def test_what_all_examples_share_is_no_part_of_the_lot():
    """A tensor as long as one lot and not as the next would be its examples' rows in one and shared in the other."""
    model = Net(lambda s, x, shared: _unfollowed(s, x) @ shared, w=raw(6)).double()
    x, y = R(N, 6).double(), torch.linspace(0, 1, N).double()
    with pytest.raises(InvalidArgument, match="as a buffer"):
        clipped_sum(model, criterion, ((x, R(6, 11).double()), y), clip=CLIP)


def test_weighted_bags():
    torch.manual_seed(4)
    model = Net(lambda s, t, w: s.b(t, per_sample_weights=w), b=nn.EmbeddingBag(11, 6, mode="sum")).double()
    x, y = (words(N, 7), R(N, 7).double()), torch.linspace(0, 1, N).double()
    assert_same(clipped_sum(model, criterion, (x, y), clip=CLIP), loop(model, criterion, (x, y), CLIP))


def test_bags_between_offsets_are_no_batch():
    """Rows of no common number: bags are padded, with weights of 0, instead."""
    with pytest.raises(InvalidArgument, match="counts examples"):
        clipped_sum(nn.EmbeddingBag(11, 6), criterion, ((words(12), torch.tensor([0, 3, 7])), R(3)), clip=CLIP)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_take_the_slow_exact_way(kind):
    def forward(s, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(s.l(x), lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(s.r(packed)[0], batch_first=True)[0].sum(1)

    torch.manual_seed(4)
    model = Net(forward, l=nn.Linear(6, 3), r=kind(3, 4, batch_first=True)).double()
    x, y = (R(N, 6, 6).double(), torch.tensor([6, 3, 1, 2, 5])), torch.linspace(0, 1, N).double()
    found = clipped_sum(model, criterion, (x, y), clip=CLIP, reads_values=True)  # torch itself reads the lengths
    assert_same(found, loop(model, criterion, (x, y), CLIP))


def test_an_input_changed_in_place_after_its_use_is_refused_as_autograd_does():
    def forward(s, x):
        hidden = x * 2
        out = s.l(hidden)
        hidden.zero_()
        return out

    model = Net(forward, l=nn.Linear(6, 3)).double()
    with pytest.raises(InvalidArgument, match="inplace"):
        clipped_sum(model, criterion, (R(N, 6).double(), torch.linspace(0, 1, N).double()), clip=CLIP)


SMALL = st.integers(1, 3)
WAYS = {
    "by shape": {},
    "direct": {"prefers_direct": lambda *_: True},
    "direct, one example at a time": {"prefers_direct": lambda *_: True, "_AT_ONCE": 1},
    "ghost": {"prefers_direct": lambda *_: False},
    "ghost, one example at a time": {"prefers_direct": lambda *_: False, "_AT_ONCE": 1},
}  # what forces each way a convolution can take


@settings(max_examples=90, deadline=None)
@given(st.data(), st.sampled_from(sorted(WAYS)))
def test_convolutions_of_every_shape(data, way):
    dims = data.draw(st.integers(1, 3))
    groups = data.draw(st.sampled_from([1, 1, 2, 3]))
    each, out = data.draw(SMALL) * groups, data.draw(SMALL) * groups
    kernel, stride, dilation = ([data.draw(SMALL) for _ in range(dims)] for _ in range(3))
    padding = [data.draw(st.integers(0, 2)) for _ in range(dims)]
    bias, transposed = data.draw(st.booleans()), data.draw(st.booleans())
    sizes = [d * (k - 1) + 1 + data.draw(st.integers(0, 4)) for d, k in zip(dilation, kernel, strict=True)]
    kind = getattr(nn, f"Conv{'Transpose' * transposed}{dims}d")
    if transposed:
        padding = [min(p, d * (k - 1) // 2) for p, d, k in zip(padding, dilation, kernel, strict=True)]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    model = kind(each, out, kernel, stride, padding, dilation=tuple(dilation), groups=groups, bias=bias).double()
    x, y = R(3, each, *sizes).double(), torch.linspace(0, 1, 3).double()
    with mock.patch.multiple(convolved, **WAYS[way]) if WAYS[way] else nullcontext():
        clipped = clipped_sum(model, criterion, (x, y), clip=CLIP)
    assert_same(clipped, loop(model, criterion, (x, y), CLIP))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.integers(1, 4), max_size=2),
    st.integers(1, 5),
    st.integers(1, 5),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([True, False, None]),
    st.integers(0, 99),
)
def test_linear_maps_of_every_shape_used_any_number_of_times(n, positions, width, height, bias, uses, direct, seed):
    torch.manual_seed(seed)
    layers = {"a": nn.Linear(width, height, bias=bias), "b": nn.Linear(height, width)}

    def forward(s, x):
        for _ in range(uses):
            x = s.b(s.a(x).tanh()) + x
        return x

    model = Net(forward, **layers).double()
    x, y = R(n, *positions, width).double(), torch.linspace(0, 1, n).double()
    prefers = contribution.prefers_direct if direct is None else lambda *_: direct
    with mock.patch.object(contribution, "prefers_direct", prefers):
        clipped = clipped_sum(model, criterion, (x, y), clip=CLIP)
    assert_same(clipped, loop(model, criterion, (x, y), CLIP))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from(["sum", "mean"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_tables_of_every_shape(n, length, width, mode, tied, seed):
    torch.manual_seed(seed)
    x, y = words(n, length), torch.linspace(0, 1, n).double()
    table = nn.Embedding(11, width, padding_idx=4)
    bag = nn.EmbeddingBag(11, width, mode=mode)
    if tied:
        bag.weight = table.weight
    model = Net(lambda s, x: s.t(x).sum(1) * s.b(x), t=table, b=bag).double()
    assert_same(clipped_sum(model, criterion, (x, y), clip=CLIP), loop(model, criterion, (x, y), CLIP))


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 5), st.sampled_from([0, 1, 2]), st.integers(0, 99))
def test_examples_are_followed_through_any_order_of_dimensions(n, place, seed):
    """(n, n, n): sizes alone cannot tell where the examples are."""
    torch.manual_seed(seed)

    def forward(s, x):
        moved = x.movedim(0, place) if place < 2 else x.permute(1, 2, 0).unsqueeze(-1).expand(-1, -1, -1, n)
        out = s.l(moved).tanh() * s.g
        return (out.movedim(place, 0)).reshape(len(x), -1) if place < 2 else out.permute(2, 0, 1, 3).flatten(1)

    model = Net(forward, l=nn.Linear(n, n), g=raw(n)).double()
    x, y = R(n, n, n).double(), torch.linspace(0, 1, n).double()
    expected = loop(
        Net(_front, l=model.l, g=model.g, place=None) if place < 2 else Net(_spread(n), l=model.l, g=model.g),
        criterion,
        (x, y),
        CLIP,
    )
    assert_same(clipped_sum(model, criterion, (x, y), clip=CLIP, microbatch=n), expected)


def _front(s, x):
    return (s.l(x).tanh() * s.g).flatten(1)


def _spread(n):
    return lambda s, x: (s.l(x.unsqueeze(-1).expand(-1, -1, -1, n)).tanh() * s.g).flatten(1)


# -- mutants: each is a known bug, built on purpose; the comparison must catch it -------------------------


def _caught(result, expected):
    with pytest.raises(AssertionError):
        assert_same(result, expected)


def test_mutant_clip_after_averaging_is_caught():
    model, x, y = prepared(CASES["mlp"])
    whole = torch.autograd.grad(criterion(model(x), y).sum(), list(model.parameters()))
    norm = torch.sqrt(sum(g.square().sum() for g in whole))
    names = [name for name, _ in model.named_parameters()]
    result = clipped_sum(model, criterion, (x, y), clip=CLIP)
    mutant = {name: g * min(1.0, CLIP / float(norm)) for name, g in zip(names, whole, strict=True)}
    _caught(result._replace(sums=mutant), loop(model, criterion, (x, y), CLIP))


def test_mutant_norms_without_cross_terms_are_caught(monkeypatch):
    from terrine.sgd.clipping import parameter_view

    class Apart(contribution.Outer):
        def squares(self):
            first, second = self.inputs.split(1, 1), self.gradients.split(1, 1)
            pairs = zip(first, second, strict=True)
            return sum(contribution.Outer(a, b, self.shape).squares() for a, b in pairs)

    original = parameter_view.combined

    def combined(parts):
        total = original(parts)
        return Apart(total.inputs, total.gradients, total.shape) if isinstance(total, contribution.Outer) else total

    model, x, y = prepared(CASES["used twice"])
    expected = loop(model, criterion, (x, y), CLIP)
    assert_same(clipped_sum(model, criterion, (x, y), clip=CLIP), expected)
    monkeypatch.setattr(parameter_view, "combined", combined)
    _caught(clipped_sum(model, criterion, (x, y), clip=CLIP), expected)


def test_mutant_bias_left_out_of_the_norm_is_caught():
    model, x, y = prepared(CASES["mlp"])
    expected = loop(model, criterion, (x, y), CLIP)
    model[0].bias.requires_grad_(False)
    without = clipped_sum(model, criterion, (x, y), clip=CLIP)
    _caught(without._replace(sums={**without.sums, "0.bias": expected[0]["0.bias"]}), expected)


@pytest.mark.parametrize("words_each", [2, 300])
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_bags_over_a_large_table_in_parts(words_each, kind, tolerance):
    """Few tokens go to their rows, many make all rows; in parts they add up to the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(600, 6, mode="sum"), nn.Linear(6, 3)).to(kind)
    x, y = torch.randint(600, (8, words_each)), torch.linspace(0, 1, 8).to(kind)
    assert_same(
        clipped_sum(model, criterion, (x, y), clip=CLIP, microbatch=3), loop(model, criterion, (x, y), CLIP), tolerance
    )


@pytest.mark.parametrize("words_each", [2, 300])
@pytest.mark.parametrize("vocabulary", [3, 500])
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_tables_in_parts(words_each, vocabulary, kind, tolerance):
    """Words that an example has again and again, or never; few go to their rows, many make all rows at once."""
    torch.manual_seed(0)
    model = Net(lambda s, x: s.out(s.table(x).tanh().mean(1)), table=nn.Embedding(500, 6), out=nn.Linear(6, 3)).to(kind)
    x, y = torch.randint(vocabulary, (8, words_each)), torch.linspace(0, 1, 8).to(kind)
    assert_same(
        clipped_sum(model, criterion, (x, y), clip=CLIP, microbatch=3), loop(model, criterion, (x, y), CLIP), tolerance
    )


def test_rows_that_cancel_leave_no_norm():
    """Opposite gradients of one word: nothing is left, and nothing is subtracted to find that out."""
    gradients = torch.randn(1, 1, 5) * torch.tensor([1e4, -1e4, 1.0]).view(1, 3, 1)
    part = Lookup(torch.tensor([[2, 2, 0]]), gradients, (4, 5))
    assert torch.allclose(part.squares(), gradients[:, 2].square().sum(1), rtol=1e-6)


def test_what_attention_leaves_out_at_random_is_left_out_of_the_bias_as_well():
    torch.manual_seed(3)
    model = Net(lambda s, x: attend(*heads(s.l(x)), s.b, 0.5), l=nn.Linear(6, 18), b=raw(2, 4, 4)).double()
    x = torch.randn(1, 4, 6, dtype=torch.float64)
    torch.manual_seed(7)
    found = Clipper(model, criterion, microbatch=1).add_up((x, torch.zeros(1)), Flat(1e6))
    torch.manual_seed(7)
    criterion(model(x), torch.zeros(1)).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.sums[name], parameter.grad, msg=name)

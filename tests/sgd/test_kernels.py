"""Compiled kernels in float32 against the obvious sums in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same, loop
from torch import nn
from torch.nn import functional

from terrine.sgd import kernels
from terrine.sgd.clipping import clipped_sum
from terrine.sgd.kernels import Image, outer, slices, team
from terrine.sgd.kernels.tiles import TILES
from terrine.sgd.kernels.vectors import LANES

SIZES = st.sampled_from([1, 2, 3, LANES - 1, LANES, LANES + 1, 3 * LANES, 5 * LANES + 3])


def patches(image: Image) -> torch.Tensor:
    """Every patch of an image, (n, positions, lines * run), in float64: cut out one by one."""
    (top, bottom), (left, right) = image.padding
    padded = functional.pad(image.pixels.double(), (0, 0, left, right, top, bottom))
    rows, columns = image.places
    lines = [image.dilation * a for a in range(image.kernel[0])]
    found = [
        padded[:, [r * image.stride[0] + a for a in lines]][:, :, c * image.stride[1] :][:, :, : image.kernel[1]]
        for r in range(rows)
        for c in range(columns)
    ]
    return torch.stack([one.flatten(1) for one in found], 1)


@st.composite
def images(draw):
    kernel, stride = ((draw(st.integers(1, 4)), draw(st.integers(1, 3))) for _ in range(2))
    padding = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(2))
    dilation, channels = draw(st.integers(1, 2)), draw(SIZES)
    sizes = (kernel[0] - 1) * dilation + draw(st.integers(1, 4)), kernel[1] + draw(st.integers(0, 4))
    torch.manual_seed(draw(st.integers(0, 99)))
    return Image(torch.randn(draw(st.integers(1, 4)), *sizes, channels), kernel, stride, padding, dilation)


@settings(max_examples=120, deadline=None)
@given(images(), SIZES, st.sampled_from([1, 2]))
def test_norms_gradients_and_sums_of_every_image(image, outputs, threads):
    n, laid = len(image.pixels), patches(image)
    out = torch.randn(n, laid.shape[1], outputs)
    wanted = torch.einsum("npe,npk->nek", out.double(), laid)
    rows, others = torch.full((2, n, laid.shape[2] * outputs), torch.nan)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (squares, sums), (turned, also, too) = image.squares(out), outer.gradients(image, out, rows)
        as_well, besides = slices.gradients(image, out, others)
    finally:
        torch.set_num_threads(before)
    norms = wanted.square().sum((1, 2))
    alone = (laid.norm(dim=2) * out.double().norm(dim=2)).sum(1)  # what may be lost where terms cancel: cancelling.py
    lost = 2.0**-24 * (kernels.steps(laid.shape[2], outputs) + laid.shape[1]) * alone.square()
    for found in (squares, also, as_well):
        assert bool(((found.double() - norms).abs() <= 1e-5 * norms + lost + 1e-9).all())
    for found in (sums, too, besides):
        torch.testing.assert_close(found.double(), out.double().sum(1), rtol=1e-5, atol=1e-5)
    made = rows.view(n, -1, outputs).transpose(1, 2) if turned else rows.view(n, outputs, -1)
    for found in (made, others.view(n, outputs, -1)):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kernel", [(1, 1), (2, 3)])
@pytest.mark.parametrize("positions", [31, 32, 33, 48, 61])
@pytest.mark.parametrize(("channels", "outputs"), [(1, 600), (65, 7), (256, 64), (257, 255)])
def test_norms_of_many_positions_of_every_image(kernel, positions, channels, outputs):
    """Panels and tiles that are whole, and those that are not; runs of less and of more numbers than a panel has."""
    torch.manual_seed(positions)
    image = Image(torch.randn(3, kernel[0], positions + kernel[1] - 1, channels), kernel)
    laid, out = patches(image), torch.randn(3, positions, 2 * outputs)[:, :, :outputs]
    squares, sums = image.squares(out)
    wanted = torch.einsum("npe,npk->nek", out.double(), laid).square().sum((1, 2))
    torch.testing.assert_close(squares.double(), wanted, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(sums.double(), out.double().sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("pixels", "out"),
    [
        (torch.zeros(2, 1, 9, 5), torch.zeros(2, 8, 3)),
        (torch.zeros(2, 1, 9, 5), torch.zeros(3, 9, 3)),
        (torch.zeros(2, 1, 5, 9).transpose(2, 3), torch.zeros(2, 9, 3)),
        (torch.zeros(2, 1, 9, 5), torch.zeros(2, 3, 9).transpose(1, 2)),
    ],
)
def test_what_does_not_fit_is_never_read(pixels, out):
    with pytest.raises(ValueError, match="want"):
        Image(pixels).squares(out)
    with pytest.raises(ValueError, match="want"):
        Image(pixels).gradients(out, torch.empty(len(out), 15))
    with pytest.raises(ValueError, match="want"):
        Image(pixels).weighted(out, torch.ones(len(out)))


@settings(max_examples=80, deadline=None)
@given(images(), SIZES, st.sampled_from([1, 2]), st.sampled_from([1, 300, 1 << 15]))
def test_weighted_sums_of_every_image(image, outputs, threads, cached):
    """However few examples are taken at a time."""
    laid, before = patches(image), torch.get_num_threads()
    out, factor = torch.randn(len(laid), laid.shape[1], outputs), torch.rand(len(laid))
    torch.set_num_threads(threads)
    try:
        with mock.patch("terrine.sgd.kernels.slices._CACHED", cached):
            found = image.weighted(out, factor)
    finally:
        torch.set_num_threads(before)
    wanted = torch.einsum("n,npe,npk->ek", factor.double(), out.double(), laid)
    torch.testing.assert_close(found.view(outputs, -1).double(), wanted, rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match="want a number for each"):
        image.weighted(out, torch.ones(len(laid) + 1))


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_laid_out_stays_in_its_room(n):
    """Fewer examples than threads as well: every thread has a place of its own."""
    rooms = []

    def room(_, shape, like):
        size = math.prod(shape)
        rooms.append((torch.full((3 * size,), 7.0), size))
        return rooms[-1][0][:size].view(shape)

    image, outputs = Image(torch.randn(n, 5, 6, 5 * LANES + 3), (3, 2), padding=((1, 0), (0, 1))), 2 * LANES + 5
    out = torch.randn(n, image.places[0] * image.places[1], outputs)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with mock.patch("terrine.sgd.kernels.slices.scratch", room):
            slices.gradients(image, out, torch.empty(n, image.lines * image.run * outputs))
            slices.summed(image, out, torch.ones(n))
    finally:
        torch.set_num_threads(before)
    assert len(rooms) == 3
    assert all(bool((memory[size:] == 7.0).all()) for memory, size in rooms)


def test_numbers_are_laid_out_where_each_is_multiplied_often():
    wide, narrow, single = (Image(torch.zeros(1, 9, 9, c), (k, k)) for c, k in ((64, 3), (3, 3), (16, 1)))
    assert wide.prefers_slices(64)
    assert not narrow.prefers_slices(64)
    assert not single.prefers_slices(64)


@settings(max_examples=80, deadline=None)
@given(images(), SIZES, st.sampled_from([1, 2]), st.sampled_from([1, 300, 1 << 16]))
def test_sums_over_all_examples(image, outputs, threads, cached):
    """However few of them are taken at a time; what has a frame is refused."""
    image, before = replace(image, padding=((0, 0), (0, 0))), torch.get_num_threads()
    laid = patches(image)
    out = torch.randn(len(laid), laid.shape[1], outputs)
    torch.set_num_threads(threads)
    try:
        with mock.patch("terrine.sgd.kernels.outer._CACHED", cached):
            turned, found = image.summed(out)
    finally:
        torch.set_num_threads(before)
    found = found.view(-1, outputs).t() if turned else found.view(outputs, -1)
    torch.testing.assert_close(found.double(), torch.einsum("npe,npk->ek", out.double(), laid), rtol=1e-5, atol=1e-4)
    padded = replace(image, padding=((image.stride[0], 0), (0, 0)))
    out = torch.zeros(len(laid), padded.places[0] * padded.places[1], outputs)
    with pytest.raises(ValueError, match="want none"):
        padded.summed(out)


@pytest.mark.parametrize("width", [256 * LANES - 1, 256 * LANES, 70_001])
def test_wide_rows_of_many_positions_need_no_gradients(width):
    """A vocabulary's worth of outputs: the error that rounding could make is still known to be small."""
    torch.manual_seed(0)
    inputs, out = torch.randn(2, 1, 60, 5), torch.randn(2, 60, width)
    with mock.patch.object(Image, "gradients", side_effect=AssertionError):
        squares, _ = Image(inputs).squares(out)
    wanted = torch.einsum("npe,npk->nek", out.double(), inputs[:, 0].double()).square().sum((1, 2))
    torch.testing.assert_close(squares.double(), wanted, rtol=1e-5, atol=0.0)


def test_gradients_have_their_place():
    with pytest.raises(ValueError, match="want"):
        Image(torch.zeros(2, 1, 9, 5)).gradients(torch.zeros(2, 9, 3), torch.empty(2, 14))


@pytest.mark.parametrize("tile", range(len(TILES)))
def test_every_tile(tile):
    """Whatever is chosen by its time is right: each tile alone, with and without empty lanes."""
    vectors, high = TILES[tile]
    for channels, outputs in ((vectors * LANES, high), (vectors * LANES + 5, 2 * high + 1), (3, 1)):
        torch.manual_seed(0)
        image, out = Image(torch.randn(2, 1, 7, channels)), torch.randn(2, 7, outputs)
        rows, others = torch.full((2, 2, channels * outputs), torch.nan)
        with mock.patch("terrine.sgd.kernels.outer.fastest", return_value=(0.0, tile)):
            turned, squares, _ = outer.gradients(image, out, rows)
            also, total = image.summed(out)
        with mock.patch("terrine.sgd.kernels.slices.fastest", return_value=(0.0, tile)):
            as_well, _ = slices.gradients(image, out, others)
            weighted = slices.summed(image, out, torch.ones(2))
        assert not turned
        assert not also
        wanted = torch.einsum("npe,npc->nec", out.double(), image.pixels[:, 0].double())
        for found in (rows, others):
            torch.testing.assert_close(found.view(2, outputs, channels).double(), wanted, rtol=1e-5, atol=1e-5)
        for found in (squares, as_well):
            torch.testing.assert_close(found.double(), wanted.square().sum((1, 2)), rtol=1e-5, atol=1e-6)
        for found in (total, weighted):
            torch.testing.assert_close(found.view(outputs, channels).double(), wanted.sum(0), rtol=1e-5, atol=1e-5)


def test_positions_that_lie_apart():
    """(T, n, d) seen as (n, T, d), as sequences first have it, and one position seen by every example."""
    torch.manual_seed(0)
    inputs, out = torch.randn(9, 4, 21).transpose(0, 1), torch.randn(9, 4, 6).transpose(0, 1)
    for inputs_ in (inputs, torch.randn(1, 9, 21).expand(4, -1, -1)):
        wanted = torch.einsum("npe,npd->ned", out.double(), inputs_.double())
        image, rows = Image(inputs_.unsqueeze(1)), torch.empty(4, 6 * 21)
        turned, squares, sums = image.gradients(out, rows)
        made = rows.view(4, 21, 6).transpose(1, 2) if turned else rows.view(4, 6, 21)
        torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=1e-5)
        for found in (squares, image.squares(out)[0]):
            torch.testing.assert_close(found.double(), wanted.square().sum((1, 2)), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sums.double(), out.double().sum(1), rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), SIZES, SIZES, st.booleans())
def test_weights_on_features(n, width, outputs, apart):
    torch.manual_seed(n)
    features, weight = torch.randn(n, width + 7 * apart)[:, :width], torch.randn(outputs, width)
    found, squares = kernels.applied(features, weight)
    torch.testing.assert_close(found.double(), features.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squares.double(), features.double().square().sum(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [300.0, 1.0, 1e-3, 1e-5, 0.0])
def test_norms_of_what_cancels_are_never_too_small(scale):
    """Pairs of positions that take each other away but for a little: rounding must not hide the little."""
    torch.manual_seed(0)
    inputs, out = torch.randn(20, 32, 50), 1e3 * torch.randn(20, 32, 30)
    inputs, out = torch.cat([inputs, inputs], 1), torch.cat([out, -out + scale * torch.randn(20, 32, 30)], 1)
    true = torch.einsum("npe,npd->ned", out.double(), inputs.double()).square().sum((1, 2))
    found = Image(inputs.unsqueeze(1)).squares(out)[0].double()
    assert (found >= true * 0.999).all()
    alone = (out.double().norm(dim=2) * inputs.double().norm(dim=2)).sum(1)
    assert (found.sqrt() <= true.sqrt() * 1.001 + 2.0**-23 * out.shape[1] * alone).all()
    grams = [torch.bmm(one, one.transpose(1, 2)) for one in (inputs, out)]
    plain = (grams[0] * grams[1]).sum((1, 2)).double()
    assert scale > 1e-2 or not (plain >= true * 0.999).all()  # it does where nothing is done about it


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e4])
@pytest.mark.parametrize(
    ("made", "turned", "shape"),
    [
        (lambda: nn.Linear(64, 64, bias=False), True, (8, 64)),
        (lambda: nn.Linear(64, 64, bias=False), False, (8, 64)),
        (lambda: nn.Conv2d(20, 40, 3, dilation=2, bias=False), False, (20, 6, 7)),
        (lambda: nn.Conv2d(20, 40, 3, bias=False), False, (20, 4, 5)),
    ],
    ids=["strided", "linear", "dilated", "conv"],
)
def test_inputs_far_from_zero_whose_gradients_cancel(made, turned, shape, offset, dtype):
    """Outputs' gradients add up to 0 over the positions: what the inputs have in common leaves nothing behind."""
    torch.manual_seed(0)
    model, x = made().to(dtype), torch.randn(16, *shape, dtype=torch.float64).to(dtype) + offset
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if turned else x
    axes = 1 if turned or len(shape) == 2 else (2, 3)

    def criterion(out, y):
        out = out - out.mean(axes, keepdim=True)
        weights = torch.linspace(-1, 1, out[0].numel(), dtype=torch.float64).square().to(out.dtype).view(out.shape[1:])
        return 0.1 * (out * weights * (1 + y).view(-1, *[1] * len(shape))).flatten(1).sum(1)

    y = torch.linspace(0, 1, 16, dtype=dtype)
    found = clipped_sum(model, criterion, x, y, clip=1.0).norms.double()
    _, wanted = loop(model.double(), criterion, x.double(), y.double(), 1.0)
    assert (found >= wanted * 0.996).all()
    assert (found <= wanted * (1.05 if dtype is torch.float32 else 1.0001)).all()


@pytest.mark.parametrize("huge", [0, 1])
@pytest.mark.parametrize(("shape", "outputs"), [((100_000,), 1), ((40,), 300), ((6, 300), 300), ((9, 50), 7)])
def test_what_is_tiny_times_what_is_huge(shape, outputs, huge):
    """Its square may be 0 in single precision; its norm is never too small for that."""
    torch.manual_seed(0)
    scales = (3e-23, 5e17) if huge else (5e17, 3e-23)
    x, y = scales[0] * torch.randn(4, *shape), scales[1] * torch.randn(4, *shape[:-1], outputs)
    model = nn.Linear(shape[-1], outputs, bias=False)
    found = clipped_sum(model, lambda out, y: (out * y).flatten(1).sum(1), x, y, clip=1e-3)
    bounded = found.norms.double().reciprocal().mul(1e-3).clamp(max=1.0)
    _, true = loop(model.double(), lambda out, y: (out * y).flatten(1).sum(1), x.double(), y.double(), 1e-3)
    assert (bounded * true <= 1e-3 * 1.001).all()


@pytest.mark.parametrize("positions", [3, 40])
@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0)])
def test_rows_without_numbers_have_no_norm(positions, width, height):
    squares, sums = Image(torch.randn(2, 1, positions, width)).squares(torch.ones(2, positions, height))
    assert squares.tolist() == [0.0, 0.0]
    assert torch.equal(sums, torch.full((2, height), float(positions)))


def test_an_example_without_a_gradient_has_no_norm():
    torch.manual_seed(0)
    model, x, y = nn.Linear(300, 300), torch.randn(4, 6, 300), torch.tensor([0.0, 1.0, 0.0, 1.0])
    norms = clipped_sum(model, lambda out, y: out.flatten(1).sum(1) * y, x, y, clip=1.0).norms
    assert ((norms < 1e-8) == (y == 0)).all()


@pytest.mark.parametrize(("width", "height"), [(1024, 1024), (1024, 5), (3, 2048)])
def test_rows_that_lie_on_top_of_each_other_in_the_cache(width, height):
    """They are moved apart before they are multiplied."""
    torch.manual_seed(0)
    inputs, out = torch.randn(3, 37, width), torch.randn(3, 37, height)
    squares, sums = Image(inputs.unsqueeze(1)).squares(out)
    wanted = torch.einsum("npe,npd->ned", out.double(), inputs.double()).square().sum((1, 2))
    torch.testing.assert_close(squares.double(), wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(sums.double(), out.double().sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("n", [1, 3, 4, 9])
def test_weighted_sums(n, fresh):
    torch.manual_seed(0)
    rows, factor, total = torch.randn(n, 5_000), torch.rand(n), torch.randn(5_000)
    wanted = factor.double() @ rows.double() + (0.0 if fresh else total.double())
    total = total.fill_(torch.nan) if fresh else total
    kernels.add_weighted(total, rows, factor, fresh)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-5, atol=1e-5)


def test_without_torchs_threads(monkeypatch):
    """Where OpenMP is not to be had, the caller does all of it."""
    monkeypatch.setattr(team, "_together", lambda: None)
    torch.manual_seed(0)
    rows, total = torch.randn(4, 9_000), torch.empty(9_000)
    kernels.add_weighted(total, rows, torch.ones(4), True)
    torch.testing.assert_close(total, rows.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kept", [0.0, 1e30], ids=["direct", "ghost"])
@pytest.mark.parametrize(
    ("made", "shape"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 20, 3, 2, 1), nn.Tanh(), nn.Conv2d(20, 4, 2, bias=False)), (3, 9, 8)),
        (lambda: nn.Sequential(nn.Conv1d(5, 6, 4, 2, 3, dilation=2), nn.Tanh(), nn.Conv1d(6, 2, 3)), (5, 17)),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 5, 3, dilation=(2, 1), padding="same"), nn.Conv2d(5, 7, (3, 1))),
            (3, 6, 7),
        ),
        (lambda: nn.Sequential(nn.ConvTranspose2d(3, 5, 3, 2, 1), nn.ReLU(), nn.Conv2d(5, 2, 3)), (3, 5, 4)),
        (lambda: nn.Conv2d(1, 8, (3, 5), stride=(1, 2)), (1, 20, 5)),
        (lambda: nn.Sequential(nn.Conv2d(3, 1, 1), nn.Tanh(), nn.Conv2d(1, 8, (3, 5), stride=(1, 2))), (3, 20, 5)),
        (lambda: nn.Conv3d(1, 17, 3, stride=(1, 1, 5)), (1, 5, 8, 6)),
        (lambda: nn.ConvTranspose1d(5, 5, 1, dilation=3, output_padding=1), (5, 13)),
        (lambda: nn.Sequential(nn.Linear(19, 33), nn.ReLU(), nn.Linear(33, 2)), (11, 19)),
        (lambda: nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True), (6, 16)),
        (lambda: nn.GRU(7, 5, batch_first=True), (6, 7)),
    ],
    ids=[
        "conv",
        "conv1d",
        "dilated",
        "transposed",
        "column",
        "column after",
        "column in space",
        "left over",
        "linear",
        "attention",
        "gru",
    ],
)
def test_single_precision_is_the_loop_in_double(made, shape, kept, monkeypatch):
    """Float32 takes the kernels, whichever way is said to be cheap; the oracle loops in float64."""
    monkeypatch.setattr(kernels, "_CACHED", kept)
    monkeypatch.setattr(kernels, "_FAR", kept)
    torch.manual_seed(0)
    model = made()

    def criterion(output, y):  # far from its minimum, where its gradient would be a small difference of large numbers
        output = output[0] if isinstance(output, tuple) else output
        return ((output.flatten(1).tanh().mean(1) - y - 2) ** 2).mean()

    x, y = torch.randn(6, *shape), torch.linspace(0, 1, 6)
    clipped = clipped_sum(model, criterion, x, y, clip=0.5)
    sums, norms = loop(model.double(), criterion, x.double(), y.double(), 0.5)
    model.float()
    torch.testing.assert_close(clipped.norms.double(), norms, rtol=1e-4, atol=1e-6)
    for name, value in sums.items():
        torch.testing.assert_close(clipped.sums[name].double(), value, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), SIZES, st.integers(1, 3), st.booleans(), st.booleans())
def test_group_norm(n, each, groups, side, far, last):
    """Outputs, the way back and every example's gradients, against torch in float64; means may be far from 0."""
    torch.manual_seed(n)
    channels = each * groups
    pixels = torch.randn(n, channels, side * (side + 1)) + 30.0 * far
    weight, bias, gradient = torch.randn(channels), torch.randn(channels), torch.randn_like(pixels)
    module = kernels.grouping()
    if last:
        turned = pixels.mT.contiguous()
        out = torch.empty_like(turned)
        moments = module.normalise(turned, groups, weight, bias, 1e-3, out)
        back, products, alone = module.back(turned, groups, weight, *moments, gradient.mT.contiguous(), last=True)
        out, back = out.mT, back.mT
    else:
        out, *moments = torch.native_group_norm(pixels, weight, bias, n, channels, pixels.shape[2], groups, 1e-3)
        back, products, alone = module.back(pixels, groups, weight, *moments, gradient, last=False)

    x, w, b = (one.double().requires_grad_() for one in (pixels, weight, bias))
    wanted = functional.group_norm(x, groups, w, b, 1e-3)
    for found, truth in (
        (out, wanted),
        (back, torch.autograd.grad(wanted, x, gradient.double(), retain_graph=True)[0]),
    ):
        torch.testing.assert_close(found.double(), truth.detach(), rtol=1e-3, atol=1e-3)
    for i in range(n):
        rows = torch.autograd.grad(wanted[i], (w, b), gradient[i].double(), retain_graph=True)
        for found, truth in zip((products[i], alone[i]), rows, strict=True):
            torch.testing.assert_close(found.double(), truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_behind_a_convolution(affine):
    torch.manual_seed(0)
    norm = nn.GroupNorm(2, 6, affine=affine)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.Conv2d(6, 4, 3), nn.GroupNorm(4, 4), nn.Flatten())
    x, y, criterion = torch.randn(5, 3, 7, 8), torch.randint(4, (5,)), nn.CrossEntropyLoss()
    assert_same(clipped_sum(model, criterion, x, y, clip=0.5), loop(model, criterion, x, y, 0.5), 1e-4)


@pytest.mark.parametrize(("n", "width"), [(1, 1), (5, 3), (33, 17), (16, 16), (1, 40), (70, 130)])
def test_a_matrix_turned(n, width):
    torch.manual_seed(0)
    rows, factor, target = torch.randn(n, width + 3)[:, :width], torch.rand(n), torch.full((width, n), float("nan"))
    assert torch.equal(kernels.turn(rows, factor, target), (rows * factor.unsqueeze(1)).t())


@pytest.mark.parametrize("fresh", [True, False])
def test_rows_added_up_by_token(fresh):
    torch.manual_seed(0)
    tokens = torch.randint(700, (900,)).sort().values
    rows, index, weights = torch.randn(40, 21), torch.randint(40, (900,)), torch.randn(900)
    before = torch.randn(700, 21)
    total = torch.full_like(before, float("nan")) if fresh else before.clone()
    ends = torch.bincount(tokens, minlength=700).cumsum(0)
    assert kernels.add_gathered(total, rows, index, weights, ends, fresh)
    wanted = (0 if fresh else before.double()) + torch.zeros(700, 21).double().index_add_(
        0, tokens, weights.double().unsqueeze(1) * rows.double()[index]
    )
    torch.testing.assert_close(total.double(), wanted, rtol=1e-4, atol=1e-4)
    assert not kernels.add_gathered(total.double(), rows, index, weights, ends, fresh)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=8), st.integers(7, 40))
def test_tokens_in_order_and_how_often_bags_have_them(bags, many):
    tokens = torch.tensor([token for bag in bags for token in bag], dtype=torch.int64)
    whose = torch.tensor([i for i, bag in enumerate(bags) for _ in bag], dtype=torch.int64)
    tokens, whose = (torch.stack([one, one + 1], 1)[:, 0] for one in (tokens, whose))  # not side by side in memory
    order, ends = kernels.in_order(tokens, many)
    assert order.tolist() == sorted(range(len(tokens)), key=lambda place: (int(tokens[place]), place))
    assert ends.tolist() == [int((tokens <= token).sum()) for token in range(many)]
    found = kernels.squared_counts(tokens, order, whose, len(bags))
    assert found.tolist() == [sum(bag.count(token) ** 2 for token in set(bag)) for bag in bags]


@pytest.mark.parametrize("token", [-1, 5, 1 << 40])
def test_a_token_that_is_no_row_is_never_followed(token):
    with pytest.raises(IndexError, match="no row of a table of 5"):
        kernels.in_order(torch.tensor([0, token, 3]), 5)

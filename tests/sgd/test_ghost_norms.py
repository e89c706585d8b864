"""Ghost norms: never too small, whatever cancels, vanishes or overflows; and single precision beside double."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from terrine.sgd import clipped_sum
from terrine.sgd.clipping import contribution, convolved
from terrine.sgd.clipping.ghost import ghost_squares

from .helpers import Criterion
from .oracle import assert_same, loop


@pytest.mark.parametrize("scale", [300.0, 1.0, 1e-3, 1e-5, 0.0])
def test_norms_of_what_cancels_are_never_too_small(scale):
    """Pairs of positions that take each other away but for a little: rounding must not hide the little."""
    torch.manual_seed(0)
    inputs, out = torch.randn(20, 32, 50), 1e3 * torch.randn(20, 32, 30)
    inputs, out = torch.cat([inputs, inputs], 1), torch.cat([out, -out + scale * torch.randn(20, 32, 30)], 1)
    true = torch.einsum("npe,npd->ned", out.double(), inputs.double()).square().sum((1, 2))
    found = ghost_squares(inputs, out).double()
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

    @Criterion
    def criterion(out, y):
        out = out - out.mean(axes, keepdim=True)
        weights = torch.linspace(-1, 1, out[0].numel(), dtype=torch.float64).square().to(out.dtype).view(out.shape[1:])
        return 0.1 * (out * weights * (1 + y).view(-1, *[1] * len(shape))).flatten(1).sum(1)

    y = torch.linspace(0, 1, 16, dtype=dtype)
    found = clipped_sum(model, criterion, (x, y), clip=1.0).norms.double()
    _, wanted = loop(model.double(), criterion, (x.double(), y.double()), 1.0)
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
    criterion = Criterion(lambda out, y: (out * y).flatten(1).sum(1))
    found = clipped_sum(model, criterion, (x, y), clip=1e-3)
    bounded = found.norms.double().reciprocal().mul(1e-3).clamp(max=1.0)
    _, true = loop(model.double(), criterion, (x.double(), y.double()), 1e-3)
    assert (bounded * true <= 1e-3 * 1.001).all()


@pytest.mark.parametrize("positions", [3, 40])
@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0)])
def test_rows_without_numbers_have_no_norm(positions, width, height):
    assert (ghost_squares(torch.randn(2, positions, width), torch.ones(2, positions, height)) < 1e-20).all()


def test_an_example_without_a_gradient_has_no_norm():
    torch.manual_seed(0)
    model, x, y = nn.Linear(300, 300), torch.randn(4, 6, 300), torch.tensor([0.0, 1.0, 0.0, 1.0])
    criterion = Criterion(lambda out, y: out.flatten(1).sum(1) * y)
    norms = clipped_sum(model, criterion, (x, y), clip=1.0).norms
    assert ((norms < 1e-8) == (y == 0)).all()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "ghost"])
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
def test_single_precision_is_the_loop_in_double(made, shape, direct, monkeypatch):
    """Whichever way is said to be cheap; the oracle loops in float64."""
    for module in (contribution, convolved):
        monkeypatch.setattr(module, "prefers_direct", lambda *_: direct)
    torch.manual_seed(0)
    model = made()

    @Criterion
    def criterion(output, y):  # far from its minimum, where its gradient would be a small difference of large numbers
        output = output[0] if isinstance(output, tuple) else output
        return ((output.flatten(1).tanh().mean(1) - y - 2) ** 2).mean()

    x, y = torch.randn(6, *shape), torch.linspace(0, 1, 6)
    clipped = clipped_sum(model, criterion, (x, y), clip=0.5)
    sums, norms = loop(model.double(), criterion, (x.double(), y.double()), 0.5)
    model.float()
    torch.testing.assert_close(clipped.norms.double(), norms, rtol=1e-4, atol=1e-6)
    for name, value in sums.items():
        torch.testing.assert_close(clipped.sums[name].double(), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_behind_a_convolution(affine):
    torch.manual_seed(0)
    norm = nn.GroupNorm(2, 6, affine=affine)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.Conv2d(6, 4, 3), nn.GroupNorm(4, 4), nn.Flatten())
    x, y, criterion = torch.randn(5, 3, 7, 8), torch.randint(4, (5,)), nn.CrossEntropyLoss()
    assert_same(clipped_sum(model, criterion, (x, y), clip=0.5), loop(model, criterion, (x, y), 0.5), 1e-4)

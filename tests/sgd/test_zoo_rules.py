"""What was made fast for whole model families, each against one example after the other by autograd in float64.

Normalisation, small and depthwise convolutions, weights that are standardised, recurrent layers whose uses over time
are merged, and what is computed without waiting on a device other than the CPU.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine.errors import InvalidArgument
from terrine.sgd import clipped_sum
from terrine.sgd.clipping import contribution, ghost, parameter_view
from terrine.sgd.clipping.alone import way_of
from terrine.sgd.clipping.contribution import Dense, Lookup, Outer, combined
from terrine.sgd.clipping.convolved import Convolved, Geometry
from terrine.sgd.clipping.rules.embedding import Bags
from tests.sgd.oracle import assert_same, loop
from tests.sgd.test_convolved import one_by_one

CRITERION = nn.MSELoss(reduction="sum")


def check(model, *shape):
    """The clipped sums are those of a loop, and vmap ran the model."""
    torch.manual_seed(0)
    model = model.double()
    x = torch.randn(4, *shape, dtype=torch.float64)
    y = torch.randn_like(model(x).detach())
    assert_same(clipped_sum(model, CRITERION, (x, y), clip=0.5), loop(model, CRITERION, (x, y), 0.5))
    assert not way_of(model).one_by_one


class Standardised(nn.Conv2d):
    """A convolution whose weight is standardised by batch normalisation of the weight, as in timm's nf_resnet."""

    def __init__(self):
        super().__init__(3, 4, 3)
        self.gain = nn.Parameter(torch.full((4, 1, 1, 1), 0.7))

    def forward(self, x):
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = functional.batch_norm(flat, None, None, weight=self.gain.view(-1), training=True, eps=1e-5)
        return functional.conv2d(x, weight.reshape_as(self.weight), self.bias)


class Twice(nn.Module):
    """One normalisation used twice, the second time by arguments with names."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        groups, weight, bias = self.norm.num_groups, self.norm.weight, self.norm.bias
        return functional.group_norm(input=self.norm(x).tanh(), num_groups=groups, weight=weight, bias=bias)


MODELS = {
    "group norm of one pixel": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()), (3, 3, 3)),
    "group norm of images": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU()), (3, 7, 6)),
    "group norm of series": (lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.GroupNorm(4, 8)), (3, 7)),
    "group norm of vectors": (lambda: nn.Sequential(nn.Linear(3, 8), nn.GroupNorm(2, 8)), (3,)),
    "group norm without scale": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8, 1e-5, False)), (3, 3, 3)),
    "group norm twice": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Twice(nn.GroupNorm(2, 8))), (3, 3, 3)),
    "instance norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True)), (3, 6, 5)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)), (6, 3)),
    "layer norm of two axes": (lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm((6, 5)), nn.Tanh()), (6, 3)),
    "layer norm without shift": (lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5, bias=False)), (6, 3)),
    "RMS norm": (lambda: nn.Sequential(nn.Linear(3, 5), nn.RMSNorm(5), nn.Tanh()), (6, 3)),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(4, 8, 5, 2, 2, groups=4), nn.Tanh()), (4, 6, 5)),
    "depthwise of series": (lambda: nn.Sequential(nn.Conv1d(4, 4, 4, padding=3, groups=4), nn.Tanh()), (4, 6)),
    "groups on one pixel": (lambda: nn.Sequential(nn.Conv2d(8, 4, 3, 1, 1, groups=2), nn.Tanh()), (8, 1, 1)),
    "one pixel": (lambda: nn.Sequential(nn.Conv2d(4, 64, 3, 1, 1), nn.Conv2d(64, 64, 3, 1, 1), nn.Tanh()), (4, 1, 1)),
    "two pixels": (lambda: nn.Sequential(nn.Conv2d(4, 64, 3, 2, 1), nn.Conv2d(64, 64, 1), nn.Tanh()), (4, 3, 2)),
    "up from one pixel": (lambda: nn.Sequential(nn.ConvTranspose2d(32, 32, 3, 2), nn.Tanh()), (32, 1, 1)),
    "standardised weights": (lambda: nn.Sequential(Standardised(), nn.Tanh()), (3, 5, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_clipped_sums_are_the_loop(name):
    build, shape = MODELS[name]
    torch.manual_seed(1)
    check(build(), *shape)


def test_large_computed_weights_are_not_kept_for_every_example(monkeypatch):
    for limit in ("_KEPT", "_AT_ONCE"):
        monkeypatch.setattr(parameter_view, limit, 100)
    torch.manual_seed(1)
    check(nn.Sequential(Standardised(), nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 2, 3))), 3, 5, 5)
    x, y = torch.randn(4, 3, 5, 5), torch.randn(4, 4, 3, 3)
    x[1] = torch.nan
    model = Standardised()
    others = [0, 2, 3]
    found = clipped_sum(model, CRITERION, (x, y), clip=0.5)
    assert_same(found._replace(norms=found.norms[others]), loop(model, CRITERION, (x[others], y[others]), 0.5), 1e-4)


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(2, 8), lambda: nn.LayerNorm(8)])
def test_parts_of_a_normalisation_are_frozen(norm, frozen):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), norm(), nn.Tanh(), nn.Linear(8, 2))
    for name, parameter in model[1].named_parameters():
        parameter.requires_grad_(frozen not in (name, "both"))
    check(model, 3)


def test_normalisation_of_several_rows_of_a_person():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.Flatten(), nn.LayerNorm(32)).double()
    x, y = torch.randn(6, 3, 2, 2, dtype=torch.float64), torch.randn(6, 32, dtype=torch.float64)
    found = clipped_sum(model, CRITERION, (x, y), clip=0.5, rows=[3, 3])
    people = [clipped_sum(model, CRITERION, (x[rows], y[rows]), clip=1e9) for rows in (slice(3), slice(3, 6))]
    for name, total in found.sums.items():
        norms = [
            torch.stack([one.square().sum() for one in person.sums.values()]).sum().sqrt() / 3 for person in people
        ]
        wanted = sum(
            person.sums[name] / 3 * (0.5 / norm).clamp(max=1.0) for person, norm in zip(people, norms, strict=True)
        )
        torch.testing.assert_close(total, wanted, rtol=1e-9, atol=1e-9)


def test_batch_statistics_of_examples_stay_refused():
    class Hidden(nn.Linear):
        def forward(self, x):
            return functional.batch_norm(super().forward(x), None, None, self.bias, self.bias, True)

    with pytest.raises(InvalidArgument, match="mixes examples"):
        clipped_sum(Hidden(3, 4), CRITERION, (torch.randn(4, 3), torch.randn(4, 4)), clip=1.0)


@pytest.mark.parametrize("kernel", [1, 2, 3, 5, 7])
def test_depthwise_and_grouped_gradients(kernel):
    torch.manual_seed(0)
    for size, stride, dilation, groups, each in itertools.product((2, 6), (1, 2), (1, 2), (2, 4), (1, 2)):
        padding = dilation * (kernel // 2) + 1
        image = torch.randn(3, size, size + 1, 4, dtype=torch.float64)
        places = [(length + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for length in (size, size + 1)]
        out = torch.randn(3, *places, 4 * each, dtype=torch.float64)
        wanted = one_by_one(image, out, kernel, stride, padding, dilation, groups)
        geometry = Geometry((kernel,) * 2, (stride,) * 2, ((padding,) * 2,) * 2, (dilation,) * 2, groups)
        part = Convolved(image, out, geometry, tuple(wanted.shape[1:]))
        torch.testing.assert_close(part.dense(), wanted)
        torch.testing.assert_close(part._by_groups(), wanted)
        if groups == 4:
            torch.testing.assert_close(part._by_places(), wanted)


@pytest.mark.parametrize(("images", "size"), [(1, 1), (2, 2), (1, 5)])
def test_weighted_sums_of_convolutions_on_small_maps(images, size):
    torch.manual_seed(0)
    image, out = (torch.randn(4, size, size, width, dtype=torch.float64) for width in (3, 5))
    wanted = one_by_one(image, out, 3, 1, 1, 1, 1).unflatten(0, (-1, images)).sum(1)
    part = Convolved(image, out, Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)), (5, 3, 3, 3), images)
    factor = torch.rand(4 // images, dtype=torch.float64)
    torch.testing.assert_close(part.weighted_sum(factor), torch.einsum("n,n...->...", factor, wanted))


@pytest.mark.parametrize("positions", [1, 3, 40])
def test_uses_of_a_weight_are_merged_before_they_are_dense(positions):
    torch.manual_seed(0)
    shape = (4, 3)
    outers = [Outer(torch.randn(2, positions, 3), torch.randn(2, positions, 4), shape) for _ in range(3)]
    whole = combined(outers)
    wanted = sum(part.dense() for part in outers)
    torch.testing.assert_close(whole.dense(), wanted)
    torch.testing.assert_close(whole.squares(), wanted.flatten(1).square().sum(1))
    rest = combined([*outers, Dense(torch.ones(2, 4, 3)), Lookup(torch.tensor([[0], [3]]), torch.ones(2, 1, 3), shape)])
    wanted = wanted + 1.0
    wanted[0, 0] += 1.0
    wanted[1, 3] += 1.0
    torch.testing.assert_close(rest.dense(), wanted)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True),
        lambda: nn.LSTM(3, 4, batch_first=True, proj_size=2),
        lambda: nn.GRU(3, 4),
        lambda: nn.RNN(3, 4, nonlinearity="relu"),
    ],
    ids=["lstm", "lstm with projections", "gru", "relu"],
)
def test_recurrent_layers_leave_vmap_once(layer):
    class First(nn.Module):
        """What a recurrent layer says after two positions, the others unused, and its last state."""

        def __init__(self):
            super().__init__()
            self.layer = layer()

        def forward(self, x):
            x = x if self.layer.batch_first else x.transpose(0, 1)
            out, last = self.layer(x)
            last = last[0] if isinstance(last, tuple) else last
            return (
                torch.cat([out.reshape(1, -1)[:, :4], last[:, :, :2].reshape(1, -1)], 1) if len(last[0]) == 1 else out
            )

    torch.manual_seed(1)
    model = First().double()
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    y = torch.randn(4, model(x[:1]).shape[1], dtype=torch.float64)
    assert_same(clipped_sum(model, CRITERION, (x, y), clip=0.5), loop(model, CRITERION, (x, y), 0.5))


# -- nothing waits for a device that is not the CPU ------------------------------------------------------


@pytest.fixture
def asynchronous(monkeypatch):
    for module in (ghost, contribution):
        monkeypatch.setattr(module, "is_asynchronous", lambda _: True)


class Waits(torch.overrides.TorchFunctionMode):
    """Counts what would wait for a GPU."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__ in ("item", "__bool__", "nonzero", "tolist", "__int__", "bincount", "__float__")
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("asynchronous")
def test_norms_and_sums_wait_for_nothing():
    torch.manual_seed(0)
    tokens, rows = torch.randint(5, (3, 8)), torch.randn(3, 8, 4)
    bags, share = torch.arange(3).repeat_interleave(8), torch.rand(24)
    parts = [
        Outer(torch.randn(3, 7, 6), torch.randn(3, 7, 5), (5, 6)),
        Lookup(tokens, rows, (5, 4)),
        Bags(tokens.flatten(), bags, share, rows[:, 0], (5, 4)),
        combined([Outer(torch.randn(3, 7, 4), torch.randn(3, 7, 5), (5, 4)), Lookup(tokens, rows, (5, 4))]),
    ]
    factor = torch.rand(3)
    with Waits() as waits:
        squares, sums = [part.squares() for part in parts], [part.weighted_sum(factor) for part in parts]
    assert waits.count == 0
    for part, square, total in zip(parts, squares, sums, strict=True):
        torch.testing.assert_close(square, part.dense().flatten(1).square().sum(1))
        torch.testing.assert_close(total, torch.einsum("n,n...->...", factor, part.dense()))


@pytest.mark.usefixtures("asynchronous")
def test_norms_that_rounding_could_hide_are_rounded_up():
    torch.manual_seed(0)
    row, gradient = torch.randn(1, 1, 9), torch.randn(1, 1, 8)
    inputs, gradients = row.repeat(1, 2, 1), torch.cat([gradient, -gradient], 1)
    gradients[0, 1, 0] += 1e-4
    exact = torch.bmm(gradients.double().mT, inputs.double()).square().sum()
    reach = (inputs.norm(dim=2) * gradients.norm(dim=2)).sum()
    found = ghost.ghost_squares(inputs, gradients)
    assert exact.sqrt() <= found.sqrt() <= exact.sqrt() + 0.01 * reach

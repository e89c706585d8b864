"""Operations without parameters that kernels do: what the library makes of them, there and back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import assert_same, loop
from torch import nn
from torch.nn import functional

from terrine.sgd import kernels
from terrine.sgd.clipping import clipped_sum
from terrine.sgd.clipping.rules import unlearned
from terrine.sgd.kernels.bends import bent
from terrine.sgd.kernels.vectors import LANES

PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@pytest.fixture(autouse=True)
def _every_size(monkeypatch):
    monkeypatch.setattr(unlearned, "_WORTH", 0)


@settings(max_examples=200, deadline=None)
@given(
    PAIRS, PAIRS, st.tuples(st.integers(0, 1), st.integers(0, 1)), PAIRS, st.integers(1, 9), st.integers(1, 9),
    st.sampled_from([1, 3, LANES, 2 * LANES + 1]), st.sampled_from(["random", "ties", "strange"]), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_the_largest_of_every_window(kernel, stride, padding, dilation, high, wide, channels, kind, last, seed):
    assume(all(2 * p <= k for p, k in zip(padding, kernel, strict=True)))
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    assume(all(s + 2 * p >= w for s, p, w in zip((high, wide), padding, spans, strict=True)))
    torch.manual_seed(seed)
    x = torch.randn(3, channels, high, wide)
    if kind == "ties":
        x = x.round()
    if kind == "strange":
        x[x > 1], x[x < -1] = math.nan, -math.inf
        x[1] = -math.inf
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    made = unlearned.max_pool2d(ours, kernel, stride, padding, dilation)
    assert (made is None) == any(p and d > 1 for p, d in zip(padding, dilation, strict=True))
    if made is None:  # a window may have nothing of the image in it
        return
    wanted = functional.max_pool2d(theirs, kernel, stride, padding, dilation)
    assert torch.equal(made.nan_to_num(7.0), wanted.nan_to_num(7.0))
    gradient = torch.randn_like(wanted)
    made.backward(gradient)
    wanted.backward(gradient)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("given_stride", [None, 1, 2])
def test_the_largest_along_a_line(given_stride):
    x = torch.randn(3, 5, 11)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    made, wanted = (pool(one, 3, given_stride, 1) for pool, one in ((unlearned.max_pool1d, ours),
                                                                   (functional.max_pool1d, theirs)))  # fmt: skip
    assert torch.equal(made, wanted)
    for one in (made, wanted):
        one.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    "settings",
    [{"ceil_mode": True}, {"return_indices": True}, {"padding": 2}, {"kernel_size": 9}, {"stride": 0}],
    ids=str,
)
def test_what_kernels_do_not_know_is_left_to_the_library(settings):
    assert unlearned.max_pool2d(torch.randn(2, 3, 8, 8), **{"kernel_size": 2, **settings}) is None


def test_other_types_and_unbatched_images_are_left_to_the_library():
    assert unlearned.max_pool2d(torch.randn(3, 8, 8), 2) is None
    assert unlearned.max_pool1d(torch.randn(3, 8), 2) is None
    assert unlearned.max_pool2d(torch.randn(2, 3, 8, 8).double(), 2) is None
    assert unlearned.tanh(torch.randn(8).double()) is None
    assert unlearned.tanh(torch.randn(8, 4)[:, ::2]) is None


def test_tangents_are_within_two_units_of_the_last_place():
    x = torch.cat([torch.linspace(-20, 20, 200_001), torch.logspace(-30, 1, 10_001)])
    wanted = torch.tanh(x.double())
    units = torch.from_numpy(np.spacing(wanted.abs().float().numpy()))
    made = bent(x, torch.empty_like(x))
    assert float(((made.double() - wanted).abs() / units).max()) < 2
    assert float(made.abs().max()) == 1.0


def test_tangents_of_what_is_no_number():
    strange = torch.tensor([math.nan, math.inf, -math.inf])
    made = bent(strange, torch.empty(3))
    assert math.isnan(made[0])
    assert made[1:].tolist() == [1.0, -1.0]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_tangents_there_and_back(layout):
    x = torch.randn(4, 5, 6, 7).contiguous(memory_format=layout)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    made, wanted = unlearned.tanh(ours), torch.tanh(theirs)
    assert made.stride() == wanted.stride()
    torch.testing.assert_close(made, wanted)
    made.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


class ByName(nn.Module):
    """Gives arguments by name, or says where the result is to go."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Conv2d(1, 2, 1), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(input=self.layer(x))
        x = functional.max_pool2d(input=torch.max_pool2d(input=x, kernel_size=[2]), kernel_size=2)
        with torch.no_grad():
            torch.tanh(x, out=torch.empty_like(x))
        return self.out(x.flatten(1))


def test_arguments_may_be_given_by_name():
    torch.manual_seed(3)
    model, x, y = ByName(), torch.randn(5, 1, 8, 8), torch.randint(3, (5,))
    criterion = nn.CrossEntropyLoss(reduction="sum")
    found = clipped_sum(model, criterion, x, y, clip=0.5)
    assert_same(found, loop(model, criterion, x, y, 0.5), tolerance=2e-5)


def test_a_network_of_them_is_clipped_as_one_by_one(monkeypatch):
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(2, 7, 3, padding=1), nn.Tanh(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(7, 4, 2), nn.MaxPool2d(2, 1),
        nn.Flatten(2), nn.Conv1d(4, 6, 2), nn.MaxPool1d(2), nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip
    x, y = torch.randn(9, 2, 12, 12), torch.randint(3, (9,))
    model(x)
    used = []
    for name in ("windows", "bending"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda real=real, name=name: used.append(name) or real())
    criterion = nn.CrossEntropyLoss(reduction="sum")
    found = clipped_sum(model, criterion, x, y, clip=0.5)
    assert set(used) == {"windows", "bending"}
    assert_same(found, loop(model, criterion, x, y, 0.5), tolerance=2e-5)

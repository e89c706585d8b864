"""Convolutions computed another way than the library's: the same output and the same gradient of the input."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from terrine.sgd.clipping import convolving
from terrine.sgd.clipping.convolving import convolve
from terrine.sgd.clipping.patches import Geometry

LIBRARY = (functional.conv1d, functional.conv2d, functional.conv3d)
SHAPES = [
    (dims, kernel, stride, padding)
    for dims, kernel, stride, padding in itertools.product((1, 2, 3), (2, 4, 6), (1, 2), (0, 1, 2))
    if padding < kernel
]


def both_ways(dims, kernel, stride, padding, *, channels, outputs, examples):
    """Output and input gradient by the library, and by `convolve`."""
    torch.manual_seed(0)
    image = torch.randn(examples, channels, *range(9, 9 + dims), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(outputs, channels, *[kernel] * dims, dtype=torch.float64)
    bias = torch.randn(outputs, dtype=torch.float64)
    geometry = Geometry((kernel,) * dims, (stride,) * dims, ((padding, padding),) * dims, (1,) * dims)
    found = []
    for out in (LIBRARY[dims - 1](image, weight, bias, stride, padding), convolve(image, weight, bias, geometry)):
        if out is None:
            return None
        towards = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
        found.append((out.detach(), torch.autograd.grad((out * towards).sum(), image)[0]))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_phases_of_a_stride(shape, monkeypatch):
    monkeypatch.setattr(convolving, "few", lambda places, outputs: False)
    found = both_ways(*shape, channels=3, outputs=5, examples=4)
    assert (found is None) == (shape[2] == 1)  # without a stride there are no phases
    if found is not None:
        for one, two in zip(*found, strict=True):
            assert torch.allclose(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_product(shape, monkeypatch):
    monkeypatch.setattr(convolving, "few", lambda places, outputs: True)
    for one, two in zip(*both_ways(*shape, channels=3, outputs=5, examples=4), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-12)

"""Convolutions computed another way than the library's: the same output and the same gradient of the input."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from terrine.sgd.clipping import convolved, convolving
from terrine.sgd.clipping.convolved import Convolved
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


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] < 3])
def test_one_product_of_fewer_patches_than_outputs(shape):
    for one, two in zip(*both_ways(*shape, channels=3, outputs=300, examples=2), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-11)


@pytest.mark.parametrize("outputs", [4, 64])
@pytest.mark.parametrize("kernel", [1, 3])
def test_sums_of_few_patches(kernel, outputs, monkeypatch):
    """The weighted sum by one product, more and fewer patches than outputs, is that of the gradients themselves."""
    torch.manual_seed(0)
    geometry = Geometry((kernel, kernel), (1, 1), ((1, 1), (1, 1)), (1, 1))
    image = torch.randn(3, 3, 3, 5, dtype=torch.float64)
    out = torch.randn(3, *geometry.places(image), outputs, dtype=torch.float64)
    factor = torch.rand(3, dtype=torch.float64)
    shape = (outputs, 5, kernel, kernel)
    monkeypatch.setattr(convolved, "few", lambda patches, outputs: True)
    monkeypatch.setattr(Convolved, "_prefers_direct", lambda self: False)
    part, rows = Convolved(image, out, geometry, shape), Convolved(image, out, geometry, shape).dense()
    torch.testing.assert_close(part.squares(), rows.flatten(1).square().sum(1))
    total = torch.empty(shape, dtype=torch.float64)
    part.add_to(total, factor, fresh=True)
    torch.testing.assert_close(total, torch.einsum("n,n...->...", factor, rows))

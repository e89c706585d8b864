"""Convolutions: each example's gradient, and their weighted sum, are what autograd gives for that example alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from terrine.sgd.clipping.convolved import Convolved, Geometry

LIBRARY = (functional.conv1d, functional.conv2d, functional.conv3d)
CASES = list(itertools.product((1, 2, 3), (1, 2, 3, 5), (1, 2), (0, 1), (1, 2), (1, 3)))


def one_by_one(image, out, kernel, stride, padding, dilation, groups):
    """(n, *shape), by autograd, one example after the other."""
    dims, channels = image.dim() - 2, image.shape[-1]
    weight = torch.zeros(out.shape[-1], channels // groups, *[kernel] * dims, dtype=image.dtype, requires_grad=True)
    rows = []
    for x, y in zip(image.movedim(-1, 1), out.movedim(-1, 1), strict=True):
        made = LIBRARY[dims - 1](x.unsqueeze(0), weight, None, stride, padding, dilation, groups)
        rows.append(torch.autograd.grad((made * y).sum(), weight)[0])
    return torch.stack(rows)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_are_the_loop(groups):
    torch.manual_seed(0)
    for dims, kernel, stride, padding, dilation, each in CASES:
        geometry = Geometry(
            (kernel,) * dims, (stride,) * dims, ((padding, padding),) * dims, (dilation,) * dims, groups
        )
        image = torch.randn(3, *range(9, 9 + dims), 4, dtype=torch.float64)
        places = [(size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for size in range(9, 9 + dims)]
        out = torch.randn(3, *places, 4 * each, dtype=torch.float64)
        wanted = one_by_one(image, out, kernel, stride, padding, dilation, groups)
        part = Convolved(image, out, geometry, tuple(wanted.shape[1:]))
        case = f"{dims} dimensions, kernel {kernel}, stride {stride}, padding {padding}, dilation {dilation}, {each}"
        torch.testing.assert_close(part.dense(), wanted, msg=lambda m, c=case: f"{c}: {m}")
        factor = torch.rand(3, dtype=torch.float64)
        summed = torch.einsum("n,n...->...", factor, wanted)
        torch.testing.assert_close(part.weighted_sum(factor), summed, msg=lambda m, c=case: f"{c}: {m}")
        if groups == 1:
            squares = wanted.flatten(1).square().sum(1)
            torch.testing.assert_close(part.squares(), squares, msg=lambda m, c=case: f"{c}: {m}")

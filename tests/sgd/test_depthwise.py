"""Depthwise convolutions: each example's gradient, by both ways, is what autograd gives for that example alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from terrine.sgd.clipping import depthwise
from terrine.sgd.clipping.patches import Geometry

LIBRARY = (functional.conv1d, functional.conv2d, functional.conv3d)
CASES = list(itertools.product((1, 2, 3), (1, 2, 3, 5), (1, 2), (0, 1), (1, 2), (1, 3)))


def one_by_one(image, out, kernel, stride, padding, dilation):
    """(n, outputs * kernel), by autograd, one example after the other."""
    dims, channels = image.dim() - 2, image.shape[-1]
    weight = torch.zeros(out.shape[-1], 1, *[kernel] * dims, dtype=image.dtype, requires_grad=True)
    rows = []
    for x, y in zip(image.movedim(-1, 1), out.movedim(-1, 1), strict=True):
        made = LIBRARY[dims - 1](x.unsqueeze(0), weight, None, stride, padding, dilation, channels)
        rows.append(torch.autograd.grad((made * y).sum(), weight)[0].flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("folds", [True, False])
def test_gradients_are_the_loop(folds, monkeypatch):
    if not folds:
        monkeypatch.setattr(depthwise, "_folds", lambda geometry: False)
    torch.manual_seed(0)
    for dims, kernel, stride, padding, dilation, each in CASES:
        geometry = Geometry((kernel,) * dims, (stride,) * dims, ((padding, padding),) * dims, (dilation,) * dims, 4)
        image = torch.randn(3, *range(9, 9 + dims), 4, dtype=torch.float64)
        out = torch.randn(3, *geometry.places(image), 4 * each, dtype=torch.float64)
        wanted = one_by_one(image, out, kernel, stride, padding, dilation)
        case = f"{dims} dimensions, kernel {kernel}, stride {stride}, padding {padding}, dilation {dilation}, {each}"
        torch.testing.assert_close(depthwise.gradients(geometry, image, out), wanted, msg=lambda m, c=case: f"{c}: {m}")


def test_a_lot_of_images_is_folded_in_parts(monkeypatch):
    torch.manual_seed(0)
    geometry = Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 4)
    image, out = torch.randn(2, 7, 6, 6, 4, dtype=torch.float64).unbind(0)
    whole = depthwise.gradients(geometry, image, out)
    monkeypatch.setattr(depthwise, "_FOLDED", 3 * image[0].numel() * 8)
    assert torch.equal(depthwise.gradients(geometry, image, out), whole)
    torch.testing.assert_close(whole, one_by_one(image, out, 3, 1, 1, 1))


def test_what_is_depthwise():
    image = torch.zeros(1, 4, 4, 6)
    for groups, expected in ((6, True), (3, False), (1, False)):
        assert depthwise.is_depthwise(Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), groups), image) == expected
    assert not depthwise.is_depthwise(Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)), image[..., :1])

"""A depthwise convolution's per-example gradients, by channel: g_ik = sum over positions l of out_il image_i(l+k).

Nothing in them is a product of matrices. Two ways:

    folded   small kernels: the library's own weight gradient, of one image whose channels are those of all examples
    taps     any other: for every place of the kernel one product, number by number, and one sum
"""

from __future__ import annotations

from itertools import product
from math import prod

import torch
from torch import Tensor

from terrine.sgd.clipping.examples import chunks
from terrine.sgd.clipping.patches import Border, Geometry
from terrine.sgd.scratch import scratch

_FOLDED = 8 << 20  # bytes of images folded at once
_CACHED = 256 << 10  # bytes of products summed at once, for each thread


def is_depthwise(geometry: Geometry, image: Tensor) -> bool:
    """Whether every output channel sees one channel of `image` (n, *sizes, channels)."""
    return geometry.groups == image.shape[-1] > 1


def gradients(geometry: Geometry, image: Tensor, out: Tensor) -> Tensor:
    """(n, outputs * kernel) of `image` (n, *sizes, channels) and output gradients `out` (n, *places, outputs)."""
    rows = out.new_empty(len(out), out.shape[-1] * prod(geometry.kernel))
    if _folds(geometry) and image.shape[-1] == out.shape[-1] and out.device.type == "cpu":
        _folded(geometry, image, out, rows)
    else:
        _by_taps(geometry, image, out, rows)
    return rows


def _folds(geometry: Geometry) -> bool:
    plain = max(geometry.dilation) == 1 and all(low == high for low, high in geometry.padding)
    return plain and len(geometry.kernel) == 2 and max(geometry.kernel) <= 3


def _folded(geometry: Geometry, image: Tensor, out: Tensor, rows: Tensor) -> None:
    channels, step = out.shape[-1], max(1, _FOLDED // (image[0].numel() * image.element_size()))
    for start, stop in chunks(len(out), step):
        wide = (stop - start) * channels
        made = torch.ops.aten.convolution_backward(
            _fold("folded out", out[start:stop]), _fold("folded image", image[start:stop]),
            out.new_empty(wide, 1, *geometry.kernel), None, geometry.stride, [low for low, _ in geometry.padding],
            geometry.dilation, False, [0, 0], wide, [False, True, False],
        )[1]  # fmt: skip
        rows[start:stop] = made.reshape(stop - start, -1)


def _fold(purpose: str, images: Tensor) -> Tensor:
    """(n, height, width, channels) as one image of n * channels channels, channels last in memory."""
    n, height, width, channels = images.shape
    made = scratch(purpose, (height, width, n, channels), images).copy_(images.permute(1, 2, 0, 3))
    return made.view(1, height, width, n * channels).permute(0, 3, 1, 2)


def _by_taps(geometry: Geometry, image: Tensor, out: Tensor, rows: Tensor) -> None:
    n, places, channels, outputs = len(out), geometry.places(image), image.shape[-1], out.shape[-1]
    most = _CACHED * torch.get_num_threads() // (out[0].numel() * out.element_size())
    step = max(1, min(n, most))
    border = Border(geometry, image, step)
    sums = rows.view(n, outputs, -1)
    outs = out.unflatten(-1, (channels, -1))
    products = scratch("products", (step, *outs.shape[1:]), out)
    for start, stop in chunks(n, step):
        pixels, here = border.base[border(start, stop)], products[: stop - start]
        for index, place in enumerate(product(*map(range, geometry.kernel))):
            torch.mul(geometry.under(pixels, place, places).unsqueeze(-1), outs[start:stop], out=here)
            sums[start:stop, :, index] = here.view(stop - start, -1, outputs).sum(1)

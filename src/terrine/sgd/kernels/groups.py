"""Group normalisation of images, there and back, with what every example adds to the gradients of weight and bias.

    there   y = (x - m_g) s_g w_c + b_c,       m_g and 1 / s_g the mean and the deviation of a group
    back    b'_c = sum of y',  w'_c = s_g sum of y' (x - m_g)
            x' = s_g w_c y' - M_g - (x - m_g) V_g,  M_g = s_g mean of w_c b'_c,  V_g = s_g^2 mean of w_c w'_c

An example at a time: it stays in a core's cache from the first pass over it to the last. Channels lie last, or, on the
way back, positions do.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from terrine.sgd.kernels.team import FIRST, ITEMS, TAKEN, Kernel, floats, inner, taken
from terrine.sgd.scratch import scratch

PIXELS, POSITIONS, CHANNELS, EACH, MEANS, SCALES, WEIGHT, RESULT, BIAS, EPS = range(FIRST, FIRST + 10)
GRADIENT, SUMS, PRODUCTS, ROOM = range(RESULT + 1, RESULT + 5)


def normalise(
    pixels: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill `out` with the normalised images, both (n, positions, channels).

    Returned are means and reciprocal deviations, (n, channels).
    """
    n, positions, channels = pixels.shape
    means, scales = torch.empty(n, channels), torch.empty(n, channels)
    small = torch.tensor([eps])
    _there.work(
        n, pixels.data_ptr(), positions, channels, channels // groups, means.data_ptr(), scales.data_ptr(),
        weight.data_ptr(), out.data_ptr(), bias.data_ptr(), small.data_ptr(),
    )  # fmt: skip
    return means, scales


def back(
    pixels: Tensor, groups: int, weight: Tensor, means: Tensor, scales: Tensor, gradient: Tensor, *, last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the pixels, and every example's of weight and bias, (n, channels).

    Pixels and gradient are (n, positions, channels), with means and scales of every channel, as `normalise` makes
    them; where channels are not last, (n, channels, positions), with means and scales of every group.
    """
    n, channels = len(pixels), len(weight)
    result, products, alone = torch.empty_like(pixels), torch.empty(n, channels), torch.empty(n, channels)
    room = scratch("groups", (n, 2 * channels), alone)
    (_back if last else _back_by_channel).work(
        n, pixels.data_ptr(), pixels[0].numel() // channels, channels, channels // groups, means.data_ptr(),
        scales.data_ptr(), weight.data_ptr(), result.data_ptr(), gradient.data_ptr(), alone.data_ptr(),
        products.data_ptr(), room.data_ptr(),
    )  # fmt: skip
    return result, products, alone


@inner
def _spread(values: Any, channels: int, each: int, size: float) -> None:
    """Every channel gets the sum over its group, divided by so many."""
    for first in range(0, channels, each):
        total = 0.0
        for c in range(first, first + each):
            total += values[c]
        for c in range(first, first + each):
            values[c] = total / size


@Kernel
def _there(job: Any) -> None:
    positions, channels, each = job[POSITIONS], job[CHANNELS], job[EACH]
    weight, bias, eps = floats(job[WEIGHT]), floats(job[BIAS]), floats(job[EPS])[0]
    size = float(positions * each)
    while True:
        i = taken(job, TAKEN)
        if i >= job[ITEMS]:
            break
        image, out = job[PIXELS] + 4 * i * positions * channels, job[RESULT] + 4 * i * positions * channels
        mean, scale = floats(job[MEANS] + 4 * i * channels), floats(job[SCALES] + 4 * i * channels)
        for c in range(channels):
            mean[c] = scale[c] = 0.0
        for p in range(positions):
            row = floats(image + 4 * p * channels)
            for c in range(channels):
                mean[c] += row[c]
        _spread(mean, channels, each, size)
        for p in range(positions):
            row = floats(image + 4 * p * channels)
            for c in range(channels):
                apart = row[c] - mean[c]
                scale[c] += apart * apart
        _spread(scale, channels, each, size)
        for c in range(channels):
            scale[c] = 1.0 / math.sqrt(scale[c] + eps)
        for p in range(positions):
            row, target = floats(image + 4 * p * channels), floats(out + 4 * p * channels)
            for c in range(channels):
                target[c] = (row[c] - mean[c]) * (scale[c] * weight[c]) + bias[c]


@Kernel
def _back(job: Any) -> None:
    positions, channels, each, weight = job[POSITIONS], job[CHANNELS], job[EACH], floats(job[WEIGHT])
    size = float(positions * each)
    while True:
        i = taken(job, TAKEN)
        if i >= job[ITEMS]:
            break
        mean, scale = floats(job[MEANS] + 4 * i * channels), floats(job[SCALES] + 4 * i * channels)
        alone, product = floats(job[SUMS] + 4 * i * channels), floats(job[PRODUCTS] + 4 * i * channels)
        less, slope = floats(job[ROOM] + 8 * i * channels), floats(job[ROOM] + 8 * i * channels + 4 * channels)
        start = 4 * i * positions * channels
        for c in range(channels):
            alone[c] = product[c] = 0.0
        for p in range(positions):
            row = floats(job[PIXELS] + start + 4 * p * channels)
            y = floats(job[GRADIENT] + start + 4 * p * channels)
            for c in range(channels):
                alone[c] += y[c]
                product[c] += y[c] * (row[c] - mean[c])
        for c in range(channels):
            product[c] *= scale[c]
            less[c], slope[c] = weight[c] * alone[c] * scale[c], weight[c] * product[c] * scale[c] * scale[c]
        _spread(less, channels, each, size)
        _spread(slope, channels, each, size)
        for p in range(positions):
            row = floats(job[PIXELS] + start + 4 * p * channels)
            y = floats(job[GRADIENT] + start + 4 * p * channels)
            target = floats(job[RESULT] + start + 4 * p * channels)
            for c in range(channels):
                target[c] = y[c] * (weight[c] * scale[c]) - less[c] - (row[c] - mean[c]) * slope[c]


@Kernel
def _back_by_channel(job: Any) -> None:
    positions, channels, each, weight = job[POSITIONS], job[CHANNELS], job[EACH], floats(job[WEIGHT])
    size, groups = float(positions * each), channels // each
    while True:
        i = taken(job, TAKEN)
        if i >= job[ITEMS]:
            break
        means, scales = floats(job[MEANS] + 4 * i * groups), floats(job[SCALES] + 4 * i * groups)
        alone, product = floats(job[SUMS] + 4 * i * channels), floats(job[PRODUCTS] + 4 * i * channels)
        start = 4 * i * positions * channels
        for g in range(groups):
            mean, scale = means[g], scales[g]
            less = slope = np.float32(0.0)
            for c in range(g * each, g * each + each):
                row = floats(job[PIXELS] + start + 4 * c * positions)
                y = floats(job[GRADIENT] + start + 4 * c * positions)
                total = weighted = np.float32(0.0)
                for p in range(positions):
                    total += y[p]
                    weighted += y[p] * (row[p] - mean)
                alone[c], product[c] = total, weighted * scale
                less += weight[c] * alone[c]
                slope += weight[c] * product[c]
            less, slope = np.float32(less * scale / size), np.float32(slope * scale * scale / size)
            for c in range(g * each, g * each + each):
                row = floats(job[PIXELS] + start + 4 * c * positions)
                y = floats(job[GRADIENT] + start + 4 * c * positions)
                target, factor = floats(job[RESULT] + start + 4 * c * positions), weight[c] * scale
                for p in range(positions):
                    target[p] = y[p] * factor - less - (row[p] - mean) * slope

"""Group normalisation of images whose channels lie last, there and back, with the sums that every example adds.

    there   y = (x - m_g) s_g w_c + b_c,       m_g and 1 / s_g the mean and the deviation of a group
    sums    A_c = sum of y',  B_c = sum of y' (x - m_g):  what b_c and, times s_g, w_c have as their gradient
    back    x' = s_g (w_c y' - M1_g - (x - m_g) s_g^2 M2_g),  M1_g = mean of w_c y',  M2_g = mean of w_c y' (x - m_g)

An example at a time: it stays in a core's cache from the first pass over it to the last.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from terrine.sgd.kernels.team import FIRST, ITEMS, TAKEN, Kernel, floats, inner, taken

PIXELS, POSITIONS, CHANNELS, EACH, MEANS, SCALES, WEIGHT, BIAS, EPS, RESULT = range(FIRST, FIRST + 10)
GRADIENT, SUMS, PRODUCTS = BIAS, EPS, RESULT + 1


def normalised(pixels: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised images, like pixels (n, positions, channels); means and reciprocal deviations, (n, channels)."""
    n, positions, channels = pixels.shape
    out, means, scales = torch.empty_like(pixels), torch.empty(n, channels), torch.empty(n, channels)
    small = torch.tensor([eps])
    _there.work(
        n, pixels.data_ptr(), positions, channels, channels // groups, means.data_ptr(), scales.data_ptr(),
        weight.data_ptr(), bias.data_ptr(), small.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out, means, scales


def sums(pixels: Tensor, means: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """A and B, (n, channels), of gradient and pixels (n, positions, channels)."""
    n, positions, channels = pixels.shape
    alone, products = torch.empty(n, channels), torch.empty(n, channels)
    _sums.work(
        n, pixels.data_ptr(), positions, channels, 0, means.data_ptr(), 0, 0, gradient.data_ptr(), alone.data_ptr(), 0,
        products.data_ptr(),
    )  # fmt: skip
    return alone, products


def back(
    pixels: Tensor, groups: int, weight: Tensor, moments: tuple[Tensor, Tensor], gradient: Tensor,
    found: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """The gradient of the pixels, from means and scales, and from A and B."""
    n, positions, channels = pixels.shape
    result, alone, products = torch.empty_like(pixels), found[0].clone(), found[1].clone()
    _back.work(
        n, pixels.data_ptr(), positions, channels, channels // groups, moments[0].data_ptr(), moments[1].data_ptr(),
        weight.data_ptr(), gradient.data_ptr(), alone.data_ptr(), result.data_ptr(), products.data_ptr(),
    )  # fmt: skip
    return result


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
def _sums(job: Any) -> None:
    positions, channels = job[POSITIONS], job[CHANNELS]
    while True:
        i = taken(job, TAKEN)
        if i >= job[ITEMS]:
            break
        mean, start = floats(job[MEANS] + 4 * i * channels), 4 * i * positions * channels
        alone, product = floats(job[SUMS] + 4 * i * channels), floats(job[PRODUCTS] + 4 * i * channels)
        for c in range(channels):
            alone[c] = product[c] = 0.0
        for p in range(positions):
            row = floats(job[PIXELS] + start + 4 * p * channels)
            y = floats(job[GRADIENT] + start + 4 * p * channels)
            for c in range(channels):
                alone[c] += y[c]
                product[c] += y[c] * (row[c] - mean[c])


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
        start = 4 * i * positions * channels
        for g in range(0, channels, each):
            total = weighted = 0.0
            for c in range(g, g + each):
                total += weight[c] * alone[c]
                weighted += weight[c] * product[c]
            for c in range(g, g + each):
                alone[c] = total / size * scale[c]
                product[c] = weighted / size * scale[c] * scale[c] * scale[c]
        for p in range(positions):
            row = floats(job[PIXELS] + start + 4 * p * channels)
            y = floats(job[GRADIENT] + start + 4 * p * channels)
            target = floats(job[RESULT] + start + 4 * p * channels)
            for c in range(channels):
                target[c] = y[c] * (weight[c] * scale[c]) - alone[c] - (row[c] - mean[c]) * product[c]

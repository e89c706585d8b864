"""Norms of linear layers, and what clipping makes of norms: one pass for what would be ten operations on short vectors.

squares     |out_i in_i^T|^2 = (|out_i| |in_i|)^2,  |out_i|^2
clip        norm_i = scale * the root of the sum of all squares_i,  factor_i = scale * min(1, bound / norm_i)
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from terrine.sgd.kernels.team import FIRST, ITEMS, TAKEN, Kernel, floats, numbers, taken

BLOCK = 1 << 15
"""About as many numbers as a thread takes at a time."""
TINY = torch.finfo(torch.float32).tiny
INPUTS, APART, WIDTH, OUTS, OUTS_APART, HEIGHT, LOST, EXAMPLES, ROWS, FOUND = range(FIRST, FIRST + 10)
TABLE, MANY, LENGTH, SETTINGS, NORMS = range(FIRST, FIRST + 5)


def squares(inputs: Tensor, outs: Tensor) -> tuple[Tensor, Tensor]:
    """(|out_i| |in_i|)^2 and |out_i|^2 of inputs (n, d) and outs (n, e), (n,) both.

    Lengths are rounded up by all that squares can lose below the smallest number there is: in their product, one may be
    as small as another is large.
    """
    (n, width), height = inputs.shape, outs.shape[1]
    found = torch.empty(2, n)
    lost = array("f", [math.sqrt(width * TINY), math.sqrt(height * TINY)])
    rows = max(1, BLOCK // max(width + height, 1))
    _squares.work(
        -(-n // rows), inputs.data_ptr(), inputs.stride(0), width, outs.data_ptr(), outs.stride(0), height,
        lost.buffer_info()[0], n, rows, found.data_ptr(),
    )  # fmt: skip
    both = found.unbind(0)
    return both[0], both[1]


@Kernel
def _squares(job: Any) -> None:
    n, lost = job[EXAMPLES], floats(job[LOST])
    weight, bias = floats(job[FOUND]), floats(job[FOUND] + 4 * n)
    while True:
        start = taken(job, TAKEN) * job[ROWS]
        if start >= job[ITEMS] * job[ROWS]:
            break
        for i in range(start, min(start + job[ROWS], n)):
            one, other = floats(job[INPUTS] + 4 * i * job[APART]), floats(job[OUTS] + 4 * i * job[OUTS_APART])
            long = high = np.float32(0.0)
            for k in range(job[WIDTH]):
                long += one[k] * one[k]
            for k in range(job[HEIGHT]):
                high += other[k] * other[k]
            reach = np.sqrt(high) + lost[1]
            both = (np.sqrt(long) + lost[0]) * reach
            weight[i], bias[i] = both * both, reach * reach


def clip(squares: Sequence[Tensor], scale: float, bound: float) -> tuple[Tensor, Tensor, bool]:
    """Norms and factors of contiguous squares (n,), and whether all norms are finite."""
    n = len(squares[0])
    if any(one.shape != (n,) for one in squares):
        raise ValueError(f"squares of shapes {[tuple(one.shape) for one in squares]}: want ({n},) all of them")
    table = array("q", [one.data_ptr() for one in squares])
    settings = array("f", [scale, bound, 0.0])
    found = torch.empty(2, n)
    _clip.work(1, table.buffer_info()[0], len(table), n, settings.buffer_info()[0], found.data_ptr())
    norms, factors = found.unbind(0)
    return norms, factors, math.isfinite(settings[2])


@Kernel
def _clip(job: Any) -> None:
    n, table, settings = job[LENGTH], numbers(job[TABLE]), floats(job[SETTINGS])
    norms, factors = floats(job[NORMS]), floats(job[NORMS] + 4 * n)
    scale, bound = settings[0], settings[1]
    for i in range(n):
        norms[i] = np.float32(0.0)
    for part in range(job[MANY]):
        squares = floats(table[part])
        for i in range(n):
            norms[i] += squares[i]
    total = np.float32(0.0)
    for i in range(n):
        norm = np.float32(np.sqrt(norms[i]) * scale)
        factor = np.float32(np.float32(1.0) / norm * bound)
        norms[i], factors[i] = norm, (factor if factor < np.float32(1.0) else np.float32(1.0)) * scale
        total += norm
    settings[2] = total

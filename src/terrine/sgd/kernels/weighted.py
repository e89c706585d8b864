"""sum_i factor_i row_i, some numbers of all rows at a time: what is added to stays in cache, a row is read once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from terrine.sgd.kernels.team import FIRST, ITEMS, TAKEN, Kernel, floats, taken

BLOCK = 2048
"""Most numbers of every row that are added up at a time."""
ROWS, EXAMPLES, WIDTH, FACTORS, TOTAL, FRESH, SIZE = range(FIRST, FIRST + 7)


def add_weighted(total: Tensor, rows: Tensor, factor: Tensor, fresh: bool) -> None:
    """total += sum_i factor_i rows_i of rows (n, numbers), or = where it is fresh; contiguous float32 all of them."""
    n, width = rows.shape
    size = max(64, min(BLOCK, -(-width // (2 * torch.get_num_threads()))))
    _weighted.work(-(-width // size), rows.data_ptr(), n, width, factor.data_ptr(), total.data_ptr(), fresh, size)


@Kernel
def _weighted(job: Any) -> None:
    n, width, factors = job[EXAMPLES], job[WIDTH], floats(job[FACTORS])
    while True:
        start = taken(job, TAKEN) * job[SIZE]
        if start >= job[ITEMS] * job[SIZE]:
            break
        size = min(job[SIZE], width - start)
        total = floats(job[TOTAL] + 4 * start)
        if job[FRESH]:
            for k in range(size):
                total[k] = 0.0
        i = 0
        while i + 4 <= n:
            one, two = floats(job[ROWS] + 4 * (i * width + start)), floats(job[ROWS] + 4 * ((i + 1) * width + start))
            three = floats(job[ROWS] + 4 * ((i + 2) * width + start))
            four = floats(job[ROWS] + 4 * ((i + 3) * width + start))
            a, b, c, d = factors[i], factors[i + 1], factors[i + 2], factors[i + 3]
            for k in range(size):
                total[k] += (a * one[k] + b * two[k]) + (c * three[k] + d * four[k])
            i += 4
        while i < n:
            row, a = floats(job[ROWS] + 4 * (i * width + start)), factors[i]
            for k in range(size):
                total[k] += a * row[k]
            i += 1

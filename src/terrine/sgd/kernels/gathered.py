"""Sums of rows by token: what a table's gradient is made of, written once and where it belongs.

total_t = sum of weight_j rows_(index_j) over the j of token t, which lie side by side
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from terrine.sgd.kernels.team import FIRST, ITEMS, TAKEN, Kernel, floats, numbers, taken

BLOCK = 256
"""Tokens that a thread takes at a time."""
ROWS, WIDTH, INDEX, WEIGHTS, ENDS, TOKENS, TOTAL, FRESH = range(FIRST, FIRST + 8)


def add_gathered(total: Tensor, rows: Tensor, index: Tensor, weights: Tensor, ends: Tensor, fresh: bool) -> None:
    """total (tokens, d) += the sums of rows (n, d), or = where it is fresh; token t's places end before ends[t]."""
    tokens, width = total.shape
    _gathered.work(
        -(-tokens // BLOCK), rows.data_ptr(), width, index.data_ptr(), weights.data_ptr(), ends.data_ptr(), tokens,
        total.data_ptr(), fresh,
    )  # fmt: skip


@Kernel
def _gathered(job: Any) -> None:
    width, index, weights, ends = job[WIDTH], numbers(job[INDEX]), floats(job[WEIGHTS]), numbers(job[ENDS])
    while True:
        start = taken(job, TAKEN) * BLOCK
        if start >= job[ITEMS] * BLOCK:
            break
        place = ends[start - 1] if start > 0 else 0
        for token in range(start, min(start + BLOCK, job[TOKENS])):
            target = floats(job[TOTAL] + 4 * token * width)
            if job[FRESH]:
                for k in range(width):
                    target[k] = 0.0
            while place < ends[token]:
                row, weight = floats(job[ROWS] + 4 * index[place] * width), weights[place]
                for k in range(width):
                    target[k] += weight * row[k]
                place += 1

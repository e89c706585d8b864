"""A matrix turned, every row times its factor: squares of it go through registers, so that memory is read in rows and
written in rows.

    turned_ji = factor_i rows_ij
"""

from __future__ import annotations

from typing import Any

from numba import types
from torch import Tensor

from terrine.sgd.kernels.team import AT, FIRST, ITEMS, TAKEN, WHOLE, Kernel, floats, instruction, taken
from terrine.sgd.kernels.vectors import LANES, Builder, Value, below, load, number, store, transposed

BLOCK = 4 * LANES
"""Rows that a thread takes at a time: whole lines of the cache of what is written."""
ROWS, APART, MANY, WIDTH, FACTORS, TARGET = range(FIRST, FIRST + 6)


def turn(rows: Tensor, factor: Tensor, target: Tensor) -> Tensor:
    """Fill target (d, n), contiguous, with rows (n, d), whose numbers lie side by side; each row times its factor."""
    n, width = rows.shape
    _turn.work(-(-n // BLOCK), rows.data_ptr(), rows.stride(0), n, width, factor.data_ptr(), target.data_ptr())
    return target


@Kernel
def _turn(job: Any) -> None:
    n, width, apart = job[MANY], job[WIDTH], job[APART]
    while True:
        start = taken(job, TAKEN) * BLOCK
        if start >= job[ITEMS] * BLOCK:
            break
        for j in range(0, width, LANES):
            for i in range(start, min(start + BLOCK, n), LANES):
                _square(floats(job[ROWS] + 4 * (i * apart + j)), apart, n - i, width - j,
                        floats(job[FACTORS] + 4 * i), floats(job[TARGET] + 4 * (j * n + i)), n)  # fmt: skip


@instruction(types.void, AT, WHOLE, WHOLE, WHOLE, AT, AT, WHOLE)
def _square(builder: Builder, rows: Value, apart: Value, many: Value, width: Value, factors: Value, target: Value,
            to: Value) -> None:  # fmt: skip
    """Turn LANES rows of LANES numbers, or as many as there are."""
    last = builder.sub(many, number(1))
    inside = below(builder, list(range(LANES)), number(0), width)
    read = []
    for r in range(LANES):
        row = builder.select(builder.icmp_signed("<", number(r), many), number(r), last)
        read.append(load(builder, builder.gep(rows, [builder.mul(row, apart)]), inside))
    there = below(builder, list(range(LANES)), number(0), many)
    scale = load(builder, factors, there)
    for c, column in enumerate(transposed(builder, read)):
        with builder.if_then(builder.icmp_signed("<", number(c), width)):
            place = builder.gep(target, [builder.mul(number(c), to)])
            store(builder, builder.fmul(column, scale), place, there)

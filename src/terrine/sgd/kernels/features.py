"""Fixed features times a weight with few outputs, and the features' squared norms: all in one pass over the features.

    y_i = W x_i,  |x_i|^2

Wide features come from memory, which is what takes the time; the weight stays in cache.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from terrine.sgd.kernels.dots import dots
from terrine.sgd.kernels.team import AT, FIRST, ITEMS, TAKEN, WHOLE, Kernel, floats, instruction, taken
from terrine.sgd.kernels.vectors import I32, LANES, REGISTERS, Builder, Value, number

HIGH, LONG = (4, 5) if REGISTERS >= 32 else (2, 4)
BLOCK = 16
"""Rows that a thread takes at a time."""
INPUTS, APART, EXAMPLES, WIDTH, WEIGHT, WEIGHT_APART, OUTPUTS, FOUND, SQUARES = range(FIRST, FIRST + 9)


def applied(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """inputs (n, d) times weight (e, d), (n, e), and the squared norms of the inputs, (n,)."""
    (n, width), outputs = inputs.shape, len(weight)
    found, squares = torch.empty(n, outputs), torch.empty(n)
    _applied.work(
        -(-n // BLOCK), inputs.data_ptr(), inputs.stride(0), n, width, weight.data_ptr(), weight.stride(0), outputs,
        found.data_ptr(), squares.data_ptr(),
    )  # fmt: skip
    return found, squares


@Kernel
def _applied(job: Any) -> None:
    n, outputs, apart = job[EXAMPLES], job[OUTPUTS], job[APART]
    while True:
        start = taken(job, TAKEN) * BLOCK
        if start >= job[ITEMS] * BLOCK:
            break
        for i in range(start, min(start + BLOCK, n), HIGH):
            rows, target = floats(job[INPUTS] + 4 * i * apart), job[FOUND] + 4 * i * outputs
            for k in range(0, outputs, LONG):
                weight = floats(job[WEIGHT] + 4 * k * job[WEIGHT_APART])
                _tile(rows, apart, n - i, weight, job[WEIGHT_APART], outputs - k, job[WIDTH],
                      floats(target + 4 * k), outputs, floats(job[SQUARES] + 4 * i))  # fmt: skip


@instruction(types.void, AT, WHOLE, WHOLE, AT, WHOLE, WHOLE, WHOLE, AT, WHOLE, AT)
def _tile(builder: Builder, rows: Value, apart: Value, many: Value, weight: Value, weight_apart: Value, outputs: Value,
          width: Value, target: Value, target_apart: Value, squares: Value) -> None:  # fmt: skip
    """A few rows times a few of the weight's, and the rows' squares, to where they belong."""

    def lines(base: Value, step: Value, high: int, there: Value) -> list[Value]:
        last = builder.sub(there, number(1))
        chosen = [builder.select(builder.icmp_signed("<", number(r), there), number(r), last) for r in range(high)]
        return [builder.gep(base, [builder.mul(one, step)]) for one in chosen]

    left, right = lines(rows, apart, HIGH, many), lines(weight, weight_apart, LONG, outputs)
    made = dots(builder, left, right, number(1), number(0), width, squares=True)
    for r in range(HIGH):
        with builder.if_then(builder.icmp_signed("<", number(r), many)):
            to = builder.gep(target, [builder.mul(target_apart, number(r))])
            for c in range(LONG):
                with builder.if_then(builder.icmp_signed("<", number(c), outputs)):
                    builder.store(_lane(builder, made, r * LONG + c), builder.gep(to, [number(c)]))
            builder.store(_lane(builder, made, HIGH * LONG + r), builder.gep(squares, [number(r)]))


def _lane(builder: Builder, vectors: list[Value], i: int) -> Value:
    return builder.extract_element(vectors[i // LANES], ir.Constant(I32, i % LANES))

"""The steps of an LSTM, there and back, a few examples from the first step to the last: they wait for nobody else.

    there   i, f, g, o = x + U h';  c = s(f) c' + s(i) tanh(g);  h = s(o) tanh(c)
    back    the gradient of i, f, g and o from those of h and c, and from it, times U, that of h'

The weight comes from a core's cache once for all the examples of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from terrine.sgd.kernels.bends import sigmoid, tanh
from terrine.sgd.kernels.team import AT, FIRST, ITEMS, TAKEN, WHOLE, Kernel, floats, inner, instruction, taken
from terrine.sgd.kernels.vectors import LANES, REGISTERS, Builder, Sums, Value, below, every, load, loop, number, store

ROWS, VECTORS = (8, 3) if REGISTERS >= 32 else (4, 2)
"""Examples, and vectors of what they are multiplied with, that are added up in registers."""
TIME, EXAMPLES, WIDTH, WEIGHT, GATES, OUTPUTS, CELLS, BENT, STATE, CELL, MADE, BEFORE = range(FIRST, FIRST + 12)


def there(gates: Tensor, first: tuple[Tensor, Tensor], weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h, c and tanh(c) of every step, (time, n, width); `gates` (time, n, 4 width) are x, and then i, f, g and o.

    `first` has h and c before the first step, (n, width), and `weight` is (4 width, width); contiguous float32 all.
    """
    time, n, width = gates.shape[0], gates.shape[1], weight.shape[1]
    outputs, cells, bent = (gates.new_empty(time, n, width) for _ in range(3))
    across, (state, cell) = weight.t().contiguous(), first
    _there.work(
        -(-n // ROWS), time, n, width, across.data_ptr(), gates.data_ptr(), outputs.data_ptr(), cells.data_ptr(),
        bent.data_ptr(), state.data_ptr(), cell.data_ptr(),
    )  # fmt: skip
    return outputs, cells, bent


def back(
    gates: Tensor, cells: Tensor, bent: Tensor, first: Tensor, weight: Tensor, gradient: Tensor, state: Tensor,
    cell: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of i, f, g and o before they are bent, (time, n, 4 width), from those of all h and of the last step.

    `state` and `cell` hold the latter, and then those of the state before the first step, whose c is `first`.
    """
    time, n, width = cells.shape
    made = torch.empty_like(gates)
    _back.work(
        -(-n // ROWS), time, n, width, weight.data_ptr(), gates.data_ptr(), gradient.data_ptr(), cells.data_ptr(),
        bent.data_ptr(), state.data_ptr(), cell.data_ptr(), made.data_ptr(), first.data_ptr(),
    )  # fmt: skip
    return made


_f = np.float32


@Kernel
def _there(job: Any) -> None:
    time, n, width = job[TIME], job[EXAMPLES], job[WIDTH]
    across = job[WEIGHT]
    while True:
        start = taken(job, TAKEN) * ROWS
        if start >= job[ITEMS] * ROWS:
            break
        many, before, cell = min(ROWS, n - start), job[STATE] + 4 * start * width, job[CELL] + 4 * start * width
        for t in range(time):
            place = 4 * (t * n + start) * width
            gates, out, c, bent = job[GATES] + 4 * place, job[OUTPUTS] + place, job[CELLS] + place, job[BENT] + place
            for v in range(0, 4 * width, VECTORS * LANES):
                _add_product(floats(before), width, many, floats(across + 4 * v), 4 * width, 4 * width - v, width,
                             floats(gates + 4 * v), 4 * width)  # fmt: skip
            for r in range(many):
                _forward(gates + 16 * r * width, cell + 4 * r * width, c + 4 * r * width, bent + 4 * r * width,
                         out + 4 * r * width, width)  # fmt: skip
            before, cell = out, c


@inner
def _forward(gates: int, before: int, cell: int, bent: int, out: int, width: int) -> None:
    """One example's step, its gates known but for their bends."""
    enter, forget, new = floats(gates), floats(gates + 4 * width), floats(gates + 8 * width)
    leave, old, c, t, h = floats(gates + 12 * width), floats(before), floats(cell), floats(bent), floats(out)
    for k in range(width):
        enter[k] = sigmoid(enter[k])
    for k in range(width):
        forget[k] = sigmoid(forget[k])
    for k in range(width):
        new[k] = tanh(new[k])
    for k in range(width):
        leave[k] = sigmoid(leave[k])
    for k in range(width):
        c[k] = forget[k] * old[k] + enter[k] * new[k]
    for k in range(width):
        t[k] = tanh(c[k])
    for k in range(width):
        h[k] = leave[k] * t[k]


@Kernel
def _back(job: Any) -> None:
    time, n, width = job[TIME], job[EXAMPLES], job[WIDTH]
    while True:
        start = taken(job, TAKEN) * ROWS
        if start >= job[ITEMS] * ROWS:
            break
        many, state, cell = min(ROWS, n - start), job[STATE] + 4 * start * width, job[CELL] + 4 * start * width
        for t in range(time - 1, -1, -1):
            place = 4 * (t * n + start) * width
            made = job[MADE] + 4 * place
            old = job[CELLS] + place - 4 * n * width if t > 0 else job[BEFORE] + 4 * start * width
            for r in range(many):
                row = 4 * r * width
                _backward(job[GATES] + 4 * place + 4 * row, old + row, job[BENT] + place + row,
                          job[OUTPUTS] + place + row, state + row, cell + row, made + 4 * row, width)  # fmt: skip
            for v in range(0, width, VECTORS * LANES):
                _add_product(floats(made), 4 * width, many, floats(job[WEIGHT] + 4 * v), width, width - v, 4 * width,
                             floats(state + 4 * v), width)  # fmt: skip


@inner
def _backward(gates: int, old: int, bent: int, more: int, state: int, cell: int, made: int, width: int) -> None:
    """One example's step back; nothing is left of the gradient of h, to which that of h' is to be added."""
    enter, forget, new, leave = (
        floats(gates), floats(gates + 4 * width), floats(gates + 8 * width), floats(gates + 12 * width),
    )  # fmt: skip
    before, t, y, h, c = floats(old), floats(bent), floats(more), floats(state), floats(cell)
    of_enter, of_forget, of_new, of_leave = (
        floats(made), floats(made + 4 * width), floats(made + 8 * width), floats(made + 12 * width),
    )  # fmt: skip
    one = _f(1.0)
    for k in range(width):
        h[k] += y[k]
        c[k] += h[k] * leave[k] * (one - t[k] * t[k])
        of_leave[k] = h[k] * t[k] * (leave[k] * (one - leave[k]))
        h[k] = _f(0.0)
    for k in range(width):
        of_enter[k] = c[k] * new[k] * (enter[k] * (one - enter[k]))
        of_new[k] = c[k] * enter[k] * (one - new[k] * new[k])
    for k in range(width):
        of_forget[k] = c[k] * before[k] * (forget[k] * (one - forget[k]))
        c[k] *= forget[k]


@instruction(types.void, AT, WHOLE, WHOLE, AT, WHOLE, WHOLE, WHOLE, AT, WHOLE)
def _add_product(builder: Builder, rows: Value, apart: Value, many: Value, weight: Value, weight_apart: Value,
                 lanes: Value, depth: Value, target: Value, target_apart: Value) -> None:  # fmt: skip
    """target_rv += sum over k of rows_rk weight_kv, for `many` rows and the first `lanes` numbers v."""
    last = builder.sub(many, number(1))
    chosen = [builder.select(builder.icmp_signed("<", number(r), many), number(r), last) for r in range(ROWS)]
    left = [builder.gep(rows, [builder.mul(one, apart)]) for one in chosen]
    right = [builder.gep(target, [builder.mul(one, target_apart)]) for one in chosen]
    masks = [below(builder, list(range(LANES)), number(v * LANES), lanes) for v in range(VECTORS)]
    sums = Sums(builder, ROWS * VECTORS)
    inside = builder.icmp_signed(">=", lanes, number(VECTORS * LANES))

    def add(masks: list[Value | None]) -> None:
        sums.put(
            [load(builder, builder.gep(to, [number(v * LANES)]), masks[v]) for to in right for v in range(VECTORS)]
        )
        with loop(builder, depth) as k:
            at = builder.gep(weight, [builder.mul(k.index, weight_apart)])
            taken = [load(builder, builder.gep(at, [number(v * LANES)]), mask) for v, mask in enumerate(masks)]
            for r, row in enumerate(left):
                factor = every(builder, builder.load(builder.gep(row, [k.index])))
                for v, one in enumerate(taken):
                    sums.add(r * VECTORS + v, one, factor)

    with builder.if_else(inside) as (then, otherwise):
        with then:
            add([None] * VECTORS)
        with otherwise:
            add(list(masks))
    made = sums.values()
    for r, to in enumerate(right):
        with builder.if_then(builder.icmp_signed("<", number(r), many)):
            for v in range(VECTORS):
                store(builder, made[r * VECTORS + v], builder.gep(to, [number(v * LANES)]), masks[v])

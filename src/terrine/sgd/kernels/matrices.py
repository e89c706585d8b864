"""Products of matrices, of which every thread takes the next part as soon as it is free.

    target_ij = sum over k of left_ik right_jk,    + bias_j or what was there

A library gives every thread its share beforehand, and then waits for the slowest: on a machine that others use too, one
core is often half as fast as its neighbour. Here a job is a row of tickets. Those of a first phase lay out the right
matrix for everybody, in panels of as many rows as a tile is wide; those of the next multiply some rows of the left one,
which whoever holds the ticket lays out for itself: the fewer rows are left, the fewer to a ticket. A ticket is worked
on once all phases before its own are done. Where the right matrix is large, that goes on for some of it at a time.

A number is the same whoever made it: its k are added up in the same order.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from torch import Tensor

from terrine.sgd.kernels.image import Table
from terrine.sgd.kernels.team import (
    AT,
    FIRST,
    ITEMS,
    TABLE,
    TAKEN,
    WHOLE,
    WORKERS,
    Kernel,
    by_itself,
    floats,
    inner,
    instruction,
    numbers,
    taken,
)
from terrine.sgd.kernels.tiles import Tile, put
from terrine.sgd.kernels.vectors import (
    I32,
    I64,
    LANES,
    REGISTERS,
    Builder,
    Stretch,
    Value,
    below,
    every,
    load,
    loop,
    number,
    prefetch,
    store,
    transposed,
)
from terrine.sgd.scratch import scratch

HIGH, VECTORS = (12, 2) if LANES >= 12 and REGISTERS >= 32 else (min(6, LANES), 2)
LONG = VECTORS * LANES
"""A tile: rows of the left matrix, at most as many as a register has numbers, by rows of the right one."""
DEEP = 320
"""Most k that a tile adds up: a panel of the right matrix stays in the innermost cache while the left one's go by."""
LAID = 5 << 16
"""Most numbers of the right matrix that are laid out at a time."""
TALL, LEAST = 24 * HIGH, 2 * HIGH
"""Most rows of the left matrix that a ticket multiplies, which stay in a core's cache; and the least."""
SHORT = 4 * LONG
"""Rows of the right matrix that a ticket lays out."""
AHEAD = 8
"""How many k before they are read what lies far apart is asked for."""
ASKED = 14
"""Lines of the cache of the next panel that are asked for beside each tile."""
PATIENCE = 1 << 12
"""How often a thread looks for what it waits for before it lets others run."""
(LEFT, LEFT_ROW, LEFT_NEXT, RIGHT, RIGHT_ROW, RIGHT_NEXT, ROWS, COLUMNS, MANY, FACTORS, BIAS, TARGET, APART, MORE,
 DEPTH, DEEPEST, SOME, STARTS, ROOM, SHARE, PANELS, DONE) = range(FIRST, FIRST + 22)  # fmt: skip


def multiply(left: Tensor, right: Tensor, target: Tensor, *, factor: Tensor | None = None, bias: Tensor | None = None,
             more: bool = False) -> Tensor:  # fmt: skip
    """Fill target (m, n) with left (m, k) times right (n, k), transposed; where there is `more`, add to it instead.

    Every matrix has numbers side by side along one of its dimensions, the target along rows. All k of the left one are
    multiplied by their factors (k,), which wants its rows side by side, and the bias (n,) is added to every row.
    """
    (m, many), n = left.shape, len(right)
    if not m * n * many or right.shape[1] != many or target.shape != (m, n) or (n > 1 and target.stride(1) != 1):
        shapes = tuple(left.shape), tuple(right.shape), tuple(target.shape)
        raise ValueError(f"left, right and target {shapes}: want (m, k), (n, k), (m, n), a row's numbers side by side")
    for one, size in ((factor, many), (bias, n)):
        if one is not None and (one.shape != (size,) or not one.is_contiguous()):
            raise ValueError(f"factor or bias {tuple(one.shape)}: want ({size},)")
    steps = _steps(left)
    if factor is not None and steps[0] != 1:
        raise ValueError("factors want the rows of the left matrix side by side")
    across = -(-n // LONG)
    depth = evenly(many, max(DEEP, LAID // (across * LONG)))
    deepest, panels = evenly(depth, DEEP), evenly(across, LAID // (depth * LONG))
    threads = torch.get_num_threads()
    starts = _starts(m, threads)
    laid = scratch("panels", (-(-depth // deepest), panels, LONG * deepest), target)
    room = scratch("left panels", (threads, TALL // HIGH, HIGH * deepest + LANES), target)
    _multiply.work(
        len(starts.numbers) - 1, left.data_ptr(), *steps, right.data_ptr(), *_steps(right), m, n, many,
        0 if factor is None else factor.data_ptr(), 0 if bias is None else bias.data_ptr(), target.data_ptr(),
        target.stride(0), more, depth, deepest, panels * LONG, starts.address, room.data_ptr(), room[0].numel(),
        laid.data_ptr(), 0,
    )  # fmt: skip
    return target


def evenly(size: int, most: int) -> int:
    """The largest of as few parts as there can be, about equally large, of at most so many."""
    return -(-size // max(1, -(-size // most)))


def _steps(matrix: Tensor) -> tuple[int, int]:
    """How far apart rows and k lie."""
    row, step = matrix.stride()
    if row != 1 and step != 1 and 1 not in matrix.shape:
        raise ValueError(f"a matrix of strides {(row, step)}: want numbers side by side along one dimension")
    return (1 if matrix.shape[0] == 1 else row), (1 if matrix.shape[1] == 1 else step)


@lru_cache(maxsize=256)
def _starts(rows: int, threads: int) -> Table:
    """Where every ticket's rows begin, and where the last one's end: the fewer are left, the fewer a ticket has."""
    starts = [0]
    while starts[-1] < rows:
        share = -(-(rows - starts[-1]) // (2 * threads * HIGH)) * HIGH
        starts.append(min(rows, starts[-1] + max(LEAST, min(TALL, share))))
    numbers = np.array(starts, dtype=np.int64)
    return Table(numbers, numbers.ctypes.data)


@Kernel
def _multiply(job: Any) -> None:
    """All tickets, round by round: some k of some columns."""
    room = job[ROOM] + 4 * taken(job, WORKERS) * job[SHARE]
    ticket, first, blocks, starts = taken(job, TAKEN), 0, job[ITEMS], numbers(job[STARTS])
    for j in range(0, job[COLUMNS], job[SOME]):
        columns = min(job[SOME], job[COLUMNS] - j)
        short = (columns + SHORT - 1) // SHORT
        for k in range(0, job[MANY], job[DEPTH]):
            last = min(k + job[DEPTH], job[MANY])
            while ticket < first + short:
                _wait(job, first)
                _lay_right(job, j, columns, (ticket - first) * SHORT, k, last)
                _end(job, DONE)
                ticket = taken(job, TAKEN)
            first += short
            while ticket < first + blocks:
                _wait(job, first)
                _block(job, starts[ticket - first], starts[ticket - first + 1], j, columns, k, last, room)
                _end(job, DONE)
                ticket = taken(job, TAKEN)
            first += blocks


@inner
def _wait(job: Any, many: int) -> None:
    """Until so many tickets are done; after a while, for whoever else wants the processor."""
    turns = 0
    while _done(job, DONE) < many:
        turns += 1
        if turns % PATIENCE == 0:
            _give_way()


@instruction(WHOLE, TABLE, WHOLE)
def _done(builder: Builder, job: Value, counter: Value) -> Value:
    """How many tickets are done: what they wrote can be seen."""
    return builder.load_atomic(builder.gep(job, [counter]), "acquire", 8)


@instruction(types.void, TABLE, WHOLE)
def _end(builder: Builder, job: Value, counter: Value) -> None:
    """One more is done."""
    builder.atomic_rmw("add", builder.gep(job, [counter]), number(1), "release")


@instruction(types.void)
def _give_way(builder: Builder) -> None:
    """Let another thread run, where the system has a function for that."""
    if os.name == "posix":
        kind = ir.FunctionType(I32, [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])


@inner
def _lay_left(job: Any, top: int, bottom: int, k: int, depth: int, room: int) -> None:
    """Rows of the left matrix in groups as high as a tile."""
    source, factors, apart = job[LEFT] + 4 * (top * job[LEFT_ROW] + k * job[LEFT_NEXT]), 0, HIGH * depth + LANES
    if job[FACTORS] != 0:
        factors = job[FACTORS] + 4 * k
    if job[LEFT_ROW] == 1:
        _copy_groups(floats(source), job[LEFT_NEXT], bottom - top, job[ROWS] - top, depth, floats(factors),
                     floats(room), apart)  # fmt: skip
    else:
        for row in range(0, bottom - top, HIGH):
            _turn(floats(source + 4 * row * job[LEFT_ROW]), job[LEFT_ROW], min(HIGH, bottom - top - row), depth,
                  floats(room + 4 * (row // HIGH) * apart), HIGH)  # fmt: skip


@inner
def _lay_right(job: Any, j: int, columns: int, start: int, first: int, last: int) -> None:
    """Rows of the right matrix from the start on, in panels as wide as a tile."""
    many = min(SHORT, columns - start)
    for k in range(first, last, job[DEEPEST]):
        source = job[RIGHT] + 4 * ((j + start) * job[RIGHT_ROW] + k * job[RIGHT_NEXT])
        depth = min(job[DEEPEST], last - k)
        if job[RIGHT_ROW] == 1:
            _copy_panels(floats(source), job[RIGHT_NEXT], many, many, depth, floats(0),
                         floats(_panel(job, start, k - first)), LONG * job[DEEPEST])  # fmt: skip
        else:
            for row in range(0, many, LANES):
                _turn(floats(source + 4 * row * job[RIGHT_ROW]), job[RIGHT_ROW], min(LANES, many - row), depth,
                      floats(_panel(job, start + row, k - first) + 4 * (row % LONG)), LONG)  # fmt: skip


@inner
def _panel(job: Any, column: int, k: int) -> Any:
    """Where a panel of the right matrix is laid out."""
    return job[PANELS] + 4 * (k // job[DEEPEST] * (job[SOME] // LONG) + column // LONG) * LONG * job[DEEPEST]


def _copying(name: str, width: int) -> Any:
    """An instruction that lays out groups of so many rows whose numbers for one k lie side by side."""

    def copied(builder: Builder, source: Value, step: Value, many: Value, there: Value, depth: Value, factors: Value,
               target: Value, apart: Value) -> None:  # fmt: skip
        """k by k, in the order in which memory has them. Of a row's vectors, the last may reach beyond its group."""
        groups = builder.udiv(builder.add(many, number(width - 1)), number(width))
        beyond = -width % LANES  # numbers that a group's last vector has too many
        whole = builder.sdiv(builder.sub(there, number(beyond)), number(width))
        whole = builder.select(builder.icmp_signed("<", whole, groups), whole, groups)
        is_scaled = builder.icmp_unsigned("!=", builder.ptrtoint(factors, I64), number(0))

        def copy(k: Value, g: Value, factor: Value | None, masked: bool) -> None:
            row = builder.mul(g, number(width))
            at = builder.gep(source, [builder.add(builder.mul(k, step), row)])
            to = builder.gep(target, [builder.add(builder.mul(k, number(width)), builder.mul(g, apart))])
            prefetch(builder, builder.gep(at, [builder.mul(step, number(AHEAD))]))
            for v in range(0, width, LANES):
                left = builder.sub(builder.sub(there, row), number(v))
                mask = below(builder, list(range(LANES)), number(0), left) if masked else None
                one = load(builder, builder.gep(at, [number(v)]), mask)
                if factor is not None:
                    one = builder.fmul(one, factor)
                store(builder, one, builder.gep(to, [number(v)]))

        def all_of(scaled: bool) -> None:
            with loop(builder, depth) as k:
                factor = every(builder, builder.load(builder.gep(factors, [k.index]))) if scaled else None
                with loop(builder, whole) as g:
                    copy(k.index, g.index, factor, False)
                with loop(builder, builder.sub(groups, whole)) as g:
                    copy(k.index, builder.add(whole, g.index), factor, True)

        with builder.if_else(is_scaled) as (times, plain):
            with times:
                all_of(True)
            with plain:
                all_of(False)

    copied.__name__ = name
    return instruction(types.void, AT, WHOLE, WHOLE, WHOLE, WHOLE, AT, AT, WHOLE)(by_itself()(copied))


_copy_groups, _copy_panels = _copying("copy_groups", HIGH), _copying("copy_panels", LONG)


@instruction(types.void, AT, WHOLE, WHOLE, WHOLE, AT, WHOLE)
@by_itself()
def _turn(builder: Builder, source: Value, row: Value, many: Value, depth: Value, target: Value, apart: Value) -> None:
    """A vector of rows whose k lie side by side, for every k."""
    last = builder.sub(many, number(1))
    chosen = [builder.select(builder.icmp_signed("<", number(r), many), number(r), last) for r in range(LANES)]
    rows = [builder.gep(source, [builder.mul(one, row)]) for one in chosen]
    following = builder.mul(many, row)

    def turn(k: Value, mask: Value | None) -> None:
        read = [load(builder, builder.gep(one, [k]), mask) for one in rows]
        for one in rows:
            prefetch(builder, builder.gep(one, [builder.add(k, following)]))
        for c, one in enumerate(transposed(builder, read)):
            place = builder.gep(target, [builder.mul(builder.add(k, number(c)), apart)])
            if mask is None:
                store(builder, one, place)
            else:
                with builder.if_then(builder.icmp_signed("<", builder.add(k, number(c)), depth)):
                    store(builder, one, place)

    Stretch(builder, depth).each(turn)


@inner
def _block(job: Any, top: int, bottom: int, j: int, columns: int, first: int, last: int, room: int) -> None:
    """Some rows with all columns that are laid out, tile by tile."""
    if first == 0 and job[BIAS] != 0:
        bias = floats(job[BIAS] + 4 * j)
        for row in range(top, bottom):
            place = floats(job[TARGET] + 4 * (row * job[APART] + j))
            for column in range(columns):
                place[column] = bias[column] + place[column] if job[MORE] != 0 else bias[column]
    more = job[BIAS] != 0 or job[MORE] != 0
    for k in range(first, last, job[DEEPEST]):
        depth = min(job[DEEPEST], last - k)
        _lay_left(job, top, bottom, k, depth, room)
        for column in range(0, columns, LONG):
            panel = floats(_panel(job, column, k - first))
            following = _panel(job, column + LONG, k - first)
            for row in range(top, bottom, HIGH):
                group = (row - top) // HIGH
                _ask(floats(following + 64 * ASKED * group))
                _tile(floats(room + 4 * group * (HIGH * depth + LANES)), panel, depth, columns - column, bottom - row,
                      floats(job[TARGET] + 4 * (row * job[APART] + j + column)), job[APART], more or k > 0)  # fmt: skip


@instruction(types.void, AT)
def _ask(builder: Builder, place: Value) -> None:
    """Have some lines of the cache come closer."""
    for line in range(ASKED):
        prefetch(builder, builder.gep(place, [number(16 * line)]), close=2)


@instruction(types.void, AT, AT, WHOLE, WHOLE, WHOLE, AT, WHOLE, types.boolean)
@by_itself()
def _tile(builder: Builder, group: Value, panel: Value, depth: Value, lanes: Value, many: Value, target: Value,
          apart: Value, more: Value) -> None:  # fmt: skip
    """A group of the left matrix with a panel of the right one, to its place or added to what is there."""
    tile = Tile(builder, VECTORS, HIGH, lanes, many)
    for r in range(HIGH):
        for place in (0, LONG - 1):
            at = builder.add(builder.mul(apart, number(r)), number(place))
            prefetch(builder, builder.gep(target, [at]), written=True)
    with loop(builder, depth) as k:
        left = builder.gep(group, [builder.mul(k.index, number(HIGH))])
        right = builder.gep(panel, [builder.mul(k.index, number(LONG))])
        vectors = [load(builder, builder.gep(right, [number(v * LANES)])) for v in range(VECTORS)]
        tile.add(vectors, [builder.gep(left, [number(r)]) for r in range(HIGH)])
    tile.write(target, apart, lambda made, place, mask: put(builder, made, place, mask, more))

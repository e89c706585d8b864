"""Squared norms of sums of outer products, by Gram matrices that never leave the cache.

    |sum_p out_p in_p^T|^2 = sum over p, q of <in_p, in_q> <out_p, out_q>

A tile, a few rows p by a few rows q, is made in registers; of a pair of tiles that mirror each other one is made and
counts twice. Both matrices are made some numbers of all rows at a time, which stay in cache for all tiles, and are then
multiplied and added up. An `in_p` may be a patch of an image: as many segments as the kernel has lines, which are read
where they lie. Of many rows that are no patches, what is needed next is laid out side by side first.

Large terms may cancel, and the sum of their rounding errors then be larger than it. Those are at most

    u (steps + 24) (sum_p |in_p| |out_p|)^2,    u = 2^-24

for as many steps as both inner products take in a lane, and from some numbers to the next. Wherever that is a hundredth
or more, the gradients themselves are made, see `cancelling.py`; below, it could make a norm too small by 0.4% at the
very worst, were all roundings to conspire. They amount to some 1e-6.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from terrine.sgd.kernels import cancelling
from terrine.sgd.kernels.dots import dots
from terrine.sgd.kernels.frames import HEIGHT, NEXT, POSITIONS, added_up, cleared, framed, job
from terrine.sgd.kernels.image import Image, every_step
from terrine.sgd.kernels.team import (
    AT,
    ITEMS,
    TABLE,
    TAKEN,
    WHOLE,
    Kernel,
    by_itself,
    floats,
    inner,
    instruction,
    numbers,
    taken,
)
from terrine.sgd.kernels.vectors import (
    F32,
    LANES,
    REGISTERS,
    VECTOR,
    ZERO,
    Builder,
    Sums,
    Value,
    added,
    below,
    equal,
    load,
    number,
    root,
    store,
    total,
)
from terrine.sgd.scratch import scratch

SMALL, NEGLIGIBLE = cancelling.SMALL, cancelling.negligible(torch.float32)
_LOST = ir.Constant(VECTOR, [cancelling.lost(torch.float32)] * LANES)
HIGH, LONG = (4, 4) if REGISTERS >= 32 else (2, 4)
SIZE = HIGH * LONG
NEAR = 2 * LONG  # rows whose numbers stay in the innermost cache while all others meet them
MANY = 32  # positions from which on numbers are laid out
BLOCK = 64 * LANES  # numbers of a row that are multiplied at a time
STARTS, OUT_STARTS, LAID_STARTS, LINES, STEP, RUN, ROOM, SHARE, FOUND = range(NEXT, NEXT + 9)


def squares(image: Image, out: Tensor) -> tuple[Tensor, Tensor]:
    """See `Image.squares`."""
    n, positions, height = out.shape
    found, sums, frames = torch.empty(n), torch.empty(n, height), image.frames()
    starts, outs = image.starts(), every_step(1, positions, 0, out.stride(1))
    laid = every_step(1, positions, 0, BLOCK + LANES)
    room = scratch("grams", (image.threads, 2 * _numbers(positions) + positions * (BLOCK + LANES)), out)
    _squares.work(
        n, *job(image, frames, out, sums), starts.ctypes.data, outs.ctypes.data, laid.ctypes.data, image.lines,
        image.dilation * image.steps[0], image.run, room.data_ptr(), room.shape[1], found.data_ptr(),
    )  # fmt: skip
    if n and not float(found.min()) >= 0.0:  # nan if any is

        def direct(some: Tensor) -> Tensor:
            part, outs = replace(image, pixels=image.pixels.index_select(0, some)), out.index_select(0, some)
            return part.gradients(outs, scratch("cancelling", (len(some), numbers), out))[1]

        numbers = image.lines * image.run * height
        cancelling.replace(found, found < 0.0, -found, positions, numbers, direct)
    return found, sums


def _numbers(positions: int) -> int:
    """Numbers of a matrix's tiles."""
    return -(-positions // HIGH) * -(-positions // LONG) * SIZE


@Kernel
def _squares(job: Any) -> None:
    """The squares, or the negative of sum_p |in_p| |out_p| where they are doubtful."""
    worker, found, positions = cleared(job), floats(job[FOUND]), job[POSITIONS]
    error = (roundings(job[LINES], job[RUN]) + roundings(1, job[HEIGHT]) + 24.0) * 2.0**-24
    across = (positions + LONG - 1) // LONG
    inputs = job[ROOM] + 4 * worker * job[SHARE]
    outs = inputs + 4 * ((positions + HIGH - 1) // HIGH * across * SIZE)
    laid = outs + (outs - inputs)
    while True:
        i = taken(job, TAKEN)
        if i >= job[ITEMS]:
            break
        _gram(job, framed(job, i, worker), job[STARTS], job[LINES], job[STEP], job[RUN], laid, inputs)
        _gram(job, added_up(job, i), job[OUT_STARTS], 1, 0, job[HEIGHT], laid, outs)
        norm = alone = 0.0
        for p in range(0, positions, HIGH):
            for q in range(0, p + HIGH, LONG):
                place = 4 * SIZE * (p // HIGH * across + q // LONG)
                tile, diagonal = _both(floats(inputs + place), floats(outs + place), positions, p, q)
                norm += tile if q + LONG > p else 2.0 * tile
                alone += diagonal
        most = error * alone * alone
        if most > SMALL * norm:
            found[i] = -alone if alone > NEGLIGIBLE else alone * alone
        else:
            found[i] = norm


@inner
def roundings(lines: int, run: int) -> int:
    """How many additions one lane's number goes through at most, in rows of so many runs."""
    some, most = max(1, BLOCK // run), min(run, BLOCK)
    blocks = ((lines + some - 1) // some) * ((run + most - 1) // most)
    return min(some, lines) * ((most + LANES - 1) // LANES) + blocks


@inner
def _gram(job: Any, rows: int, starts: int, lines: int, step: int, run: int, laid: int, target: int) -> None:
    """The tiles, on the diagonal and below, of rows of `lines` runs."""
    positions, some, most = job[POSITIONS], max(1, BLOCK // run), min(run, BLOCK)
    across = (positions + LONG - 1) // LONG
    for a in range(0, lines, some):
        for k in range(0, run, most):
            here, together, wide = rows + 4 * (a * step + k), min(some, lines - a), min(most, run - k)
            places = starts
            if positions >= MANY and lines == 1:
                _lay(here, numbers(starts), positions, wide, laid)
                here, places = laid, job[LAID_STARTS]
            for first in range(0, positions, NEAR):
                for p in range(first, positions, HIGH):
                    for q in range(first, min(first + NEAR, p + HIGH), LONG):
                        _tile(floats(here), numbers(places), together, step, wide, positions, p, q,
                              floats(target + 4 * SIZE * (p // HIGH * across + q // LONG)), a + k > 0)  # fmt: skip


@inner
def _lay(rows: int, starts: Any, positions: int, wide: int, laid: int) -> None:
    """Some numbers of all rows, side by side."""
    for p in range(positions):
        source, target = floats(rows + 4 * starts[p]), floats(laid + 4 * p * (BLOCK + LANES))
        for k in range(wide):
            target[k] = source[k]


@instruction(types.void, AT, TABLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, AT, types.boolean)
@by_itself()
def _tile(builder: Builder, rows: Value, starts: Value, lines: Value, step: Value, width: Value, positions: Value,
          p: Value, q: Value, target: Value, more: Value) -> None:  # fmt: skip
    """<row_p, row_q> of a tile from rows p and columns q on, to its place or added to what is there."""
    last = builder.sub(positions, number(1))

    def within(first: Value, many: int) -> list[Value]:
        several = [builder.add(first, number(i)) for i in range(many)]
        chosen = [builder.select(builder.icmp_signed("<", one, positions), one, last) for one in several]
        return [builder.gep(rows, [builder.load(builder.gep(starts, [one]))]) for one in chosen]

    made = dots(builder, within(p, HIGH), within(q, LONG), lines, step, width, narrow=True)
    for i, one in enumerate(made):
        place = builder.gep(target, [number(i * LANES)])
        before = builder.select(more, load(builder, place), ZERO)
        store(builder, builder.fadd(one, before), place)


@instruction(types.UniTuple(types.float32, 2), AT, AT, WHOLE, WHOLE, WHOLE)
@by_itself(F32, F32)
def _both(builder: Builder, inputs: Value, outs: Value, positions: Value, p: Value, q: Value) -> tuple[Value, Value]:
    """The sum over a tile of <in_p, in_q> <out_p, out_q>; and of |in_p| |out_p|."""
    tiles = range(SIZE // LANES)
    inner, outer = ([load(builder, builder.gep(one, [number(i * LANES)])) for i in tiles] for one in (inputs, outs))
    products = [builder.fmul(one, other) for one, other in zip(inner, outer, strict=True)]
    places = [[divmod(k * LANES + i, LONG) for i in range(LANES)] for k in range(len(products))]
    kept, alone = Sums(builder, len(products)), Sums(builder, 1)
    whole = builder.and_(
        builder.icmp_signed("<=", builder.add(p, number(HIGH)), positions),
        builder.icmp_signed("<=", builder.add(q, number(LONG)), positions),
    )
    with builder.if_else(whole) as (then, otherwise):
        with then:
            kept.put(products)
        with otherwise:
            kept.put([_inside(builder, one, some, p, q, positions) for some, one in zip(places, products, strict=True)])
    products = kept.values()
    with builder.if_then(builder.icmp_signed("<", p, builder.add(q, number(LONG)))):
        pairs = zip(places, inner, outer, strict=True)
        lengths = [_on_diagonal(builder, one, other, some, p, q, positions) for some, one, other in pairs]
        alone.put([added(builder, lengths)])
    return total(builder, added(builder, products)), total(builder, alone.values()[0])


Places = list[tuple[int, int]]


def _inside(builder: Builder, products: Value, places: Places, p: Value, q: Value, positions: Value) -> Value:
    """The products of rows and columns that there are, 0 for the others."""
    high = below(builder, [row for row, _ in places], p, positions)
    wide = below(builder, [column for _, column in places], q, positions)
    return builder.select(builder.and_(high, wide), products, ZERO)


def _on_diagonal(
    builder: Builder, inner: Value, outer: Value, places: Places, p: Value, q: Value, positions: Value
) -> Value:
    """|in_p| |out_p|, each rounded up, where a row and a column are the same one, 0 for the others."""
    same = equal(builder, [row - column for row, column in places], builder.sub(p, q))
    there = builder.and_(same, below(builder, [row for row, _ in places], p, positions))
    lengths = [root(builder, builder.fadd(one, _LOST)) for one in (inner, outer)]
    return builder.select(there, builder.fmul(*lengths), ZERO)

"""Squared norms of sums of outer products, by Gram matrices that never leave the cache.

    |sum_p out_p in_p^T|^2 = sum over p, q of <in_p, in_q> <out_p, out_q>

A tile, a few rows p by a few rows q, is made in registers; what has its mirror image beyond the diagonal is made once
and counts twice. Both matrices are made some numbers of all rows at a time, which stay in cache for all tiles, and are
then multiplied and added up: those of many rows as `panels.py` has it, where registers are few, the others here. An
`in_p` may be a patch of an image: as many segments as the kernel has lines, which are read where they lie. Of many rows
that are no patches, what is needed next is laid out side by side first.

Large terms may cancel, and the sum of their rounding errors then be larger than it. Those are at most

    u (steps + 24) (sum_p |in_p| |out_p|)^2,    u = 2^-24

for as many steps as both inner products take, in a lane and from some numbers to the next. Wherever that is a hundredth
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

from terrine.sgd.kernels import cancelling, panels
from terrine.sgd.kernels.dots import dots
from terrine.sgd.kernels.frames import HEIGHT, NEXT, POSITIONS, added_up, cleared, framed, job
from terrine.sgd.kernels.image import Image, every_step
from terrine.sgd.kernels.panels import put, within
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
    if not image.run or not height:
        return torch.zeros(n), out.sum(1)
    found, sums, frames = torch.empty(n), torch.empty(n, height), image.frames()
    starts, outs = image.starts(), every_step(1, positions, 0, out.stride(1))
    laid = every_step(1, positions, 0, BLOCK + LANES)
    room = scratch("grams", (image.threads, 2 * _numbers(positions) + _room(positions)), out)
    _squares.work(
        n, *job(image, frames, out, sums), starts.address, outs.address, laid.address, image.lines,
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
    high, long = (panels.HIGH, panels.LONG) if positions >= panels.MANY else (HIGH, LONG)
    return -(-positions // high) * -(-positions // long) * high * long


def _room(positions: int) -> int:
    """Numbers laid out at a time."""
    return panels.ROOM if positions >= panels.MANY else positions * (BLOCK + LANES)


@Kernel
def _squares(job: Any) -> None:
    """The squares, or the negative of sum_p |in_p| |out_p| where they are doubtful."""
    worker, found, positions = cleared(job), floats(job[FOUND]), job[POSITIONS]
    by_panels = positions >= panels.MANY
    high, long = (panels.HIGH, panels.LONG) if by_panels else (HIGH, LONG)
    error = (roundings(job[LINES], job[RUN], by_panels) + roundings(1, job[HEIGHT], by_panels) + 24.0) * 2.0**-24
    across, size = (positions + long - 1) // long, high * long
    inputs = job[ROOM] + 4 * worker * job[SHARE]
    outs = inputs + 4 * ((positions + high - 1) // high * across * size)
    room = outs + (outs - inputs)
    while True:
        i = taken(job, TAKEN)
        if i >= job[ITEMS]:
            break
        image, out = framed(job, i, worker), added_up(job, i)
        if by_panels:
            panels.gram(image, job[STARTS], positions, job[LINES], job[STEP], job[RUN], room, inputs)
            panels.gram(out, job[OUT_STARTS], positions, 1, 0, job[HEIGHT], room, outs)
        else:
            _gram(job, image, job[STARTS], job[LINES], job[STEP], job[RUN], room, inputs)
            _gram(job, out, job[OUT_STARTS], 1, 0, job[HEIGHT], room, outs)
        norm = alone = 0.0
        for p in range(0, positions, high):
            for q in range(0, p + high, long):
                place = 4 * size * (p // high * across + q // long)
                one, other = floats(inputs + place), floats(outs + place)
                if by_panels:
                    tile, diagonal = _both_of_panels(one, other, positions, p, q)
                else:
                    tile, diagonal = _both(one, other, positions, p, q)
                norm += tile
                alone += diagonal
        most = error * alone * alone
        if most > SMALL * norm:
            found[i] = -alone if alone > NEGLIGIBLE else alone * alone
        else:
            found[i] = norm


@inner
def roundings(lines: int, run: int, by_panels: bool) -> int:
    """How many additions a number goes through at most, in rows of so many runs."""
    if by_panels:
        return int(panels.roundings(lines, run))
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
    left, right = (within(builder, rows, starts, first, many, positions) for first, many in ((p, HIGH), (q, LONG)))
    put(builder, dots(builder, left, right, lines, step, width, narrow=True), target, more)


def _sum_of_both(high: int, long: int) -> Any:
    """An instruction for tiles of this form."""

    def both(builder: Builder, inputs: Value, outs: Value, positions: Value, p: Value, q: Value) -> tuple[Value, Value]:
        """The sum over a tile of <in_p, in_q> <out_p, out_q>, twice below the diagonal; and of |in_p| |out_p|."""
        vectors = range(high * long // LANES)
        inner, outer = (
            [load(builder, builder.gep(one, [number(i * LANES)])) for i in vectors] for one in (inputs, outs)
        )
        products = [builder.fmul(one, other) for one, other in zip(inner, outer, strict=True)]
        places = [[divmod(v * LANES + i, long) for i in range(LANES)] for v in vectors]
        kept, alone = Sums(builder, 1), Sums(builder, 1)
        whole = builder.and_(
            builder.icmp_signed("<=", builder.add(p, number(high)), positions),
            builder.icmp_signed("<=", builder.add(q, number(long)), p),
        )
        with builder.if_else(whole) as (then, otherwise):
            with then:
                once = added(builder, products)
                kept.put([builder.fadd(once, once)])
            with otherwise:
                counted = [
                    _counted(builder, one, some, p, q, positions) for some, one in zip(places, products, strict=True)
                ]
                kept.put([added(builder, counted)])
                pairs = zip(places, inner, outer, strict=True)
                lengths = [_on_diagonal(builder, one, other, some, p, q, positions) for some, one, other in pairs]
                alone.put([added(builder, lengths)])
        return total(builder, kept.values()[0]), total(builder, alone.values()[0])

    both.__name__ = f"both_{high}_{long}"
    return instruction(types.UniTuple(types.float32, 2), AT, AT, WHOLE, WHOLE, WHOLE)(by_itself(F32, F32)(both))


Places = list[tuple[int, int]]


def _counted(builder: Builder, products: Value, places: Places, p: Value, q: Value, positions: Value) -> Value:
    """The products of rows that there are: twice below the diagonal, once on it, 0 above."""
    there = below(builder, [row for row, _ in places], p, positions)
    apart = [column - row for row, column in places]
    once = builder.select(equal(builder, apart, builder.sub(q, p)), products, ZERO)
    counted = builder.select(below(builder, apart, q, p), builder.fadd(products, products), once)
    return builder.select(there, counted, ZERO)


def _on_diagonal(
    builder: Builder, inner: Value, outer: Value, places: Places, p: Value, q: Value, positions: Value
) -> Value:
    """|in_p| |out_p|, each rounded up, where a row and a column are the same one, 0 for the others."""
    same = equal(builder, [row - column for row, column in places], builder.sub(p, q))
    there = builder.and_(same, below(builder, [row for row, _ in places], p, positions))
    lengths = [root(builder, builder.fadd(one, _LOST)) for one in (inner, outer)]
    return builder.select(there, builder.fmul(*lengths), ZERO)


_both, _both_of_panels = _sum_of_both(HIGH, LONG), _sum_of_both(panels.HIGH, panels.LONG)

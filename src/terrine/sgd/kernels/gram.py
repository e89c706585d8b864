"""Squared norms of sums of outer products, by Gram matrices of which nothing is ever kept.

    |sum_p out_p in_p^T|^2 = sum over p, q of <in_p, in_q> <out_p, out_q>

A tile of both matrices, a few rows p by a few rows q, is made in registers, multiplied and added up; of a pair of
tiles that mirror each other one is made and counts twice. An `in_p` may be a patch of an image: as many segments as the
kernel has lines, which are read where they lie.

Large terms may cancel, and the sum of their rounding errors then be larger than it. Those are at most

    u (steps + 24) (sum_p |in_p| |out_p|)^2,    u = 2^-24

for as many steps as both inner products take in a lane. Wherever that is a hundredth or more, the gradients themselves
are made, see `cancelling.py`; below, it could make a norm too small by 0.4% at the very worst, were all roundings to
conspire. They amount to some 1e-6.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from terrine.sgd.kernels import cancelling
from terrine.sgd.kernels.dots import dots, roundings
from terrine.sgd.kernels.frames import HEIGHT, NEXT, OUT, POSITIONS, added_up, cleared, framed, job
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
    number,
    root,
    total,
)
from terrine.sgd.scratch import scratch

SMALL, NEGLIGIBLE = cancelling.SMALL, cancelling.negligible(torch.float32)
_LOST = ir.Constant(VECTOR, [cancelling.lost(torch.float32)] * LANES)
HIGH, LONG = (4, 4) if REGISTERS >= 32 else (2, 4)
STARTS, LINES, STEP, RUN, FOUND, INPUTS, INPUTS_ROOM, INPUTS_STEP, OUT_ROOM, OUT_STEP, ROOM = range(NEXT, NEXT + 11)


def squares(image: Image, out: Tensor) -> tuple[Tensor, Tensor]:
    """See `Image.squares`."""
    n, positions, height = out.shape
    found, sums, frames = torch.empty(n), torch.empty(n, height), image.frames()
    plain, width = image.kernel == (1, 1) and image.places[0] == 1 and not image.framed, image.run
    inputs_step = _apart(positions, width, image.strides[1]) if plain else 0
    out_step = _apart(positions, height, out.stride(1))
    starts = image.starts() if not inputs_step else every_step(1, positions, 0, inputs_step)
    laid = scratch("rows", (image.threads, positions * (inputs_step + out_step)), out)
    _squares.work(
        n, *job(image, frames, out, sums), starts.ctypes.data, image.lines, image.dilation * image.steps[0], width,
        found.data_ptr(), image.strides[1], laid.data_ptr(), inputs_step,
        laid.data_ptr() + 4 * positions * inputs_step, out_step, laid.shape[1],
    )  # fmt: skip
    if n and not float(found.min()) >= 0.0:  # nan if any is

        def direct(some: Tensor) -> Tensor:
            part, outs = replace(image, pixels=image.pixels.index_select(0, some)), out.index_select(0, some)
            return part.gradients(outs, scratch("cancelling", (len(some), numbers), out))[1]

        numbers = image.lines * width * height
        cancelling.replace(found, found < 0.0, -found, positions, numbers, direct)
    return found, sums


def _apart(positions: int, width: int, step: int) -> int:
    """How far apart rows are to be laid that many neighbours would lie on top of each other in the cache; or 0."""
    return width + LANES if step % 1024 == 0 and positions >= 32 else 0


@inner
def _laid(source: int, step: int, positions: int, width: int, place: int, apart: int) -> int:
    """The address of rows, moved apart if they are to be."""
    if apart:
        for p in range(positions):
            one, other = floats(source + 4 * p * step), floats(place + 4 * p * apart)
            for k in range(width):
                other[k] = one[k]
        return place
    return source


@Kernel
def _squares(job: Any) -> None:
    """The squares, or the negative of sum_p |in_p| |out_p| where they are doubtful."""
    worker, found, positions = cleared(job), floats(job[FOUND]), job[POSITIONS]
    error = (roundings(job[LINES], job[RUN]) + roundings(1, job[HEIGHT]) + 24.0) * 2.0**-24
    starts, shift = numbers(job[STARTS]), 4 * worker * job[ROOM]
    step = job[OUT_STEP] or job[OUT]
    while True:
        i = taken(job, TAKEN)
        if i >= job[ITEMS]:
            break
        image = floats(_laid(framed(job, i, worker), job[INPUTS], positions, job[RUN],
                             job[INPUTS_ROOM] + shift, job[INPUTS_STEP]))  # fmt: skip
        out = floats(_laid(added_up(job, i), job[OUT], positions, job[HEIGHT], job[OUT_ROOM] + shift, job[OUT_STEP]))
        norm = alone = 0.0
        for p in range(0, positions, HIGH):
            for q in range(0, p + HIGH, LONG):
                tile, diagonal = _tile(
                    image, starts, job[LINES], job[STEP], job[RUN], out, step, job[HEIGHT], positions, p, q
                )
                norm += tile if q + LONG > p else 2.0 * tile
                alone += diagonal
        most = error * alone * alone
        if most > SMALL * norm:
            found[i] = -alone if alone > NEGLIGIBLE else alone * alone
        else:
            found[i] = norm


@instruction(types.UniTuple(types.float32, 2), AT, TABLE, WHOLE, WHOLE, WHOLE, AT, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE)
@by_itself(F32, F32)
def _tile(builder: Builder, image: Value, starts: Value, lines: Value, step: Value, run: Value, out: Value,
          apart: Value, height: Value, positions: Value, p: Value, q: Value) -> tuple[Value, Value]:  # fmt: skip
    """The sum over a tile, from rows p and columns q on, of <in_p, in_q> <out_p, out_q>; and of |in_p| |out_p|."""
    last = builder.sub(positions, number(1))

    def within(first: Value, many: int) -> list[Value]:
        several = [builder.add(first, number(i)) for i in range(many)]
        return [builder.select(builder.icmp_signed("<", one, positions), one, last) for one in several]

    def patch(position: Value) -> Value:
        return builder.gep(image, [builder.load(builder.gep(starts, [position]))])

    def line(position: Value) -> Value:
        return builder.gep(out, [builder.mul(position, apart)])

    rows, columns = within(p, HIGH), within(q, LONG)
    inner = dots(builder, [*map(patch, rows)], [*map(patch, columns)], lines, step, run)
    outer = dots(builder, [*map(line, rows)], [*map(line, columns)], number(1), number(0), height)
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

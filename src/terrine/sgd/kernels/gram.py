"""Squared norms of sums of outer products, by Gram matrices of which nothing is ever kept.

    |sum_p out_p in_p^T|^2 = sum over p, q of <in_p, in_q> <out_p, out_q>

A tile of both matrices, a few rows p by a few rows q, is made in registers, multiplied and added up; of a pair of tiles
that mirror each other one is made and counts twice. An `in_p` may be a patch of an image: as many segments as the kernel
has lines, which are read where they lie.

Large terms may cancel, and the sum of their rounding errors then be larger than it. Those are at most

    u (patch / lanes + outputs / lanes + 24) (sum_p |in_p| |out_p|)^2,    u = 2^-24

which is added wherever it is a hundredth or more. Below that it could make a norm too small by 0.4% at the very worst,
were all roundings to conspire; they amount to some 1e-6.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from terrine.sgd.kernels.frames import HEIGHT, NEXT, OUT, POSITIONS, added_up, cleared, framed, job
from terrine.sgd.kernels.image import Image
from terrine.sgd.kernels.team import ITEMS, TAKEN, Kernel, floats, numbers, taken
from terrine.sgd.kernels.vectors import (
    LANES,
    REGISTERS,
    ZERO,
    Builder,
    Load,
    Sums,
    Value,
    below,
    equal,
    load,
    load_where,
    loop,
    number,
    root,
    total,
    totals,
)

HIGH, WIDE = (4, 4) if REGISTERS >= 32 else (2, 4)


STARTS, LINES, STEP, RUN, FOUND, ALONE = range(NEXT, NEXT + 6)


def squares(image: Image, out: Tensor) -> tuple[Tensor, Tensor]:
    """See `Image.squares`."""
    n, _, height = out.shape
    found, sums, alone = torch.empty(n), torch.empty(n, height), torch.zeros(n)
    frames, starts = image.frames(), image.starts()
    _squares.work(
        n, *job(image, frames, out, sums), starts.ctypes.data, image.lines, image.dilation * image.steps[0], image.run,
        found.data_ptr(), alone.data_ptr(),
    )  # fmt: skip
    return found, sums


@Kernel
def _squares(job: Any) -> None:
    worker, found, alone, positions = cleared(job), floats(job[FOUND]), floats(job[ALONE]), job[POSITIONS]
    error = ((job[LINES] * job[RUN] + job[HEIGHT]) / LANES + 24.0) * 2.0**-24
    while True:
        i = taken(job, TAKEN)
        if i >= job[ITEMS]:
            break
        image, out = floats(framed(job, i, worker)), floats(added_up(job, i))
        norm = 0.0
        for p in range(0, positions, HIGH):
            for q in range(0, p + HIGH, WIDE):
                tile = _tile(
                    image, numbers(job[STARTS]), job[LINES], job[STEP], job[RUN], out, job[OUT], job[HEIGHT],
                    positions, p, q, floats(job[ALONE] + 4 * i),
                )  # fmt: skip
                norm += tile if q + WIDE > p else 2.0 * tile
        most = error * alone[i] * alone[i]
        found[i] = max(norm, 0.0) + most if most > 2.0**-7 * norm else norm


@intrinsic  # type: ignore[untyped-decorator]
def _tile(context: Any, image: Any, starts: Any, lines: Any, step: Any, run: Any, out: Any, apart: Any, height: Any,
          positions: Any, p: Any, q: Any, alone: Any) -> Any:  # fmt: skip
    """The sum over a tile, from rows p and columns q on, of <in_p, in_q> <out_p, out_q>; adds up |in_p| |out_p|."""

    def build(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        image, starts, lines, step, run, out, apart, height, positions, p, q, alone = arguments
        last = builder.sub(positions, number(1))
        rows, columns = (
            [builder.add(first, number(i)) for i in range(many)] for first, many in ((p, HIGH), (q, WIDE))
        )
        rows, columns = (
            [builder.select(builder.icmp_signed("<", one, positions), one, last) for one in several]
            for several in (rows, columns)
        )

        def patch(position: Value) -> Value:
            return builder.gep(image, [builder.load(builder.gep(starts, [position]))])

        def line(position: Value) -> Value:
            return builder.gep(out, [builder.mul(position, apart)])

        inner = _dots(builder, [*map(patch, rows)], [*map(patch, columns)], lines, step, run)
        outer = _dots(builder, [*map(line, rows)], [*map(line, columns)], number(1), number(0), height)
        added = diagonal = ZERO
        for k, (one, other) in enumerate(zip(inner, outer, strict=True)):
            places = [divmod(k * LANES + i, WIDE) for i in range(LANES)]
            inside = builder.and_(
                below(builder, [row for row, _ in places], p, positions),
                below(builder, [column for _, column in places], q, positions),
            )
            product = builder.select(inside, builder.fmul(one, other), ZERO)
            added = builder.fadd(added, product)
            same = equal(builder, [row - column for row, column in places], builder.sub(p, q))
            diagonal = builder.fadd(diagonal, builder.select(same, root(builder, product), ZERO))
        builder.store(builder.fadd(builder.load(alone), total(builder, diagonal)), alone)
        return total(builder, added)

    pointer, whole = types.CPointer(types.float32), types.int64
    table = types.CPointer(types.int64)
    return types.float32(pointer, table, whole, whole, whole, pointer, whole, whole, whole, whole, whole, pointer), build


def _dots(builder: Builder, rows: list[Value], columns: list[Value], segments: Value, step: Value, width: Value) -> list[Value]:
    """<row, column> of every pair, LANES to a vector; each is `segments` runs of `width`, one every `step` numbers."""
    sums = Sums(builder, len(rows) * len(columns))

    def add(at: Value, read: Load) -> None:
        left = [read(builder.gep(row, [at])) for row in rows]
        for c, column in enumerate(columns):
            right = read(builder.gep(column, [at]))
            for r, one in enumerate(left):
                sums.add(r * len(columns) + c, one, right)

    whole = builder.udiv(width, number(LANES))
    rest = builder.urem(width, number(LANES))
    mask = below(builder, list(range(LANES)), number(0), rest)
    with loop(builder, segments) as segment:
        start = builder.mul(segment.index, step)
        with loop(builder, whole) as i:
            add(builder.add(start, builder.mul(i.index, number(LANES))), lambda at: load(builder, at))
        with builder.if_then(builder.icmp_unsigned(">", rest, number(0))):
            end = builder.add(start, builder.mul(whole, number(LANES)))
            add(end, lambda at: load_where(builder, at, mask))
    return totals(builder, sums.values())


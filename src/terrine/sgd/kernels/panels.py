"""Inner products of all rows with all rows, a few of which are turned into a panel first.

    gram_pq = <row_p, row_q>,    q <= p

A panel has the first numbers of its rows side by side, then their second ones, and so on: one number of another row,
spread, meets a vector of them, and no sum has to be added up across a register in the end. Where registers are few,
that takes less time than inner products of vectors once rows are many enough for turning them to be little.
"""

from __future__ import annotations

from numba import types

from terrine.sgd.kernels.team import AT, TABLE, WHOLE, by_itself, floats, inner, instruction, numbers
from terrine.sgd.kernels.vectors import (
    LANES,
    REGISTERS,
    ZERO,
    Builder,
    Stretch,
    Sums,
    Value,
    every,
    load,
    loop,
    number,
    store,
    transposed,
)

HIGH, LONG = 6, 2 * LANES
"""A tile: single rows, and rows of a panel."""
SIZE = HIGH * LONG
MANY = 32 if REGISTERS < 32 else 1 << 62
"""Rows from which on panels are faster than inner products of vectors."""
DEEP, BLOCK = 64, 256
"""Numbers of a row that are added up one after the other; and that a panel has, which stays in the innermost cache."""
ROOM = BLOCK * LONG


@inner
def roundings(lines: int, run: int) -> int:
    """How many additions a number goes through at most, in rows of so many runs."""
    return min(run, DEEP) + lines * ((run + DEEP - 1) // DEEP)


@inner
def gram(rows: int, starts: int, positions: int, lines: int, step: int, run: int, panel: int, target: int) -> None:
    """The tiles, on the diagonal and below, of rows of `lines` runs."""
    across = (positions + LONG - 1) // LONG
    for a in range(lines):
        for k in range(0, run, BLOCK):
            here, wide = rows + 4 * (a * step + k), min(BLOCK, run - k)
            for q in range(0, positions, LONG):
                _turn(floats(here), numbers(starts), positions, q, wide, floats(panel))
                for p in range(q // HIGH * HIGH, positions, HIGH):
                    tile = floats(target + 4 * SIZE * (p // HIGH * across + q // LONG))
                    for d in range(0, wide, DEEP):
                        _tile(floats(here + 4 * d), numbers(starts), positions, p, floats(panel + 4 * d * LONG),
                              min(DEEP, wide - d), tile, a + k + d > 0)  # fmt: skip


def within(builder: Builder, rows: Value, starts: Value, first: Value, many: int, positions: Value) -> list[Value]:
    """The addresses of so many rows; of the last one instead of those there are not."""
    last = builder.sub(positions, number(1))
    several = [builder.add(first, number(i)) for i in range(many)]
    chosen = [builder.select(builder.icmp_signed("<", one, positions), one, last) for one in several]
    return [builder.gep(rows, [builder.load(builder.gep(starts, [one]))]) for one in chosen]


def put(builder: Builder, made: list[Value], target: Value, more: Value) -> None:
    """Vectors of a tile to its place, or added to what is there."""
    for i, one in enumerate(made):
        place = builder.gep(target, [number(i * LANES)])
        before = builder.select(more, load(builder, place), ZERO)
        store(builder, builder.fadd(one, before), place)


@instruction(types.void, AT, TABLE, WHOLE, WHOLE, WHOLE, AT)
@by_itself()
def _turn(builder: Builder, rows: Value, starts: Value, positions: Value, q: Value, wide: Value, panel: Value) -> None:
    """A panel of so many numbers of the rows from q on; of a last vector there may be more than those."""
    for half in range(0, LONG, LANES):
        several = within(builder, rows, starts, builder.add(q, number(half)), LANES, positions)

        def turn(offset: Value, mask: Value | None, several: list[Value] = several, half: int = half) -> None:
            read = [load(builder, builder.gep(row, [offset]), mask) for row in several]
            for i, one in enumerate(transposed(builder, read)):
                place = builder.mul(builder.add(offset, number(i)), number(LONG))
                store(builder, one, builder.gep(panel, [builder.add(place, number(half))]))

        Stretch(builder, wide).each(turn)


@instruction(types.void, AT, TABLE, WHOLE, WHOLE, AT, WHOLE, AT, types.boolean)
@by_itself()
def _tile(builder: Builder, rows: Value, starts: Value, positions: Value, p: Value, panel: Value, many: Value,
          target: Value, more: Value) -> None:  # fmt: skip
    """<row_p, row_q> for the panel's q, from so many numbers, to its place or added to what is there."""
    several, vectors = within(builder, rows, starts, p, HIGH, positions), LONG // LANES
    sums = Sums(builder, HIGH * vectors)
    with loop(builder, many) as k:
        at = builder.gep(panel, [builder.mul(k.index, number(LONG))])
        beside = [load(builder, builder.gep(at, [number(v * LANES)])) for v in range(vectors)]
        for r, row in enumerate(several):
            spread = every(builder, builder.load(builder.gep(row, [k.index])))
            for v, one in enumerate(beside):
                sums.add(r * vectors + v, one, spread)
    put(builder, sums.values(), target, more)

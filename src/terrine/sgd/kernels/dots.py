"""Inner products of a few rows with a few others, all at once: every number is read once for several of them.

Of rows of `WIDE` vectors or more, `BLOCK` at a time are added up by themselves: a sum of a few sums is off by much less
than one long sum.
"""

from __future__ import annotations

from functools import partial

from terrine.sgd.kernels.vectors import LANES, ZERO, Builder, Stretch, Sums, Value, load, loop, number, totals

BLOCK, WIDE = 64, 256


def dots(builder: Builder, rows: list[Value], columns: list[Value], segments: Value, step: Value, width: Value,
         squares: bool = False, narrow: bool = False) -> list[Value]:  # fmt: skip
    """<row, column> of every pair, row by row, and if asked for |row|^2 of every row: LANES to a vector.

    Each is `segments` runs of `width` numbers, one run every `step` numbers; `narrow` if there are never many.
    """
    pairs = len(rows) * len(columns)
    sums, made = (Sums(builder, pairs + len(rows) * squares) for _ in range(2))

    def add(first: Value, offset: Value, mask: Value | None) -> None:
        at = builder.add(first, offset)
        left = [load(builder, builder.gep(row, [at]), mask) for row in rows]
        for c, column in enumerate(columns):
            right = load(builder, builder.gep(column, [at]), mask)
            for r, one in enumerate(left):
                sums.add(r * len(columns) + c, one, right)
        for r, one in enumerate(left if squares else []):
            sums.add(pairs + r, one, one)

    def settle() -> None:
        """Add what has been summed to what will be the result, and begin anew."""
        made.put([builder.fadd(one, other) for one, other in zip(made.values(), sums.values(), strict=True)])
        sums.put([ZERO] * len(sums.values()))

    def at_once() -> None:
        stretch = Stretch(builder, width)
        with loop(builder, segments) as segment:
            stretch.each(partial(add, builder.mul(segment.index, step)))
        made.put(sums.values())

    def in_blocks() -> None:
        size = number(BLOCK * LANES)
        blocks = builder.udiv(width, size)
        block, rest = Stretch(builder, size), Stretch(builder, builder.urem(width, size))
        with loop(builder, segments) as segment:
            start = builder.mul(segment.index, step)
            with loop(builder, blocks) as i:
                block.each(partial(add, builder.add(start, builder.mul(i.index, size))))
                settle()
            rest.each(partial(add, builder.add(start, builder.mul(blocks, size))))
            settle()

    if narrow:
        at_once()
    else:
        vectors = builder.udiv(builder.add(width, number(LANES - 1)), number(LANES))
        with builder.if_else(builder.icmp_unsigned("<", vectors, number(WIDE))) as (few, many):
            with few:
                at_once()
            with many:
                in_blocks()
    found = made.values()
    return totals(builder, found + [ZERO] * (-len(found) % LANES))

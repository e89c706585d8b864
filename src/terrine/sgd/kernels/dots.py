"""Inner products of a few rows with a few others, all at once: every number is read once for several of them."""

from __future__ import annotations

from terrine.sgd.kernels.vectors import LANES, ZERO, Builder, Stretch, Sums, Value, load, loop, totals


def dots(builder: Builder, rows: list[Value], columns: list[Value], segments: Value, step: Value, width: Value,
         squares: bool = False) -> list[Value]:  # fmt: skip
    """<row, column> of every pair, row by row, and if asked for |row|^2 of every row: LANES to a vector.

    Each is `segments` runs of `width` numbers, one run every `step` numbers.
    """
    pairs = len(rows) * len(columns)
    sums = Sums(builder, pairs + len(rows) * squares)

    stretch = Stretch(builder, width)
    with loop(builder, segments) as segment:
        start = builder.mul(segment.index, step)

        def add(offset: Value, mask: Value | None) -> None:
            at = builder.add(start, offset)
            left = [load(builder, builder.gep(row, [at]), mask) for row in rows]
            for c, column in enumerate(columns):
                right = load(builder, builder.gep(column, [at]), mask)
                for r, one in enumerate(left):
                    sums.add(r * len(columns) + c, one, right)
            for r, one in enumerate(left if squares else []):
                sums.add(pairs + r, one, one)

        stretch.each(add)
    made = sums.values()
    return totals(builder, made + [ZERO] * (-len(made) % LANES))

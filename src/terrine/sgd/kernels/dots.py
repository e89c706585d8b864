"""Inner products of a few rows with a few others, all at once: every number is read once for several of them."""

from __future__ import annotations

from terrine.sgd.kernels.vectors import (
    LANES,
    ZERO,
    Builder,
    Load,
    Sums,
    Value,
    below,
    load,
    load_where,
    loop,
    number,
    totals,
)


def dots(builder: Builder, rows: list[Value], columns: list[Value], segments: Value, step: Value, width: Value,
         squares: bool = False) -> list[Value]:  # fmt: skip
    """<row, column> of every pair, row by row, and if asked for |row|^2 of every row: LANES to a vector.

    Each is `segments` runs of `width` numbers, one run every `step` numbers.
    """
    pairs = len(rows) * len(columns)
    sums = Sums(builder, pairs + len(rows) * squares)

    def add(at: Value, read: Load) -> None:
        left = [read(builder.gep(row, [at])) for row in rows]
        for c, column in enumerate(columns):
            right = read(builder.gep(column, [at]))
            for r, one in enumerate(left):
                sums.add(r * len(columns) + c, one, right)
        for r, one in enumerate(left if squares else []):
            sums.add(pairs + r, one, one)

    whole, rest = builder.udiv(width, number(LANES)), builder.urem(width, number(LANES))
    mask = below(builder, list(range(LANES)), number(0), rest)
    with loop(builder, segments) as segment:
        start = builder.mul(segment.index, step)
        with loop(builder, whole) as i:
            add(builder.add(start, builder.mul(i.index, number(LANES))), lambda at: load(builder, at))
        with builder.if_then(builder.icmp_unsigned(">", rest, number(0))):
            end = builder.add(start, builder.mul(whole, number(LANES)))
            add(end, lambda at: load_where(builder, at, mask))
    made = sums.values()
    return totals(builder, made + [ZERO] * (-len(made) % LANES))

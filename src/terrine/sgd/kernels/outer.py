"""Sums of outer products, example by example, with their squared norms.

    g_i = sum_p out_ip in_ip^T

A tile of one example's sum is made in registers, from the first position to the last, squared and written. An `in_p`
may be a patch of an image, which is read where it lies: lines of the kernel are made one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from numba import types
from numba.core import cgutils
from torch import Tensor

from terrine.sgd.kernels.frames import HEIGHT, NEXT, OUT, added_up, cleared, framed, job
from terrine.sgd.kernels.image import Image
from terrine.sgd.kernels.team import AT, ITEMS, TAKEN, WHOLE, Kernel, floats, inner, instruction, taken
from terrine.sgd.kernels.vectors import (
    F32,
    LANES,
    REGISTERS,
    Builder,
    Sums,
    Value,
    below,
    every,
    load,
    loop,
    number,
    store,
    total,
)

TILES = ((1, 8), (1, 12), (2, 8), (2, 12), (3, 8), (4, 6), (6, 4)) if REGISTERS >= 32 else ((1, 8), (2, 6), (3, 4))
"""Tiles by the vectors of their width and the numbers spread against them: sums and what is added are in registers."""
ROWS, COLUMNS, DOWN, ALONG, LINES, STEP, RUN, TURNED, TILE, FOUND, SQUARES = range(NEXT, NEXT + 11)


def gradients(image: Image, out: Tensor, rows: Tensor) -> tuple[bool, Tensor, Tensor]:
    """See `Image.gradients`."""
    n, _, height = out.shape
    turned = _fastest(height, image.run)[0] < _fastest(image.run, height)[0]
    _, tile = _fastest(height, image.run) if turned else _fastest(image.run, height)
    squares, sums, frames = torch.empty(n), torch.empty(n, height), image.frames()
    _gradients.work(
        n, *job(image, frames, out, sums), *image.places, *image.strides, image.lines, image.dilation * image.steps[0],
        image.run, turned, tile, rows.data_ptr(), squares.data_ptr(),
    )  # fmt: skip
    return turned, squares, sums


@lru_cache(maxsize=1024)
def _fastest(numbers: int, spread: int) -> tuple[float, int]:
    """The tile that takes least time for so many numbers in vectors and so many spread, and that time."""
    return min((_time(*tile, numbers, spread), i) for i, tile in enumerate(TILES))


def _time(vectors: int, high: int, numbers: int, spread: int) -> float:
    """Multiplications, what is read for them and what counts positions, in half cycles a position."""
    tiles = -(-numbers // (vectors * LANES)) * -(-spread // high)
    return tiles * (vectors * high + 0.25 * (vectors + high) + 2)


@Kernel
def _gradients(job: Any) -> None:
    worker, squares = cleared(job), floats(job[SQUARES])
    out_line, apart, height, lines, run = job[COLUMNS] * job[OUT], job[OUT], job[HEIGHT], job[LINES], job[RUN]
    while True:
        i = taken(job, TAKEN)
        if i >= job[ITEMS]:
            break
        image, out = framed(job, i, worker), added_up(job, i)
        target = job[FOUND] + 4 * i * lines * run * height
        norm = 0.0
        for a in range(lines):
            patch = image + 4 * a * job[STEP]
            if job[TURNED]:
                norm += _panels(job[TILE], out, out_line, apart, height, patch, job[DOWN], job[ALONG], run, job[ROWS],
                                job[COLUMNS], target + 4 * a * run * height, height)  # fmt: skip
            else:
                norm += _panels(job[TILE], patch, job[DOWN], job[ALONG], run, out, out_line, apart, height, job[ROWS],
                                job[COLUMNS], target + 4 * a * run, lines * run)  # fmt: skip
        squares[i] = norm


@inner
def _panels(tile: int, wide: int, line: int, pixel: int, numbers: int, spread: int, other_line: int, other_pixel: int,
            many: int, rows: int, columns: int, target: int, apart: int) -> float:  # fmt: skip
    """All tiles of one line of the kernel."""
    vectors, high = TILES[tile]
    norm = 0.0
    for v in range(0, numbers, vectors * LANES):
        for r in range(0, many, high):
            norm += _tile(
                tile, floats(wide + 4 * v), line, pixel, numbers - v, floats(spread + 4 * r), other_line, other_pixel,
                many - r, rows, columns, floats(target + 4 * (r * apart + v)), apart,
            )  # fmt: skip
    return norm


@instruction(types.float32, WHOLE, AT, WHOLE, WHOLE, WHOLE, AT, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, AT, WHOLE)
def _tile(builder: Builder, tile: Value, *arguments: Value) -> Value:
    """One of the tiles, as `_build` makes it; the sum of its squares."""
    norm = cgutils.alloca_once(builder, F32)
    done = builder.append_basic_block("done")
    choice = builder.switch(tile, done)
    for i, (vectors, high) in enumerate(TILES):
        block = builder.append_basic_block(f"tile{i}")
        choice.add_case(number(i), block)
        builder.position_at_end(block)
        builder.store(_build(builder, vectors, high, *arguments), norm)
        builder.branch(done)
    builder.position_at_end(done)
    return builder.load(norm)


def _build(builder: Builder, vectors: int, high: int, wide: Value, line: Value, pixel: Value, lanes: Value,
           spread: Value, other_line: Value, other_pixel: Value, many: Value, rows: Value, columns: Value,
           target: Value, apart: Value) -> Value:  # fmt: skip
    """sum over positions of wide, `lanes` numbers in vectors, times spread, `many` numbers."""
    sums, squares = Sums(builder, vectors * high), Sums(builder, 1)
    masks = [below(builder, list(range(LANES)), number(v * LANES), lanes) for v in range(vectors)]
    last = builder.sub(many, number(1))
    offsets = [builder.select(builder.icmp_signed("<", number(r), many), number(r), last) for r in range(high)]
    inside = builder.icmp_signed(">=", lanes, number(vectors * LANES))

    def positions(masks: Sequence[Value | None]) -> None:
        with loop(builder, rows) as row:
            here, there = builder.mul(row.index, line), builder.mul(row.index, other_line)
            with loop(builder, columns) as column:
                at = builder.gep(wide, [builder.add(here, builder.mul(column.index, pixel))])
                beside = builder.gep(spread, [builder.add(there, builder.mul(column.index, other_pixel))])
                taken = [load(builder, builder.gep(at, [number(v * LANES)]), mask) for v, mask in enumerate(masks)]
                for r, offset in enumerate(offsets):
                    factor = every(builder, builder.load(builder.gep(beside, [offset])))
                    for v, one in enumerate(taken):
                        sums.add(r * vectors + v, one, factor)

    with builder.if_else(inside) as (then, otherwise):
        with then:
            positions([None] * vectors)
        with otherwise:
            positions(masks)
    made = sums.values()
    for r in range(high):
        with builder.if_then(builder.icmp_signed("<", number(r), many)):
            to = builder.gep(target, [builder.mul(apart, number(r))])
            for v in range(vectors):
                one = made[r * vectors + v]
                squares.add(0, one, one)
                store(builder, one, builder.gep(to, [number(v * LANES)]), masks[v])
    return total(builder, squares.values()[0])

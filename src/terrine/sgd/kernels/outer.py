"""Sums of outer products, example by example, with their squared norms.

    g_i = sum_p out_ip in_ip^T

A tile of one example's sum is made in registers, from the first position to the last, squared and written. An `in_p`
may be a patch of an image, which is read where it lies: lines of the kernel are made one after the other. Or a tile of
the sum over all examples is made so, a few of them at a time, which stay in cache for the tiles beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numba import types
from torch import Tensor

from terrine.sgd.kernels.frames import (
    APART,
    HEIGHT,
    NEXT,
    OUT,
    OUTS,
    OUTS_APART,
    PIXELS,
    added_up,
    cleared,
    framed,
    job,
)
from terrine.sgd.kernels.image import Image, Table, every_step
from terrine.sgd.kernels.team import AT, ITEMS, TABLE, TAKEN, WHOLE, Kernel, floats, inner, instruction, taken
from terrine.sgd.kernels.team import numbers as table
from terrine.sgd.kernels.tiles import TILES, Tile, fastest, measured, one_of
from terrine.sgd.kernels.vectors import LANES, ZERO, Builder, Sums, Value, load, loop, number, store, total

ROWS, COLUMNS, DOWN, ALONG, LINES, STEP, RUN, TURNED, TILE, PLACES, FOUND, SQUARES = range(NEXT, NEXT + 12)
EXAMPLES, PANELS, SOME = range(SQUARES, SQUARES + 3)
_CACHED = 1 << 16  # numbers that stay in a core's cache from one tile to the next


def gradients(image: Image, out: Tensor, rows: Tensor) -> tuple[bool, Tensor, Tensor]:
    """See `Image.gradients`."""
    n, _, height = out.shape
    turned, tile, places = _chosen(image, height, image.lines)
    squares, sums, frames = torch.empty(n), torch.empty(n, height), image.frames()
    _gradients.work(
        n, *job(image, frames, out, sums), *image.places, *image.strides, image.lines, image.dilation * image.steps[0],
        image.run, turned, tile, places.address, rows.data_ptr(), squares.data_ptr(),
    )  # fmt: skip
    return turned, squares, sums


def summed(image: Image, out: Tensor) -> tuple[bool, Tensor]:
    """See `Image.summed`."""
    n, _, height = out.shape
    turned, tile, places = _chosen(image, height, 1)
    panels = -(-(height if turned else image.run) // (TILES[tile][0] * LANES))
    total, frames = out.new_empty(image.lines * image.run * height), image.frames()
    some = _CACHED * n // max(1, out.numel() + image.pixels.numel())
    threads = min(torch.get_num_threads(), image.lines * panels)
    _summed.work(
        threads, *job(image, frames, out, total), *image.places, *image.strides, image.lines,
        image.dilation * image.steps[0], image.run, turned, tile, places.address, total.data_ptr(), n, panels,
        max(1, some),
    )  # fmt: skip
    return turned, total


def time(image: Image, height: int) -> float:
    """What gradients take, in half cycles a position, were all their numbers at hand."""
    return min(_times(image, height, image.lines))[0]


def _times(image: Image, height: int, lines: int) -> tuple[tuple[float, int], tuple[float, int]]:
    """The time with outputs in vectors, and patches spread against them; and the other way round, line by line."""
    (across, tile), (along, other) = fastest(height, lines * image.run), fastest(image.run, height)
    return (across, tile), (lines * along, other)


def _chosen(image: Image, height: int, lines: int) -> tuple[bool, int, Table]:
    """Whether outputs are what lies in vectors, the tile, and where the numbers lie that are spread against them.

    That may be numbers of so many lines of the kernel at once; outputs are spread against one line.
    """
    (across, tile), (along, other) = _times(image, height, lines)
    if across < along:
        return True, tile, every_step(lines, image.run, image.dilation * image.steps[0], 1)
    return False, other, every_step(1, height, 0, 1)


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
        if job[TURNED]:
            squares[i] = _panels(job[TILE], out, out_line, apart, height, image, job[DOWN], job[ALONG], job[PLACES],
                                 lines * run, job[ROWS], job[COLUMNS], target, height)  # fmt: skip
            continue
        norm = 0.0
        for a in range(lines):
            norm += _panels(job[TILE], image + 4 * a * job[STEP], job[DOWN], job[ALONG], run, out, out_line, apart,
                            job[PLACES], height, job[ROWS], job[COLUMNS], target + 4 * a * run,
                            lines * run)  # fmt: skip
        squares[i] = norm


@inner
def _panels(tile: int, wide: int, line: int, pixel: int, numbers: int, spread: int, other_line: int, other_pixel: int,
            places: int, many: int, rows: int, columns: int, target: int, apart: int) -> float:  # fmt: skip
    """All tiles of some numbers in vectors, and of others that are spread, which lie at their places."""
    vectors, high = TILES[tile]
    norm = 0.0
    for v in range(0, numbers, vectors * LANES):
        for r in range(0, many, high):
            norm += _tile(
                tile, floats(wide + 4 * v), line, pixel, numbers - v, floats(spread), other_line, other_pixel,
                table(places + 8 * r), many - r, rows, columns, floats(target + 4 * (r * apart + v)), apart,
            )  # fmt: skip
    return norm


@Kernel
def _summed(job: Any) -> None:
    while True:
        share = taken(job, TAKEN)
        if share >= job[ITEMS]:
            break
        panels, shares = job[LINES] * job[PANELS], job[ITEMS]
        # A share's panels are neighbours: threads that write beside each other wait for one another's cache lines.
        first, stop = share * panels // shares, (share + 1) * panels // shares
        for start in range(0, job[EXAMPLES], job[SOME]):  # while they are in cache, to all panels of this share
            for panel in range(first, stop):
                _add_to_panel(job, panel, start)


@inner
def _add_to_panel(job: Any, panel: int, start: int) -> None:
    """Some examples, from `start` on, to one panel of the sum."""
    height, lines, run = job[HEIGHT], job[LINES], job[RUN]
    vectors, high = TILES[job[TILE]]
    a, v = panel // job[PANELS], panel % job[PANELS] * vectors * LANES
    some, more = min(job[SOME], job[EXAMPLES] - start), start > 0
    columns, along, apart = job[COLUMNS], job[ALONG], job[OUT]
    if job[ROWS] * columns == 1:  # examples of one position are positions of one example
        columns, along, apart, some = some, job[APART], job[OUTS_APART], 1
    out_line = columns * apart
    patch = job[PIXELS] + 4 * (start * job[APART] + a * job[STEP])
    out = job[OUTS] + 4 * start * job[OUTS_APART]
    if job[TURNED]:
        target = job[FOUND] + 4 * (a * run * height + v)
        for r in range(0, run, high):
            _sum_tile(job[TILE], floats(out + 4 * v), out_line, apart, height - v, floats(patch), job[DOWN],
                      along, table(job[PLACES] + 8 * r), run - r, job[ROWS], columns,
                      floats(target + 4 * r * height), height, some, job[OUTS_APART], job[APART], more)  # fmt: skip
    else:
        target = job[FOUND] + 4 * (a * run + v)
        for r in range(0, height, high):
            _sum_tile(job[TILE], floats(patch + 4 * v), job[DOWN], along, run - v, floats(out), out_line, apart,
                      table(job[PLACES] + 8 * r), height - r, job[ROWS], columns,
                      floats(target + 4 * r * lines * run), lines * run, some, job[APART], job[OUTS_APART],
                      more)  # fmt: skip


@instruction(types.float32, WHOLE, AT, WHOLE, WHOLE, WHOLE, AT, WHOLE, WHOLE, TABLE, WHOLE, WHOLE, WHOLE, AT, WHOLE)
def _tile(builder: Builder, tile: Value, *arguments: Value) -> Value:
    """One of the tiles, as `_build` makes it; the sum of its squares."""
    return measured(builder, tile, _build, *arguments)


@instruction(types.void, WHOLE, AT, WHOLE, WHOLE, WHOLE, AT, WHOLE, WHOLE, TABLE, WHOLE, WHOLE, WHOLE, AT, WHOLE, WHOLE,
             WHOLE, WHOLE, types.boolean)  # fmt: skip
def _sum_tile(builder: Builder, tile: Value, *arguments: Value) -> None:
    """One of the tiles, as `_build_sum` makes it."""
    with one_of(builder, tile) as tiles:
        for vectors, high in tiles:
            _build_sum(builder, vectors, high, *arguments)


def _positions(tile: Tile, places: Value) -> Callable[..., None]:
    """What adds all positions' products: wide, in vectors, times spread, whose numbers lie at their places."""
    builder = tile.builder
    last = builder.sub(tile.many, number(1))
    there = [builder.icmp_signed("<", number(r), tile.many) for r in range(tile.high)]
    chosen = [builder.select(one, number(r), last) for r, one in enumerate(there)]
    offsets = [builder.load(builder.gep(places, [one])) for one in chosen]

    def add(wide: Value, line: Value, pixel: Value, spread: Value, other_line: Value, other_pixel: Value,
            rows: Value, columns: Value) -> None:  # fmt: skip
        def positions(masks: Sequence[Value | None]) -> None:
            with loop(builder, rows) as row:
                here, there = builder.mul(row.index, line), builder.mul(row.index, other_line)
                with loop(builder, columns) as column:
                    at = builder.gep(wide, [builder.add(here, builder.mul(column.index, pixel))])
                    beside = builder.gep(spread, [builder.add(there, builder.mul(column.index, other_pixel))])
                    taken = [load(builder, builder.gep(at, [number(v * LANES)]), mask) for v, mask in enumerate(masks)]
                    tile.add(taken, [builder.gep(beside, [offset]) for offset in offsets])

        with builder.if_else(tile.is_wide) as (then, otherwise):
            with then:
                positions([None] * tile.vectors)
            with otherwise:
                positions(tile.masks)

    return add


def _build(builder: Builder, vectors: int, high: int, wide: Value, line: Value, pixel: Value, lanes: Value,
           spread: Value, other_line: Value, other_pixel: Value, places: Value, many: Value, rows: Value,
           columns: Value, target: Value, apart: Value) -> Value:  # fmt: skip
    """One example's tile, to its place, and the sum of its squares."""
    tile, squares = Tile(builder, vectors, high, lanes, many), Sums(builder, 1)
    _positions(tile, places)(wide, line, pixel, spread, other_line, other_pixel, rows, columns)

    def put(made: Value, place: Value, mask: Value | None) -> None:
        squares.add(0, made, made)
        store(builder, made, place, mask)

    tile.write(target, apart, put)
    return total(builder, squares.values()[0])


def _build_sum(builder: Builder, vectors: int, high: int, wide: Value, line: Value, pixel: Value, lanes: Value,
               spread: Value, other_line: Value, other_pixel: Value, places: Value, many: Value, rows: Value,
               columns: Value, target: Value, apart: Value, some: Value, wide_apart: Value, spread_apart: Value,
               more: Value) -> None:  # fmt: skip
    """The tile of some examples' sum, to its place, or added to what is there."""
    tile = Tile(builder, vectors, high, lanes, many)
    add = _positions(tile, places)
    with loop(builder, some) as example:
        here = builder.gep(wide, [builder.mul(example.index, wide_apart)])
        there = builder.gep(spread, [builder.mul(example.index, spread_apart)])
        add(here, line, pixel, there, other_line, other_pixel, rows, columns)

    def put(made: Value, place: Value, mask: Value | None) -> None:
        before = builder.select(more, load(builder, place, mask), ZERO)
        store(builder, builder.fadd(made, before), place, mask)

    tile.write(target, apart, put)

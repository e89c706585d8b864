"""Sums of outer products of numbers that were laid out, before, in the order in which they are multiplied.

    g_i = sum_p out_ip in_ip^T,    and    sum_i factor_i g_i

`outer.py` multiplies them where they lie: neighbours in a tile's loop are then as far apart in memory as an image has
channels, and most of the time goes into fetching them. Here an image is cut into slices of as many channels as a tile
is wide, and outputs into groups of as many as it is high; a slice's pixels, and a group's positions, lie side by side.
Every pixel is laid out once and multiplied for every line and column of the kernel and for every output.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import types
from numba.core import cgutils
from torch import Tensor

from terrine.sgd.kernels import outer
from terrine.sgd.kernels.frames import APART, HEIGHT, NEXT, OUT, OUTS, OUTS_APART, PIXELS, POSITIONS, added_up, job
from terrine.sgd.kernels.image import Image
from terrine.sgd.kernels.team import AT, ITEMS, TAKEN, WHOLE, WORKERS, Kernel, floats, inner, instruction, taken
from terrine.sgd.kernels.tiles import TILES, Tile, fastest, measured, put
from terrine.sgd.kernels.vectors import (
    LANES,
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
from terrine.sgd.scratch import scratch

(ROOM, SHARE, LINE, PIXEL, HIGH, WIDE, CHANNELS, TOP, LEFT, TALL, LONG, ROWS, COLUMNS, DOWN, ALONG, LINES, STEP,
 ACROSS, TILE, FOUND, SQUARES) = range(NEXT, NEXT + 21)  # fmt: skip
LAID, FACTORS, EXAMPLES, SOME = range(NEXT + 21, NEXT + 25)
_OFTEN = 4 * LANES  # multiplications of a number in the time it takes to lay it out
_FASTER = 1.3  # how much longer, at least, it takes to read what lies apart
_CACHED = 1 << 15  # numbers of a slice that stay in a core's cache from one group of outputs to the next


def are_faster(image: Image, height: int) -> bool:
    """Whether to lay numbers out pays: each is multiplied often enough, and slices are not too empty."""
    channels, kernel = int(image.pixels.shape[3]), image.lines * image.kernel[1]
    often = kernel * channels * height >= _OFTEN * (channels + height)
    return often and kernel * fastest(channels, height)[0] <= _FASTER * outer.time(image, height)


def gradients(image: Image, out: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Fill rows (n, e * lines * run) with the g_i; |g_i|^2 and sum_p out_ip."""
    n, positions, height = out.shape
    tile = _tile_for(image, height)
    squares, sums = torch.empty(n), torch.empty(n, height)
    laid = scratch("slices", (image.threads, _image_size(image, tile) + _outs_size(positions, height, tile)), out)
    _gradients.work(n, *_job(image, laid, out, sums, tile, rows), squares.data_ptr())
    return squares, sums


def summed(image: Image, out: Tensor, factor: Tensor) -> Tensor:
    """sum_i factor_i g_i, (e, lines, run)."""
    n, positions, height = out.shape
    tile = _tile_for(image, height)
    vectors, high = TILES[tile]
    some = max(1, min(n, _CACHED // (image.sizes[0] * image.sizes[1] * vectors * LANES)))
    slices, groups = -(-image.pixels.shape[3] // (vectors * LANES)), -(-height // high)
    total = out.new_empty(height, image.lines, image.run)
    laid = scratch("groups", (_outs_size(n * positions, height, tile),), out)
    threads = min(torch.get_num_threads(), slices)
    room = scratch("slices", (threads, some * _image_size(image, tile) // slices), out)
    given = *_job(image, room, out, total, tile, total), 0, laid.data_ptr(), factor.data_ptr(), n, some
    _group.work(groups, *given)
    _summed.work(slices, *given)
    return total


def _tile_for(image: Image, height: int) -> int:
    return fastest(int(image.pixels.shape[3]), height)[1]


def _image_size(image: Image, tile: int) -> int:
    """Numbers of an image's slices, frames among them."""
    width = TILES[tile][0] * LANES
    return -(-int(image.pixels.shape[3]) // width) * image.sizes[0] * image.sizes[1] * width


def _outs_size(positions: int, height: int, tile: int) -> int:
    """Numbers of groups of outputs; a group's last vector may reach beyond it."""
    return -(-height // TILES[tile][1]) * (positions * TILES[tile][1] + LANES)


def _job(image: Image, room: Tensor, out: Tensor, sums: Tensor, tile: int, found: Tensor) -> tuple[int, ...]:
    _, high, wide, channels = image.pixels.shape
    return (
        *job(image, room, out, sums), room.data_ptr(), room.shape[1], image.pixels.stride(1), image.pixels.stride(2),
        high, wide, channels, image.padding[0][0], image.padding[1][0], *image.sizes, *image.places, *image.stride,
        image.lines, image.dilation, image.kernel[1], tile, found.data_ptr(),
    )  # fmt: skip


@Kernel
def _gradients(job: Any) -> None:
    vectors, high = TILES[job[TILE]]
    width, channels, height, positions = vectors * LANES, job[CHANNELS], job[HEIGHT], job[POSITIONS]
    slices, groups = (channels + width - 1) // width, (height + high - 1) // high
    area, numbers, squares = job[TALL] * job[LONG] * width, job[LINES] * job[ACROSS] * channels, floats(job[SQUARES])
    room = _clear(job)
    laid, apart = room + 4 * slices * area, positions * high + LANES
    while True:
        i = taken(job, TAKEN)
        if i >= job[ITEMS]:
            break
        outs, norm = added_up(job, i), 0.0
        for s in range(slices):
            _slice(job, i, s * width, room + 4 * s * area)
        for g in range(groups):
            _lay(outs + 4 * g * high, job[OUT], positions, height - g * high, high, laid + 4 * g * apart, 1.0)
        for s in range(slices):
            for g in range(groups):
                target = job[FOUND] + 4 * ((i * height + g * high) * numbers + s * width)
                norm += _multiply(job, room + 4 * s * area, laid + 4 * g * apart, 1, s * width, g * high, target, False)
        squares[i] = norm


@Kernel
def _group(job: Any) -> None:
    """All examples' outputs in groups, each times its example's factor."""
    _, high = TILES[job[TILE]]
    positions, factors = job[POSITIONS], floats(job[FACTORS])
    while True:
        g = taken(job, TAKEN)
        if g >= job[ITEMS]:
            break
        laid = job[LAID] + 4 * g * (job[EXAMPLES] * positions * high + LANES)
        for i in range(job[EXAMPLES]):
            outs = job[OUTS] + 4 * (i * job[OUTS_APART] + g * high)
            _lay(outs, job[OUT], positions, job[HEIGHT] - g * high, high, laid + 4 * i * positions * high, factors[i])


@Kernel
def _summed(job: Any) -> None:
    vectors, high = TILES[job[TILE]]
    width, height, n, positions = vectors * LANES, job[HEIGHT], job[EXAMPLES], job[POSITIONS]
    groups, area, room = (height + high - 1) // high, job[TALL] * job[LONG] * width, _clear(job)
    apart, numbers = n * positions * high + LANES, job[LINES] * job[ACROSS] * job[CHANNELS]
    while True:
        s = taken(job, TAKEN)
        if s >= job[ITEMS]:
            break
        for start in range(0, n, job[SOME]):
            some = min(job[SOME], n - start)
            for i in range(some):
                _slice(job, start + i, s * width, room + 4 * i * area)
            for g in range(groups):
                laid = job[LAID] + 4 * (g * apart + start * positions * high)
                target = job[FOUND] + 4 * (g * high * numbers + s * width)
                _multiply(job, room, laid, some, s * width, g * high, target, start > 0)


@inner
def _clear(job: Any) -> Any:
    """The address of this thread's room: zeros, as frames are, and channels that fill up the last slice."""
    room = job[ROOM] + 4 * taken(job, WORKERS) * job[SHARE]
    place = floats(room)
    for k in range(job[SHARE]):
        place[k] = 0.0
    return room


@inner
def _slice(job: Any, i: int, first: int, room: int) -> None:
    """Image i's channels from the first on, as many as a tile is wide, in their frame."""
    width = TILES[job[TILE]][0] * LANES
    source = job[PIXELS] + 4 * (i * job[APART] + first)
    for y in range(job[HIGH]):
        target = room + 4 * ((y + job[TOP]) * job[LONG] + job[LEFT]) * width
        _lay(source + 4 * y * job[LINE], job[PIXEL], job[WIDE], job[CHANNELS] - first, width, target, 1.0)


@inner
def _lay(source: int, apart: int, many: int, lanes: int, width: int, target: int, factor: float) -> None:
    """`width` numbers of `many` rows side by side, zeros where there are fewer, each times a factor.

    The last vector of a row may reach beyond it: it is written first, and what it has overwritten is written then.
    """
    for v in range((width - 1) // LANES * LANES, -1, -LANES):
        _column(floats(source + 4 * v), apart, many, lanes - v, floats(target + 4 * v), width, factor)


@instruction(types.void, AT, WHOLE, WHOLE, WHOLE, AT, WHOLE, types.float32)
def _column(builder: Builder, source: Value, apart: Value, many: Value, lanes: Value, target: Value, to: Value,
            factor: Value) -> None:  # fmt: skip
    """A vector of every row."""
    factors = every(builder, factor)

    def copy(mask: Value | None) -> None:
        with loop(builder, many) as row:
            vector = load(builder, builder.gep(source, [builder.mul(row.index, apart)]), mask)
            place = builder.gep(target, [builder.mul(row.index, to)])
            store(builder, builder.fmul(vector, factors), place)

    with builder.if_else(builder.icmp_signed(">=", lanes, number(LANES))) as (whole, part):
        with whole:
            copy(None)
        with part:
            copy(below(builder, list(range(LANES)), number(0), lanes))


@inner
def _multiply(job: Any, image: int, outs: int, examples: int, first: int, output: int, target: int, more: bool) -> Any:
    """A slice with a group, for all lines and columns of the kernel, to or added to the target; its squares' sum."""
    width, channels, columns = TILES[job[TILE]][0] * LANES, job[CHANNELS], job[ACROSS]
    line, area, norm = job[LONG] * width, job[TALL] * job[LONG] * width, 0.0
    for k in range(job[LINES] * columns):
        here = image + 4 * (k // columns * job[STEP] * line + k % columns * width)
        norm += _tile(
            job[TILE], floats(here), area, job[DOWN] * line, job[ALONG] * width, channels - first, floats(outs),
            examples, job[ROWS], job[COLUMNS], job[HEIGHT] - output, floats(target + 4 * k * channels),
            job[LINES] * columns * channels, more,
        )  # fmt: skip
    return norm


@instruction(types.float32, WHOLE, AT, WHOLE, WHOLE, WHOLE, WHOLE, AT, WHOLE, WHOLE, WHOLE, WHOLE, AT, WHOLE,
             types.boolean)  # fmt: skip
def _tile(builder: Builder, tile: Value, *arguments: Value) -> Value:
    """One of the tiles, as `_build` makes it; the sum of its squares."""
    return measured(builder, tile, _build, *arguments)


def _build(builder: Builder, vectors: int, high: int, image: Value, area: Value, line: Value, pixel: Value,
           lanes: Value, outs: Value, examples: Value, rows: Value, columns: Value, many: Value, target: Value,
           apart: Value, more: Value) -> Value:  # fmt: skip
    """Some examples' positions, one after the other; then to its place, or added to what is there."""
    tile, squares, beside = Tile(builder, vectors, high, lanes, many), Sums(builder, 1), _Pointer(builder, outs)
    with loop(builder, examples) as example, loop(builder, rows) as row:
        start = builder.add(builder.mul(example.index, area), builder.mul(row.index, line))
        with loop(builder, columns) as column:
            at = builder.gep(image, [builder.add(start, builder.mul(column.index, pixel))])
            taken = [load(builder, builder.gep(at, [number(v * LANES)])) for v in range(vectors)]
            tile.add(taken, beside.next(high))

    def written(made: Value, place: Value, mask: Value | None) -> None:
        squares.add(0, made, made)
        put(builder, made, place, mask, more)

    tile.write(target, apart, written)
    return total(builder, squares.values()[0])


class _Pointer:
    """An address that goes through memory, however loops are nested."""

    def __init__(self, builder: Builder, start: Value) -> None:
        self._builder, self._place = builder, cgutils.alloca_once(builder, start.type)
        builder.store(start, self._place)

    def next(self, many: int) -> list[Value]:
        """The next so many numbers' addresses."""
        here = self._builder.load(self._place)
        self._builder.store(self._builder.gep(here, [number(many)]), self._place)
        return [self._builder.gep(here, [number(r)]) for r in range(many)]

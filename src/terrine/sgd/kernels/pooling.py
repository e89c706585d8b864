"""The largest of every window of an image, there and back, channels last.

    there   y_o = max over k of x_(o + k), and the first k where it lies, or the last one that is nan
    back    x'_p = sum over o + k = p of y'_o where the largest of o lies at k

Outputs that are neighbours in memory are taken together, as vectors. Places are kept as float32, like all the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from numba import types
from numba.core import cgutils
from torch import Tensor

from terrine.sgd.kernels.team import AT, FIRST, ITEMS, TAKEN, WHOLE, Kernel, floats, inner, instruction, taken
from terrine.sgd.kernels.vectors import F32, VECTOR, ZERO, Builder, Stretch, Value, every, load, loop, number, store

(
    IMAGE, OUT, PLACES, HIGH, WIDE, CHANNELS, OUT_HIGH, OUT_WIDE, KERNEL_HIGH, KERNEL_WIDE, DOWN, ACROSS, TOP, LEFT,
    APART_DOWN, APART_ACROSS, BEGIN, END, OVERLAP,
) = range(FIRST, FIRST + 19)  # fmt: skip


@dataclass(frozen=True)
class Windows:
    """Where the windows of an image lie: sizes, strides, borders and dilations, down and across."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def counts(self, high: int, wide: int) -> tuple[int, int]:
        """How many windows lie down and across an image of that size."""
        span = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]
        down, across = (
            (size + 2 * p - w) // s + 1
            for size, p, w, s in zip((high, wide), self.padding, span, self.stride, strict=True)
        )
        return down, across

    def fit(self, high: int, wide: int) -> bool:
        """Whether they are windows at all, each with something of the image in it."""
        if min(*self.kernel, *self.stride, *self.dilation) < 1 or min(self.padding) < 0:
            return False
        sizes = zip(self.padding, self.kernel, self.dilation, strict=True)
        narrow = all(p == 0 or (2 * p <= k and d == 1) for p, k, d in sizes)
        return narrow and min(self.counts(high, wide)) > 0

    def job(self, image: Tensor, out: Tensor, places: Tensor) -> tuple[int, ...]:
        """What a kernel needs to know of images (n, high, wide, channels)."""
        _, high, wide, channels = image.shape
        return (
            image.data_ptr(), out.data_ptr(), places.data_ptr(), high, wide, channels, *out.shape[1:3], *self.kernel,
            *self.stride, *self.padding, *self.dilation, *self._whole(wide), self._overlap(),
        )  # fmt: skip

    def _overlap(self) -> int:
        """Whether a pixel may lie in several windows."""
        return int(any((k - 1) * d >= s for k, d, s in zip(self.kernel, self.dilation, self.stride, strict=True)))

    def _whole(self, wide: int) -> tuple[int, int]:
        """The first window across that does not reach over the border, and the first after it that does."""
        stride, border = self.stride[1], self.padding[1]
        last = wide + border - self.dilation[1] * (self.kernel[1] - 1) - 1
        return -(-border // stride), last // stride + 1


def largest(image: Tensor, windows: Windows, out: Tensor) -> Tensor:
    """Fill `out` (n, down, across, channels) with the largest numbers; where in its window each was, as large.

    Both `image` and `out` are contiguous.
    """
    places = torch.empty_like(out)
    _there.work(len(image), *windows.job(image, out, places))
    return places


def back(gradient: Tensor, places: Tensor, shape: torch.Size, windows: Windows) -> Tensor:
    """The gradient of images of that shape from that of their largest numbers, which lay at `places`."""
    image = gradient.new_empty(shape)
    _back.work(len(gradient), *windows.job(image, gradient, places))
    return image


@inner
def _inside(first: int, apart: int, size: int, many: int) -> tuple[int, int]:
    """The range of those of `many` places first, first + apart, ... that lie in 0, ..., size - 1."""
    if first >= 0 and first + apart * (many - 1) < size:
        return 0, many
    low = 0 if first >= 0 else (apart - 1 - first) // apart
    stop = 0 if first >= size else (size - 1 - first) // apart + 1
    return low, min(stop, many)


@inner
def _line(job: Any, i: int, y: int, back: bool) -> None:
    """One line of outputs: columns whose windows reach over the border one by one, the others together."""
    wide, channels, across, stride = job[WIDE], job[CHANNELS], job[OUT_WIDE], job[ACROSS]
    kernel, apart = job[KERNEL_WIDE], job[APART_ACROSS] * channels
    top, line = y * job[DOWN] - job[TOP], job[APART_DOWN] * wide * channels
    first_row, stop_row = _inside(top, job[APART_DOWN], job[HIGH], job[KERNEL_HIGH])
    x = 0
    while x < across:
        stop = max(job[END], x + 1) if x == job[BEGIN] else x + 1
        left = x * stride - job[LEFT]
        first, last = _inside(left, job[APART_ACROSS], wide, kernel)
        rows, columns = stop_row - first_row, last - first
        corner = (top + first_row * job[APART_DOWN]) * wide + left + first * job[APART_ACROSS]
        image = floats(job[IMAGE] + 4 * (i * job[HIGH] * wide + corner) * channels)
        at = 4 * ((i * job[OUT_HIGH] + y) * across + x) * channels
        many, each = stop - x, channels
        if stride == 1:
            many, each = 1, many * channels
        k = first_row * kernel + first
        out, places = floats(job[OUT] + at), floats(job[PLACES] + at)
        if not back:
            _keep(image, line, rows, apart, columns, stride * channels, many, each, k, kernel, out, places)
        elif job[OVERLAP] != 0:
            _add(image, line, rows, apart, columns, stride * channels, many, each, k, kernel, out, places)
        else:
            _put(image, line, rows, apart, columns, stride * channels, many, each, k, kernel, out, places)
        x = stop


@Kernel
def _there(job: Any) -> None:
    while True:
        i = taken(job, TAKEN)
        if i >= job[ITEMS]:
            break
        for y in range(job[OUT_HIGH]):
            _line(job, i, y, False)


@Kernel
def _back(job: Any) -> None:
    size = job[HIGH] * job[WIDE] * job[CHANNELS]
    while True:
        i = taken(job, TAKEN)
        if i >= job[ITEMS]:
            break
        pixels = floats(job[IMAGE] + 4 * i * size)
        for p in range(size):
            pixels[p] = 0.0
        for y in range(job[OUT_HIGH]):
            _line(job, i, y, True)


_WINDOWS = (AT, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, AT, AT)
_COMMON = ((2, 2), (1, 2), (3, 3))
"""Sizes of windows, the places of which are written out one after the other."""


@instruction(types.void, *_WINDOWS)
def _keep(builder: Builder, image: Value, line: Value, rows: Value, apart: Value, columns: Value, step: Value,
          many: Value, width: Value, k: Value, kernel: Value, out: Value, places: Value) -> None:  # fmt: skip
    """The largest in each of `many` windows, and where; windows are a step apart, `width` numbers wide."""
    best, where = (cgutils.alloca_once(builder, VECTOR) for _ in range(2))

    def largest(window: _Window, at: Value, mask: Value | None) -> None:
        builder.store(load(builder, window.corner, mask), best)
        builder.store(every(builder, builder.sitofp(k, F32)), where)

        def compare(place: Value, number: Value) -> None:
            one, other = load(builder, place, mask), builder.load(best)
            better = builder.or_(builder.fcmp_ordered(">", one, other), builder.fcmp_unordered("uno", one, one))
            builder.store(builder.select(better, one, other), best)
            builder.store(builder.select(better, number, builder.load(where)), where)

        window.each(compare)
        store(builder, builder.load(best), builder.gep(out, [at]), mask)
        store(builder, builder.load(where), builder.gep(places, [at]), mask)

    _each_window(builder, image, line, rows, apart, columns, step, many, width, k, kernel, largest)


def _spread(*, overlap: bool) -> Any:
    """Give to the image what comes back from `many` windows, each where its largest number lay."""

    @instruction(types.void, *_WINDOWS)
    def spread(builder: Builder, image: Value, line: Value, rows: Value, apart: Value, columns: Value, step: Value,
               many: Value, width: Value, k: Value, kernel: Value, gradient: Value, places: Value) -> None:  # fmt: skip
        def give(window: _Window, at: Value, mask: Value | None) -> None:
            more, where = (load(builder, builder.gep(base, [at]), mask) for base in (gradient, places))

            def one(place: Value, number: Value) -> None:
                here = builder.select(builder.fcmp_ordered("==", where, number), more, ZERO)
                store(builder, builder.fadd(load(builder, place, mask), here) if overlap else here, place, mask)

            window.each(one)

        _each_window(builder, image, line, rows, apart, columns, step, many, width, k, kernel, give)

    return spread


_add, _put = _spread(overlap=True), _spread(overlap=False)


def _each_window(builder: Builder, image: Value, line: Value, rows: Value, apart: Value, columns: Value, step: Value,
                 many: Value, width: Value, k: Value, kernel: Value,
                 body: Callable[[_Window, Value, Value | None], None]) -> None:  # fmt: skip
    """body(window, at, mask) for the vectors of every window, which go to, or come from, the outputs at `at`."""
    stretch = Stretch(builder, width)

    def all_of(size: tuple[int, int] | None) -> None:
        with loop(builder, many) as j:
            corner, start = builder.gep(image, [builder.mul(j.index, step)]), builder.mul(j.index, width)

            def one(offset: Value, mask: Value | None) -> None:
                window = _Window(builder, builder.gep(corner, [offset]), line, rows, apart, columns, k, kernel, size)
                body(window, builder.add(start, offset), mask)

            stretch.each(one)

    with ExitStack() as otherwise:
        for high, wide in _COMMON:
            same = [builder.icmp_signed("==", *pair) for pair in ((rows, number(high)), (columns, number(wide)))]
            then, other = otherwise.enter_context(builder.if_else(builder.and_(*same)))
            with then:
                all_of((high, wide))
            otherwise.enter_context(other)
        all_of(None)


@dataclass(frozen=True)
class _Window:
    """A window in code: `corner`, the number k of that place, and how far apart its rows and columns lie."""

    builder: Builder
    corner: Value
    line: Value
    rows: Value
    apart: Value
    columns: Value
    k: Value
    kernel: Value
    size: tuple[int, int] | None  # where it is known when the code is made

    def each(self, body: Callable[[Value, Value], None]) -> None:
        """body(place, number) for every place of the window, the numbers as vectors."""
        if self.size is not None:
            for y, x in product(*map(range, self.size)):
                self._at(number(y), number(x), body)
            return
        with loop(self.builder, self.rows) as row, loop(self.builder, self.columns) as column:
            self._at(row.index, column.index, body)

    def _at(self, y: Value, x: Value, body: Callable[[Value, Value], None]) -> None:
        builder = self.builder
        offset = builder.add(builder.mul(y, self.line), builder.mul(x, self.apart))
        here = builder.add(builder.add(self.k, x), builder.mul(y, self.kernel))
        body(builder.gep(self.corner, [offset]), every(builder, builder.sitofp(here, F32)))

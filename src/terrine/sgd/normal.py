"""Normal values from a keystream by Box and Muller, block by block, on as many threads as torch uses.

    radius = deviation sqrt(-2 ln u),  normal pair = radius (cos a, sin a),   u uniform on (0, 1), a on (-pi, pi)

Every block has a segment of the keystream to itself, so the values do not depend on how many threads make them.
Everything happens to a block while it lies in the processor's cache: drawing, adding, rounding to the grid and
dividing by the lot.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from terrine.sgd.threads import spread

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

BLOCK = 131_072
"""Most values made at once: few enough to stay in the cache, and enough that threads seldom wait for each other."""
_SMALL = 256.0
"""Below this many units of 2^-32 a uniform value is refined by 53 more bits, so that the tail reaches 10 sigma."""


@dataclass(frozen=True)
class Normals:
    """Independent N(0, deviation^2) values, to be added to arrays as if those were one long one.

    Where `grid` is given every sum is rounded to a multiple of it (a power of two), and then divided by `over`.
    """

    segment: Callable[[int], Callable[[Words], None]]  # random bits by address: what fills arrays with segment i's
    deviation: float
    grid: float = 0.0
    over: float = 1.0

    def add(self, arrays: Sequence[Floats], first: int = 0) -> int:
        """Add to the arrays in place, with the bits of the segments from `first` on; how many that took."""
        blocks = _cut(arrays)
        waiting = iter(enumerate(blocks, first))
        threads = min(torch.get_num_threads(), len(blocks))
        spread([partial(self._work, waiting)] * max(threads, 1))
        return len(blocks)

    def _work(self, waiting: Iterator[tuple[int, list[Floats]]]) -> None:
        for segment, parts in waiting:
            sizes = [part.size for part in parts]
            values = self._values(self.segment(segment), sum(sizes))
            noise = [values[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]
            sums = parts if len(parts) == 1 else noise  # many small arrays are rounded at once, in the noise's place
            for part, one, place in zip(parts, noise, sums, strict=True):
                np.add(part, one, place)
            self._round(sums[0] if len(sums) == 1 else values)
            for part, place in zip(parts, sums, strict=True):
                np.multiply(place, _constant(1.0 / self.over), part)

    def _round(self, sums: Floats) -> None:
        if self.grid:
            shift = _constant(1.5 * 2.0**23 * self.grid)  # beside it, floats are a grid apart: adding it rounds
            np.add(sums, shift, sums)
            np.subtract(sums, shift, sums)

    def _values(self, fill: Callable[[Words], None], count: int) -> Floats:
        pairs = (count + 1) // 2
        buffer = _workspace()
        words = buffer[: 2 * pairs].view(np.uint32)  # the bits become values where they are
        radius, first, second = (buffer[pairs * place : pairs * (place + 1)] for place in range(3))
        fill(words)
        radius[...] = words[:pairs]
        if np.minimum.reduce(radius) < _SMALL:
            refine(radius, fill)
        np.multiply(radius, _UNIT, radius)
        np.log2(radius, radius)
        np.multiply(radius, _constant(-2.0 * math.log(2.0) * self.deviation**2), radius)
        np.sqrt(radius, radius)
        first[...] = words[pairs:].view(np.int32)
        np.multiply(first, _TURN, first)
        np.sin(first, second)
        np.cos(first, first)
        np.multiply(first, radius, first)
        np.multiply(second, radius, second)
        return buffer[pairs : pairs + count]


def refine(radius: Floats, fill: Callable[[Words], None]) -> None:
    """Give uniform values close to 0, in units of 2^-32, the bits that their whole part lacks."""
    small = np.flatnonzero(radius < _SMALL)
    drawn = np.empty((small.size, 2), np.uint32)
    fill(drawn)
    for index, (high, low) in zip(small, drawn.tolist(), strict=True):
        radius[index] += ((high << 21 | low >> 11) + 0.5) * 2.0**-53


def _cut(arrays: Sequence[Floats]) -> list[list[Floats]]:
    """The arrays, laid end to end, as blocks of about equal size; every block a list of parts of arrays."""
    total = sum(array.size for array in arrays)
    most = -(-total // (2 * -(-total // (2 * BLOCK)))) if total > BLOCK else total  # an even number: for two threads
    blocks: list[list[Floats]] = []
    room = 0
    for array in arrays:
        start = 0
        while start < array.size:
            if not room:
                blocks.append([])
                room = most
            part = array[start : start + room]
            blocks[-1].append(part)
            start, room = start + part.size, room - part.size
    return blocks


@lru_cache(maxsize=64)
def _constant(value: float) -> Floats:
    """`value` as an array without dimensions: what numpy's functions take fastest."""
    return np.array(value, np.float32)


_UNIT, _TURN = _constant(2.0**-32), _constant(math.pi * 2.0**-31)


def _workspace() -> Floats:
    """A buffer for one block, kept by its thread: fresh pages are dearer than the arithmetic."""
    if not hasattr(_kept, "buffer"):
        _kept.buffer = np.empty(3 * (BLOCK // 2 + 1), np.float32)
    buffer: Floats = _kept.buffer
    return buffer


_kept = threading.local()

"""Normal values from a keystream by Box and Muller, block by block, on as many threads as torch uses.

    radius = deviation sqrt(-2 ln u),  normal pair = radius (cos a, sin a),   u uniform on (0, 1), a on (-pi, pi)

Every few blocks have a segment of the keystream to themselves, so the values do not depend on how many threads make
them. Everything happens to a block while it lies in the processor's cache: drawing, adding, rounding to the grid and
dividing by the lot.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

BLOCK = 131_072
"""Values made at once: few enough to stay in the cache, and enough that threads seldom wait for each other."""
_TURN = 4  # blocks a thread takes at a time
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
        turns = [blocks[start : start + _TURN] for start in range(0, len(blocks), _TURN)]
        waiting = iter(enumerate(turns, first))
        failed: list[BaseException] = []

        def work() -> None:
            try:
                for segment, turn in waiting:
                    fill = self.segment(segment)
                    for parts in turn:
                        self._add(fill, parts)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(min(torch.get_num_threads(), len(turns)) - 1)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return len(turns)

    def _add(self, fill: Callable[[Words], None], parts: list[Floats]) -> None:
        values = self._values(fill, sum(part.size for part in parts))
        start = 0
        for part in parts:
            part += values[start : start + part.size]
            start += part.size
            if self.grid:
                shift = np.float32(1.5 * 2.0**23 * self.grid)  # beside it, floats are a grid apart: adding it rounds
                part += shift
                part -= shift
            if self.over != 1.0:
                part *= np.float32(1.0 / self.over)

    def _values(self, fill: Callable[[Words], None], count: int) -> Floats:
        pairs = (count + 1) // 2
        words, radius, normal = _workspace()
        words, radius, normal = words[: 2 * pairs], radius[:pairs], normal[: 2 * pairs]
        first, second = normal[:pairs], normal[pairs:]
        fill(words)
        np.copyto(radius, words[:pairs], casting="unsafe")
        if radius.min() < _SMALL:
            refine(radius, fill)
        radius *= np.float32(2.0**-32)
        np.log2(radius, out=radius)
        radius *= np.float32(-2.0 * math.log(2.0) * self.deviation**2)
        np.sqrt(radius, out=radius)
        np.copyto(first, words[pairs:].view(np.int32), casting="unsafe")
        first *= np.float32(math.pi * 2.0**-31)
        np.sin(first, out=second)
        np.cos(first, out=first)
        first *= radius
        second *= radius
        return normal


def refine(radius: Floats, fill: Callable[[Words], None]) -> None:
    """Give uniform values close to 0, in units of 2^-32, the bits that their whole part lacks."""
    small = np.flatnonzero(radius < _SMALL)
    drawn = np.empty((small.size, 2), np.uint32)
    fill(drawn)
    for index, (high, low) in zip(small, drawn.tolist(), strict=True):
        radius[index] += ((high << 21 | low >> 11) + 0.5) * 2.0**-53


def _cut(arrays: Sequence[Floats]) -> list[list[Floats]]:
    """The arrays, laid end to end, as blocks of `BLOCK` values; every block a list of parts of arrays."""
    blocks: list[list[Floats]] = []
    room = 0
    for array in arrays:
        start = 0
        while start < array.size:
            if not room:
                blocks.append([])
                room = BLOCK
            part = array[start : start + room]
            blocks[-1].append(part)
            start, room = start + part.size, room - part.size
    return blocks


def _workspace() -> tuple[Words, Floats, Floats]:
    """Buffers for one block, kept by their thread: fresh pages are dearer than the arithmetic."""
    if not hasattr(_kept, "buffers"):
        _kept.buffers = np.empty(BLOCK, np.uint32), np.empty(BLOCK // 2, np.float32), np.empty(BLOCK, np.float32)
    buffers: tuple[Words, Floats, Floats] = _kept.buffers
    return buffers


_kept = threading.local()

"""Normal values from a keystream, block by block, on as many threads as torch uses.

Every run of blocks has a segment of the keystream to itself, so the values do not depend on how many threads make them.
Everything happens to a block while it lies in the processor's cache, in one pass (`kernel.py`): drawing, adding,
rounding to the grid and dividing by the lot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from terrine.sgd.threads import spread

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

BLOCK = 1 << 17
"""Most values made at once: few enough to stay in the cache."""
RUN = 4
"""Blocks that are made from one segment of the keystream: a segment's key costs time."""
SPARE = 64
"""Random words that every block has left for values whose own are too few, see `kernel.py`."""
_WORTH = 4
"""Runs that are worth a thread: the bits are drawn under Python's lock, so that a short work goes faster alone."""


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
        runs = [blocks[start : start + RUN] for start in range(0, len(blocks), RUN)]
        waiting = iter(enumerate(runs, first))
        threads = min(torch.get_num_threads(), len(runs) // _WORTH)
        spread([partial(self._work, waiting)] * max(threads, 1))
        return len(runs)

    def _work(self, waiting: Iterator[tuple[int, list[list[Floats]]]]) -> None:
        for segment, run in waiting:
            fill = self.segment(segment)
            for parts in run:
                self._block(parts, fill)

    def _block(self, parts: list[Floats], fill: Callable[[Words], None]) -> None:
        size = sum(part.size for part in parts)
        if len(parts) == 1 and size % 2 == 0:
            self._add(parts[0], fill)
            return
        together = _room.sums[: size + size % 2]  # pairs need an even number: one value may be left over
        np.concatenate(parts, out=together[:size])
        self._add(together, fill)
        for part, stop in zip(parts, accumulate(part.size for part in parts), strict=True):
            part[...] = together[stop - part.size : stop]

    def _add(self, sums: Floats, fill: Callable[[Words], None]) -> None:
        from terrine.sgd.kernel import add_normals  # the compiler behind it is loaded by whoever draws noise

        words = _room.words[: sums.size + SPARE]
        fill(words)
        shift = 1.5 * 2.0**23 * self.grid  # beside it, floats are a grid apart: adding it rounds
        settings = (np.float32(one) for one in (self.deviation, shift, 1.0 / self.over))
        add_normals(sums, words, _room.uniform[: sums.size // 2], *settings)


def _cut(arrays: Sequence[Floats]) -> list[list[Floats]]:
    """The arrays, laid end to end, as blocks; every block a list of parts of arrays."""
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


class _Room(threading.local):
    """What every thread keeps for one block: fresh pages are dearer than the arithmetic."""

    def __init__(self) -> None:
        self.words, self.uniform = np.empty(BLOCK + SPARE, np.uint32), np.empty(BLOCK // 2, np.float32)
        self.sums = np.zeros(BLOCK, np.float32)


_room = _Room()

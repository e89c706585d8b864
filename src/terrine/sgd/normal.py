"""Normal values from a keystream, block by block.

Every run of blocks has a segment of the keystream to itself, so the values do not depend on how many threads make them.
Everything happens to a block while it lies in the processor's cache, in one pass (`kernels/normals.py`): drawing,
adding, rounding to the grid and dividing by the lot. Where the processor has no instructions for AES the bits come from
the cryptography library, on one thread: the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from terrine.sgd.kernels import FLOATS, SPARE, Floats, Words
from terrine.sgd.scratch import scratch

log = logging.getLogger("terrine.sgd")

BLOCK = 1 << 13
"""Most values made at once: few enough to stay in the cache."""
RUN = 64
"""Blocks that are made from one segment of the keystream: a segment's key costs time."""


@dataclass(frozen=True)
class Normals:
    """Independent N(0, deviation^2) values, to be added to tensors as if those were one long one.

    Where `grid` is given every sum is rounded to a multiple of it (a power of two), and then divided by `over`.
    """

    segment: Callable[[int], Callable[[Words], None]]  # random bits by address: what fills arrays with segment i's
    secret: bytes = field(repr=False)  # the same bits' key and
    address: bytes  # the first 8 bytes of their counter blocks
    deviation: float
    grid: float = 0.0
    over: float = 1.0

    def add(self, tensors: Sequence[Tensor], first: int = 0) -> int:
        """Add to the tensors in place, with the bits of the segments from `first` on; how many that took.

        They are contiguous float32 in the processor's memory.
        """
        (self._by_processor if _processor_agrees() else self._by_library)(tensors, first)
        return -(-sum([tensor.numel() for tensor in tensors]) // (RUN * BLOCK))

    def _by_processor(self, tensors: Sequence[Tensor], first: int) -> None:
        from terrine.sgd.kernels.normals import add_blocks  # loads a compiler: for whoever draws noise

        address = int.from_bytes(self.address, "little", signed=True)
        add_blocks(tensors, self.secret, address, first, RUN, BLOCK, self._settings)

    def _by_library(self, tensors: Sequence[Tensor], first: int) -> None:
        arrays = [tensor.detach().numpy().reshape(-1) for tensor in tensors]
        for i, parts in enumerate(_cut([array.size for array in arrays])):
            if i % RUN == 0:
                fill = self.segment(first + i // RUN)
            self._block([arrays[which][start : start + size] for which, start, size in parts], fill)

    def _block(self, parts: list[Floats], fill: Callable[[Words], None]) -> None:
        size = sum(part.size for part in parts)
        if len(parts) == 1 and size % 2 == 0:
            self._add(parts[0], fill)
            return
        even = size + size % 2  # pairs need an even number: one value may be left over
        together = scratch("together", (even,), FLOATS).numpy()
        np.concatenate(parts, out=together[:size])
        self._add(together, fill)
        for part, stop in zip(parts, accumulate(part.size for part in parts), strict=True):
            part[...] = together[stop - part.size : stop]

    def _add(self, sums: Floats, fill: Callable[[Words], None]) -> None:
        from terrine.sgd.kernels.normals import add_normals

        words = scratch("words", (sums.size + SPARE,), FLOATS).numpy().view(np.uint32)
        uniform = scratch("uniform", (sums.size // 2,), FLOATS).numpy()
        fill(words)
        add_normals(sums, words, uniform, *map(np.float32, self._settings))

    @property
    def _settings(self) -> tuple[float, float, float]:
        shift = 1.5 * 2.0**23 * self.grid  # beside it, floats are a grid apart: adding it rounds
        return self.deviation, shift, 1.0 / self.over


@lru_cache(maxsize=1)
def _processor_agrees() -> bool:
    """Whether this processor has instructions for AES, and the noise they make is the library's."""
    from terrine.sgd.kernels import aes
    from terrine.sgd.noise import Key, Purpose

    if not aes.available():
        return False
    trial = Key.seeded(0).draw(Purpose.NOISE, 255).normals(1.0)
    here, there = torch.zeros(1_000), torch.zeros(1_000)
    trial._by_processor([here], 1)
    trial._by_library([there], 1)
    if not torch.equal(here, there):
        log.warning("this processor's AES is not the library's: noise is made by the library, which takes longer")
    return torch.equal(here, there)


def _cut(sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Tensors of these sizes, laid end to end, as blocks; every block a list of parts: which, from where, how many."""
    blocks: list[list[tuple[int, int, int]]] = []
    room = 0
    for which, size in enumerate(sizes):
        start = 0
        while start < size:
            if not room:
                blocks.append([])
                room = BLOCK
            many = min(room, size - start)
            blocks[-1].append((which, start, many))
            start, room = start + many, room - many
    return blocks

"""Randomness: from the operating system by default; from a seed for tests only, and then it says so.

`SYSTEM` reads the kernel's generator (ChaCha20 on Linux), which is reseeded, safe across forks and safe across
threads. Large requests go straight to it. Single words come from a small pool per thread, which is filled from
it, belongs to one process id (a child after a fork fills its own), and forgets a word when it hands it out.

Everything private takes `rng=SYSTEM`; who passes `Seeded(n)` gets a result whose event is marked `Reproducible`.
"""

from __future__ import annotations

import os
import struct
import threading
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from terrine.errors import InvalidArgument

Words = NDArray[np.uint64]

_POOL_WORDS = 512


class Source(Protocol):
    """Where random bits come from: 64 at a time, uniform and independent."""

    @property
    def reproducible(self) -> bool:
        """Whether someone who knows the seed can see through the noise."""

    def words(self, count: int) -> Words:
        """`count` words of 64 random bits."""

    def word(self) -> int:
        """One word of 64 random bits."""


class System:
    """The operating system's cryptographically strong generator."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def reproducible(self) -> bool:
        return False

    def words(self, count: int) -> Words:
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)

    def word(self) -> int:
        pool: list[int] | None = getattr(self._local, "pool", None)
        if not pool or self._local.process != os.getpid():
            pool = list(struct.unpack(f"={_POOL_WORDS}Q", os.urandom(8 * _POOL_WORDS)))
            self._local.pool, self._local.process = pool, os.getpid()
        return pool.pop()

    def __repr__(self) -> str:
        return "SYSTEM"


class Seeded:
    """A repeatable generator, for tests only: whatever it draws is marked as not private."""

    def __init__(self, seed: int) -> None:
        if not isinstance(seed, int) or seed < 0:
            raise InvalidArgument(f"seed={seed!r}: want a whole number >= 0")
        self.seed = seed
        self._bits = np.random.Philox(self.seed)

    @property
    def reproducible(self) -> bool:
        return True

    def words(self, count: int) -> Words:
        drawn: Words = self._bits.random_raw(count)
        return drawn

    def word(self) -> int:
        return int(self._bits.random_raw())

    def __repr__(self) -> str:
        return f"Seeded({self.seed})"


SYSTEM = System()

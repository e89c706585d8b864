"""Randomness for lots and noise, and normal values from its bits: AES-256 in counter mode, ChaCha20 on other devices.

Every draw has an address: (what it is for, which step). The bits of an address depend on the key and the address
alone, so a run that is resumed at step t draws what it would have drawn, and the state of a run is its key.

The keystream is cryptographically strong: without the key, the noise cannot be told from true randomness. A seed
makes the key public knowledge, which is for tests; the plan then stamps its event `Reproducible`.
"""

from __future__ import annotations

import enum
import hashlib
import math
import os
from collections.abc import Sequence
from functools import cached_property
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terrine import check
from terrine.common.normal_values import add_normal
from terrine.common.random_words import Keystream, keystream
from terrine.errors import OutOfOrder

_CPU = torch.device("cpu")
_SMALLEST = 2.0**-80


class Purpose(enum.IntEnum):
    """What a draw is for; each purpose has a keystream of its own."""

    LOT = 1
    NOISE = 2
    QUANTILE = 3
    VALIDATION = 4
    PROJECTION = 5
    READING = 7
    TRAINING = 8
    ROWS = 9
    GROUP = 10
    METRIC = 12


def grid_of(deviation: float) -> float:
    """The public grid for noise of this deviation: a power of two, 2^-10 of it or a little less.

    Raises:
        InvalidArgument: sums in units of the grid would leave single precision, and the noise would not hide them.
    """
    if not _SMALLEST <= deviation <= 1 / _SMALLEST:
        raise check.refuse("noise", deviation, f"a deviation between {_SMALLEST:g} and {1 / _SMALLEST:g}")
    return 2.0 ** (math.floor(math.log2(deviation)) - 10)


class Key:
    """The secret that all randomness of one run comes from.

    It belongs to the process that made it, and is not copied: a fork or a copy of a run would take its steps with the
    same noise.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) != 32:
            raise ValueError(f"a key of {len(secret)} bytes: want 32")
        self.secret, self._process = secret, os.getpid()

    @classmethod
    def fresh(cls) -> Key:
        """A key from the operating system."""
        return cls(os.urandom(32))

    @classmethod
    def seeded(cls, seed: int) -> Key:
        """A key that anyone who knows the seed can make: for tests."""
        return cls(hashlib.sha256(b"terrine seeded run %d" % seed).digest())

    def draw(self, purpose: Purpose, step: int, part: int = 0) -> Draw:
        """The keystream of one address; parts have keystreams of their own.

        Raises:
            OutOfOrder: this is a fork of the process that the run belongs to.
        """
        if os.getpid() != self._process:
            raise OutOfOrder("a private run was forked, and its noise must not be used twice; want it in one process")
        return Draw(self.secret, purpose, step, part)

    def __reduce__(self) -> NoReturn:
        raise OutOfOrder("a private run was copied or pickled, and its noise must not be used twice; want another run")

    def __repr__(self) -> str:
        return "Key(...)"


class Draw:
    """The random bits of one address, read in order; normal values have segments of the keystream to themselves.

    A nonce is (purpose, 1 byte; step, 6; segment, 4).
    """

    def __init__(self, secret: bytes, purpose: Purpose, step: int, part: int = 0) -> None:
        self._secret, self._part = secret, part
        self._address = int(purpose).to_bytes(1, "big") + step.to_bytes(6, "big")
        self._normal = 1

    @cached_property
    def _in_order(self) -> Keystream:
        return self.segment(self._part)

    def segment(self, index: int, device: torch.device = _CPU) -> Keystream:
        """The random bits of one segment."""
        return keystream(self._secret, self._address + index.to_bytes(4, "big"), device)

    def seed(self, part: int) -> bytes:
        """32 bytes to seed other generators with, one such seed for each part."""
        return self.segment(part).words(8).numpy().tobytes()

    def words(self, count: int) -> NDArray[np.uint32]:
        """`count` uniform 32-bit words."""
        return self._in_order.words(count).numpy().view(np.uint32)

    def chosen(self, population: int, rate: float) -> NDArray[np.int64]:
        """Each of `population` indices independently with probability `rate`, in order.

        One integer comparison decides each: the probability is `rate` rounded down to a multiple of 2^-64.
        """
        if rate >= 1.0:
            return np.arange(population)
        numerator, denominator = rate.as_integer_ratio()
        threshold = (numerator << 64) // denominator
        high, low = threshold >> 32, threshold & 0xFFFFFFFF
        words = self.words(population)
        inside = words < np.uint32(high)
        for index in np.flatnonzero(words == np.uint32(high)):  # one in four billion needs the lower half
            inside[index] = int(self.words(1)[0]) < low
        return np.flatnonzero(inside)

    def below(self, bound: int, count: int) -> NDArray[np.int64]:
        """`count` whole numbers, uniform on 0 ... bound - 1, by rejection."""
        kept = np.empty(0, dtype=np.int64)
        whole = (1 << 64) // bound * bound  # values at or above would favour small remainders
        while kept.size < count:
            drawn = self.words(2 * (count - kept.size)).view(np.uint64)
            if whole < 1 << 64:
                drawn = drawn[drawn < np.uint64(whole)]
            kept = np.concatenate([kept, (drawn % np.uint64(bound)).astype(np.int64)])
        return kept

    def subset(self, population: int, size: int) -> NDArray[np.int64]:
        """`size` distinct indices out of `population`, every such set equally likely, in order."""
        if 2 * size > population:
            return np.setdiff1d(np.arange(population), self.subset(population, population - size))
        chosen = np.empty(0, dtype=np.int64)
        while chosen.size < size:  # later duplicates are dropped: exactly a draw without replacement
            drawn = np.concatenate([chosen, self.below(population, size - chosen.size)])
            first = np.unique(drawn, return_index=True)[1]
            chosen = drawn[np.sort(first)]
        return np.sort(chosen)

    def permutation(self, population: int) -> NDArray[np.int64]:
        """All indices in uniformly random order."""
        while True:
            tickets = self.words(2 * population).view(np.uint64)
            order = np.argsort(tickets, kind="stable")
            if population < 2 or np.all(np.diff(tickets[order]) != 0):  # given no ties, exactly uniform
                return order

    def add_normal(self, target: Tensor, deviation: float) -> None:
        """Add independent N(0, deviation^2) values to the float tensor `target` in place."""
        self._add([target], deviation)

    def protect(self, totals: Tensor | Sequence[Tensor], deviation: float, over: float = 1.0) -> None:
        """Add N(0, deviation^2) in place, round to a public grid of 2^-10 of the deviation, and divide by `over`.

        The rounding hides the last bits of the floating-point sum. The grid is a power of two: scaling by it is exact.
        """
        tensors = [totals] if isinstance(totals, Tensor) else totals
        if deviation == 0:
            for total in tensors if over != 1.0 else ():
                total.div_(over)
            return
        self._add(tensors, deviation, grid_of(deviation), over)

    def normal(self, *shape: int, deviation: float = 1.0) -> Tensor:
        """Independent N(0, deviation^2) values."""
        result = torch.zeros(shape)
        self.add_normal(result, deviation)
        return result

    def _add(self, tensors: Sequence[Tensor], deviation: float, grid: float = 0.0, over: float = 1.0) -> None:
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            words = self.segment(self._normal, device).words
            self._normal += 1
            add_normal([one for one in tensors if one.device == device], words, deviation, grid, over)

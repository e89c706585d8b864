"""Randomness for lots and noise: AES-256 in counter mode, and normal values from its bits by Box and Muller.

    radius = sqrt(-2 ln u),  normal pair = radius (cos a, sin a),   u uniform on (0, 1), a uniform on (-pi, pi)

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
import threading

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]

_PAIRS = 32_768
"""Normal pairs made at once: small enough that every intermediate stays in the processor's cache."""
_SMALL = 256.0
"""Below this many units of 2^-31 a uniform value is refined by 53 more bits, so that the tail reaches 10 sigma."""


class Purpose(enum.IntEnum):
    """What a draw is for; each purpose has a keystream of its own."""

    LOT = 1
    NOISE = 2
    QUANTILE = 3
    VALIDATION = 4
    PROJECTION = 5
    INITIALISATION = 6


class Key:
    """The secret that all randomness of one run comes from."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != 32:
            raise ValueError(f"a key of {len(secret)} bytes: want 32")
        self.secret = secret

    @classmethod
    def fresh(cls) -> Key:
        """A key from the operating system."""
        return cls(os.urandom(32))

    @classmethod
    def seeded(cls, seed: int) -> Key:
        """A key that anyone who knows the seed can make: for tests."""
        return cls(hashlib.sha256(b"terrine seeded run %d" % seed).digest())

    def draw(self, purpose: Purpose, step: int) -> Draw:
        """The keystream of one address."""
        return Draw(self.secret, purpose, step)

    def __repr__(self) -> str:
        return "Key(...)"


class Draw:
    """The random bits of one address, read in order."""

    def __init__(self, secret: bytes, purpose: Purpose, step: int) -> None:
        counter = int(purpose).to_bytes(1, "big") + step.to_bytes(7, "big") + bytes(8)
        self._encryptor = Cipher(algorithms.AES(secret), modes.CTR(counter)).encryptor()

    def fill(self, words: NDArray[np.uint32]) -> None:
        """Overwrite `words` with random bits."""
        view = words.data.cast("B")
        for start in range(0, len(view), len(_ZEROS)):
            part = view[start : start + len(_ZEROS)]
            self._encryptor.update_into(_ZEROS[: len(part)], part)

    def words(self, count: int) -> NDArray[np.uint32]:
        """`count` uniform 32-bit words."""
        result = np.empty(count, dtype=np.uint32)
        self.fill(result)
        return result

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
        plain = target.detach()
        if _is_simple(plain):
            self._add(plain.view(-1).numpy(), deviation)
        else:
            plain.add_(self.normal(*plain.shape, deviation=deviation).to(plain))

    def protect(self, total: Tensor, deviation: float) -> None:
        """Add N(0, deviation^2) in place and round to a public grid of 2^-10 of the deviation.

        The rounding hides the last bits of the floating-point sum. The grid is a power of two: scaling by it is exact.
        """
        if deviation == 0:
            return
        grid = 2.0 ** (math.floor(math.log2(deviation)) - 10)
        plain = total.detach()
        if _is_simple(plain):
            self._add(plain.view(-1).numpy(), deviation, grid)
        else:
            self.add_normal(plain, deviation)
            plain.div_(grid).round_().mul_(grid)

    def normal(self, *shape: int, deviation: float = 1.0) -> Tensor:
        """Independent N(0, deviation^2) values."""
        result = torch.zeros(shape)
        self.add_normal(result, deviation)
        return result

    def _add(self, values: Floats, deviation: float, grid: float = 0.0) -> None:
        for start in range(0, values.size, 2 * _PAIRS):
            part = values[start : start + 2 * _PAIRS]
            half = (part.size + 1) // 2
            first, second = self._pairs(half, deviation)
            part[:half] += first
            part[half:] += second[: part.size - half]
            if grid:  # here, while the part is still in the processor's cache
                np.multiply(part, np.float32(1 / grid), out=part)
                np.rint(part, out=part)
                np.multiply(part, np.float32(grid), out=part)

    def _pairs(self, count: int, deviation: float) -> tuple[Floats, Floats]:
        words, radius, angle, sine = _workspace(count)
        self.fill(words)
        bits = words.view(np.int32)
        np.copyto(radius, bits[:count], casting="unsafe")
        np.abs(radius, out=radius)  # |signed word|: fine near 0, where the tail comes from
        if radius.min() < _SMALL:
            self._refine(radius)
        np.multiply(radius, 2.0**-31, out=radius)
        np.log(radius, out=radius)
        np.multiply(radius, np.float32(-2.0 * deviation * deviation), out=radius)
        np.sqrt(radius, out=radius)
        np.copyto(angle, bits[count:], casting="unsafe")
        np.multiply(angle, np.float32(math.pi * 2.0**-31), out=angle)
        np.sin(angle, out=sine)
        np.cos(angle, out=angle)
        return np.multiply(angle, radius, out=angle), np.multiply(sine, radius, out=sine)

    def _refine(self, radius: Floats) -> None:
        for index in np.flatnonzero(radius < _SMALL):
            high, low = (int(word) for word in self.words(2))
            radius[index] += ((high << 21 | low >> 11) + 0.5) * 2.0**-53


def _is_simple(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


_ZEROS = memoryview(bytes(1 << 20))


def _workspace(count: int) -> tuple[NDArray[np.uint32], Floats, Floats, Floats]:
    """Buffers for `count` pairs, the full size kept between calls: fresh pages are dearer than the arithmetic."""
    if not hasattr(_kept, "buffers"):
        _kept.buffers = (np.empty(2 * _PAIRS, np.uint32), *(np.empty(_PAIRS, np.float32) for _ in range(3)))
    words, radius, angle, sine = _kept.buffers
    return words[: 2 * count], radius[:count], angle[:count], sine[:count]


_kept = threading.local()

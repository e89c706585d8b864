"""Randomness from a key: of a round, which a seed makes reproducible; and of many numbers, quickly.

A ChaCha20 keystream under HMAC-SHA256(key, what it is for): without the key it cannot be told from true randomness. It
is what masks are made of, and comes several times as fast as the operating system's.
"""

from __future__ import annotations

import hmac

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from terrine.rng import Source, Words

_CHUNK = 1 << 17


def stretched(rng: Source) -> KeyedSource:
    """A keystream under 256 bits from `rng`: for as many numbers as a vector has."""
    return KeyedSource(rng.words(4).tobytes(), "stretched", reproducible=rng.reproducible)


class KeyedSource:
    """A `rng.Source`; `reproducible` where the key itself comes from a seed."""

    def __init__(self, secret: bytes, about: str, *, reproducible: bool) -> None:
        key = hmac.digest(secret, b"terrine federated " + about.encode(), "sha256")
        self._stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
        self._reproducible = reproducible

    @property
    def reproducible(self) -> bool:
        return self._reproducible

    def words(self, count: int) -> Words:
        if count <= _CHUNK:
            return np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8")
        out = np.empty(count, dtype="<u8")
        for begin in range(0, count, _CHUNK):
            part = out[begin : begin + _CHUNK]
            part[:] = np.frombuffer(self._stream.update(bytes(8 * len(part))), dtype="<u8")
        return out

    def word(self) -> int:
        return int(self.words(1)[0])

    def __repr__(self) -> str:
        return "KeyedSource(...)"

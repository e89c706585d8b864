"""Strong random words at an address: the seam between a run's key and the noise, for each device.

A keystream depends on the key and a nonce of at most 11 bytes alone, and no word of it is given twice.
"""

from __future__ import annotations

from typing import Protocol

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from terrine.sgd.chacha import ChaCha20


class Keystream(Protocol):
    """Random words, one after the other."""

    def words(self, count: int) -> Tensor:
        """The next `count` uniform 32-bit words, as int32."""
        ...


def keystream(secret: bytes, nonce: bytes, device: torch.device) -> Keystream:
    """The keystream of a 32-byte key and a nonce, made on the device: nothing is copied to it."""
    return AesCounter(secret, nonce) if device.type == "cpu" else ChaCha20(secret, nonce, device)


class AesCounter:
    """AES-256 in counter mode, by the cryptography library: zeros encrypted with counter blocks (nonce, counter)."""

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        self._encryptor = Cipher(algorithms.AES(secret), modes.CTR(nonce.ljust(16, b"\0"))).encryptor()

    def words(self, count: int) -> Tensor:
        made = torch.empty(count + 4, dtype=torch.int32)  # the library may ask for up to 15 bytes more than it fills
        view = made.numpy().data.cast("B")
        for start in range(0, 4 * count, len(_ZEROS)):
            stop = min(start + len(_ZEROS), 4 * count)
            self._encryptor.update_into(_ZEROS[: stop - start], view[start : stop + 16])
        return made[:count]


_ZEROS = memoryview(bytes(1 << 18))

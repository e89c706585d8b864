"""Strong random words at an address, for each device: AES-256 in counter mode on a CPU, ChaCha20 elsewhere.

A keystream depends on the key and a nonce of at most 11 bytes alone, and no word of it is given twice.

ChaCha20 is written in torch's integer operations, so that nothing is copied to the device   [RFC8439]. A block is 16
words of 32 bits: 4 constants, 8 words of key, a counter and 3 words of nonce, mixed by 20 rounds and added to
themselves. Many blocks are made at once, one for each column of four (4, n) tensors, the rows of the state. Words are
int32, whose sums wrap around; a shift to the right is arithmetic, so what it drags in is masked.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor


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


_CONSTANTS = struct.unpack("<4i", b"expand 32-byte k")


class ChaCha20:
    """The keystream of a key and a nonce of at most 12 bytes; every call of `words` begins at a fresh block."""

    def __init__(self, secret: bytes, nonce: bytes, device: torch.device) -> None:
        key = hashlib.sha256(b"terrine chacha20" + secret).digest()  # no key is used with two ciphers
        self._key, self._nonce, self._device = key, nonce.ljust(12, b"\0"), device
        self._block = 0

    def words(self, count: int) -> Tensor:
        """The next `count` uniform 32-bit words, as int32."""
        blocks = -(-count // 16)
        words = keystream_blocks(self._key, self._nonce, self._block, blocks, self._device)
        self._block += blocks
        return words.flatten()[:count]


def keystream_blocks(key: bytes, nonce: bytes, first: int, count: int, device: torch.device) -> Tensor:
    """Blocks `first` to `first + count` of the keystream, (count, 16) int32.

    Raises: OverflowError beyond the 2^32 blocks of one nonce, which would begin again.
    """
    if first + count > 1 << 32:
        raise OverflowError(f"ChaCha20: {first + count} blocks of one nonce, want at most 2^32")
    words = _CONSTANTS + struct.unpack("<8i", key) + (0,) + struct.unpack("<3i", nonce)
    state = torch.tensor(words, dtype=torch.int32).to(device, non_blocking=True)
    counter = torch.arange(first, first + count, device=device).to(torch.int32)
    mix: Callable[[Tensor, Tensor], Tensor] = _fused_mix() if device.type == "cuda" else mix_blocks
    return mix(state, counter)


def mix_blocks(state: Tensor, counter: Tensor) -> Tensor:
    """Return the blocks (n, 16) of a state of 16 words, in which each counter (n,) takes its place."""
    start = state.view(4, 4, 1).repeat(1, 1, len(counter))
    start[3, 0] = counter
    a, b, c, d = start.clone().unbind(0)
    for _ in range(10):
        a, b, c, d = _quarter_rounds(a, b, c, d)  # columns
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        a, b, c, d = _quarter_rounds(a, b, c, d)  # diagonals
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.stack([a, b, c, d]).add(start).flatten(0, 1).t().contiguous()


@lru_cache(maxsize=1)
def _fused_mix() -> Any:
    """The same as one kernel: 580 operations that would each write their words to memory and read them again."""
    return torch.compile(mix_blocks, dynamic=True)


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four quarter rounds side by side: a += b; d = (d ^ a) <<< 16; and so on."""
    a = a + b
    d = _rotated(d ^ a, 16)
    c = c + d
    b = _rotated(b ^ c, 12)
    a = a + b
    d = _rotated(d ^ a, 8)
    c = c + d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


def _rotated(words: Tensor, by: int) -> Tensor:
    low = (words >> (32 - by)).bitwise_and_((1 << by) - 1)
    return (words << by).bitwise_or_(low)

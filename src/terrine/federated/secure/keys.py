"""Keys of a round: X25519 agreements, HKDF, ChaCha20 masks; Ed25519 identities that last. All from `cryptography`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from terrine.errors import InvalidArgument, MissingExtra
from terrine.rng import Source

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise MissingExtra("cryptography", extra="federated") from error

Words = NDArray[np.uint32]

_CHUNK = 1 << 20
_NONCE = bytes(12)  # every key is used for one message, or one keystream


def secret(rng: Source) -> bytes:
    """32 random bytes."""
    return rng.words(4).tobytes()


class Agreeing:
    """One half of X25519 agreements, for one round."""

    def __init__(self, private: bytes) -> None:
        self.private = private
        self._key = X25519PrivateKey.from_private_bytes(private)

    @property
    def public(self) -> bytes:
        """What the others need."""
        return self._key.public_key().public_bytes_raw()

    def agreed(self, other: bytes, purpose: bytes) -> bytes:
        """The key that this client and the owner of the public key `other` share for one purpose.

        Raises:
            InvalidArgument: the other's public key is not one.
        """
        try:
            shared = self._key.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError:
            raise InvalidArgument("a public key that no key agrees with: want an X25519 key") from None
        return HKDF(algorithm=SHA256(), length=32, salt=None, info=b"terrine " + purpose).derive(shared)

    def __repr__(self) -> str:
        return "Agreeing(...)"


def add_mask(total: Words, key: bytes, *, negative: bool = False) -> None:
    """Add the keystream of `key` to `total` in place, or take it away: 32 bits an entry, modulo 2^32."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    zeros = bytes(4 * min(_CHUNK, len(total)))
    for begin in range(0, len(total), _CHUNK):
        part = total[begin : begin + _CHUNK]
        mask = np.frombuffer(stream.update(zeros[: 4 * len(part)]), dtype="<u4")
        if negative:
            np.subtract(part, mask, out=part)
        else:
            np.add(part, mask, out=part)


def sealed(key: bytes, text: bytes, about: bytes) -> bytes:
    """`text` for whoever knows `key`, bound to what it is about."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, text, about)


def opened(key: bytes, sealed_text: bytes, about: bytes) -> bytes:
    """The text again.

    Raises:
        InvalidArgument: another key, another matter, or changed on the way.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed_text, about)
    except InvalidTag:
        raise InvalidArgument("a sealed share that was changed on the way, or is of another round") from None


class Identity:
    """A client's lasting Ed25519 key, by which others know it."""

    def __init__(self, private: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private)

    @property
    def public(self) -> bytes:
        """What everyone must know beforehand, from elsewhere than the server."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, text: bytes) -> bytes:
        """A signature of `text`."""
        return self._key.sign(text)

    def __repr__(self) -> str:
        return "Identity(...)"


def is_signed(public_key: bytes, signature: bytes, text: bytes) -> bool:
    """Whether the owner of `public_key` signed `text`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True

"""Sealed fields: AES-256-GCM under the owner's key, bound to the row they stand in, padded so that length says little.

sealed = base64(nonce | AESGCM(key).encrypt(nonce, padded plaintext, "account/sequence"))
"""

from __future__ import annotations

import base64
import binascii
import secrets

from terrine.errors import InvalidArgument, LedgerDamaged, MissingExtra

_NONCE = 12
_PAD = 256


def new_key() -> str:
    """A fresh key, as text. Whoever holds it can read sealed fields; without it they are lost."""
    return base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()


def read_key(key: str | bytes | None) -> bytes | None:
    """The 32 bytes of `key`, given as they are or as `new_key` wrote them.

    Raises:
        InvalidArgument: it is not a key.
    """
    if key is None or (isinstance(key, bytes) and len(key) == 32):
        return key if isinstance(key, bytes) else None
    try:
        raw = base64.urlsafe_b64decode(key)
    except (binascii.Error, ValueError, TypeError):
        raw = b""
    if len(raw) != 32:
        raise InvalidArgument("key: want 32 bytes, or the text that terrine.ledger.new_key() gives")
    return raw


def seal(key: bytes | None, plaintext: bytes, *, place: str) -> str:
    """`plaintext`, readable only with `key` and only at `place`."""
    if key is None:
        raise InvalidArgument("sealed: the ledger was opened without a key; want Ledger.open(url, key=new_key())")
    padded = plaintext + b"\x80" + b"\x00" * (-(len(plaintext) + 1) % _PAD)
    nonce = secrets.token_bytes(_NONCE)
    return base64.b64encode(nonce + _cipher(key).encrypt(nonce, padded, place.encode())).decode()


def unseal(key: bytes | None, sealed: str, *, place: str) -> bytes:
    """What `seal` was given.

    Raises:
        InvalidArgument: there is no key.
        LedgerDamaged: another key, or the field was changed or moved.
    """
    if key is None:
        raise InvalidArgument("sealed: the ledger was opened without a key; want Ledger.open(url, key=...)")
    from cryptography.exceptions import InvalidTag

    try:
        raw = base64.b64decode(sealed, validate=True)
        padded: bytes = _cipher(key).decrypt(raw[:_NONCE], raw[_NONCE:], place.encode())
    except (InvalidTag, ValueError):
        raise LedgerDamaged(f"sealed field of {place}: another key sealed it, or it was changed") from None
    return padded.rstrip(b"\x00")[:-1]


def _cipher(key: bytes):  # type: ignore[no-untyped-def]
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise MissingExtra("cryptography", extra="ledger") from None
    return AESGCM(key)

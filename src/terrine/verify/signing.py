"""Signatures: Ed25519 over the manifest, in a DSSE envelope.

    PAE(type, payload) = "DSSEv1" SP len(type) SP type SP len(payload) SP payload      what is signed

The envelope (`manifest.signed.json`) holds the manifest's bytes, so it cannot be about another one. A key file is PEM;
the private one is readable by its owner alone. A key's name is the first 16 hexadecimal digits of the SHA-256 hash of
its 32 public bytes.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from terrine import files
from terrine.errors import InvalidArgument, MissingExtra
from terrine.verify.manifest import MANIFEST, SIGNED, read_json

_TYPE = "application/vnd.in-toto+json"


def new_key(path: Path) -> tuple[Path, Path]:
    """Make a key pair: `path` holds the private key, `path`.pub the public one.

    Raises:
        InvalidArgument: one of the files is there already, or cannot be written.
    """
    ed25519, serialization = _library()
    public = path.with_name(path.name + ".pub")
    for one in (path, public):
        if one.exists():
            raise InvalidArgument(f"{one} is there already: want another name; a key that is lost signs nothing more")
    key = ed25519.Ed25519PrivateKey.generate()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    shown = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    try:
        files.write(path, secret, private=True)
        files.write(public, shown, private=False)
    except OSError as error:
        raise InvalidArgument(f"{path}: could not be written ({error.strerror}); want another place") from None
    return path, public


def load_private(path: Path) -> Any:
    """A private key to sign with.

    Raises:
        InvalidArgument: the file holds none.
    """
    ed25519, serialization = _library()
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidArgument(f"{path}: no private key ({error}); terrine keys new makes one") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise InvalidArgument(f"{path}: not an Ed25519 key; terrine keys new makes one")
    return key


def load_public(path: Path) -> Any:
    """A public key to check signatures by.

    Raises:
        InvalidArgument: the file holds none.
    """
    ed25519, serialization = _library()
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: no public key ({error}); want the .pub file of who signed") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise InvalidArgument(f"{path}: not an Ed25519 key; want the .pub file of who signed")
    return key


def sign(folder: Path, key: Any) -> None:
    """Write the envelope of the manifest in `folder`."""
    made = envelope(_TYPE, (folder / MANIFEST).read_bytes(), key)
    files.write(folder / SIGNED, json.dumps(made, indent=2) + "\n", private=False)


def envelope(kind: str, payload: bytes, key: Any) -> dict[str, Any]:
    """A DSSE envelope: `payload` of type `kind`, signed by a private key."""
    signature = {"keyid": name_of(key.public_key()), "sig": base64.b64encode(key.sign(_signed(kind, payload))).decode()}
    return {"payloadType": kind, "payload": base64.b64encode(payload).decode(), "signatures": [signature]}


def opened(sealed: Any, kind: str, public: Any) -> bytes:
    """The payload of an envelope that `public` signed.

    Raises:
        InvalidArgument: it is no envelope, of another type, or not signed by that key.
    """
    from cryptography.exceptions import InvalidSignature

    try:
        payload = base64.b64decode(sealed["payload"], validate=True)
        made = [base64.b64decode(one["sig"], validate=True) for one in sealed["signatures"]]
        told = sealed["payloadType"]
    except (KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise InvalidArgument(f"signature: no envelope ({error}); want one of type {kind}") from None
    if told != kind:
        raise InvalidArgument(f"signature: of another type than {kind}")
    for signature in made:
        with contextlib.suppress(InvalidSignature):
            public.verify(signature, _signed(kind, payload))
            return payload
    raise InvalidArgument(f"signature: not by the key {name_of(public)}")


def check_signature(folder: Path, public: Any) -> str:
    """The name of `public`, which signed the manifest in `folder`.

    Raises:
        InvalidArgument: it did not.
    """
    from cryptography.exceptions import InvalidSignature

    envelope, wanted, payload = read_json(folder / SIGNED), name_of(public), check_payload(folder)
    try:
        made = [(one["keyid"], base64.b64decode(one["sig"], validate=True)) for one in envelope["signatures"]]
    except (KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise InvalidArgument(f"{SIGNED}: no envelope ({error})") from None
    for _, signature in made:
        try:
            public.verify(signature, _signed(_TYPE, payload))
            return wanted
        except InvalidSignature:
            continue
    names = ", ".join(str(name) for name, _ in made) or "nobody"
    raise InvalidArgument(f"{SIGNED}: signed by {names}, and not by the key {wanted}")


def check_payload(folder: Path) -> bytes:
    """What the envelope holds, which must be the manifest beside it.

    Raises:
        InvalidArgument: it is not.
    """
    envelope = read_json(folder / SIGNED)
    try:
        kind, payload = envelope["payloadType"], base64.b64decode(envelope["payload"], validate=True)
    except (KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise InvalidArgument(f"{SIGNED}: no envelope ({error})") from None
    if kind != _TYPE or payload != (folder / MANIFEST).read_bytes():
        raise InvalidArgument(f"{SIGNED}: signs another manifest than the one beside it")
    return payload


def signers(folder: Path) -> list[str]:
    """The names of the keys that an envelope says it was signed by; whether that is true needs the public key."""
    envelope = read_json(folder / SIGNED)
    try:
        return [str(one["keyid"]) for one in envelope["signatures"]]
    except (KeyError, TypeError):
        raise InvalidArgument(f"{SIGNED}: no envelope; want one with signatures") from None


def name_of(public: Any) -> str:
    """The name of a public key."""
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()[:16]


def _signed(kind: str, payload: bytes) -> bytes:
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind.encode(), len(payload), payload)


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingExtra("cryptography", extra="ledger") from None
    return ed25519, serialization

"""The files of a run that goes on after it was killed: what is on disk, who may read it, and which run may go on.

    <path>         the record, in the open; sealed, the run's key and keyed fingerprints of what decides its gradients
    <path>.key     the key of the seal (AES-GCM), for the owner alone, unless the caller keeps it
    <path>.steps   notes of what was released since the last save, and the mark of the run that goes on (`redone.py`)

The seal covers the record: the same noise on a model of somebody's choice would give its gradient away. When the run is
over, the file is written once more without the secrets, and the other two go.

Guarantee: of runs that are alive at once, two never release a step with the same noise on different sums. A run reads
the file, and takes it over before its first step: under a lock, if the file is still the one it read, it reads the
notes and puts its mark over them. A step is noted before it is released; notes and saves are written under the same
lock, and only while the mark is one's own. So whoever may release knows the file as it is, and the note of every step
that was released after it; one who read it earlier is refused, and does not disturb the run that goes on. That holds
wherever a run dies:

    before a note is whole         the step was not released; what is there of the note is cut off
    after it                       whoever goes on repeats the step, and must come to the noted sum
    while the file is written      it is written beside, flushed and renamed: the old one is there, with all its notes
    after it, before notes go      they are of steps that nobody repeats, and go with the next save
    after the last one             what is left is of no use any more, and goes when the run is opened again

Notes name the step they begin at. An older copy of the file, put in place of a newer one, begins before that, and is
refused. Nothing tells where all the files were set back, or the notes removed by hand: docs/pitfalls.md says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from terrine import files
from terrine.common.keys import Key
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.sgd.redone import Notes, locked, overtaken

_VERSION = 4
_UNWRITTEN = "the checkpoint could not be written"


@dataclass(frozen=True)
class Loaded:
    """What an interrupted run left; without its key it was over."""

    record: dict[str, Any]
    key: Key | None
    prints: Mapping[str, str]
    """Fingerprints, under the key: by themselves they could be guessed from."""


class SealedFile:
    """The file of one run. `record["plan"]` and `fields` are in every one; `seal` is a 32-byte key of the caller's."""

    def __init__(self, path: Path, fields: set[str], seal: bytes | None = None) -> None:
        self.path, self._fields, self._seal = path, {"plan"} | fields, seal
        self._key_path, self._notes_path = (path.with_name(path.name + one) for one in (".key", ".steps"))
        self._notes: Notes | None = None
        self._digest: bytes | None = None  # of the file as it was loaded

    @property
    def held(self) -> bool:
        """Whether the run was taken over here."""
        return self._notes is not None

    def demand_room(self) -> None:
        """Try the place, before anything is charged.

        Raises:
            OutOfOrder: nothing can be written there.
        """
        with _on_disk(self.path, _UNWRITTEN):
            TemporaryFile(dir=self.path.parent).close()

    def load(self, plan: str) -> Loaded | None:
        """What is there to go on from; None where nothing is.

        Raises:
            InvalidArgument: the file is of another plan or version, was changed, is none, or cannot be unsealed.
            OutOfOrder: it cannot be read.
        """
        with _on_disk(self.path, "the checkpoint could not be read"):
            self._notes, self._digest = None, self._digest_now()
            return None if self._digest is None else self._loaded(plan)

    def _loaded(self, plan: str) -> Loaded:
        whole = self._unpacked(self.path, {"version"})
        if whole["version"] != _VERSION:
            raise InvalidArgument(
                f"{self.path}: a checkpoint of version {whole['version']}, want {_VERSION}; end the run with the "
                "Terrine that began it, or choose another path"
            )
        if not isinstance(whole.get("record"), Tensor) or not isinstance(whole.get("sealed", 0), bytes | None):
            raise InvalidArgument(f"{self.path}: a checkpoint without its record or seal; remove it or choose another")
        body = whole["record"].numpy().tobytes()
        secret = None if whole["sealed"] is None else self._unsealed(whole["sealed"], body)
        record = self._unpacked(io.BytesIO(body), self._fields)
        if record["plan"] != plan:
            raise InvalidArgument(f"{self.path}: a run of another plan, {record['plan']}; want that, or another path")
        if secret is None:
            return Loaded(record, None, {})
        return Loaded(record, Key(bytes.fromhex(secret["key"])), secret["prints"])

    def demand_same(self, loaded: Loaded, prints: Mapping[str, str]) -> None:
        """Refuse to go on where something decides gradients that is not what the run began with.

        Raises:
            InvalidArgument: names all that differs.
        """
        assert loaded.key is not None
        now, before = _keyed(loaded.key, prints), loaded.prints
        if changed := sorted(name for name in {*now, *before} if now.get(name) != before.get(name)):
            raise InvalidArgument(
                f"{self.path}: a run with another {', '.join(changed)}; its noise must not be used twice, on other "
                "gradients; want what it was begun with, or another path, where a fresh run has to be paid for"
            )

    def take_over(self, saved: int) -> None:
        """Be the run that goes on from here, from step `saved`; one that did so before takes no further step.

        Raises:
            InvalidArgument: the notes or the key are not of this run.
            OutOfOrder: another run went on from what was loaded, or nothing can be written.
        """
        with _on_disk(self.path, _UNWRITTEN), locked(self._notes_path) as file:
            if self._digest_now() != self._digest:
                raise overtaken(self.path)
            fresh = self._digest is None
            if fresh:
                file.truncate(0)  # notes of another run, whose checkpoint is gone
            self._cipher = AESGCM(self._sealing_key(make=fresh))
            self._notes = Notes(self._notes_path, file, self._cipher, saved)

    def before_release(self, step: int, sums: Mapping[str, Tensor]) -> None:
        """Note what a step is about to release; refuse a repeated one that comes out otherwise than it did.

        Raises:
            InvalidArgument: it does.
            OutOfOrder: the note cannot be written, or another run went on from here; nothing was released.
        """
        assert self._notes is not None
        with _on_disk(self._notes_path, f"{_UNWRITTEN}, so nothing was released"):
            self._notes.check(step, sums)

    def save(self, record: dict[str, Any], saved: int, key: Key, prints: Mapping[str, str]) -> None:
        """Write everything, in one rename: the run goes on from step `saved`.

        Raises:
            OutOfOrder: it cannot be written, or another run went on from here.
        """
        assert self._notes is not None
        body = _packed(record)
        with _on_disk(self.path, _UNWRITTEN), self._notes.alone() as file:
            self._write(body, self._sealed({"key": key.secret.hex(), "prints": _keyed(key, prints)}, body))
            self._notes.forget(file, saved)

    def finish(self, record: dict[str, Any]) -> None:
        """Write what is final, without the secrets, and remove what they were kept by.

        Raises:
            OutOfOrder: it cannot be written, or another run went on from here.
        """
        assert self._notes is not None
        with _on_disk(self.path, _UNWRITTEN), self._notes.alone():
            self._write(_packed(record), None)
            self.clear()

    def clear(self) -> None:
        """Remove what only a run that goes on needs."""
        with _on_disk(self.path, "its notes and key could not be removed"):
            self._notes_path.unlink(missing_ok=True)
            self._key_path.unlink(missing_ok=True)

    def _digest_now(self) -> bytes | None:
        if not self.path.exists():
            return None
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    def _write(self, body: bytes, sealed: bytes | None) -> None:
        record = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        files.write(self.path, _packed({"version": _VERSION, "record": record, "sealed": sealed}), private=True)

    def _unpacked(self, file: Path | io.BytesIO, fields: set[str]) -> dict[str, Any]:
        try:
            found = torch.load(file, weights_only=True, map_location="cpu")
        except Exception as error:
            raise self._none(type(error).__name__) from None
        if missing := sorted(fields - set(found) if isinstance(found, dict) else fields):
            raise self._none(f"{missing[0]} is missing")
        return dict(found)

    def _none(self, why: str) -> InvalidArgument:
        return InvalidArgument(f"{self.path}: not a checkpoint ({why}); remove it or choose another")

    def _sealed(self, secret: dict[str, Any], body: bytes) -> bytes:
        nonce = os.urandom(12)
        return nonce + self._cipher.encrypt(nonce, json.dumps(secret).encode(), hashlib.sha256(body).digest())

    def _unsealed(self, sealed: bytes, body: bytes) -> dict[str, Any]:
        cipher = AESGCM(self._sealing_key(make=False))
        try:
            found: dict[str, Any] = json.loads(cipher.decrypt(sealed[:12], sealed[12:], hashlib.sha256(body).digest()))
        except (InvalidTag, ValueError):  # a seal too short for its nonce is a ValueError
            raise InvalidArgument(
                f"{self.path}: sealed under another key, or changed since; want the key and the file of the run"
            ) from None
        return found

    def _sealing_key(self, *, make: bool) -> bytes:
        if self._seal is not None:
            return self._seal
        if not self._key_path.exists():
            if not make:
                raise InvalidArgument(f"{self._key_path} is missing: the run cannot go on with the noise it began with")
            files.write(self._key_path, os.urandom(32), private=True)
        key = self._key_path.read_bytes()
        if len(key) != 32:
            raise InvalidArgument(f"{self._key_path}: {len(key)} bytes, want the 32 of the run's key")
        return key


@contextlib.contextmanager
def _on_disk(path: Path, failed: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutOfOrder(
            f"{path}: {failed} ({error.strerror}); want a place that may be read and written, with room, and go on"
        ) from error


def _keyed(key: Key, prints: Mapping[str, str]) -> dict[str, str]:
    return {name: hmac.new(key.secret, f"{name} {one}".encode(), "sha256").hexdigest() for name, one in prints.items()}


def _packed(values: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()

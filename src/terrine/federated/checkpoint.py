"""A federation between two rounds, on disk: a run that was killed goes on to the same model, and is not charged again.

All randomness of a run comes from its key, so a repeated round has its old clients, its old local steps and its old
noise, and releases nothing new. That argument needs the same data and settings: fingerprints of both, keyed, are sealed
with the key (AES-GCM, under a key in `<path>.key`, for the owner alone) and compared before a run goes on; and of every
round since the last save a few numbers of its exact sum are noted, encrypted, in `<path>.steps` (`sgd.redone`): a
repeated round whose sum is another is refused. The seal covers weights, history and clients' turns as well. When the
run is over the secrets are dropped.

Two that go on from one file at once would both have the noise of the next round. So before a round is opened, and
before a save, the file is compared with what this one last read or wrote, under a lock; notes are read anew each time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import hmac
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from terrine import check, files
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.sgd.noise import Key
from terrine.sgd.redone import Notes

_VERSION = 1
_FIELDS = {"plan", "rounds", "model", "optimizer", "history", "bound", "turns", "paid"}


@dataclasses.dataclass(frozen=True)
class Kept:
    """What an interrupted run left; without its key it was over."""

    record: dict[str, Any]
    key: Key | None


class FederationCheckpoint:
    """The file of one run."""

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise check.refuse("checkpoint", path, "a path, or nothing")
        self.path = Path(path)
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise check.refuse("checkpoint", path, "a file in a folder that exists")
        self._key_path, self._notes_path = (self.path.with_name(self.path.name + one) for one in (".key", ".steps"))
        self._prints: dict[str, str] = {}
        self._seen: bytes | None = None  # a digest of the file as it was last read or written here

    def open(self, plan: str, prints: Mapping[str, str]) -> Kept | None:
        """What is there to go on from; None where nothing is. `prints` are fingerprints of all that decides updates.

        Raises:
            InvalidArgument: the file is of another plan, of other data or settings, was changed, or is none.
        """
        self._prints = dict(prints)
        if not self.path.exists():
            return None
        content = self.path.read_bytes()
        self._seen = hashlib.sha256(content).digest()
        whole = _unpacked(self.path, content, {"version", "record", "sealed"})
        if whole["version"] != _VERSION:
            raise InvalidArgument(f"{self.path}: a checkpoint of version {whole['version']}, want {_VERSION}")
        body, sealed = whole["record"].numpy().tobytes(), whole["sealed"]
        secret = None if sealed is None else self._unsealed(sealed, body)
        record = _unpacked(self.path, body, _FIELDS)
        if record["plan"] != plan:
            raise InvalidArgument(f"{self.path}: a run of another plan, {record['plan']}; want that, or another path")
        if secret is None:
            return Kept(record, None)
        key = Key(bytes.fromhex(secret["key"]))
        now, before = self._keyed(key), secret["prints"]
        if changed := sorted(name for name in {*now, *before} if now.get(name) != before.get(name)):
            raise InvalidArgument(
                f"{self.path}: a run with other {', '.join(changed)}; its noise must not fall on other updates; want "
                "what it was begun with, or another path, where a fresh run has to be paid for"
            )
        return Kept(record, key)

    def begin(self, *, anew: bool) -> None:
        """Be ready to note what rounds release.

        Raises:
            InvalidArgument: the files cannot be written, or the notes there are not of this run.
        """
        try:
            if anew:
                self._notes_path.unlink(missing_ok=True)  # of another run, whose checkpoint is gone
            self._sealing_key(make=anew)
        except OSError as error:
            raise InvalidArgument(f"{self.path}: could not be written ({error.strerror}); want another path") from error
        self._notes()

    def before_release(self, round_: int, total: Tensor) -> None:
        """Note a round's exact sum; refuse a repeated round that has another.

        Raises:
            InvalidArgument: it has.
            OutOfOrder: the note cannot be written, or another went on with the run; nothing was released.
        """
        try:
            with self._alone():
                self._notes().check(round_, {"sum": total})
        except InvalidArgument:
            raise InvalidArgument(
                f"round {round_ + 1} was begun before, with other updates; its noise must not be used twice; want the "
                "clients and their training as they were, or another path, where a fresh run has to be paid for"
            ) from None
        except OSError as error:
            raise OutOfOrder(
                f"{self._notes_path}: could not be written ({error.strerror}), so nothing was opened; make room"
            ) from error

    def save(self, record: dict[str, Any], key: Key, *, over: bool) -> None:
        """Write everything, in one rename; without the secrets where the run is over.

        Raises:
            OutOfOrder: it cannot be written, or another went on with the run.
        """
        body = _packed(record)
        whole = {"version": _VERSION, "record": torch.frombuffer(bytearray(body), dtype=torch.uint8)}
        try:
            with self._alone():
                whole["sealed"] = None if over else self._sealed(key, body)
                content = _packed(whole)
                files.write(self.path, content, private=True)
                self._seen = hashlib.sha256(content).digest()
                self._notes_path.unlink(missing_ok=True)
                if over:
                    self._key_path.unlink(missing_ok=True)
        except OSError as error:
            raise OutOfOrder(f"{self.path}: could not be written ({error.strerror}); make room and go on") from error

    def _notes(self) -> Notes:
        return Notes(self._notes_path, self._sealing_key(make=False))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the run's files; refused where another went on from them, with the noise of the same rounds.

        Raises:
            OutOfOrder: another did.
        """
        with contextlib.ExitStack() as stack:
            if self._key_path.exists():
                fcntl.flock(stack.enter_context(self._key_path.open("rb+")), fcntl.LOCK_EX)
            now = hashlib.sha256(self.path.read_bytes()).digest() if self.path.exists() else None
            if now != self._seen:
                raise OutOfOrder(
                    f"{self.path}: another federation went on with this run, and its noise must not be used twice; "
                    "want one at a time, or another path"
                )
            yield

    def _keyed(self, key: Key) -> dict[str, str]:
        """The fingerprints under the run's key: by themselves they could be guessed from."""
        return {
            name: hmac.new(key.secret, f"{name} {one}".encode(), "sha256").hexdigest()
            for name, one in self._prints.items()
        }

    def _sealed(self, key: Key, body: bytes) -> bytes:
        text = json.dumps({"key": key.secret.hex(), "prints": self._keyed(key)})
        nonce = os.urandom(12)
        cipher = AESGCM(self._sealing_key(make=True))
        return nonce + cipher.encrypt(nonce, text.encode(), hashlib.sha256(body).digest())

    def _unsealed(self, sealed: bytes, body: bytes) -> dict[str, Any]:
        try:
            cipher = AESGCM(self._sealing_key(make=False))
            found: dict[str, Any] = json.loads(cipher.decrypt(sealed[:12], sealed[12:], hashlib.sha256(body).digest()))
        except InvalidTag:
            raise InvalidArgument(
                f"{self.path}: sealed under another key, or changed since; want the key and the file of the run"
            ) from None
        return found

    def _sealing_key(self, *, make: bool) -> bytes:
        if not self._key_path.exists():
            if not make:
                raise InvalidArgument(f"{self._key_path} is missing: the run cannot go on with the noise it began with")
            files.write(self._key_path, os.urandom(32), private=True)
        key = self._key_path.read_bytes()
        if len(key) != 32:
            raise InvalidArgument(f"{self._key_path}: {len(key)} bytes, want the 32 of the run's key")
        return key


def _packed(values: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def _unpacked(path: Path, content: bytes, fields: set[str]) -> dict[str, Any]:
    try:
        found = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        missing = sorted(fields - set(found))
    except Exception as error:
        raise InvalidArgument(f"{path}: not a checkpoint ({type(error).__name__}); want another path") from None
    if missing:
        raise InvalidArgument(f"{path}: not a checkpoint of a federation ({missing[0]} is missing); want another path")
    return dict(found)

"""Checkpoints: a run that was killed at any moment goes on to the same final model, and is never billed less.

The file holds the model, the optimizer, the steps taken, and, sealed, what must stay secret: the key that lots, noise
and the seeds of the global generators come from, and a keyed fingerprint of the data. Whoever could read the key could
subtract the noise, so it is encrypted (AES-GCM) under a key in a file of its own, `<path>.key`, readable by the owner
only, or under one that the caller keeps; when the run is over the sealed part is dropped and the key file removed. The
seal covers the rest of the file as well: the same noise on a model of somebody's choice would give its gradient away.
Steps that are repeated after a crash draw the same lots and the same noise: they release nothing new. That argument
needs the same gradients, so a run that is kept seeds the global generators at every lot (`generators.py`), and refuses
to go on with other data, as far as `RowReader.fingerprint` tells them apart, with another model, loss, optimizer or
schedule, as far as `fingerprint.py` does, with sums in another order, or with a step that comes out otherwise than it
did before (`redone.py`).

Each save is written beside, flushed and renamed: there is always one whole checkpoint. The first is written after the
account was charged and before the first step.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from terrine import check
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.events import Event
from terrine.sgd import distributed
from terrine.sgd.lots import RowReader
from terrine.sgd.noise import Key
from terrine.sgd.plan import Plan
from terrine.sgd.redone import Notes

if TYPE_CHECKING:
    from terrine.sgd.run import PrivateRun

_VERSION = 3


@dataclass(frozen=True)
class Saved:
    """What an interrupted run left."""

    key: Key
    charged_to: str | None
    limit: int
    record: dict[str, Any]


@dataclass
class Checkpoint:
    """Where to keep a run, and how often to save it; `seal` is a 32-byte key for what must stay secret."""

    path: Path
    every: int = 100
    seal: bytes | None = field(default=None, repr=False)
    _others: dict[str, Any] = field(default_factory=dict, repr=False)
    _constant: dict[str, Any] = field(default_factory=dict, repr=False)
    _restored: dict[str, Any] = field(default_factory=dict, repr=False)
    _bound: dict[str, str] = field(default_factory=dict, repr=False)
    _notes: Notes | None = field(default=None, repr=False)
    _saved_at: int = field(default=-1, repr=False)
    _digest: bytes | None = field(default=None, repr=False)
    """Of the file as it was read."""

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        self.every = check.whole("every", self.every)
        if self.seal is not None and len(self.seal) != 32:
            raise InvalidArgument(f"seal of {len(self.seal)} bytes: want 32, such as os.urandom(32)")

    def open(
        self,
        plan: Plan,
        source: RowReader,
        bound: Mapping[str, str],
        *,
        piece: int | None = None,
        memory: float | None = None,
    ) -> Saved | None:
        """What is there to go on from; None where nothing is. `bound` are fingerprints of all that decides gradients.

        Raises:
            InvalidArgument: the file is of another plan, of other data, of another model, loss or setting, of a run
                that adds up in another order, or cannot be unsealed.
        """
        self._constant, self._bound = {"piece": piece, "memory": memory}, dict(bound)
        self._digest = self._digest_now()
        if self._digest is None:
            return None
        body, sealed = _load(self.path)
        secret = None if sealed is None else self._unsealed(sealed, body)
        record = _unpacked(self.path, io.BytesIO(body), _FIELDS)
        if record["plan"] != repr(plan):
            raise InvalidArgument(
                f"{self.path}: a run of another plan, {record['plan']}; want the same or another path"
            )
        if secret is None:
            if record["taken"] < record["limit"]:
                raise InvalidArgument(
                    f"{self.path}: its secrets are gone after {record['taken']} of {record['limit']} steps, so the run "
                    "cannot go on; choose another path"
                )
            return Saved(Key.fresh(), record["charged_to"], record["limit"], record)
        self._check_order(record["order"])
        key = Key(bytes.fromhex(secret["key"]))
        if not hmac.compare_digest(source.fingerprint(key.secret), secret["data"]):
            raise InvalidArgument(f"{self.path}: a run on other data; its noise must not be used twice, start anew")
        self._check_bound(key, secret["bound"])
        return Saved(key, record["charged_to"], record["limit"], record)

    def attach(
        self,
        run: PrivateRun,
        source: RowReader,
        saved: Saved | None,
        *,
        charged_to: str | None,
        looks: Event | None = None,
    ) -> None:
        """Bring `run` to where it was saved, and keep it from now on."""
        self._constant |= {
            "plan": repr(run.step.plan),
            "charged_to": charged_to,
            "limit": run.step.limit,
            "looks": repr(looks),
            "data": source.fingerprint(run.step.key.secret),
        }
        if saved is None and distributed.is_first():
            self._notes_path.unlink(missing_ok=True)  # of another run, whose checkpoint is gone
        if distributed.is_first() and (saved is None or saved.record["taken"] < saved.limit):
            self._notes = Notes(self._notes_path, self._sealing_key(make=True))
            if self._digest_now() != self._digest:
                raise OutOfOrder(f"{self.path}: another run goes on with it; want one at a time, or another path")
        if saved is None:
            self.save(run)
            return
        try:
            run.step.model.load_state_dict(saved.record["model"])
            run.optimizer.load_state_dict(saved.record["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise InvalidArgument(f"{self.path}: a run of another model or optimizer ({reason})") from None
        run.step.taken, run.step.bound = saved.record["taken"], saved.record["bound"]
        self._restored = saved.record["others"]
        self._saved_at = run.step.taken

    def keep(self, others: Mapping[str, Any]) -> None:
        """Save these too, and restore them now where a run goes on."""
        for name, one in others.items():
            self._others[name] = one
            if name in self._restored:
                one.load_state_dict(self._restored[name])

    def before_release(self, run: PrivateRun) -> None:
        """Note what a step is about to release; refuse a repeated one that comes out otherwise than it did.

        Raises:
            InvalidArgument: it does.
            OutOfOrder: the note cannot be written, or another run went on from here; nothing was released.
        """
        if self._notes is None:
            return
        try:
            self._notes.check(run.step.taken, run.step._sums)
        except OSError as error:
            raise OutOfOrder(
                f"{self._notes_path}: could not be written ({error.strerror}), so the step was not taken; make room"
            ) from error

    def after_step(self, run: PrivateRun) -> None:
        """Save every so many steps."""
        if run.step.taken % self.every == 0 and run.step.taken != self._saved_at:
            self.save(run)

    def after_run(self, run: PrivateRun) -> None:
        """Save what is final, without the secrets, and remove their key."""
        self.save(run, final=True)
        if distributed.is_first():
            self._key_path.unlink(missing_ok=True)

    def save(self, run: PrivateRun, *, final: bool = False) -> None:
        """Write everything, in one rename.

        Raises:
            OutOfOrder: it cannot be written, or another run went on from the same checkpoint.
        """
        self._saved_at = run.step.taken
        if not distributed.is_first():
            return
        record = {
            "plan": self._constant["plan"],
            "charged_to": self._constant["charged_to"],
            "limit": self._constant["limit"],
            "looks": self._constant["looks"],
            "taken": run.step.taken,
            "bound": run.step.bound,
            "order": self._order(),
            "model": run.step.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "others": {name: one.state_dict() for name, one in self._others.items()},
        }
        body = _packed(record)
        sealed = None if final else self._sealed(run, body)
        whole = {"version": _VERSION, "record": torch.frombuffer(bytearray(body), dtype=torch.uint8), "sealed": sealed}
        if self._notes is None:
            _write(self.path, _packed(whole))
            return
        with self._notes.alone() as file:
            _write(self.path, _packed(whole))
            self._notes.forget(file)
            if final:
                self._notes_path.unlink(missing_ok=True)

    def _digest_now(self) -> bytes | None:
        if not self.path.exists():
            return None
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    def _order(self) -> dict[str, Any]:
        """What decides the order in which a lot is added up and drawn for: a repeated step must keep it."""
        order = {"threads": torch.get_num_threads(), "processes": distributed.share()[1]}
        return order | {name: self._constant[name] for name in ("piece", "memory")}

    def _check_order(self, before: dict[str, Any]) -> None:
        for name, now in self._order().items():
            if now != (was := before.get(name)):
                how = f"torch.set_num_threads({was})" if name == "threads" else f"{name}={was}"
                raise InvalidArgument(
                    f"{self.path}: a run of {name}={was}, here {now}: its steps would come out otherwise; want {how}"
                )

    def _check_bound(self, key: Key, before: Mapping[str, str]) -> None:
        now = self._keyed(key)
        if changed := sorted(name for name in {*now, *before} if now.get(name) != before.get(name)):
            raise InvalidArgument(
                f"{self.path}: a run with another {', '.join(changed)}; its noise must not fall on other gradients; "
                "want what it was begun with, or another path, where a fresh run has to be paid for"
            )

    def _keyed(self, key: Key) -> dict[str, str]:
        """The fingerprints under the run's key: by themselves they could be guessed from."""
        return {
            name: hmac.new(key.secret, f"{name} {one}".encode(), "sha256").hexdigest()
            for name, one in self._bound.items()
        }

    @property
    def _notes_path(self) -> Path:
        return self.path.with_name(self.path.name + ".steps")

    @property
    def _key_path(self) -> Path:
        return self.path.with_name(self.path.name + ".key")

    def _sealed(self, run: PrivateRun, body: bytes) -> bytes:
        """The secrets, encrypted; what is not secret is bound to them and cannot be changed without the key either."""
        key = run.step.key
        secret = {"key": key.secret.hex(), "data": self._constant["data"], "bound": self._keyed(key)}
        nonce = os.urandom(12)
        cipher = AESGCM(self._sealing_key(make=True))
        return nonce + cipher.encrypt(nonce, json.dumps(secret).encode(), hashlib.sha256(body).digest())

    def _unsealed(self, sealed: bytes, body: bytes) -> dict[str, Any]:
        cipher = AESGCM(self._sealing_key(make=False))
        try:
            text = cipher.decrypt(sealed[:12], sealed[12:], hashlib.sha256(body).digest())
        except InvalidTag:
            raise InvalidArgument(
                f"{self.path}: sealed under another key, or changed since; want the key and the file of the run"
            ) from None
        return json.loads(text)  # type: ignore[no-any-return]

    def _sealing_key(self, *, make: bool) -> bytes:
        if self.seal is not None:
            return self.seal
        if not self._key_path.exists():
            if not make:
                raise InvalidArgument(f"{self._key_path} is missing: the run cannot go on with the noise it began with")
            _write(self._key_path, os.urandom(32))
        return self._key_path.read_bytes()


_FIELDS = {"plan", "charged_to", "limit", "taken", "bound", "order", "model", "optimizer", "others"}


def _load(path: Path) -> tuple[bytes, bytes | None]:
    """The packed record, and the sealed secrets that are bound to it."""
    whole = _unpacked(path, path, {"version"})
    if whole["version"] != _VERSION:
        raise InvalidArgument(
            f"{path}: a checkpoint of version {whole['version']}, want {_VERSION}; end the run with the Terrine that "
            "began it, or choose another path"
        )
    if not isinstance(whole.get("record"), torch.Tensor) or not isinstance(whole.get("sealed", 0), bytes | None):
        raise InvalidArgument(f"{path}: a checkpoint without its record or seal; remove it or choose another")
    return whole["record"].numpy().tobytes(), whole["sealed"]


def _packed(values: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def _unpacked(path: Path, file: Path | io.BytesIO, fields: set[str]) -> dict[str, Any]:
    try:
        found = torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:
        raise InvalidArgument(
            f"{path}: not a checkpoint ({type(error).__name__}); remove it or choose another"
        ) from None
    missing = sorted(fields - set(found)) if isinstance(found, dict) else sorted(fields)
    if missing:
        raise InvalidArgument(f"{path}: not a checkpoint ({missing[0]} is missing); remove it or choose another")
    return found  # type: ignore[no-any-return]


def _write(path: Path, content: bytes) -> None:
    """All of `content` at `path`, or what was there before: readable by the owner only."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OutOfOrder(
            f"{path}: the checkpoint could not be written ({error.strerror}); make room and go on"
        ) from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

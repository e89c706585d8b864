"""Steps that were taken since the last checkpoint: after a crash they are repeated, and must be the same.

A repeated step has its old noise. With another gradient, the two releases of the step would differ by data alone. A
loop of the caller's own shows its loss to nobody, so what is compared is what it comes to: before a step is released, a
few numbers of its clipped sums are noted; a repeated step whose numbers differ by more than rounding is refused.

The notes are sums without noise: they are encrypted (AES-GCM, with the step as associated data) under the checkpoint's
key, lie in a file of the owner's own, `<path>.steps`, and go when a checkpoint of a later step is written.

Two runs that are alive at once would not see each other's steps. So the file begins with a mark of the run that went on
last, and the step of its last save; every step and every save is made while the file is locked, and only by the run
whose mark it bears. `sealed.py` has the whole argument.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray
from torch import Tensor

from terrine.errors import InvalidArgument, OutOfOrder

_KEPT = 64
"""Numbers of each parameter's sum that are noted."""
_ROUNDING = 1e-3
"""What sums may differ by, relative to their length, where they are added up in another order."""
_MARK, _HEAD = 16, 24
"""Bytes of the mark of the run that goes on; with the step that it goes on from."""

Floats = NDArray[np.float32]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[io.FileIO]:
    """The file at `path`, which is made if it is missing, held by nobody else while the block runs."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def overtaken(path: Path) -> OutOfOrder:
    """What a run is told that another one left behind."""
    return OutOfOrder(
        f"{path}: another run went on from the same checkpoint, and its noise must not be used twice; want one at a "
        "time, or another path"
    )


class Notes:
    """What steps from the last checkpoint on were about to release; whoever opens them takes the run over.

    `file` is the one at `path`, locked; `saved` is the step that the checkpoint goes on from.
    """

    def __init__(self, path: Path, file: io.FileIO, cipher: AESGCM, saved: int) -> None:
        self._path, self._cipher, self._mark = path, cipher, os.urandom(_MARK)
        last = int.from_bytes(file.read(_HEAD)[_MARK:], "big")
        if last > saved:
            raise InvalidArgument(
                f"{path}: the run was saved after {last} steps, and its checkpoint is an older copy, of {saved}; its "
                "noise must not be used twice; want the newest, or another path, where a fresh run has to be paid for"
            )
        self._seen = dict(self._read(file))
        self._sign(file, saved)

    def check(self, step: int, sums: Mapping[str, Tensor]) -> None:
        """Note a step that is about to be released; refuse one that was released before with other sums.

        Raises:
            InvalidArgument: it was.
            OutOfOrder: another run went on from the same checkpoint.
            OSError: the note cannot be written; then nothing is released.
        """
        with self.alone() as file:
            found, before = _numbers(sums), self._seen.get(step)
            if before is None:
                self._append(file, step, found)
            elif len(found) != len(before) or not _alike(found, before):
                raise InvalidArgument(
                    f"step {step + 1} was taken before, with other gradients: another loss, or other code; its noise "
                    "must not be used twice; want the loss as it was, or another path, where a fresh run has to be "
                    "paid for"
                )

    @contextlib.contextmanager
    def alone(self) -> Iterator[io.FileIO]:
        """Hold the run's files.

        Raises:
            OutOfOrder: another run went on from the same checkpoint.
        """
        with locked(self._path) as file:
            if file.read(_MARK) != self._mark:
                raise overtaken(self._path)
            yield file

    def forget(self, file: io.FileIO, saved: int) -> None:
        """A checkpoint was written while `alone`, that goes on from step `saved`: none before it is repeated."""
        self._sign(file, saved)
        if all(step < saved for step in self._seen):
            file.truncate(_HEAD)
            self._seen = {}

    def _sign(self, file: io.FileIO, saved: int) -> None:
        file.seek(0)
        file.write(self._mark + saved.to_bytes(_HEAD - _MARK, "big"))

    def _append(self, file: io.FileIO, step: int, found: Floats) -> None:
        nonce = os.urandom(12)
        sealed = nonce + self._cipher.encrypt(nonce, found.tobytes(), step.to_bytes(8, "big"))
        record, end = step.to_bytes(8, "big") + len(sealed).to_bytes(8, "big") + sealed, file.seek(0, os.SEEK_END)
        if file.write(record) < len(record):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._seen[step] = found

    def _read(self, file: io.FileIO) -> list[tuple[int, Floats]]:
        """The notes of a run that was interrupted; one that was cut short by a crash was of no release."""
        file.seek(0)
        content, at, found = file.read(), _HEAD, []
        while len(content) >= at + 16:
            step, size = (int.from_bytes(content[at + 8 * k : at + 8 * k + 8], "big") for k in (0, 1))
            sealed = content[at + 16 : at + 16 + size]
            if len(sealed) < size:
                break
            found.append((step, self._opened(sealed, step)))
            at += 16 + size
        if at < len(content):
            file.truncate(at)
        return found

    def _opened(self, sealed: bytes, step: int) -> Floats:
        try:
            text = self._cipher.decrypt(sealed[:12], sealed[12:], step.to_bytes(8, "big"))
        except InvalidTag:
            raise InvalidArgument(
                f"{self._path}: sealed under another key, or changed since; want the file of the run"
            ) from None
        return np.frombuffer(text, dtype=np.float32)


def _numbers(sums: Mapping[str, Tensor]) -> Floats:
    """A few numbers of every sum, evenly spread, and its length; empty for a lot without examples."""
    found = [np.zeros(0, dtype=np.float32)]
    for name in sorted(sums):
        flat = sums[name].detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _KEPT)][:_KEPT]
        found += [some.float().cpu().numpy(), flat.float().norm().reshape(1).cpu().numpy()]
    return np.concatenate(found)


def _alike(found: Floats, before: Floats) -> bool:
    return bool(np.linalg.norm(found - before) <= _ROUNDING * (np.linalg.norm(found) + np.linalg.norm(before)) / 2)

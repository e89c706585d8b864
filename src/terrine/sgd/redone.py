"""Steps that were taken since the last checkpoint: after a crash they are repeated, and must be the same.

A repeated step has its old noise. With another gradient, the two releases of the step would differ by data alone. A
loop of the caller's own shows its loss to nobody, so what is compared is what it comes to: before a step is released, a
few numbers of its clipped sums are noted; a repeated step whose numbers differ by more than rounding is refused.

The notes are sums without noise: they are encrypted (AES-GCM, with the step as associated data) under the checkpoint's
key, lie in a file of the owner's own, `<path>.steps`, and go when the next checkpoint is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray
from torch import Tensor

from terrine.errors import InvalidArgument

_KEPT = 64
"""Numbers of each parameter's sum that are noted."""
_ROUNDING = 1e-3
"""What sums may differ by, relative to their length, where they are added up in another order."""

Floats = NDArray[np.float32]


class Notes:
    """What steps from the last checkpoint on were about to release."""

    def __init__(self, path: Path, key: bytes) -> None:
        self._path, self._cipher = path, AESGCM(key)
        self._seen = dict(self._read())

    def check(self, step: int, sums: Mapping[str, Tensor]) -> None:
        """Note a step that is about to be released; refuse one that was released before with other sums.

        Raises:
            InvalidArgument: it was.
            OSError: the note cannot be written; then nothing is released.
        """
        found, before = _numbers(sums), self._seen.get(step)
        if before is None:
            self._append(step, found)
        elif len(found) != len(before) or not _alike(found, before):
            raise InvalidArgument(
                f"step {step + 1} was taken before, with other gradients: another loss, or other code; its noise must "
                "not be used twice; want the loss as it was, or another path, where a fresh run has to be paid for"
            )

    def forget(self) -> None:
        """A checkpoint was written: no step before it is repeated."""
        self._path.unlink(missing_ok=True)
        self._seen = {}

    def _append(self, step: int, found: Floats) -> None:
        nonce = os.urandom(12)
        sealed = nonce + self._cipher.encrypt(nonce, found.tobytes(), step.to_bytes(8, "big"))
        record = step.to_bytes(8, "big") + len(sealed).to_bytes(8, "big") + sealed
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, record)
        finally:
            os.close(descriptor)
        self._seen[step] = found

    def _read(self) -> list[tuple[int, Floats]]:
        """The notes of a run that was interrupted; one that was cut short by a crash was of no release."""
        content, at, found = self._path.read_bytes() if self._path.exists() else b"", 0, []
        while len(content) >= at + 16:
            step, size = (int.from_bytes(content[at + 8 * k : at + 8 * k + 8], "big") for k in (0, 1))
            sealed = content[at + 16 : at + 16 + size]
            if len(sealed) < size:
                break
            found.append((step, self._opened(sealed, step)))
            at += 16 + size
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

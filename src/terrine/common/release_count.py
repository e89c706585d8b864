"""The number of releases of a run, on disk before each is made: count, don't replay.

    <path>.count    a line that says what it is; the run's secret, 32 bytes; the count, 8 bytes, big-endian

Whoever goes on with a run after a crash goes on after the count, with fresh randomness: what was counted may have been
seen, so it is spent. The secret is for what has to stay the same for the whole run, such as a random order of the
examples; it is the owner's alone, and never noise. One process at a time holds the file: the lock belongs to the file,
under whatever name, and goes with the process.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from terrine.errors import InvalidArgument, OutOfOrder

_HEAD = b"terrine releases 1\n"
_SECRET = 32
_SIZE = len(_HEAD) + _SECRET + 8


class ReleaseCount:
    """The count at `path`, held by this process until `close`; made with a fresh secret where there is none.

    Raises:
        OutOfOrder: another process holds it, or nothing can be written there.
        InvalidArgument: what lies there is no count.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unwritten(error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = os.pread(self._file, _SIZE + 1, 0)
            self.is_new = not content
            if self.is_new:
                content = _HEAD + os.urandom(_SECRET) + bytes(8)
                self._write(content, 0)
        except BlockingIOError:
            self.close()
            raise OutOfOrder(
                f"{path}: another process goes on with this run, and no step may be released twice; want one at a "
                "time, or another path"
            ) from None
        except OSError as error:
            self.close()
            raise self._unwritten(error) from error
        if len(content) != _SIZE or not content.startswith(_HEAD):
            self.close()
            raise InvalidArgument(f"{path}: not the count of a run's releases; want the run's own, or another path")
        self.secret = content[len(_HEAD) : -8]
        self.number = int.from_bytes(content[-8:], "big")

    def advance(self, number: int) -> None:
        """Write that so many releases were made, before the last of them is.

        Raises:
            OutOfOrder: it cannot be written, so nothing may be released; or it would count backwards.
        """
        if number <= self.number:
            raise OutOfOrder(f"{self.path}: release {number} was made before; want the {self.number + 1}th")
        try:
            self._write(number.to_bytes(8, "big"), _SIZE - 8)
        except OSError as error:
            raise self._unwritten(error) from error
        self.number = number

    def close(self) -> None:
        """Let another process go on with the run."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def remove(self) -> None:
        """Remove a count with which nothing was begun."""
        self.path.unlink(missing_ok=True)
        self.close()

    def _write(self, content: bytes, at: int) -> None:
        if os.pwrite(self._file, content, at) < len(content):
            raise OSError(28, os.strerror(28))
        os.fdatasync(self._file)

    def _unwritten(self, error: OSError) -> OutOfOrder:
        return OutOfOrder(
            f"{self.path}: the count of releases could not be written ({error.strerror}), so nothing is released; want "
            "a place that may be read and written, with room, and go on"
        )

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            self.close()


__all__ = ["ReleaseCount"]

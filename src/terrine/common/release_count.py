"""The number of releases of a run, on disk before each is made: count, don't replay.

    <path>.count    a line that says what it is; the run's secret, 32 bytes; the count, 8 bytes, big-endian

Whoever goes on with a run after a crash goes on after the count, with fresh randomness: what was counted may have been
seen, so it is spent. The secret is for what has to stay the same for the whole run, such as a random order of the
examples; it is the owner's alone, and never noise.

One run at a time holds the file. The lock belongs to the file, under whatever name, and goes with the process; forks
of the process, such as workers that read data, do not have it. Before each release the file is looked for again: one
that was replaced meanwhile, as by a backup, would not be the one whose count is read after a crash. A write that was
torn in the middle leaves a number between the old one and more than the new one: steps may be lost, none comes twice.
"""

from __future__ import annotations

import fcntl
import gc
import os
import stat
import weakref
from pathlib import Path

from terrine.errors import InvalidArgument, OutOfOrder

_HEAD = b"terrine releases 1\n"
_SECRET = 32
_SIZE = len(_HEAD) + _SECRET + 8

_flush = getattr(os, "fdatasync", os.fsync)  # some systems have the second only


class ReleaseCount:
    """The count at `path`, held by this process until `close`; made with a fresh secret where there is none.

    Raises:
        OutOfOrder: another run holds it, or nothing can be written there.
        InvalidArgument: what lies there is no count.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, -1
        try:
            self._file = self._open()
            content = os.pread(self._file, _SIZE + 1, 0)
            self.is_new = not content
            if self.is_new:
                content = _HEAD + os.urandom(_SECRET) + bytes(8)
                self._write(content, 0)
        except OSError as error:
            self.close()
            raise self._unwritten(error) from error
        if len(content) != _SIZE or not content.startswith(_HEAD):
            self.close()
            raise InvalidArgument(f"{path}: not the count of a run's releases; want the run's own, or another path")
        self.secret = content[len(_HEAD) : -8]
        self.number = int.from_bytes(content[-8:], "big")
        _OPEN.add(self)

    @property
    def is_open(self) -> bool:
        """Whether this process may release, as it holds the count."""
        return self._file >= 0

    def advance(self, number: int) -> None:
        """Write that so many releases were made, before the last of them is.

        Raises:
            OutOfOrder: it cannot be written, so nothing may be released; or it would count backwards.
        """
        if not self.is_open:
            raise OutOfOrder(f"{self.path}: the run was closed here, or belongs to the process that this is a fork of")
        if number <= self.number:
            raise OutOfOrder(f"{self.path}: release {number} was made before; want the {self.number + 1}th")
        if not self._is_in_place():
            raise OutOfOrder(
                f"{self.path}: was replaced or removed while the run was going on, so nothing is released; want the "
                "newest count there, and go on"
            )
        try:
            self._write(number.to_bytes(8, "big"), _SIZE - 8)
        except OSError as error:
            raise self._unwritten(error) from error
        self.number = number

    def close(self) -> None:
        """Let another run go on from here."""
        if self.is_open:
            file, self._file = self._file, -1
            os.close(file)

    def remove(self) -> None:
        """Remove a count with which nothing was begun."""
        if self.is_open and self._is_in_place():
            self.path.unlink(missing_ok=True)
        self.close()

    def _open(self) -> int:
        """Return the file, locked, and still the one of its name."""
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise OSError(22, "no regular file")
                _lock(file)
            except BlockingIOError:
                os.close(file)
                raise OutOfOrder(
                    f"{self.path}: another run goes on from here, and no step may be released twice; want one at a "
                    "time, ended by its process or by steps.close(), or another path"
                ) from None
            except BaseException:
                os.close(file)
                raise
            if _is_same(file, self.path):
                return file
            os.close(file)  # removed by who held it, between opening and locking

    def _is_in_place(self) -> bool:
        return _is_same(self._file, self.path)

    def _write(self, content: bytes, at: int) -> None:
        if os.pwrite(self._file, content, at) < len(content):
            raise OSError(28, os.strerror(28))
        _flush(self._file)

    def _unwritten(self, error: OSError) -> OutOfOrder:
        return OutOfOrder(
            f"{self.path}: the count of releases could not be written ({error.strerror}), so nothing is released; want "
            "a place that may be read and written, with room, and go on"
        )

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            self.close()


def _lock(file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        gc.collect()  # a run of this process that nobody can reach any more may hold it
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


_OPEN: weakref.WeakSet[ReleaseCount] = weakref.WeakSet()


def _close_in_fork() -> None:
    """The lock stays with the process that has it, and goes with it, whatever it has forked."""
    for count in list(_OPEN):
        count.close()


os.register_at_fork(after_in_child=_close_in_fork)

__all__ = ["ReleaseCount"]

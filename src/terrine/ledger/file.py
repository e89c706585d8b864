"""The file of a ledger in SQLite: made whole and for its owner alone, and missed when it is moved away.

A process that holds a file open goes on writing to it after it was moved or removed: its charges would be on disk, and
nobody who opens the ledger by its name would see them. So every transaction, before it is committed, looks whether the
file of that name, and the log and its index beside it, are still the ones that were opened.

Nothing here opens the file of a database: when a process closes a file, POSIX drops all its locks on it, SQLite's too,
and another process would take the log for its own and remove it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from terrine.errors import LedgerDamaged, LedgerUnavailable

PAGE = 2048
"""The size of a ledger's pages: a charge touches one row each on a few pages, and a commit writes whole pages."""

NOTHING = "nothing was charged, nothing was released"

Identity = tuple[int, int]
"""Device and number of a file: what stays the same when it is renamed."""

Files = tuple[Identity | None, Identity | None, Identity | None]
"""Which files the database, its log and the log's index are."""


class DatabaseFile:
    """One file by its name; `path` is absolute, so that a change of the working folder leads nowhere else."""

    def __init__(self, given: Path) -> None:
        self.given = given
        self.path = given.absolute()
        self._names = (str(self.path), "", "")
        self._opened: Identity | None = None
        self._cut = False

    def find_or_create(self, create: bool, build: Callable[[Path], None]) -> None:
        """Make sure that there is a file, built by `build` if there was none, and remember which it is."""
        beside = Path(os.path.realpath(self.path))
        try:
            there = self.path.exists()
            size = self.path.stat().st_size if there else PAGE
            logged = _size(f"{beside}-wal")
        except OSError as error:
            raise LedgerUnavailable(f"{self.given}: {error.strerror}; {NOTHING}") from error
        if not there and not create:
            raise LedgerUnavailable(f"{self.given}: no such file; `terrine ledger create` makes one")
        if not there and (logged is not None or _size(f"{beside}-journal") is not None):
            raise LedgerDamaged(
                f"{self.given}: gone, but its log is still there; put the file back, or remove the log to begin anew"
            )
        if size == 0:
            raise LedgerDamaged(
                f"{self.given}: an empty file where a ledger should be; restore it, or remove it to begin anew"
            )
        if not there:
            self._create(build)
        self._cut = bool(size % PAGE) and not logged
        self._names = (str(self.path), f"{beside}-wal", f"{beside}-shm")
        self._opened = _identity(self._names[0])

    def must_be_whole(self) -> None:
        """Refuse a file whose last page was cut: SQLite, which finds missing pages, would fill its end with zeros.

        Raises:
            LedgerDamaged: it was cut, and there is no log from which SQLite would repair it.
        """
        if self._cut:
            raise LedgerDamaged(
                f"{self.given}: the file is damaged or cut short; restore it from a backup or an export"
            )

    def found(self) -> Files:
        """Which files are there now: the one that was opened first, whatever log is beside it.

        Raises:
            LedgerUnavailable: the database was moved, removed or replaced.
        """
        database, log, index = self._names
        if (now := _identity(database)) is None or now != self._opened:
            raise self._missing(str(self.given))
        return now, _identity(log), _identity(index)

    def must_be(self, files: Files | None) -> None:
        """Refuse to go on if other files are there now.

        Raises:
            LedgerUnavailable: the database or its log was moved, removed or replaced.
        """
        if self.found() != files:
            raise self._missing(f"the log beside {self.given}")

    def _missing(self, what: str) -> LedgerUnavailable:
        return LedgerUnavailable(
            f"{what}: moved away or replaced while the ledger was open; put it back, or open the ledger again and "
            f"`terrine ledger verify --against` the last hash you know; {NOTHING}"
        )

    def _create(self, build: Callable[[Path], None]) -> None:
        # Built aside and linked into place, so that no other process ever sees a ledger that is half made. The files
        # that SQLite puts beside it have its permissions.
        real = Path(os.path.realpath(self.path))  # a link to a file that is not there yet stays a link
        draft = real.with_name(f".{real.name}.{secrets.token_hex(8)}")
        try:
            os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            build(draft)
            with contextlib.suppress(FileExistsError):
                os.link(draft, real)
        except OSError as error:
            raise LedgerUnavailable(f"{self.given}: {error.strerror}; {NOTHING}") from error
        finally:
            for tail in ("", "-wal", "-shm", "-journal"):
                _with(draft, tail).unlink(missing_ok=True)


def _with(path: Path, tail: str) -> Path:
    return path.with_name(path.name + tail)


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def _identity(path: str) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino

"""The file of a ledger in SQLite: made whole and for its owner alone, and missed when it is moved away.

A process that holds a file open goes on writing to it after it was moved or removed: its charges would be on disk, and
nobody who opens the ledger by its name would see them. So every transaction, before it is committed, looks whether the
file of that name, and the log and its index beside it, are still the ones that were opened.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from terrine.errors import LedgerDamaged, LedgerUnavailable

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

    def find_or_create(self, create: bool, build: Callable[[Path], None]) -> None:
        """Make sure that there is a whole file, built by `build` if there was none, and remember which it is."""
        beside = Path(os.path.realpath(self.path))
        if self.path.exists():
            _must_be_whole(self.given, beside)
        elif not create:
            raise LedgerUnavailable(f"{self.given}: no such file; `terrine ledger create` makes one")
        elif any(_with(beside, tail).exists() for tail in ("-wal", "-journal")):
            raise LedgerDamaged(
                f"{self.given}: gone, but its log is still there; put the file back, or remove the log to begin anew"
            )
        else:
            self._create(build)
        beside = Path(os.path.realpath(self.path))
        self._names = (str(self.path), f"{beside}-wal", f"{beside}-shm")
        self._opened = _identity(self._names[0])

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


def _identity(path: str) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _must_be_whole(given: Path, file: Path) -> None:
    """Refuse a file that was cut short: SQLite would fill the end of a cut page with zeros, and an empty file anew."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as opened:
            header = opened.read(100)
    except OSError as error:
        raise LedgerUnavailable(f"{given}: {error.strerror}; {NOTHING}") from error
    if size == 0:
        raise LedgerDamaged(f"{given}: an empty file where a ledger should be; restore it, or remove it to begin anew")
    log = _with(file, "-wal")
    if len(header) < 100 or not header.startswith(b"SQLite format 3") or (log.exists() and log.stat().st_size):
        return  # SQLite itself says what is wrong, or repairs the file from its log
    page = int.from_bytes(header[16:18], "big")
    page = 65536 if page == 1 else page
    if size % page or size < page * int.from_bytes(header[28:32], "big"):
        raise LedgerDamaged(f"{given}: the file is damaged or cut short; restore it from a backup or an export")

"""The database of a gateway: the ledger's, with the gateway's tables beside it, and one clock that never runs back.

Every change of state is one transaction of the ledger's own store, durable when it returns. In SQLite writers take
turns within the process, so that they do not wait for each other by polling; that SQLite itself lets only one write
is what is relied on.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import func, insert, select, text, update

from terrine.gateway import schema
from terrine.ledger import Ledger
from terrine.ledger.sealing import read_key
from terrine.ledger.store import OpenConnection, Store

_MIGRATION_LOCK = 0x6761_7465_7761_79  # "gateway"
_BEAT, _SILENCE = 5.0, 60.0
_MICRO = 1_000_000

Session = OpenConnection
"""One open transaction."""


def changed(session: Session, statement: Any) -> int:
    """Run a statement that changes rows; how many it changed."""
    result: Any = session.execute(statement)
    return int(result.rowcount)


class Database:
    """One gateway's database.

    Raises:
        LedgerUnavailable: it cannot be opened now.
        LedgerDamaged: what is there is not a whole ledger.
    """

    def __init__(self, url: str, *, create: bool = False, clock: Callable[[], float] = time.time) -> None:
        self.store = Store(url, create=create, timeout=30.0)
        key = read_key(os.environ.get("TERRINE_LEDGER_KEY"))
        self.ledger = Ledger(self.store, key=key, clock=clock, clock_tolerance=5.0)
        self._clock, self._latest, self._clock_turn = clock, 0, threading.Lock()
        self._turn = threading.RLock() if self.store.dialect == "sqlite" else contextlib.nullcontext()
        with self.write() as session:
            if self.store.dialect == "postgresql":
                session.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            session.execute(text("SELECT 1"))
            schema.migrate(session.connection)
        with self.read() as session:
            self._latest = session.execute(select(func.max(schema.LOG.c.at))).scalar() or 0

    def close(self) -> None:
        """Let go of every connection."""
        self.store.close()

    def read(self) -> contextlib.AbstractContextManager[Session]:
        """A transaction that only reads: all of one moment."""
        return self.store.transaction(write=False)

    @contextlib.contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction: on disk when the block ends, undone when it raises."""
        with self.turn, self.store.transaction() as session:
            yield session

    @property
    def turn(self) -> contextlib.AbstractContextManager[object]:
        """A writer's turn."""
        return self._turn

    def now(self) -> int:
        """Microseconds since 1970; never less than before, so that nothing that expired comes back to life."""
        with self._clock_turn:
            self._latest = max(self._latest, int(self._clock() * _MICRO))
            return self._latest


class Presence:
    """That this server is alive, for others to see; and whether another one still is."""

    def __init__(self, database: Database) -> None:
        self.server = secrets.token_hex(16)
        self._database = database
        self._stopped = threading.Event()
        with database.write() as session:
            told = {"server": self.server, "place": _place(os.getpid()), "beat": database.now()}
            session.execute(insert(schema.SERVERS), told)
        self._thread = threading.Thread(target=self._beat, name="gateway presence", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._stopped.set()

    def alive(self, session: Session, server: str) -> bool:
        """Whether `server` may still be at work."""
        if server == self.server:
            return True
        found = session.execute(select(schema.SERVERS).where(schema.SERVERS.c.server == server)).first()
        if found is None:
            return False
        host, process, _ = found.place.rsplit("/", 2)
        if host == _host():
            return bool(found.place == _place(int(process)))
        return bool(found.beat > self._database.now() - _SILENCE * _MICRO)

    def _beat(self) -> None:
        while not self._stopped.wait(_BEAT):
            with contextlib.suppress(Exception), self._database.write() as session:
                mine = schema.SERVERS.c.server == self.server
                session.execute(update(schema.SERVERS).where(mine).values(beat=self._database.now()))


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()}/{boot.read_text().strip() if boot.is_file() else ''}"


def _place(process: int) -> str:
    """Host, process and when it began: another process of the same number is not taken for it."""
    try:
        began = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        try:
            os.kill(process, 0)
            began = ""
        except OSError:
            began = "gone"
    return f"{_host()}/{process}/{began}"

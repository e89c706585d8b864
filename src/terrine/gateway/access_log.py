"""The access log: who did what and how it ended, appended only, each entry chained to the one before it.

    hash_n = SHA-256(JSON of all fields of entry n, with hash_(n-1) among them)

It holds names, addresses of routes and statuses; never a token, a question or an answer. Entries that arrive while
one is being written go together in the next transaction: nobody waits for more than two commits.
"""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Any

from sqlalchemy import insert, select, update

from terrine.gateway.database import Database, Session
from terrine.gateway.schema import LOG, META

_FIELDS = ("sequence", "at", "member", "role", "token", "dataset", "action", "subject", "detail", "status", "previous")


def digest(entry: dict[str, Any]) -> str:
    """The hash of every field but the hash itself."""
    return hashlib.sha256(json.dumps([entry[name] for name in _FIELDS]).encode()).hexdigest()


class _Entry:
    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.written = False


class AccessLog:
    """The log of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._arrived: list[_Entry] = []
        self._arriving, self._writing = threading.Lock(), threading.Lock()

    def append(self, action: str, status: int, caller: Any = None, **told: str) -> None:
        """One entry, on disk when this returns."""
        entry = _Entry(
            {
                "member": getattr(caller, "member", ""),
                "role": getattr(caller, "role", ""),
                "token": getattr(caller, "token", ""),
                "dataset": told.get("dataset", ""),
                "action": action,
                "subject": told.get("subject", ""),
                "detail": told.get("detail", ""),
                "status": status,
            }
        )
        with self._arriving:
            self._arrived.append(entry)
        with self._writing:
            if entry.written:  # went along with somebody else's
                return
            with self._arriving:
                together, self._arrived = self._arrived, []
            try:
                with self._database.write() as session:
                    self._write(session, together)
            except BaseException:
                with self._arriving:  # the others try for themselves
                    self._arrived = [one for one in together if one is not entry] + self._arrived
                raise
            for one in together:
                one.written = True

    def _write(self, session: Session, entries: list[_Entry]) -> None:
        head = session.execute(select(META).with_for_update()).one()
        sequence, previous = head.log_sequence, head.log_hash
        rows = []
        for entry in entries:
            sequence += 1
            row = entry.told | {"sequence": sequence, "at": self._database.now(), "previous": previous}
            previous = row["hash"] = digest(row)
            rows.append(row)
        session.execute(insert(LOG), rows)
        session.execute(update(META).values(log_sequence=sequence, log_hash=previous))


def read(session: Session, *, after: int = 0, dataset: str | None = None, most: int = 1_000) -> list[dict[str, Any]]:
    """Entries in order; `dataset` leaves out those of others."""
    wanted = select(LOG).where(LOG.c.sequence > after).order_by(LOG.c.sequence).limit(most)
    if dataset is not None:
        wanted = wanted.where(LOG.c.dataset == dataset)
    return [dict(row._mapping) for row in session.execute(wanted)]


def broken(session: Session) -> str:
    """The first thing that is wrong with the chain, in words; empty if nothing is."""
    previous, last = "", 0
    for row in session.execute(select(LOG).order_by(LOG.c.sequence), execution_options={"yield_per": 1_000}):
        entry = dict(row._mapping)
        if entry["sequence"] != last + 1:
            return f"entry {last + 1} is missing"
        if entry["previous"] != previous or digest(entry) != entry["hash"]:
            return f"entry {entry['sequence']} was edited"
        previous, last = entry["hash"], entry["sequence"]
    head = session.execute(select(META)).one()
    if (head.log_sequence, head.log_hash) != (last, previous):
        return f"entries after {last} are missing"
    return ""

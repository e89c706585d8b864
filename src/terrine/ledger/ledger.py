"""The ledger: durable accounts in one database.

    ledger = Ledger.open("sqlite:///ledger.db")
    account = ledger.account("hospital", budget=Budget(epsilon=1.0, delta=1e-6))
    answer = account.release(mechanism, value, purpose="weekly count", by="ann")

`head` gives what to write down elsewhere: with it, `verify` finds what was cut off the end, which no ledger can tell by
itself.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import IO

from terrine import check
from terrine.accounting.filters import DeltaShares, Terms
from terrine.errors import InvalidArgument, LedgerUnavailable
from terrine.events import Budget, Neighbours, Unit
from terrine.ledger import sealing, transfer, verification
from terrine.ledger.account import Account
from terrine.ledger.records import LAST_MOMENT, Declaration, write_declaration
from terrine.ledger.store import Store


class Ledger:
    """A durable set of accounts in one database."""

    def __init__(self, store: Store, *, key: bytes | None, clock: Callable[[], float], clock_tolerance: float) -> None:
        self._store = store
        self._key = key
        self._clock = clock
        self._clock_tolerance = clock_tolerance

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        key: str | bytes | None = None,
        create: bool = True,
        timeout: float = 30.0,
        clock: Callable[[], float] | None = None,
        clock_tolerance: float = 5.0,
    ) -> Ledger:
        """The ledger at `url`: a path, `sqlite:///file` or `postgresql+psycopg://...`; made if it is not there.

        `key` seals and reads sealed fields. A clock that stands more than `clock_tolerance` seconds before the last
        charge stops further charges.

        Raises:
            LedgerUnavailable: locked, read-only, full, from a newer Terrine, or not there.
            LedgerDamaged: what is there is not a whole ledger.
        """
        timeout = check.not_negative("timeout", timeout)
        tolerance = check.not_negative("clock_tolerance", clock_tolerance)
        store = Store(url, create=create, timeout=timeout)
        return cls(store, key=sealing.read_key(key), clock=clock or _now, clock_tolerance=tolerance)

    def close(self) -> None:
        """Let go of the database."""
        self._store.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def account(
        self,
        name: str,
        *,
        budget: Budget | None = None,
        unit: Unit | None = None,
        neighbours: Neighbours | None = None,
        partitions: Sequence[str] | None = None,
        split: DeltaShares | None = None,
    ) -> Account:
        """The account called `name`, opened with `budget` if there is none yet. What was declared never changes.

        `partitions` declares that no unit is in two of them: charges on different ones cost their maximum.

        Raises:
            InvalidArgument: no such account and no budget, or it was opened with other terms.
        """
        name = check.text("name", name, at_least=1)
        with self._store.transaction(write=False) as session:
            found = self._store.accounts(session, name)
        if not found:
            if budget is None:
                opening = "give budget=Budget(...), or `terrine ledger create`, to open it"
                raise InvalidArgument(f"account {name!r}: not in this ledger; {opening}")
            declared = _declaration(budget, unit, neighbours, partitions, split)
            row = write_declaration(declared, account=secrets.token_hex(16), name=name, opened=self._microseconds())
            with self._store.transaction() as session:
                found = self._store.accounts(session, name)
                if not found:
                    self._store.declare(session, row)
                    found = [row]
        account = Account(self, found[0])
        account._must_match(budget, unit, neighbours, partitions, split)
        return account

    def accounts(self) -> list[Account]:
        """Every account, by name."""
        with self._store.transaction(write=False) as session:
            return [Account(self, row) for row in self._store.accounts(session)]

    def head(self) -> str:
        """The hash of every account's newest record, in the order of names, with spaces between them.

        Written down elsewhere, it lets `verify` find whatever is cut off or rewritten later.

        Raises:
            InvalidArgument: there is no account yet.
        """
        if not (accounts := self.accounts()):
            raise InvalidArgument("the ledger has no account yet, so there is no hash to write down; open one first")
        return " ".join(account.head() for account in accounts)

    def verify(self, *, against: str | None = None) -> list[verification.Finding]:
        """Replay everything: what was edited, dropped, reordered or mispriced; an empty list if nothing was.

        `against` is what `head` or a charge gave earlier, one hash or several: each must still be in a chain. Without
        it, records cut off the end are not missed.
        """
        return verification.verify(self._store, against=against)

    def export(self, file: IO[str], *, account: str | None = None) -> int:
        """Write every record as JSON Lines; returns how many lines."""
        wanted = None if account is None else check.text("account", account, at_least=1)
        return transfer.export(self._store, file, account=wanted)

    def import_(self, file: IO[str], *, against: str | None = None) -> int:
        """Add the accounts of an export, bit for bit, all or none; returns how many lines.

        Raises:
            LedgerDamaged: the export does not verify, or lacks a hash of `against`.
            InvalidArgument: an account of that name is here already.
        """
        return transfer.import_(self._store, file, against=against)

    def _microseconds(self) -> int:
        now = self._clock()
        if not 0 <= now * 1_000_000 <= LAST_MOMENT:
            raise LedgerUnavailable(f"the clock says {now} s since 1970; set it right; nothing was charged or released")
        return int(now * 1_000_000)


def _declaration(
    budget: Budget,
    unit: Unit | None,
    neighbours: Neighbours | None,
    partitions: Sequence[str] | None,
    split: DeltaShares | None,
) -> Declaration:
    for name, value, kind in (("budget", budget, Budget), ("split", split, DeltaShares | None)):
        if not isinstance(value, kind):
            raise check.refuse(name, value, "Budget(epsilon=..., delta=...)" if name == "budget" else "a DeltaShares")
    return Declaration(
        Terms.of(budget, split),
        Unit.EXAMPLE if unit is None else unit,
        Neighbours.ADD_REMOVE if neighbours is None else neighbours,
        () if partitions is None else partitions,  # type: ignore[arg-type]
    )


def _now() -> float:
    return time.time()

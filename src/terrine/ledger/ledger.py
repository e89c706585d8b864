"""The ledger: accounts with a budget, and charges that are on disk before anything is shown.

    ledger = Ledger.open("sqlite:///ledger.db")
    account = ledger.account("hospital", budget=Budget(epsilon=1.0, delta=1e-6))
    answer = account.release(mechanism, value, purpose="weekly count")

A charge is one transaction: read, account, compare, append, commit. A crash may waste budget; it never hides a spend.
Events are chosen adaptively, so the check is the filter's (terrine.accounting.filters), fixed when an account opens.
"""

from __future__ import annotations

import collections
import datetime
import functools
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from terrine import check
from terrine.accounting import epsilon as certified_epsilon
from terrine.accounting.costs import Cost, price
from terrine.accounting.filters import Quote, Remaining, Split, Terms
from terrine.errors import InvalidArgument, LedgerDamaged, LedgerUnavailable, UnsupportedEvent
from terrine.events import (
    Budget,
    Composed,
    Event,
    Neighbours,
    Repeated,
    Reproducible,
    Unit,
    from_json,
    is_reproducible,
    settled_neighbours,
    settled_unit,
    to_json,
)
from terrine.ledger import sealing, transfer, verification
from terrine.ledger.balance import WHOLE, Balance, summed
from terrine.ledger.records import (
    AccountRow,
    ChargeRow,
    digest,
    hashed,
    read_cost,
    read_state,
    read_terms,
    write_cost,
    write_state,
    write_terms,
)
from terrine.ledger.store import Session, Store

_LONGEST = 10_000
_EPOCH = datetime.datetime.fromtimestamp(0, tz=datetime.UTC)


@dataclass(frozen=True)
class Charge:
    """One entry of an account's history. A sealed field shows only that it is there."""

    sequence: int
    at: datetime.datetime
    event: Event
    purpose: str
    by: str
    partition: str
    sealed: bool
    hash: str


@dataclass(frozen=True)
class Report:
    """What an account has spent at `delta`, by both theorems.

    `adaptive` always holds. `planned` holds only if every event was fixed before the first answer was seen; it is None
    where the certified accountant cannot bound the whole. `theorem` says which of them this account may claim.
    """

    delta: float
    adaptive: float
    planned: float | None
    theorem: str
    used: float
    charges: int
    reproducible: bool


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
        split: Split | None = None,
    ) -> Account:
        """The account called `name`, opened with `budget` if there is none yet. What was declared never changes.

        `partitions` declares that no unit is in two of them: charges on different ones cost their maximum.

        Raises:
            InvalidArgument: no such account and no budget, or it was opened with other terms.
        """
        name = _text("name", name, at_least=1)
        with self._store.transaction(write=False) as session:
            found = self._store.accounts(session, name)
        if not found:
            if budget is None:
                opening = "give budget=Budget(...), or `terrine ledger create`, to open it"
                raise InvalidArgument(f"account {name!r}: not in this ledger; {opening}")
            row = _declared(name, Terms.of(budget, split), unit, neighbours, partitions, self._microseconds())
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
        """A hash of every account's last charge: written down elsewhere, it shows later whether anything was cut."""
        with self._store.transaction(write=False) as session:
            heads = [(one.account, self._store.head(session, one.account)) for one in self._store.accounts(session)]
        return hashlib.sha256(json.dumps(heads).encode()).hexdigest()

    def verify(self) -> list[verification.Finding]:
        """Replay everything: what was edited, dropped, reordered or mispriced; an empty list if nothing was."""
        return verification.verify(self._store)

    def export(self, file: IO[str], *, account: str | None = None) -> int:
        """Write every record as JSON Lines; returns how many lines."""
        return transfer.export(self._store, file, account=account)

    def import_(self, file: IO[str]) -> int:
        """Add the accounts of an export, bit for bit, all or none; returns how many lines.

        Raises:
            LedgerDamaged: the export does not verify.
            InvalidArgument: an account of that name is here already.
        """
        return transfer.import_(self._store, file)

    def _microseconds(self) -> int:
        return int(self._clock() * 1_000_000)


class Account:
    """One budget over one data set. Made by `Ledger.account`."""

    def __init__(self, ledger: Ledger, row: AccountRow) -> None:
        if digest(row) != row.hash:
            raise LedgerDamaged(f"account {row.name!r}: its declaration was edited; run `terrine ledger verify`")
        self._ledger = ledger
        self._row = row
        self.name = row.name
        self.terms = read_terms(row.terms)
        self.budget = self.terms.budget
        self.unit = Unit(row.unit)
        self.neighbours = Neighbours(row.neighbours)
        self.partitions: tuple[str, ...] = tuple(json.loads(row.partitions))
        self._last: tuple[tuple[int, str], int, Balance] | None = None  # head, time and balance as last seen here

    def charge(
        self,
        event: Event,
        *,
        purpose: str = "",
        by: str = "",
        partition: str = WHOLE,
        sealed: str | bytes | None = None,
    ) -> Charge:
        """Record `event` and its cost, durably, if it fits.

        `sealed` is stored encrypted under the ledger's key: for a bill that depends on the data.

        Raises:
            BudgetExceeded: it does not fit; nothing was charged.
            UnsupportedEvent: no rule can bound it; nothing was charged.
            LedgerUnavailable, LedgerDamaged: the database refused, or the account's records are broken.
        """
        known = self._protected(event)
        purpose, by = _text("purpose", purpose), _text("by", by)
        store = self._ledger._store
        with store.charging() as session:
            head = store.lock_head(session, self._row.account)
            at, balance = self._standing(session, head)
            accepted = balance.accept(event, partition)
            if accepted is None:
                raise balance.refusal(event, partition)
            cost, after = accepted
            sequence = head[0] + 1
            row = ChargeRow(
                account=self._row.account,
                sequence=sequence,
                at=self._time(at),
                event=known.text,
                purpose=purpose,
                by=by,
                partition=partition,
                cost=write_cost(cost) if cost.planned else known.cost,
                state=write_state(*after.state(partition)),
                sealed="" if sealed is None else self._seal(sealed, sequence),
                previous=head[1],
            )
            row = hashed(row)
            store.append(session, row)
        self._last = ((row.sequence, row.hash), row.at, after)
        return _shown(row, event)

    def release(
        self, mechanism: Any, *value: Any, purpose: str = "", by: str = "", partition: str = WHOLE, **options: Any
    ) -> Any:
        """Charge `mechanism.event`, and only then return `mechanism.release(*value, **options)`.

        Guarantee: nothing is computed from `value` before its charge is on disk.

        Raises:
            BudgetExceeded: it does not fit; the mechanism was not run.
            InvalidArgument: the mechanism reports another event than the one charged; its answer is withheld.
        """
        event: Event = mechanism.event
        if getattr(options.get("rng"), "reproducible", False) and not isinstance(event, Reproducible):
            event = Reproducible(event)
        self.charge(event, purpose=purpose or type(mechanism).__name__, by=by, partition=partition)
        answer = mechanism.release(*value, **options)
        if (billed := getattr(answer, "event", event)) != event:
            kinds = f"charged {type(event).__name__}, billed {type(billed).__name__}"
            raise InvalidArgument(f"{type(mechanism).__name__}: {kinds}; its answer is withheld; charge what it bills")
        return answer

    def would_cost(self, event: Event, *, partition: str = WHOLE) -> Quote:
        """What charging `event` would do now; nothing is charged."""
        self._protected(event)
        return self._balance().quote(event, partition)

    def spent(self, delta: float | None = None) -> float:
        """An epsilon that holds at `delta` (the budget's, if None) for all charges, however they were chosen."""
        balance = self._balance()
        return balance.spent(delta, self._plan(balance))

    def remaining(self, *, partition: str = WHOLE) -> Remaining:
        """What is left."""
        return self._balance().remaining(partition)

    def used(self) -> float:
        """The share of the budget that is used up."""
        return self._balance().used()

    def history(self) -> Iterator[Charge]:
        """Every charge, in order."""
        store = self._ledger._store
        with store.transaction(write=False) as session:
            for row in store.rows(session, self._row.account):
                yield _shown(row, _event(row.event))

    def unseal(self, sequence: int) -> bytes:
        """The sealed field of one charge.

        Raises:
            InvalidArgument: no key, or no sealed field there.
            LedgerDamaged: another key sealed it, or it was changed.
        """
        store = self._ledger._store
        with store.transaction(write=False) as session:
            row = store.row(session, self._row.account, check.whole("sequence", sequence))
        if row is None or not row.sealed:
            raise InvalidArgument(f"sequence={sequence}: no sealed field there")
        return sealing.unseal(self._ledger._key, row.sealed, place=self._place(sequence))

    def report(self, delta: float | None = None) -> Report:
        """What was spent, by the filter and as if it had all been one plan."""
        balance = self._balance()
        wanted = self.budget.delta if delta is None else delta
        counts: dict[str, collections.Counter[Event]] = {}
        for charge in self.history():
            counts.setdefault(charge.partition, collections.Counter())[charge.event] += 1
        charges = sum(counter.total() for counter in counts.values())
        planned = any(cost.planned for cost in balance.streams.values())
        return Report(
            delta=wanted,
            adaptive=balance.spent(wanted, self._plan(balance)),
            planned=_planned(counts, wanted),
            theorem="planned: one event, fixed before any answer" if planned else "adaptive: a filter fixed in advance",
            used=balance.used(),
            charges=charges,
            reproducible=any(is_reproducible(event) for counter in counts.values() for event in counter),
        )

    def _balance(self) -> Balance:
        store = self._ledger._store
        with store.transaction(write=False) as session:
            head = store.head(session, self._row.account)
            if head is None:
                raise LedgerDamaged(f"account {self.name!r}: its head row is gone; run `terrine ledger verify`")
            return self._standing(session, head)[1]

    def _standing(self, session: Session, head: tuple[int, str]) -> tuple[int, Balance]:
        """The time of the last charge and the balance after it, read again only if someone else charged."""
        if self._last is not None and self._last[0] == head:
            return self._last[1:]
        store = self._ledger._store
        last = store.row(session, self._row.account, head[0]) if head[0] else None
        if head[0] and (last is None or last.hash != head[1] or digest(last) != last.hash):
            raise LedgerDamaged(
                f"account {self.name!r}: charge {head[0]} is gone or edited; run `terrine ledger verify`"
            )
        balance = summed(self.terms, self.partitions, self._streams(session, last) if last else {})
        at = last.at if last else self._row.opened
        self._last = (head, at, balance)
        return at, balance

    def _streams(self, session: Session, last: ChargeRow) -> dict[str, Cost]:
        """The sum of every stream that was charged, given the account's last charge."""
        own, common = read_state(last.state)
        if last.partition == WHOLE:
            common = own
        wanted = self.partitions if common else (WHOLE, *self.partitions)  # the first ledgers did not write `common`
        rows = self._ledger._store.last_of_streams(session, self._row.account, wanted) if self.partitions else []
        for row in rows:
            if digest(row) != row.hash:
                raise LedgerDamaged(
                    f"account {self.name!r}: charge {row.sequence} was edited; run `terrine ledger verify`"
                )
        streams = {row.partition: read_cost(row.state) for row in rows}
        return streams | ({WHOLE: common} if common and common.events else {})

    def _time(self, last: int) -> int:
        now = self._ledger._microseconds()
        if (behind := (last - now) / 1e6) > self._ledger._clock_tolerance:
            raise LedgerUnavailable(
                f"the clock stands {behind:.0f} s before the last charge ({_moment(last):%Y-%m-%d %H:%M:%S} UTC); "
                "set it right, or open the ledger with a larger clock_tolerance; nothing was charged or released"
            )
        return max(now, last)

    def _plan(self, balance: Balance) -> Event | None:
        if not any(cost.planned for cost in balance.streams.values()) or self.partitions:
            return None
        return next(self.history()).event

    def _seal(self, sealed: str | bytes, sequence: int) -> str:
        plaintext = sealed.encode() if isinstance(sealed, str) else bytes(sealed)
        return sealing.seal(self._ledger._key, plaintext, place=self._place(sequence))

    def _place(self, sequence: int) -> str:
        return f"{self._row.account}/{sequence}"

    def _protected(self, event: Event) -> _Known:
        """What is known of `event`, which must protect what this account protects."""
        known, kind = _known(event, self.terms.orders), type(event).__name__
        if known.neighbours is not self.neighbours:
            raise InvalidArgument(
                f"{kind}: stated under {known.neighbours.value} neighbours; "
                f"account {self.name!r} wants {self.neighbours.value}"
            )
        if known.unit is not self.unit:
            raise InvalidArgument(
                f"{kind}: protects one {known.unit.value}; account {self.name!r} wants one {self.unit.value}"
            )
        return known

    def _must_match(
        self,
        budget: Budget | None,
        unit: Unit | None,
        neighbours: Neighbours | None,
        partitions: Sequence[str] | None,
        split: Split | None,
    ) -> None:
        asked: dict[str, Any] = {"budget": budget, "unit": unit, "neighbours": neighbours, "split": split}
        asked["partitions"] = None if partitions is None else tuple(partitions)
        for name, value in asked.items():
            declared = self.terms.split if name == "split" else getattr(self, name)
            if value is not None and value != declared:
                raise InvalidArgument(
                    f"account {self.name!r}: opened with {name}={declared}; it never changes, got {value}"
                )


def _declared(
    name: str,
    terms: Terms,
    unit: Unit | None,
    neighbours: Neighbours | None,
    partitions: Sequence[str] | None,
    opened: int,
) -> AccountRow:
    names = [_text("partition", one, at_least=1) for one in partitions or ()]
    if len(set(names)) < len(names):
        raise InvalidArgument(f"partitions={names}: want different names")
    relation = neighbours or Neighbours.ADD_REMOVE
    if names and relation is Neighbours.REPLACE_ONE:
        raise InvalidArgument(
            "partitions: replacing a unit may move it to another partition; want add-remove neighbours"
        )
    row = AccountRow(
        account=secrets.token_hex(16),
        name=name,
        opened=opened,
        terms=write_terms(terms),
        unit=(unit or Unit.EXAMPLE).value,
        neighbours=relation.value,
        partitions=json.dumps(names),
    )
    return row._replace(hash=digest(row))


def _planned(counts: dict[str, collections.Counter[Event]], delta: float) -> float | None:
    if not counts:
        return 0.0
    common = counts.get(WHOLE, collections.Counter())
    streams = [common + counter for name, counter in counts.items() if name != WHOLE] or [common]
    wholes = [Composed(Repeated(event, times=times) for event, times in stream.items()) for stream in streams]
    try:
        return max(certified_epsilon(whole, delta=delta) for whole in wholes)
    except (UnsupportedEvent, InvalidArgument):
        return None


def _shown(row: ChargeRow, event: Event) -> Charge:
    return Charge(
        sequence=row.sequence,
        at=_moment(row.at),
        event=event,
        purpose=row.purpose,
        by=row.by,
        partition=row.partition,
        sealed=bool(row.sealed),
        hash=row.hash,
    )


_event = functools.lru_cache(maxsize=4096)(from_json)


class _Known(NamedTuple):
    """All of a charge that follows from its event alone."""

    text: str
    cost: str
    neighbours: Neighbours
    unit: Unit


@functools.lru_cache(maxsize=4096)
def _known(event: Event, orders: tuple[float, ...]) -> _Known:
    return _Known(to_json(event), write_cost(price(event, orders)), settled_neighbours(event), settled_unit(event))


def _moment(microseconds: int) -> datetime.datetime:
    return _EPOCH + datetime.timedelta(microseconds=microseconds)


def _now() -> float:
    return time.time()


def _text(name: str, value: Any, at_least: int = 0) -> str:
    wanted = f"text of {at_least} to {_LONGEST} printable characters"
    if not isinstance(value, str) or not at_least <= len(value) <= _LONGEST:
        raise check.refuse(name, value, wanted)
    if not value.isprintable() and any(_strange(character) for character in value):
        raise check.refuse(name, value, wanted)
    return value


def _strange(character: str) -> bool:
    return character not in "\n\t" and (character < " " or "\ud800" <= character <= "\udfff")

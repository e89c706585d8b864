"""One account: a budget over one data set, and charges that are on disk before anything is shown.

A charge is one transaction: read, account, compare, append, commit. A crash may waste budget; it never hides a spend.
Events are chosen adaptively, so the check is the filter's (terrine.accounting.filters), fixed when an account opens.
"""

from __future__ import annotations

import collections
import datetime
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from terrine import check
from terrine.accounting.costs import Cost, price
from terrine.accounting.filters import DeltaShares, Quote, Remaining
from terrine.errors import InvalidArgument, LedgerDamaged, LedgerUnavailable
from terrine.events import (
    Budget,
    Event,
    Neighbours,
    Reproducible,
    Unit,
    from_json,
    is_reproducible,
    settled_neighbours,
    settled_unit,
    to_json,
)
from terrine.ledger import sealing
from terrine.ledger.balance import WHOLE, Balance, summed
from terrine.ledger.records import (
    AccountRow,
    ChargeRow,
    check_charge,
    digest,
    hashed,
    mistyped,
    read_declaration,
    read_state,
    write_cost,
    write_state,
)
from terrine.ledger.report import Report, planned_epsilon
from terrine.ledger.store import OpenConnection

if TYPE_CHECKING:
    from terrine.ledger.ledger import Ledger

_EPOCH = datetime.datetime.fromtimestamp(0, tz=datetime.UTC)
_EVENTS = get_args(Event)


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


class Account:
    """One budget over one data set. Made by `Ledger.account`."""

    def __init__(self, ledger: Ledger, row: AccountRow) -> None:
        if digest(row) != row.hash:
            raise LedgerDamaged(f"account {row.name!r}: its declaration was edited; run `terrine ledger verify`")
        declared = read_declaration(row)
        self._ledger = ledger
        self._row = row
        self.name = row.name
        self.terms = declared.terms
        self.budget = declared.terms.budget
        self.unit = declared.unit
        self.neighbours = declared.neighbours
        self.partitions = declared.partitions
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
        """Record `event` and its cost, durably, if it fits: who asked (`by`), what for (`purpose`), and when.

        `sealed` is stored encrypted under the ledger's key: for a bill that depends on the data.

        Raises:
            BudgetExceeded: it does not fit; nothing was charged.
            UnsupportedEvent: no rule can bound it; nothing was charged.
            LedgerUnavailable: the database refused, or its file was moved away or replaced.
            LedgerDamaged: the account's records are broken, or were rolled back since this handle last saw them.
        """
        known = self._protected(event)
        purpose, by = check.text("purpose", purpose), check.text("by", by)
        partition = check.text("partition", partition)
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
            InvalidArgument: it is no mechanism and was not run; or its answer carries no event, or another one than
                was charged: then the answer is withheld, and the charge stays, because it has looked at the data.
        """
        kind, event = type(mechanism).__name__, getattr(mechanism, "event", None)
        if not isinstance(event, _EVENTS) or not callable(getattr(mechanism, "release", None)):
            raise InvalidArgument(f"{kind}: want a mechanism, with an event and a release(value); nothing was charged")
        if getattr(options.get("rng"), "reproducible", False) and not isinstance(event, Reproducible):
            event = Reproducible(event)
        self.charge(event, purpose=purpose or kind, by=by, partition=partition)
        answer = mechanism.release(*value, **options)
        billed = getattr(answer, "event", None)
        if not isinstance(billed, _EVENTS):
            told = f"charged {type(event).__name__}, but what it gave carries no event"
            raise InvalidArgument(f"{kind}: {told}; its answer is withheld; want Release(value, event)")
        if billed != event:
            kinds = f"charged {type(event).__name__}, billed {type(billed).__name__}"
            raise InvalidArgument(f"{kind}: {kinds}; its answer is withheld; charge what it bills")
        return answer

    def head(self) -> str:
        """The hash of the newest charge, which depends on all before it: to write down elsewhere, for `verify`."""
        store = self._ledger._store
        with store.transaction(write=False) as session:
            head = self._head(session)
            self._standing(session, head)
        return head[1]

    def would_cost(self, event: Event, *, partition: str = WHOLE) -> Quote:
        """What charging `event` would do now; nothing is charged."""
        self._protected(event)
        return self._balance().quote(event, check.text("partition", partition))

    def spent(self, delta: float | None = None) -> float:
        """An epsilon that holds at `delta` (the budget's, if None) for all charges, however they were chosen."""
        balance = self._balance()
        return balance.spent(delta, self._plan(balance))

    def remaining(self, *, partition: str = WHOLE) -> Remaining:
        """What is left."""
        return self._balance().remaining(check.text("partition", partition))

    def used(self) -> float:
        """The share of the budget that is used up."""
        return self._balance().used()

    def history(self) -> Iterator[Charge]:
        """Every charge, in order.

        Raises:
            LedgerDamaged: at the first row that is not what Terrine wrote after the one before it.
        """
        store, previous = self._ledger._store, self._row.hash
        with store.transaction(write=False) as session:
            for row in store.rows(session, self._row.account):
                if mistyped(row) or digest(row) != row.hash or row.previous != previous:
                    raise self._edited(row.sequence)
                check_charge(row)
                previous = row.hash
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
        left = balance.remaining()
        wanted = self.budget.delta if delta is None else check.half_open_unit("delta", delta)
        counts: dict[str, collections.Counter[Event]] = {}
        for charge in self.history():
            counts.setdefault(charge.partition, collections.Counter())[charge.event] += 1
        return Report(
            budget=self.budget,
            partitions=self.partitions,
            delta=wanted,
            charges=sum(counter.total() for counter in counts.values()),
            decides="plan" if any(cost.planned for cost in balance.streams.values()) else "filter",
            used=balance.used(),
            left=left.share,
            largest=left.epsilon,
            planned=planned_epsilon(counts, wanted),
            adaptive=balance.spent(wanted, self._plan(balance)),
            reproducible=any(is_reproducible(event) for counter in counts.values() for event in counter),
        )

    def _balance(self) -> Balance:
        store = self._ledger._store
        with store.transaction(write=False) as session:
            return self._standing(session, self._head(session))[1]

    def _head(self, session: OpenConnection) -> tuple[int, str]:
        head = self._ledger._store.head(session, self._row.account)
        if head is None:
            raise LedgerDamaged(f"account {self.name!r}: its head row is gone; run `terrine ledger verify`")
        return head

    def _standing(self, session: OpenConnection, head: tuple[int, str]) -> tuple[int, Balance]:
        """The time of the last charge and the balance after it, read again only if someone else charged."""
        if self._last is not None:
            if self._last[0] == head:
                return self._last[1:]
            self._must_follow(session, self._last[0])
        store = self._ledger._store
        last = store.row(session, self._row.account, head[0]) if head[0] else None
        if head[0] and (last is None or last.hash != head[1] or digest(last) != last.hash):
            raise self._edited(head[0])
        balance = summed(self.terms, self.partitions, self._streams(session, last) if last else {})
        at = last.at if last else self._row.opened
        self._last = (head, at, balance)
        return at, balance

    def _must_follow(self, session: OpenConnection, seen: tuple[int, str]) -> None:
        """What this handle saw must still be there: a ledger only grows."""
        row = self._ledger._store.row(session, self._row.account, seen[0]) if seen[0] else None
        if seen[0] and (row is None or row.hash != seen[1]):
            raise LedgerDamaged(
                f"account {self.name!r}: charge {seen[0]} was there and is gone: the ledger was rolled back; "
                f"run `terrine ledger verify --against {seen[1]}`"
            )

    def _edited(self, sequence: object) -> LedgerDamaged:
        return LedgerDamaged(f"account {self.name!r}: charge {sequence} is gone or edited; run `terrine ledger verify`")

    def _streams(self, session: OpenConnection, last: ChargeRow) -> dict[str, Cost]:
        """The sum of every stream that was charged, given the account's last charge."""
        own, common = read_state(last.state, self.terms.orders)
        if last.partition == WHOLE:
            common = own
        elif common is None:
            raise self._edited(last.sequence)
        rows = self._ledger._store.last_of_streams(session, self._row.account, self.partitions)
        for row in rows:
            if digest(row) != row.hash:
                raise self._edited(row.sequence)
        streams = {row.partition: read_state(row.state, self.terms.orders)[0] for row in rows}
        return streams | ({WHOLE: common} if common.events else {})

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
        if not isinstance(sealed, str | bytes):
            raise InvalidArgument(f"sealed: want text or bytes, got {type(sealed).__name__}; nothing was charged")
        plaintext = sealed.encode() if isinstance(sealed, str) else sealed
        return sealing.seal(self._ledger._key, plaintext, place=self._place(sequence))

    def _place(self, sequence: int) -> str:
        return f"{self._row.account}/{sequence}"

    def _protected(self, event: Event) -> _Known:
        """What is known of `event`, which must protect what this account protects."""
        if not isinstance(event, _EVENTS):
            raise check.refuse("event", event, "an event, such as PureDP(epsilon=0.1)")
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
        split: DeltaShares | None,
    ) -> None:
        asked: dict[str, Any] = {"budget": budget, "unit": unit, "neighbours": neighbours, "split": split}
        if partitions is not None:
            asked["partitions"] = tuple(check.text("partition", one, at_least=1) for one in partitions)
        for name, value in asked.items():
            declared = self.terms.split if name == "split" else getattr(self, name)
            if value is not None and value != declared:
                raise InvalidArgument(
                    f"account {self.name!r}: opened with {name}={declared}; it never changes, got {value}"
                )


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
    text = to_json(event)
    if from_json(text) != event:
        raise InvalidArgument(
            f"{type(event).__name__}: what the ledger would write is another event; nothing was charged"
        )
    return _Known(text, write_cost(price(event, orders)), settled_neighbours(event), settled_unit(event))


def _moment(microseconds: int) -> datetime.datetime:
    return _EPOCH + datetime.timedelta(microseconds=microseconds)

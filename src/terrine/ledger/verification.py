"""Verification: replay every account from its declaration, and name what does not follow.

For each row: its hash covers its fields, it chains to the row before it, its number follows, its cost is no less than
what the accountant says today, its running sum is the last one plus its cost bit for bit, and the filter accepts it.
A chain that was cut at its end is whole: only a hash that was written down elsewhere shows what is missing.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from terrine import check
from terrine.accounting.costs import Cost, price
from terrine.errors import TerrineError
from terrine.events import from_json, settled_neighbours, settled_unit
from terrine.ledger.balance import Balance, summed
from terrine.ledger.records import (
    AccountRow,
    ChargeRow,
    Declaration,
    check_charge,
    digest,
    mistyped,
    read_cost,
    read_declaration,
    read_state,
)
from terrine.ledger.store import Store

_SAME = 1e-9
"""Relative room for an accountant that was improved, or another machine's rounding, since the row was written."""


_event = functools.lru_cache(maxsize=4096)(from_json)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: in which account (nothing: the whole ledger), at which charge (0: none), and what."""

    account: str
    sequence: int
    problem: str

    def __str__(self) -> str:
        if not self.account:
            return f"the ledger: {self.problem}"
        where = f"charge {self.sequence}" if self.sequence else "declaration"
        return f"account {check.shown(self.account)}, {where}: {self.problem}"


class Wanted:
    """The hashes that must be found in a chain.

    Raises:
        InvalidArgument: `against` holds something else than hashes.
    """

    def __init__(self, against: str | None) -> None:
        hashes = against.lower().split() if isinstance(against, str) else []
        if against is not None and not (hashes and all(re.fullmatch("[0-9a-f]{64}", one) for one in hashes)):
            raise check.refuse("against", against, "the hash that `terrine ledger head` prints: 64 hexadecimal digits")
        self._missing = dict.fromkeys(hashes)

    def seen(self, row: AccountRow | ChargeRow) -> None:
        """`row` is in a chain; it counts if its hash is its own."""
        if row.hash in self._missing and digest(row) == row.hash:
            del self._missing[row.hash]

    def findings(self) -> list[Finding]:
        """One for each hash that was not seen."""
        told = "in no chain: records were cut off, rolled back or rewritten since it was written down"
        return [Finding("", 0, f"{one} is {told}, or it is of another ledger") for one in self._missing]


def verify(store: Store, *, against: str | None = None) -> list[Finding]:
    """Everything wrong in the whole ledger."""
    found: list[Finding] = []
    wanted = Wanted(against)
    with store.transaction(write=False) as session:
        accounts = store.accounts(session)
        counted = store.counted(session)
        if counted != len(accounts):
            found.append(
                Finding(
                    "",
                    0,
                    f"{len(accounts)} accounts are here, {check.shown(counted)} were opened: one was dropped or added",
                )
            )
        for account in accounts:
            head = store.head(session, account.account)
            found.extend(verify_account(account, store.rows(session, account.account), head, wanted))
    return found + wanted.findings()


def verify_account(
    account: AccountRow, rows: Iterable[ChargeRow], head: tuple[int, str] | None, wanted: Wanted
) -> list[Finding]:
    """Everything wrong in one account, given its rows in order and its head."""
    found: list[Finding] = []
    if digest(account) != account.hash:
        found.append(Finding(account.name, 0, "the declaration was edited"))
    wanted.seen(account)
    try:
        declared: Declaration | None = read_declaration(account)
    except TerrineError as error:
        found.append(Finding(account.name, 0, str(error)))
        declared = None
    balance = summed(declared.terms, declared.partitions, {}) if declared else None
    last = ChargeRow(account.account, 0, account.opened, "", "", "", "", "", "", "", "", hash=account.hash)
    for row in rows:
        problems = _linked(row, last)
        if declared is not None and balance is not None and not mistyped(row):
            balance, more = _replayed(declared, balance, row)
            problems += more
        found.extend(Finding(account.name, row.sequence, problem) for problem in problems)
        wanted.seen(row)
        last = row
    return found + _ended(account, last, head)


def _linked(row: ChargeRow, last: ChargeRow) -> list[str]:
    if name := mistyped(row):
        return [f"edited: {name} is not of its type"]
    problems = []
    if digest(row) != row.hash:
        problems.append("edited: the hash does not cover what is written")
    if row.account != last.account:
        problems.append("moved: it belongs to another account")
    if mistyped(last):
        return problems
    if row.sequence != last.sequence + 1:
        problems.append(f"dropped or added: it follows charge {last.sequence}")
    elif row.previous != last.hash:
        problems.append("reordered or replaced: it does not chain to the row before it")
    if row.at < last.at:
        problems.append("reordered: it is older than the row before it")
    return problems


def _replayed(declared: Declaration, balance: Balance, row: ChargeRow) -> tuple[Balance, list[str]]:
    orders = declared.terms.orders
    try:
        check_charge(row)
        event = _event(row.event)
        accepted = balance.accept(event, row.partition)
        now, after = accepted or (price(event, orders), balance)
        cost, (own, common) = read_cost(row.cost, orders), read_state(row.state, orders)
        if not accepted or cost != now:
            after = balance.plus(cost, row.partition)
    except TerrineError as error:
        return balance, [f"edited: {error}"]
    problems = []
    if (own, common) != after.state(row.partition):
        problems.append("edited: the running sum is not the last one plus this cost")
    if not _covers(cost, now):
        problems.append("mispriced: the event costs more than what was charged")
    if accepted is None:
        problems.append("overspent: the budget did not allow it")
    if (settled_neighbours(event), settled_unit(event)) != (declared.neighbours, declared.unit):
        problems.append("the event protects another unit, or under another relation, than the account")
    return after, problems


def _ended(account: AccountRow, last: ChargeRow, head: tuple[int, str] | None) -> list[Finding]:
    if head is None:
        return [Finding(account.name, 0, "its head row was dropped")]
    if head == (last.sequence, last.hash):
        return []
    if not mistyped(last) and type(head[0]) is int and head[0] > last.sequence:
        gone = f"dropped: the head is at {head[0]}, the last row at {last.sequence}"
        return [Finding(account.name, last.sequence + 1, gone)]
    return [Finding(account.name, last.sequence, f"the head is at {head[0]} with another hash: edited or added")]


def _covers(charged: Cost, now: Cost) -> bool:
    if charged == now:
        return True

    def enough(one: Fraction | None, two: Fraction | None) -> bool:
        return one is None or (two is not None and two <= one * (1 + Fraction(_SAME)))

    exact = [(charged.epsilon, now.epsilon), (charged.delta, now.delta), (charged.mu_squared, now.mu_squared)]
    curves = zip(charged.renyi, now.renyi, strict=True)
    return all(enough(*pair) for pair in exact) and all(
        math.isinf(one) or two <= one * (1 + _SAME) for one, two in curves
    )

"""Verification: replay every account from its declaration, and name what does not follow.

For each row: its hash covers its fields, it chains to the row before it, its number follows, its cost is no less than
what the accountant says today, its running sum is the last one plus its cost bit for bit, and the filter accepts it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from terrine.accounting.costs import Cost, price
from terrine.errors import TerrineError
from terrine.events import from_json
from terrine.ledger.balance import Balance, summed
from terrine.ledger.records import AccountRow, ChargeRow, digest, read_cost, read_state, read_terms
from terrine.ledger.store import Store

_SAME = 1e-9
"""Relative room for an accountant that was improved, or another machine's rounding, since the row was written."""


_event = functools.lru_cache(maxsize=4096)(from_json)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: in which account, at which charge (0: the account itself), and what."""

    account: str
    sequence: int
    problem: str

    def __str__(self) -> str:
        where = f"charge {self.sequence}" if self.sequence else "declaration"
        return f"account {self.account!r}, {where}: {self.problem}"


def verify(store: Store) -> list[Finding]:
    """Everything wrong in the whole ledger."""
    found: list[Finding] = []
    with store.transaction(write=False) as session:
        accounts = store.accounts(session)
        counted = store.counted(session)
        if counted != len(accounts):
            found.append(
                Finding("*", 0, f"{len(accounts)} accounts are here, {counted} were opened: one was dropped or added")
            )
        for account in accounts:
            head = store.head(session, account.account)
            found.extend(verify_account(account, store.rows(session, account.account), head))
    return found


def verify_account(account: AccountRow, rows: Iterable[ChargeRow], head: tuple[int, str] | None) -> list[Finding]:
    """Everything wrong in one account, given its rows in order and its head."""
    found: list[Finding] = []
    if digest(account) != account.hash:
        found.append(Finding(account.name, 0, "the declaration was edited"))
    try:
        balance: Balance | None = summed(read_terms(account.terms), tuple(json.loads(account.partitions)), {})
    except (TerrineError, ValueError, TypeError) as error:
        found.append(Finding(account.name, 0, str(error)))
        balance = None
    sequence, previous, at = 0, account.hash, account.opened
    for row in rows:
        for problem in _linked(row, sequence, previous, at):
            found.append(Finding(account.name, row.sequence, problem))
        if balance is not None:
            balance, problems = _replayed(balance, row)
            found.extend(Finding(account.name, row.sequence, problem) for problem in problems)
        sequence, previous, at = row.sequence, row.hash, row.at
    if head is None:
        found.append(Finding(account.name, 0, "its head row was dropped"))
    elif head[0] > sequence:
        found.append(
            Finding(account.name, sequence + 1, f"dropped: the head is at {head[0]}, the last row at {sequence}")
        )
    elif head != (sequence, previous):
        found.append(Finding(account.name, sequence, f"the head is at {head[0]} with another hash: edited or added"))
    return found


def _linked(row: ChargeRow, sequence: int, previous: str, at: int) -> list[str]:
    problems = []
    if digest(row) != row.hash:
        problems.append("edited: the hash does not cover what is written")
    if row.sequence != sequence + 1:
        problems.append(f"dropped or added: it follows charge {sequence}")
    elif row.previous != previous:
        problems.append("reordered or replaced: it does not chain to the row before it")
    if row.at < at:
        problems.append("reordered: it is older than the row before it")
    return problems


def _replayed(balance: Balance, row: ChargeRow) -> tuple[Balance, list[str]]:
    try:
        event = _event(row.event)
        accepted = balance.accept(event, row.partition)
        now, after = accepted or (price(event, balance.terms.orders), balance)
        cost, (own, common) = read_cost(row.cost), read_state(row.state)
        if not accepted or cost != now:
            after = balance.plus(cost, row.partition)
    except TerrineError as error:
        return balance, [f"edited: {error}"]
    problems = []
    wanted = after.state(row.partition)
    if own != wanted[0] or common not in (None, wanted[1]):  # the first ledgers did not write `common`
        problems.append("edited: the running sum is not the last one plus this cost")
    if not _covers(cost, now):
        problems.append("mispriced: the event costs more than what was charged")
    if accepted is None:
        problems.append("overspent: the budget did not allow it")
    return after, problems


def _covers(charged: Cost, now: Cost) -> bool:
    if charged == now:
        return True

    def enough(one: float | None, two: float | None) -> bool:
        return one is None or (two is not None and two <= one * (1 + _SAME))

    exact = [(charged.epsilon, now.epsilon), (charged.delta, now.delta), (charged.mu_squared, now.mu_squared)]
    plain = [(None if one is None else float(one), None if two is None else float(two)) for one, two in exact]
    curves = zip(charged.renyi, now.renyi, strict=True)
    return all(enough(*pair) for pair in plain) and all(
        math.isinf(one) or two <= one * (1 + _SAME) for one, two in curves
    )

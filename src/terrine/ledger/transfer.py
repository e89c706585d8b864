"""Export and import: the rows as JSON Lines, one object a line, the same bytes from either ledger.

{"terrine-ledger": 1}
{"account": {...}}
{"charge": {...}}
{"end": 4}

The last line says how many there are, so that a file that was cut short is not taken for a whole one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from terrine.errors import InvalidArgument, LedgerDamaged, MalformedEvents
from terrine.events.codec import read_json
from terrine.ledger.records import AccountRow, ChargeRow, mistyped
from terrine.ledger.store import Store
from terrine.ledger.verification import Finding, Wanted, verify_account

VERSION = 1
_ENVELOPE = "terrine-ledger"
START = json.dumps({_ENVELOPE: VERSION})
"""The first line of an export."""

_Accounts = list[tuple[AccountRow, list[ChargeRow]]]


def export(store: Store, file: IO[str], *, account: str | None = None) -> int:
    """Write every record, or those of one account; returns how many lines."""
    lines = 2
    with store.transaction(write=False) as session:
        accounts = store.accounts(session, account)
        if account is not None and not accounts:
            raise InvalidArgument(f"account {account!r}: not in this ledger")
        file.write(START + "\n")
        for row in accounts:
            file.write(_line("account", row))
            lines += 1
            for charge in store.rows(session, row.account):
                file.write(_line("charge", charge))
                lines += 1
        file.write(json.dumps({"end": lines}) + "\n")
    return lines


def _line(kind: str, row: AccountRow | ChargeRow) -> str:
    if name := mistyped(row):
        raise LedgerDamaged(f"a row of kind {kind} has a {name} not of its type; run `terrine ledger verify`")
    return json.dumps({kind: row._asdict()}) + "\n"


def import_(store: Store, file: IO[str], *, against: str | None = None) -> int:
    """Add the accounts of an export, all or none; returns how many lines."""
    accounts, findings = _verified(file, Wanted(against))
    if findings:
        raise LedgerDamaged(f"the export does not verify: {findings[0]}; nothing was imported")
    with store.transaction() as session:
        known = store.accounts(session)
        for account, charges in accounts:
            if any(account.name == one.name or account.account == one.account for one in known):
                raise InvalidArgument(f"account {account.name!r}: already in this ledger; nothing was imported")
            store.declare(session, account)
            for charge in charges:
                store.append(session, charge)
    return 2 + sum(1 + len(charges) for _, charges in accounts)


def verify_export(file: IO[str], *, against: str | None = None) -> list[Finding]:
    """Replay an export as `Ledger.verify` does a ledger; an empty list if nothing is wrong.

    `against` is what `head` or a charge gave earlier: each hash of it must be in the export.
    """
    return _verified(file, Wanted(against))[1]


def _verified(file: IO[str], wanted: Wanted) -> tuple[_Accounts, list[Finding]]:
    try:
        accounts = list(_accounts(file))
    except (LedgerDamaged, UnicodeDecodeError) as error:
        return [], [Finding("", 0, str(error))]
    found: list[Finding] = []
    for names in ([row.name for row, _ in accounts], [row.account for row, _ in accounts]):
        if len(set(names)) < len(names):
            found.append(Finding("", 0, "an account stands twice in the export"))
    for account, charges in accounts:
        last = charges[-1] if charges else None
        head = (last.sequence, last.hash) if last else (0, account.hash)
        found.extend(verify_account(account, charges, head, wanted))
    return accounts, found + wanted.findings()


def _accounts(file: IO[str]) -> Iterator[tuple[AccountRow, list[ChargeRow]]]:
    current: tuple[AccountRow, list[ChargeRow]] | None = None
    number, ended = 0, False
    for number, line in enumerate(file, start=1):
        if ended:
            raise LedgerDamaged(f"line {number}: stands after the end")
        kind, value = _parsed(line, number)
        if (kind == _ENVELOPE) is not (number == 1) or (kind == _ENVELOPE and not _is(value, VERSION)):
            raise LedgerDamaged(f"line {number}: not an export this Terrine reads; want {START} first")
        if kind == "account":
            if current is not None:
                yield current
            current = (_row(AccountRow, value, number), [])
        elif kind == "charge" and current is not None:
            current[1].append(_row(ChargeRow, value, number))
        elif kind == "end" and _is(value, number):
            ended = True
        elif kind != _ENVELOPE:
            raise LedgerDamaged(f"line {number}: want an account, a charge of it, or an end that counts the lines")
    if not ended:
        raise LedgerDamaged(f"line {number + 1}: the export is cut short; want a last line that counts the lines")
    if current is not None:
        yield current


def _is(value: Any, wanted: int) -> bool:
    return type(value) is int and value == wanted


def _parsed(line: str, number: int) -> tuple[str, Any]:
    try:
        record = read_json(line)
    except MalformedEvents as error:
        raise LedgerDamaged(f"line {number}: {error}") from None
    if not isinstance(record, dict) or len(record) != 1:
        raise LedgerDamaged(f"line {number}: want a JSON object with one name")
    [(kind, value)] = record.items()
    return kind, value


def _row(kind: Any, fields: Any, number: int) -> Any:
    if not isinstance(fields, dict) or set(fields) != set(kind._fields):
        raise LedgerDamaged(f"line {number}: want the fields {', '.join(kind._fields)}")
    row = kind(**fields)
    if name := mistyped(row):
        raise LedgerDamaged(f"line {number}: {name} is not of its type")
    return row

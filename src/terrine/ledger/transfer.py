"""Export and import: the rows as JSON Lines, one object a line, the same bytes from either ledger.

{"terrine-ledger": 1}
{"account": {...}}
{"charge": {...}}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any, get_type_hints

from terrine.errors import InvalidArgument, LedgerDamaged
from terrine.ledger.records import AccountRow, ChargeRow
from terrine.ledger.store import Store
from terrine.ledger.verification import verify_account

VERSION = 1
_ENVELOPE = "terrine-ledger"


def export(store: Store, file: IO[str], *, account: str | None = None) -> int:
    """Write every record, or those of one account; returns how many lines."""
    lines = 1
    with store.transaction(write=False) as session:
        accounts = store.accounts(session, account)
        if account is not None and not accounts:
            raise InvalidArgument(f"account {account!r}: not in this ledger")
        file.write(json.dumps({_ENVELOPE: VERSION}) + "\n")
        for row in accounts:
            file.write(json.dumps({"account": row._asdict()}) + "\n")
            lines += 1
            for charge in store.rows(session, row.account):
                file.write(json.dumps({"charge": charge._asdict()}) + "\n")
                lines += 1
    return lines


def import_(store: Store, file: IO[str]) -> int:
    """Add the accounts of an export, all or none; returns how many lines."""
    accounts = list(_accounts(file))
    for account, charges in accounts:
        last = charges[-1] if charges else None
        head = (last.sequence, last.hash) if last else (0, account.hash)
        if findings := verify_account(account, charges, head):
            raise LedgerDamaged(f"the export does not verify: {findings[0]}; nothing was imported")
    with store.transaction() as session:
        for account, charges in accounts:
            if store.accounts(session, account.name):
                raise InvalidArgument(f"account {account.name!r}: already in this ledger; nothing was imported")
            store.declare(session, account)
            for charge in charges:
                store.append(session, charge)
    return 1 + sum(1 + len(charges) for _, charges in accounts)


def _accounts(file: IO[str]) -> Iterator[tuple[AccountRow, list[ChargeRow]]]:
    current: tuple[AccountRow, list[ChargeRow]] | None = None
    for number, line in enumerate(file, start=1):
        record = _parsed(line, number)
        if number == 1:
            if record.get(_ENVELOPE) != VERSION:
                raise LedgerDamaged(f"line 1: want {{{_ENVELOPE!r}: {VERSION}}}; not an export this Terrine reads")
        elif "account" in record:
            if current is not None:
                yield current
            current = (_row(AccountRow, record["account"], number), [])
        elif "charge" in record and current is not None:
            current[1].append(_row(ChargeRow, record["charge"], number))
        else:
            raise LedgerDamaged(f"line {number}: want an account or a charge; nothing was imported")
    if current is not None:
        yield current


def _parsed(line: str, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise LedgerDamaged(f"line {number}: not a JSON object; nothing was imported")
    return record


def _row(kind: Any, fields: Any, number: int) -> Any:
    wanted = get_type_hints(kind)
    if not isinstance(fields, dict) or set(fields) != set(wanted):
        raise LedgerDamaged(f"line {number}: want the fields {', '.join(wanted)}; nothing was imported")
    for name, type_ in wanted.items():
        if type(fields[name]) is not type_:
            raise LedgerDamaged(f"line {number}: {name} is not {type_.__name__}; nothing was imported")
    return kind(**fields)

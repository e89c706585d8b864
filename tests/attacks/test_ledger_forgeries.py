"""Anything at all in any field of an export or a database, by a forger who makes every hash again: only our errors.

What is drawn depends on the seed alone. Each draw changes one field, at any depth of the JSON in it, to something odd.
"""

from __future__ import annotations

import io
import json
import random
import sqlite3

import pytest

from terrine.errors import TerrineError
from terrine.events import Budget, Gaussian, PureDP
from terrine.ledger import Account, Ledger, new_key, verify_export
from terrine.ledger.records import AccountRow, ChargeRow, digest

KEY = new_key()
WORDS = ["", "x", "\ud800", "\x00", "9" * 5000, "[]", "{}", "null", "NaN", "1e999", "-1", "0", "true", "\u202e", "1/0"]
NUMBERS = [0, -1, 1, 2**63, 10**400, 1.5, True, None, float("nan"), float("inf")]
ODD = [*WORDS, *NUMBERS, [], {}, "[" * 3000, "7ff8000000000000" * 8, "main", "a"]


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "ledger.db", key=KEY) as made:
        account = made.account("main", budget=Budget(epsilon=1.0, delta=1e-6), partitions=["a", "b"])
        for number, partition in enumerate(["a", "b", "", "a"]):
            account.charge(Gaussian(noise=50.0 + number), partition=partition, purpose="p", by="b", sealed="x")
        made.account("two", budget=Budget(epsilon=2.0, delta=0.0)).charge(PureDP(epsilon=0.5))
        yield made


def changed(value, draw):
    """`value` with one thing in it replaced, dropped or added."""
    if draw.random() < 0.25 or not isinstance(value, dict | list | str) or not value:
        return draw.choice(ODD)
    if isinstance(value, dict):
        name, kind = draw.choice(list(value)), draw.random()
        if kind < 0.1:
            return {one: value[one] for one in value if one != name}
        if kind < 0.2:
            return value | {draw.choice(["extra", "kind", "planned", "common"]): draw.choice(ODD)}
        return value | {name: changed(value[name], draw)}
    place = draw.randrange(len(value))
    if isinstance(value, list):
        return [*value[:place], changed(value[place], draw), *value[place + 1 :]]
    if value[0] in "{[":
        return json.dumps(changed(json.loads(value), draw))
    return value[:place] + draw.choice(["", "x", "\x00", "9"]) + value[place + 1 :]


def rehashed(records):
    """Every hash made again, as far as the rows still are rows."""
    previous = ""
    for record in records:
        for name, kind in (("account", AccountRow), ("charge", ChargeRow)):
            fields = record.get(name) if isinstance(record, dict) else None
            if not isinstance(fields, dict) or set(fields) != set(kind._fields):
                continue
            if kind is ChargeRow:
                fields["previous"] = previous
            previous = fields["hash"] = digest(kind(**fields))
    return records


@pytest.mark.parametrize("seed", range(8))
def test_a_forged_export_is_refused_or_whole(ledger, tmp_path, seed):
    draw, whole = random.Random(seed), io.StringIO()
    ledger.export(whole)
    refused = 0
    with Ledger.open(tmp_path / "copy.db") as copy:
        for number in range(40):
            records = [json.loads(line) for line in whole.getvalue().splitlines()]
            place = draw.randrange(len(records))
            records[place] = changed(records[place], draw)
            text = "".join(json.dumps(one) + "\n" for one in (rehashed(records) if draw.random() < 0.8 else records))
            found = verify_export(io.StringIO(text))
            assert all("\n" not in str(one) and len(str(one)) < 1000 for one in found)
            if found:
                refused += 1
                with pytest.raises(TerrineError):
                    copy.import_(io.StringIO(text))
                assert copy.accounts() == []
                continue
            with Ledger.open(tmp_path / f"{number}.db") as fresh:
                fresh.import_(io.StringIO(text))
                assert fresh.verify() == []
                for account in fresh.accounts():
                    assert account.report().words()
    assert refused > 20


TABLES = {
    "ledger_accounts": AccountRow._fields,
    "ledger_charges": ChargeRow._fields,
    "ledger_heads": ("account", "sequence", "hash"),
    "ledger_meta": ("one", "version", "accounts"),
}


def tampered(path, draw):
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = DELETE")
    table = draw.choice(list(TABLES))
    column = draw.choice(TABLES[table])
    row, old = draw.choice(connection.execute(f'SELECT rowid, "{column}" FROM {table}').fetchall())
    value = draw.choice([changed(old, draw), b"\xff"])
    try:
        connection.execute(f'UPDATE {table} SET "{column}" = ? WHERE rowid = ?', (value, row))
        if draw.random() < 0.6:
            chain_again(connection)
        connection.commit()
    except (sqlite3.Error, OverflowError, UnicodeEncodeError):  # what SQLite does not take
        connection.rollback()
    connection.close()


def chain_again(connection):
    for account in connection.execute("SELECT * FROM ledger_accounts").fetchall():
        key, previous, last = account[0], digest(AccountRow(*account)), 0
        connection.execute("UPDATE ledger_accounts SET hash = ? WHERE account = ?", (previous, key))
        for found in connection.execute("SELECT * FROM ledger_charges WHERE account = ? ORDER BY sequence", (key,)):
            row = ChargeRow(*found)._replace(previous=previous)
            last, previous = row.sequence, digest(row)
            values = (row.previous, previous, key, last)
            connection.execute(
                "UPDATE ledger_charges SET previous = ?, hash = ? WHERE account = ? AND sequence = ?", values
            )
        connection.execute("UPDATE ledger_heads SET sequence = ?, hash = ? WHERE account = ?", (last, previous, key))


def ours(call, *arguments, **options):
    """What `call` gives, or one of our errors, in one line."""
    try:
        return call(*arguments, **options)
    except TerrineError as error:
        refusal = error
    assert "\n" not in str(refusal)
    assert len(str(refusal)) < 1000
    return refusal


@pytest.mark.parametrize("seed", range(8))
def test_a_tampered_database_never_gives_a_raw_error(ledger, tmp_path, seed):
    draw = random.Random(100 + seed)
    ledger.close()
    whole = (tmp_path / "ledger.db").read_bytes()
    for number in range(15):
        path = tmp_path / f"{number}.db"
        path.write_bytes(whole)
        tampered(path, draw)
        opened = ours(Ledger.open, path, key=KEY)
        if not isinstance(opened, Ledger):
            continue
        with opened as book:
            assert all("\n" not in str(one) for one in ours(book.verify, against="a" * 64))
            ours(book.export, io.StringIO())
            ours(book.head)
            for account in (ours(book.account, "main"), ours(book.account, "two")):
                if isinstance(account, Account):
                    for call in (account.head, account.spent, account.report):
                        ours(call)
                    ours(list, account.history())
                    ours(account.unseal, 1)
                    ours(account.charge, PureDP(epsilon=0.001))

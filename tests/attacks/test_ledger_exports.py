"""Exports made by a forger who knows the hashes: a clear refusal, never a raw error, a hang or a half import."""

from __future__ import annotations

import io
import json
import sqlite3

import pytest

from terrine.errors import LedgerDamaged, TerrineError
from terrine.events import Budget, PureDP
from terrine.ledger import Ledger, verify_export
from terrine.ledger.records import AccountRow, ChargeRow, digest

BUDGET = Budget(epsilon=1.0, delta=0.0)
LONG = "9" * 5000


@pytest.fixture
def lines(tmp_path):
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.account("main", budget=BUDGET).charge(PureDP(epsilon=0.1), purpose="p", by="b")
        exported = io.StringIO()
        ledger.export(exported)
    return exported.getvalue().splitlines(keepends=True)


def refused(lines, tmp_path, match=None):
    text = "".join(lines)
    found = verify_export(io.StringIO(text))
    assert found
    assert all("\n" not in str(one) and len(str(one)) < 400 for one in found)
    with Ledger.open(tmp_path / "copy.db") as copy:
        with pytest.raises(LedgerDamaged, match=match) as refusal:
            copy.import_(io.StringIO(text))
        assert "\n" not in str(refusal.value)
        assert copy.accounts() == []


def forged(lines, **changes):
    """The export with fields changed and every hash made again."""
    account, charge = AccountRow(**json.loads(lines[1])["account"]), ChargeRow(**json.loads(lines[2])["charge"])
    account = account._replace(**{name: value for name, value in changes.items() if name in AccountRow._fields})
    account = account._replace(hash=digest(account))
    own = {name: value for name, value in changes.items() if name in ChargeRow._fields and name != "account"}
    charge = charge._replace(previous=account.hash, account=account.account)._replace(**own)
    charge = charge._replace(hash=digest(charge))
    return [
        lines[0],
        *(json.dumps(one) + "\n" for one in ({"account": account._asdict()}, {"charge": charge._asdict()})),
        lines[3],
    ]


def test_forging_without_a_change_is_no_finding(lines):
    assert verify_export(io.StringIO("".join(forged(lines)))) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"by": "b"', '"by": "b", "by": "b"'),
        ('"sequence": 1', '"sequence": 99, "sequence": 1'),
        ('{"charge"', '{"charge": {}, "charge"'),
        ('{"charge"', '{"account": {}, "charge"'),
        ('{"terrine-ledger": 1}', '{"terrine-ledger": 1, "terrine-ledger": 1}'),
        ('{"terrine-ledger": 1}', '{"terrine-ledger": true}'),
        ('{"terrine-ledger": 1}', '{"terrine-ledger": 1.0}'),
        ('{"end": 4}', '{"end": 4.0}'),
        ('{"end": 4}', '{"end": true}'),
        ('{"end": 4}', '{"end": 4, "end": 4}'),
        ('{"end": 4}', '{"end": 4}\n{"end": 5}'),
        ('"sequence": 1', f'"sequence": {LONG}'),
        ('"sequence": 1', '"sequence": NaN'),
        ('"sequence": 1', '"sequence": true'),
    ],
)
def test_lines_that_mean_two_things_are_refused(lines, tmp_path, old, new):
    text = "".join(lines)
    assert text.count(old) >= 1
    refused([text.replace(old, new, 1)], tmp_path, match="line")


@pytest.mark.parametrize(
    "changes",
    [
        {"unit": "banana"},
        {"neighbours": "banana"},
        {"unit": "person"},
        {"partitions": '["a", "a"]'},
        {"partitions": '{"a": 1}'},
        {"partitions": "[1]"},
        {"partitions": '"ab"'},
        {"partitions": LONG},
        {"partitions": "[" * 100_000},
        {"partitions": '["a"]', "neighbours": "replace-one"},
        {"terms": "{}"},
        {"terms": LONG},
        {"terms": "[]"},
        {"opened": 10**30},
        {"opened": -1},
        {"at": 10**30},
        {"sealed": "\ud800"},
        {"sealed": "not base64"},
        {"account": "\ud800"},
        {"account": ""},
        {"event": LONG},
        {"event": '{"kind": "PureDP", "epsilon": 9, "epsilon": 0.1}'},
        {"event": "\ud800"},
        {"partition": "nowhere"},
        {"cost": LONG},
        {"cost": "[]"},
        {"state": "[]"},
        {"state": "null"},
    ],
    ids=lambda changes: next(f"{name}={str(value)[:20]!a}" for name, value in changes.items()),
)
def test_a_forged_field_with_every_hash_made_again_is_refused(lines, tmp_path, changes):
    refused(forged(lines, **changes), tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", "1e999999999"),
        ("epsilon", "-1/10"),
        ("epsilon", "0.1"),
        ("epsilon", 0.1),
        ("epsilon", LONG),
        ("epsilon", f"1/{LONG}"),
        ("epsilon", "1/0"),
        ("epsilon", ["1"]),
        ("delta", None),
        ("delta", "nan"),
        ("mu_squared", "-1"),
        ("renyi", "7ff8000000000000" * 8),
        ("renyi", 7),
        ("renyi", ""),
        ("events", True),
        ("events", 1.5),
        ("events", "1"),
        ("events", -1),
        ("planned", "yes"),
        ("extra", 1),
    ],
)
def test_a_forged_cost_is_refused_at_once(lines, tmp_path, field, value):
    cost = json.loads(json.loads(lines[2])["charge"]["cost"])
    refused(forged(lines, cost=json.dumps(cost | {field: value})), tmp_path)
    refused(forged(lines, state=json.dumps(cost | {field: value})), tmp_path)


def test_a_cost_with_a_name_twice_is_refused(lines, tmp_path):
    cost = json.loads(lines[2])["charge"]["cost"]
    refused(forged(lines, cost=cost.replace('"events"', '"epsilon": "1/1000", "events"')), tmp_path)


@pytest.mark.parametrize("same", ["name", "account"])
def test_one_account_twice_in_an_export_is_refused(lines, tmp_path, same):
    other = forged(lines, **({"account": "f" * 32} if same == "name" else {"name": "other"}))
    refused([*lines[:3], *other[1:3], json.dumps({"end": 6}) + "\n"], tmp_path, match="twice")


def test_a_charge_that_belongs_to_another_account_is_refused(lines, tmp_path):
    """Imported as it stands, it would move the head of that other account."""
    with Ledger.open(tmp_path / "victim.db") as victim:
        victim.account("victim", budget=BUDGET)
        exported = io.StringIO()
        victim.export(exported)
        other = json.loads(exported.getvalue().splitlines()[1])["account"]["account"]
        charge = ChargeRow(**json.loads(lines[2])["charge"])._replace(account=other)
        lines[2] = json.dumps({"charge": charge._replace(hash=digest(charge))._asdict()}) + "\n"
        assert any("another account" in str(one) for one in verify_export(io.StringIO("".join(lines))))
        with pytest.raises(LedgerDamaged):
            victim.import_(io.StringIO("".join(lines)))
        assert victim.verify() == []


@pytest.mark.parametrize(
    ("column", "value"),
    [("at", "soon"), ("at", 1.5), ("purpose", b"\xff"), ("by", b""), ("event", b"x"), ("sequence", "x"), ("hash", b"")],
)
def test_a_row_of_other_types_is_a_finding_and_our_error(lines, tmp_path, column, value):
    path = tmp_path / "ledger.db"
    with Ledger.open(path) as ledger:
        ledger.account("main").charge(PureDP(epsilon=0.1))
    with sqlite3.connect(path) as connection:
        connection.execute(f'UPDATE ledger_charges SET "{column}" = ? WHERE sequence = 1', (value,))
    with Ledger.open(path) as ledger:
        assert ledger.verify()
        assert all(str(one).isprintable() for one in ledger.verify())
        with pytest.raises(TerrineError):
            list(ledger.account("main").history())


@pytest.mark.parametrize("text", ["", "\n", "{}\n", "null\n", "[]\n", "x", '{"terrine-ledger": 1}\n', "\ud800\n"])
def test_what_is_no_export_is_refused(tmp_path, text):
    refused([text], tmp_path)


@pytest.mark.parametrize(
    ("column", "value"),
    [("unit", "banana"), ("neighbours", ""), ("partitions", "["), ("partitions", "[1]"), ("terms", "null")],
)
def test_a_forged_declaration_in_the_database_is_our_error(lines, tmp_path, column, value):
    path = tmp_path / "ledger.db"
    with sqlite3.connect(path) as connection:
        row = AccountRow(*connection.execute("SELECT * FROM ledger_accounts").fetchone())._replace(**{column: value})
        connection.execute(f"UPDATE ledger_accounts SET {column} = ?, hash = ?", (value, digest(row)))
    with Ledger.open(path) as ledger:
        assert any(one.sequence == 0 for one in ledger.verify())
        with pytest.raises(TerrineError):
            ledger.account("main")

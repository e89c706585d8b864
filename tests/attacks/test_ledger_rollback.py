"""Whoever cuts the newest charges off a ledger or an export is found by a hash that was written down elsewhere."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3

import pytest
from typer.testing import CliRunner

from terrine.cli.app import app
from terrine.errors import InvalidArgument, LedgerDamaged
from terrine.events import Budget, PureDP
from terrine.ledger import Ledger, verify_export

BUDGET = Budget(epsilon=1.0, delta=0.0)
TENTH = PureDP(epsilon=0.1)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ledger.db"
    with Ledger.open(path) as ledger:
        account = ledger.account("clinic", budget=BUDGET)
        for number in range(5):
            account.charge(TENTH, purpose=f"count {number}", by="ann")
        ledger.account("survey", budget=BUDGET).charge(TENTH)
    return path


def cut(path, keep, name="clinic"):
    """What the attacker does: delete the last rows, move the stored head."""
    with sqlite3.connect(path) as connection:
        (account, opened) = connection.execute(
            "SELECT account, hash FROM ledger_accounts WHERE name = ?", (name,)
        ).fetchone()
        connection.execute("DELETE FROM ledger_charges WHERE account = ? AND sequence > ?", (account, keep))
        last = connection.execute(
            "SELECT hash FROM ledger_charges WHERE account = ? AND sequence = ?", (account, keep)
        ).fetchone()
        head = last[0] if last else opened
        connection.execute("UPDATE ledger_heads SET sequence = ?, hash = ? WHERE account = ?", (keep, head, account))


def head(path):
    with Ledger.open(path) as ledger:
        return ledger.head()


def findings(path, **options):
    with Ledger.open(path) as ledger:
        return ledger.verify(**options)


@pytest.mark.parametrize("keep", [0, 1, 4])
def test_charges_cut_off_the_end_are_found_by_the_hash_written_down(file, keep):
    written = head(file)
    assert findings(file, against=written) == []
    cut(file, keep)
    assert findings(file) == []  # nothing in the file itself can tell
    found = findings(file, against=written)
    assert len(found) == 1
    assert written.split()[0] in str(found[0])
    assert "cut" in str(found[0])


def test_charges_cut_off_and_replaced_by_as_many_others_are_found(file):
    written = head(file)
    cut(file, 3)
    with Ledger.open(file) as ledger:
        for _ in range(4):
            ledger.account("clinic").charge(PureDP(epsilon=0.01))
    assert findings(file) == []
    assert len(findings(file, against=written)) == 1


def test_what_was_charged_after_the_hash_was_written_down_is_no_finding(file):
    written = head(file)
    with Ledger.open(file) as ledger:
        ledger.account("clinic").charge(TENTH)
        ledger.account("later", budget=BUDGET).charge(TENTH)
        assert ledger.verify(against=written) == []
        assert ledger.verify(against=ledger.head()) == []
    cut(file, 5)  # only what came after it is gone: this hash cannot tell
    assert findings(file, against=written) == []


def test_every_hash_that_a_charge_gave_can_be_asked_for(file):
    with Ledger.open(file) as ledger:
        account = ledger.account("clinic")
        hashes = [charge.hash for charge in account.history()]
        assert account.head() == hashes[-1]
        for one in hashes:
            assert ledger.verify(against=one) == []
    cut(file, 2)
    assert [len(findings(file, against=one)) for one in hashes] == [0, 0, 1, 1, 1]
    assert len(findings(file, against=" ".join(hashes))) == 3


def test_an_account_dropped_with_its_count_is_found(file):
    written = head(file)
    cut(file, 0, "survey")
    with sqlite3.connect(file) as connection:
        connection.execute(
            "DELETE FROM ledger_heads WHERE account = (SELECT account FROM ledger_accounts WHERE name = 'survey')"
        )
        connection.execute("DELETE FROM ledger_accounts WHERE name = 'survey'")
        connection.execute("UPDATE ledger_meta SET accounts = accounts - 1")
    assert findings(file) == []
    assert len(findings(file, against=written)) == 1


def test_an_older_copy_of_the_whole_file_is_found(file, tmp_path):
    old = tmp_path / "old.db"
    shutil.copy(file, old)
    with Ledger.open(file) as ledger:
        ledger.account("clinic").charge(TENTH)
        written = ledger.head()
    assert findings(old) == []
    assert len(findings(old, against=written)) == 1


def test_a_row_that_only_carries_the_hash_does_not_count(file):
    written = head(file).split()[0]
    cut(file, 4)
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE ledger_charges SET hash = ? WHERE sequence = 4", (written,))
        connection.execute("UPDATE ledger_heads SET hash = ? WHERE sequence = 4", (written,))
    assert any(written in str(one) for one in findings(file, against=written))


@pytest.mark.parametrize("wrong", ["", " ", "abc", "g" * 64, "a" * 63, "a" * 65, 7, "a" * 64 + " x"])
def test_a_hash_that_is_none_never_verifies(file, wrong):
    with Ledger.open(file) as ledger, pytest.raises(InvalidArgument, match="want the hash"):
        ledger.verify(against=wrong)


def test_a_ledger_without_accounts_has_nothing_to_write_down(tmp_path):
    with Ledger.open(tmp_path / "empty.db") as ledger, pytest.raises(InvalidArgument, match="no account"):
        ledger.head()


def exported(path, account=None):
    text = io.StringIO()
    with Ledger.open(path) as ledger:
        ledger.export(text, account=account)
    return text.getvalue().splitlines(keepends=True)


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_an_export_cut_short_is_refused_even_without_a_hash(file, tmp_path, gone):
    lines = exported(file)[:-gone]
    assert verify_export(io.StringIO("".join(lines))) != []
    with Ledger.open(tmp_path / "copy.db") as copy:
        with pytest.raises(LedgerDamaged, match="cut short"):
            copy.import_(io.StringIO("".join(lines)))
        assert copy.accounts() == []


def test_an_export_cut_with_care_is_found_by_the_hash_written_down(file, tmp_path):
    written = head(file)
    lines = exported(file, "clinic")
    assert verify_export(io.StringIO("".join(lines)), against=written.split()[0]) == []
    del lines[-2]  # the newest charge
    end = json.loads(lines[-1])
    lines[-1] = json.dumps({"end": end["end"] - 1}) + "\n"
    assert verify_export(io.StringIO("".join(lines))) == []
    assert len(verify_export(io.StringIO("".join(lines)), against=written.split()[0])) == 1
    with Ledger.open(tmp_path / "copy.db") as copy:
        with pytest.raises(LedgerDamaged, match="cut"):
            copy.import_(io.StringIO("".join(lines)), against=written.split()[0])
        assert copy.accounts() == []


def run(*arguments):
    return CliRunner().invoke(app, ["ledger", *map(str, arguments)])


def test_the_command_line_finds_the_cut_in_a_ledger_and_in_an_export(file, tmp_path):
    written = run("head", file).stdout.strip()
    assert written.split() == head(file).split()
    out = tmp_path / "out.jsonl"
    run("export", file, "--out", out)
    assert run("verify", file, "--against", written).exit_code == 0
    assert run("verify", out, "--against", written).exit_code == 0
    cut(file, 2)
    assert run("verify", file).exit_code == 0
    result = run("verify", file, "--against", written)
    assert result.exit_code == 1
    assert written.split()[0] in result.stdout
    run("export", file, "--out", out)
    assert run("verify", out).exit_code == 0
    assert run("verify", out, "--against", written).exit_code == 1
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:-2]))
    assert run("verify", out).exit_code == 1


def test_a_ledger_rolled_back_under_an_open_account_is_noticed_at_the_next_charge(file):
    with Ledger.open(file) as ledger:
        account = ledger.account("clinic")
        account.charge(TENTH)
        cut(file, 3)
        with pytest.raises(LedgerDamaged, match="charge 6 was there"):
            account.charge(TENTH)
        with Ledger.open(file) as other:
            for _ in range(4):
                other.account("clinic").charge(PureDP(epsilon=0.01))
        with pytest.raises(LedgerDamaged, match="charge 6 was there"):
            account.charge(TENTH)
        with pytest.raises(LedgerDamaged, match="charge 6 was there"):
            account.spent()

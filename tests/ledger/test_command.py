"""`terrine ledger` from outside: every command, both outputs, and one clear line for every refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from terrine.cli.app import app
from terrine.errors import TerrineError

RUN = CliRunner()


def run(*arguments):
    result = RUN.invoke(app, ["ledger", *map(str, arguments)], catch_exceptions=True)
    if isinstance(result.exception, TerrineError):
        raise result.exception
    assert result.exit_code in (0, 1), result.output
    return result


def run_json(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "ledger.db"
    made = run_json("create", path, "--account", "clinic", "--epsilon", 1, "--delta", 1e-6)
    assert made["account"] == "clinic"
    assert made["epsilon"] == 1.0
    return path


def test_a_session_from_create_to_import(ledger, tmp_path):
    done = run_json("charge", ledger, "-a", "clinic", "--laplace", 10, "--purpose", "count", "--by", "ann")
    assert (done["sequence"], done["spent"], done["used"]) == (1, 0.1, 0.1)
    run("charge", ledger, "-a", "clinic", "--noise", 2, "--rate", 0.001, "--steps", 10)
    quote = run_json("charge", ledger, "-a", "clinic", "--event", '{"kind": "PureDP", "epsilon": 9}', "--dry-run")
    assert quote["fits"] is False
    shown = run_json("show", ledger)["accounts"][0]
    assert shown["charges"] == 2
    assert shown["spent"]["adaptive"] >= shown["spent"]["planned"] > 0
    assert shown["history"][0]["by"] == "ann"
    text = run("show", ledger).stdout
    assert "█" in text
    assert "░" in text
    assert "which holds: adaptive" in text
    assert run_json("verify", ledger) == {"ok": True, "findings": []}
    out, copy, again = tmp_path / "out.jsonl", tmp_path / "copy.db", tmp_path / "again.jsonl"
    assert run_json("export", ledger, "--out", out)["lines"] == 4
    assert run_json("import", copy, out)["lines"] == 4
    run("export", copy, "--out", again)
    assert again.read_bytes() == out.read_bytes()
    assert run("export", copy).stdout.encode() == out.read_bytes()


def test_verify_says_which_row_and_exits_with_1(ledger):
    import sqlite3

    run("charge", ledger, "-a", "clinic", "--laplace", 10)
    with sqlite3.connect(ledger) as connection:
        connection.execute("UPDATE ledger_charges SET purpose = 'other'")
    result = run("verify", ledger)
    assert result.exit_code == 1
    assert "account 'clinic', charge 1: edited" in result.stdout
    assert run_json("verify", ledger)["findings"][0]["sequence"] == 1


def test_events_come_from_a_file_too(ledger, tmp_path):
    events = tmp_path / "events.json"
    events.write_text('[{"kind": "Gaussian", "noise": 50.0}, {"kind": "Laplace", "noise": 50.0}]')
    assert run_json("charge", ledger, "-a", "clinic", "--events", events)["sequence"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["charge", "LEDGER", "-a", "clinic"], "exactly one of"),
        (["charge", "LEDGER", "-a", "nobody", "--noise", "1"], "not in this ledger"),
        (["charge", "LEDGER", "-a", "clinic", "--noise", "0.01"], "nothing was charged"),
        (["charge", "LEDGER", "-a", "clinic", "--noise", "nan"], "noise=nan"),
        (["charge", "LEDGER", "-a", "clinic", "--laplace", "0"], "noise=0.0"),
        (["charge", "LEDGER", "-a", "clinic", "--event", "{"], "not JSON"),
        (["create", "LEDGER", "-a", "clinic", "--epsilon", "1", "--delta", "0"], "already in this ledger"),
        (["create", "LEDGER", "-a", "b", "--epsilon", "-1", "--delta", "0"], "epsilon=-1.0"),
        (["create", "LEDGER", "-a", "b", "--epsilon", "1", "--delta", "1"], "delta=1.0"),
        (["create", "LEDGER", "-a", "b", "--epsilon", "1", "--delta", "0", "--unit", "cat"], "example, person, client"),
        (["show", "nowhere.db"], "no such file"),
        (["import", "LEDGER", "nowhere.jsonl"], "nothing was imported"),
        (["export", "LEDGER", "--out", "no/such/folder.jsonl"], "nothing was written"),
    ],
)
def test_refusals_are_one_clear_line(ledger, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TerrineError) as found:
        run(*[str(ledger) if one == "LEDGER" else one for one in arguments])
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_the_real_command_exits_with_2_and_no_traceback(ledger):
    code = "from terrine.cli import main; main()"
    command = [sys.executable, "-c", code, "ledger", "charge", str(ledger), "-a", "clinic", "--noise", "0.01"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=60)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("terrine: Gaussian: wants")
    assert result.stderr.count("\n") == 1


def test_a_sealed_field_shows_only_that_it_is_there(ledger, monkeypatch):
    from terrine.events import PureDP
    from terrine.ledger import Ledger

    key = run("key").stdout.strip()
    with Ledger.open(ledger, key=key) as book:
        book.account("clinic").charge(PureDP(epsilon=0.1), sealed="bill 7321")
    monkeypatch.setenv("TERRINE_LEDGER_KEY", key)
    listing = run("show", ledger, "--json").stdout + run("show", ledger).stdout + run("export", ledger).stdout
    assert "7321" not in listing
    assert '"sealed": true' in listing


def test_without_the_database_package_the_error_says_what_to_install(ledger):
    hidden = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n: None if n == 'sqlalchemy' else f(n)"
    code = f"{hidden}; from terrine.cli import main; main()"
    command = [sys.executable, "-c", code, "ledger", "show", str(ledger)]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=60)
    assert result.returncode == 2
    assert "pip install 'terrine[ledger]'" in result.stderr

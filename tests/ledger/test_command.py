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
from terrine.ledger.records import ChargeRow, hashed

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
    assert made["budget"] == {"epsilon": 1.0, "delta": 1e-6}
    return path


def test_a_session_from_create_to_import(ledger, tmp_path):
    done = run_json("charge", ledger, "-a", "clinic", "--laplace", 10, "--purpose", "count", "--by", "ann")
    assert (done["sequence"], done["claimed"], done["filter"]["used"]) == (1, 0.1, 0.1)
    assert (done["by"], done["purpose"]) == ("ann", "count")
    run("charge", ledger, "-a", "clinic", "--noise", 2, "--rate", 0.001, "--steps", 10)
    quote = run_json("charge", ledger, "-a", "clinic", "--event", '{"kind": "PureDP", "epsilon": 9}', "--dry-run")
    assert quote["fits"] is False
    shown = run_json("show", ledger)["accounts"][0]
    assert shown["charges"] == 2
    assert shown["claimed"]["epsilon"] >= shown["certified"]["epsilon"] > 0
    assert shown["decides"] == "filter"
    assert (shown["history"][0]["by"], shown["history"][0]["purpose"]) == ("ann", "count")
    text = run("show", ledger).stdout
    assert "█" in text
    assert "░" in text
    assert run_json("verify", ledger) == {"ok": True, "findings": [], "against": []}
    out, copy, again = tmp_path / "out.jsonl", tmp_path / "copy.db", tmp_path / "again.jsonl"
    assert run_json("export", ledger, "--out", out)["lines"] == 5
    assert run_json("import", copy, out)["lines"] == 5
    run("export", copy, "--out", again)
    assert again.read_bytes() == out.read_bytes()
    assert run("export", copy).stdout.encode() == out.read_bytes()


def words(text):
    """What a reader reads: without the frame and the line breaks."""
    return " ".join("".join(" " if one in "│┃" else one for one in text).split())


def test_show_says_who_what_for_and_when(ledger):
    run("charge", ledger, "-a", "clinic", "--laplace", 20, "--purpose", "weekly count", "--by", "Ann")
    run("charge", ledger, "-a", "clinic", "--laplace", 20, "--by", "")
    shown = run_json("show", ledger)["accounts"][0]["history"]
    text = words(run("show", ledger).stdout)
    when = [one["at"][:19].replace("T", " ") for one in shown]
    assert "charge when (UTC) who what for event" in text
    assert f"1 {when[0]} Ann weekly count Laplace(noise=20.0)" in text
    assert f"2 {when[1]} not said not said Laplace(noise=20.0)" in text


def test_show_explains_a_part_used_beside_a_whole_epsilon(tmp_path):
    path = tmp_path / "ledger.db"
    run("create", path, "--epsilon", 2.5, "--delta", 1e-5)
    for noise in (5, 4, 7, 3):
        run("charge", path, "--noise", noise)
    told = run_json("show", path)["accounts"][0]
    assert told["decides"] == "filter"
    assert told["filter"]["used"] == pytest.approx(0.715, abs=0.01)
    assert told["claimed"] == {"epsilon": 2.5, "delta": 1e-5}
    assert 1 < told["certified"]["epsilon"] < 2
    text = words(run("show", path).stdout)
    for sentence in told["words"].values():
        assert sentence in text
    assert told["words"]["next charge"].startswith("The filter decides: 71.5% of its room is used and 28.5% is left;")
    assert "charges together cost epsilon 1.921 at delta 1e-05, certified, if all" in told["words"]["price"]
    assert told["words"]["price"].endswith("This does not decide.")
    assert "Epsilon 2.5 at delta 1e-05 may be claimed, the whole budget" in told["words"]["claim"]
    assert "The budget is not gone for that: 28.5% of the room is left." in told["words"]["claim"]
    assert f"write down {told['head']}" in text


def test_what_show_says_comes_true(tmp_path):
    path = tmp_path / "ledger.db"
    run("create", path, "--epsilon", 2.5, "--delta", 1e-5)
    for noise in (5, 4, 7, 3):
        run("charge", path, "--noise", noise)
    said = run_json("show", path)["accounts"][0]["words"]["next charge"]
    largest = float(said.split("of up to epsilon ")[1].split(" fits")[0])
    too_much = json.dumps({"kind": "PureDP", "epsilon": largest * 1.01})
    assert not run_json("charge", path, "--event", too_much, "--dry-run")["fits"]
    run("charge", path, "--event", json.dumps({"kind": "PureDP", "epsilon": largest}))


def test_show_says_that_a_plan_decided_by_its_certified_price(tmp_path):
    path = tmp_path / "ledger.db"
    run("create", path, "--epsilon", 2, "--delta", 1e-5)
    run("charge", path, "--noise", 0.8, "--rate", 0.004, "--steps", 1000)
    told = run_json("show", path)["accounts"][0]
    assert told["decides"] == "plan"
    assert told["claimed"] == told["certified"]
    assert told["words"]["next charge"].startswith("No more is accepted.")
    assert told["words"]["price"].endswith("certified. This decided.")


@pytest.mark.parametrize(("delta", "claim"), [("1e-9", "however each charge was"), ("0", "No epsilon is proven")])
def test_show_at_another_delta(tmp_path, delta, claim):
    path = tmp_path / "ledger.db"
    run("create", path, "--epsilon", 2.5, "--delta", 1e-5)
    assert run_json("show", path)["accounts"][0]["words"]["claim"] == "Nothing was spent."
    run("charge", path, "--noise", 3)
    assert claim in run_json("show", path, "--delta", delta)["accounts"][0]["words"]["claim"]


def test_a_tampered_row_cannot_write_to_the_terminal(ledger):
    import sqlite3

    for _ in range(2):
        run("charge", ledger, "-a", "clinic", "--laplace", 20)
    with sqlite3.connect(ledger) as connection:
        connection.execute("UPDATE ledger_charges SET purpose = 'a\x1b[2Jb\u202ec' WHERE sequence = 1")
    with pytest.raises(TerrineError, match="charge 1 is gone or edited"):
        run("show", ledger)
    previous = ""
    with sqlite3.connect(ledger) as connection:  # and by someone who knows the hash
        for sequence in (1, 2):
            rows = connection.execute("SELECT * FROM ledger_charges WHERE sequence = ?", (sequence,))
            row = ChargeRow(*rows.fetchone())
            row = hashed(row if sequence == 1 else row._replace(previous=previous))
            previous = row.hash
            connection.execute(
                "UPDATE ledger_charges SET previous = ?, hash = ? WHERE sequence = ?",
                (row.previous, row.hash, sequence),
            )
        connection.execute("UPDATE ledger_heads SET hash = ?", (previous,))
    with pytest.raises(TerrineError, match=r"U\+001B") as refusal:
        run("show", ledger)
    assert str(refusal.value).isprintable()
    assert str(refusal.value).isascii()
    result = run("verify", ledger)
    assert result.exit_code == 1
    assert "\x1b" not in result.stdout
    assert "\u202e" not in result.stdout


def test_head_is_one_hash_for_each_account(ledger):
    run("create", ledger, "--account", "survey", "--epsilon", 1, "--delta", 0)
    done = run_json("charge", ledger, "-a", "clinic", "--laplace", 10)
    told = run_json("head", ledger)
    assert told["accounts"]["clinic"] == done["hash"]
    assert run("head", ledger).stdout.split() == list(told["accounts"].values()) == told["head"].split()
    assert run("head", ledger, "-a", "clinic").stdout == done["hash"] + "\n"
    text = run("charge", ledger, "-a", "survey", "--laplace", 10).stdout
    assert text.splitlines()[1] == f"hash {run('head', ledger, '-a', 'survey').stdout.strip()}"
    assert run("verify", ledger, "--against", done["hash"], "--against", told["accounts"]["survey"]).exit_code == 0


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

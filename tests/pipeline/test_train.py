"""The main job end to end: a folder that holds model, claim, report and audit, and that goes on where it stopped."""

import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from terrine import accounting, cli, pipeline
from terrine.errors import InvalidArgument
from terrine.events import Budget, Unit, from_json
from terrine.ledger import Ledger
from terrine.pipeline import coins, job, recipes
from tests.pipeline.conftest import SCHEMA, write_table

QUICK = ("--epochs", 4, "--lot", 100)


def test_a_table_becomes_a_model_with_its_claim(run, table, tmp_path):
    out = tmp_path / "run"
    result = run("train", "people.csv", "--label", "ill", "--epsilon", 8, "--accuracy-within", 20, "--out", out)
    assert result.exit_code == 0, result.said
    assert "counted nowhere: --ledger and --account would charge this run to a budget" in result.output
    claim = json.loads((out / "privacy.json").read_text())
    event = from_json(json.dumps(claim["events"]))
    assert claim["epsilon"] <= 8
    assert accounting.delta(event, epsilon=8.0) <= claim["delta"]
    assert claim["epsilon_certified"]["lower"] <= claim["epsilon_certified"]["upper"] <= 8
    assert claim["delta"] < 1 / 400
    assert (claim["unit"], claim["neighbours"]) == ("example", "add-remove")
    assert claim["reproducible_noise_for_tests_only"] is False
    assert {"terrine", "python", "torch"} <= set(claim["versions"])
    results = json.loads((out / "results.json").read_text())
    assert "paid for" in results["measured_on"]
    assert "DiscreteLaplace" in json.dumps(claim["events"])  # the accuracy is in the bill
    assert run("audit", "run", out).exit_code == 0


def test_it_learns_and_predicts(run, table, tmp_path):
    write_table(tmp_path / "test.csv", seed=1)
    asked = ("train", "people.csv", "--label", "ill", "--epsilon", 8, "--test", "test.csv", "--out", "run", "--json")
    found = run(*asked).read()
    assert found["results"]["accuracy"] > found["results"]["majority"] + 0.1
    (tmp_path / "new.csv").write_text("name,age,city\na,95,south\nb,2,north\nc,,west\n")
    assert run("predict", "run", "new.csv").output.splitlines()[:3] == ["prediction", "yes", "no"]
    shares = run("predict", "run", "new.csv", "--probabilities", "--out", "told.csv")
    assert shares.exit_code == 0
    assert (tmp_path / "told.csv").read_text().startswith("prediction,no,yes\n")
    assert pipeline.load("run").predict(np.zeros((1, 5), np.float32)).shape == (1,)


def test_the_ledger_is_charged_once_with_the_claimed_event(run, table, tmp_path):
    with Ledger.open(f"sqlite:///{tmp_path}/budget.db") as book:
        book.account("patients", budget=Budget(2.2, 1e-5))
    asked = ("train", "people.csv", "--label", "ill", "--epsilon", 2, "--out", "run", *QUICK)
    charge = ("--ledger", f"sqlite:///{tmp_path}/budget.db", "--account", "patients")
    assert run(*asked, *charge).exit_code == 0
    again = run(*asked, *charge)
    assert "nothing was trained or charged" in again.output
    with Ledger.open(f"sqlite:///{tmp_path}/budget.db") as book:
        history = list(book.account("patients").history())
    assert len(history) == 1
    claim = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert history[0].event == from_json(json.dumps(claim["events"]))
    refused = run("train", "people.csv", "--label", "ill", "--epsilon", 2, "--out", "more", *QUICK, *charge)
    assert refused.exit_code != 0
    assert not (tmp_path / "more" / "model.safetensors").exists()


def test_an_interrupted_run_goes_on_to_the_same_model(run, table, tmp_path, dying_at):
    asked = ("train", "people.csv", "--label", "ill", "--epsilon", 4, "--seed", 3, *QUICK)
    assert run(*asked, "--out", "whole").exit_code == 0
    with dying_at(9):
        run(*asked, "--out", "cut").read()
    assert not (tmp_path / "cut" / "privacy.json").exists()
    assert run(*asked, "--out", "cut").exit_code == 0
    whole, cut = (
        torch.cat([p.flatten() for p in pipeline.load(name).module.parameters()]) for name in ("whole", "cut")
    )
    assert torch.equal(whole, cut)


def test_a_seeded_run_says_everywhere_that_it_is_not_private(run, table, tmp_path):
    result = run("train", "people.csv", "--label", "ill", "--epsilon", 4, "--seed", 3, "--out", "run", *QUICK)
    assert "NOT private" in result.output
    assert "Nothing below is a guarantee" in (tmp_path / "run" / "report.html").read_text()
    assert "NOT PRIVATE" in (tmp_path / "run" / "model_card.md").read_text()


def test_rows_left_out_by_their_coin_do_not_move_the_model(table, tmp_path, monkeypatch):
    """With the same noise, other labels of left-out rows change nothing; other labels of the rest do."""
    settings = pipeline.Settings(epsilon=4, table=str(table), label="ill", seed=5, epochs=3, lot=100)
    weights, original = {}, job.open_data

    def flipped(which):
        def opened(asked):
            found = original(asked)

            def look(bounds):
                material = found.look(bounds)
                tossed = coins.tossed(tmp_path / "plain" / "owner" / "coins.npz", units=400, count=40, seed=5)
                rows = tossed.out if which == "out" else tossed.units[tossed.heads]
                material.labels[rows] = 1 - material.labels[rows]
                return material

            return dataclasses.replace(found, look=look)

        return opened

    for name in ("plain", "out", "in"):
        if name != "plain":
            monkeypatch.setattr(job, "open_data", flipped(name))
        pipeline.train(settings, tmp_path / name)
        weights[name] = pipeline.load(tmp_path / name).module.weight.detach()
    assert torch.equal(weights["plain"], weights["out"])
    assert not torch.equal(weights["plain"], weights["in"])


def test_pate_on_digits_pays_for_its_labels_only(run, tmp_path):
    asked = ("train", "--data", "digits", "--method", "pate", "--teachers", 12, "--queries", 15, "--epsilon", 8)
    found = run(*asked, "--out", "run", "--json").read()
    assert found["method"] == "PATE"
    assert found["neighbours"] == "replace-one"
    assert found["epsilon"] <= 8
    assert found["queries"] == 15
    assert found["results"]["accuracy"] > 0.25
    assert run("audit", "run", "run").exit_code == 0
    assert run("report", "run").exit_code == 0


def test_the_report_needs_no_network_and_holds_no_script(run, tmp_path):
    assert run("train", "--data", "digits", "--model", "linear", "--epsilon", 3, "--out", "run").exit_code == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("<svg") == 3
    assert not re.search(r"<script|<link|@import|url\((?!#)", page)
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert all("www.w3.org" in one or "purl.org" in one or "creativecommons" in one for one in addresses)
    assert "terrine train --epsilon 3 --data digits --model linear --out run/" in page
    assert "model_card.md" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("people.csv", "--label", "il", "--epsilon", 1), "did you mean 'ill'"),
        (("people.csv", "--epsilon", 1), "want --label"),
        (("people.csv", "--label", "ill", "--epsilon", 0), "epsilon=0.0: want > 0"),
        (("people.csv", "--label", "ill", "--epsilon", 1, "--delta", 2), "0 < delta < 1"),
        (("people.csv", "--label", "ill", "--epsilon", 1, "--model", "cnn"), "want one of linear, mlp"),
        (("people.csv", "--label", "ill", "--epsilon", 1, "--method", "magic"), "want one of sgd, pate"),
        (("people.csv", "--label", "ill", "--epsilon", 1, "--teachers", 5), "not for --method sgd"),
        (("people.csv", "--label", "ill", "--epsilon", 1, "--method", "pate"), "want --public"),
        (("people.csv", "--label", "ill", "--epsilon", 1, "--ledger", "x.db"), "want both, or neither"),
        (("none.csv", "--label", "ill", "--epsilon", 1), "no such file"),
        (("--data", "mnst", "--epsilon", 1), "want one of digits, mnist"),
        (("--epsilon", 1), "one of the two"),
        (("bare.csv", "--label", "ill", "--epsilon", 1), "terrine schema bare.csv --label ill"),
        (("empty.csv", "--label", "ill", "--epsilon", 1), "the file is empty"),
    ],
)
def test_mistakes_are_one_clear_line_and_leave_no_folder(run, table, tmp_path, words, said):
    (tmp_path / "empty.csv").write_text("")
    write_table(tmp_path / "bare.csv")
    result = run("train", *words, "--out", "run")
    assert result.exit_code != 0
    assert said in result.said
    assert not (tmp_path / "run").exists()


def refused(monkeypatch, capsys, *words):
    """What the command says when it ends with code 2: one line, and no traceback."""
    monkeypatch.setattr(sys, "argv", ["terrine", *(str(word) for word in words)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr().err.strip()
    assert left.value.code == 2
    assert len(said.splitlines()) == 1
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("people.csv", "--label", "il", "--epsilon", 1), "no such column; want one of name, age, city, ill"),
        (("empty.csv", "--label", "ill", "--epsilon", 1), "the file is empty"),
        (("header.csv", "--label", "ill", "--epsilon", 1), "column names but no rows"),
        (("single.csv", "--label", "ill", "--epsilon", 1), "has 1 class; want two or more"),
        (("people.csv", "--label", "ill", "--epsilon", 0), "epsilon=0.0: want > 0"),
        (("people.csv", "--label", "ill", "--epsilon", "many"), "Invalid value for '--epsilon'"),
        (("people.csv", "--label", "ill"), "Missing option '--epsilon'"),
        (("people.csv", "--label", "ill", "--epsilon", 1, "--ledger", "no.db", "--account", "a"), "no such file"),
    ],
)
def test_a_new_user_is_told_in_one_line_and_nothing_is_made(table, tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    lines = table.read_text().splitlines()
    for name, text in (("empty", ""), ("header", lines[0] + "\n"), ("single", table.read_text())):
        (tmp_path / f"{name}.csv").write_text(text)
        (tmp_path / f"{name}.schema.toml").write_text(SCHEMA)
    (tmp_path / "single.schema.toml").write_text(SCHEMA.replace('["no", "yes"]', '["yes"]'))
    before = sorted(path.name for path in tmp_path.iterdir())
    assert said in refused(monkeypatch, capsys, "train", *words, "--out", "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_schema_of_one_class_is_not_even_drafted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.csv").write_text("age,ill\n1,yes\n2,yes\n")
    assert "one class" in refused(monkeypatch, capsys, "schema", "one.csv", "--label", "ill", "--yes")
    assert not (tmp_path / "one.schema.toml").exists()


def test_what_lies_in_the_way_stays_as_it_was(run, table, tmp_path, monkeypatch, capsys):
    asked = ("train", "people.csv", "--label", "ill", *QUICK)
    assert run(*asked, "--epsilon", 2, "--out", "run").exit_code == 0
    (tmp_path / "notes").write_text("a file")
    kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert "holds another run" in refused(monkeypatch, capsys, *asked, "--epsilon", 3, "--out", "run")
    assert "a file; want a new folder" in refused(monkeypatch, capsys, *asked, "--epsilon", 3, "--out", "notes")
    assert "could not be made" in refused(monkeypatch, capsys, *asked, "--epsilon", 3, "--out", "notes/run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == kept
    assert (tmp_path / "notes").read_text() == "a file"


def test_a_folder_that_holds_something_else_is_refused(run, table, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    asked = ("train", "people.csv", "--label", "ill", "--out")
    assert "not of a run" in run(*asked, "full", "--epsilon", 1).said
    assert run(*asked, "run", "--epsilon", 2, *QUICK).exit_code == 0
    assert "holds another run (epsilon=2.0 there, 3.0 asked for)" in run(*asked, "run", "--epsilon", 3, *QUICK).said


def test_an_unconfirmed_schema_is_refused_until_it_is_confirmed(run, tmp_path):
    write_table(tmp_path / "people.csv")
    assert run("schema", "people.csv", "--label", "ill", "--yes").exit_code == 0
    asked = ("train", "people.csv", "--label", "ill", "--epsilon", 4, "--out", "run", *QUICK)
    assert "drafted from the rows and not confirmed" in run(*asked).said
    assert "is there already" in run("schema", "people.csv", "--label", "ill", "--yes").said
    path = tmp_path / "people.schema.toml"
    path.write_text(path.read_text().replace("confirmed = false", "confirmed = true"))
    assert run(*asked).exit_code == 0


def test_private_bounds_are_found_billed_and_kept(run, tmp_path):
    write_table(tmp_path / "people.csv", rows=20_000)  # so many that the private quantile cannot stray
    text = SCHEMA.replace("high = 100", "high = 100\nconfirmed = false")
    (tmp_path / "people.schema.toml").write_text(text)
    asked = ("train", "people.csv", "--label", "ill", "--epsilon", 8, "--out", "run", *QUICK, "--private-bounds")
    assert "not confirmed: age" in run(*asked[:-1]).said
    assert run(*asked).exit_code == 0
    claim = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert "Selection" in json.dumps(claim["events"])
    assert accounting.delta(from_json(json.dumps(claim["events"])), epsilon=8.0) <= claim["delta"]
    age = pipeline.load("run").schema.columns["age"]
    assert 0 <= age.low < 25
    assert 70 < age.high <= 100
    assert "nothing was trained" in run(*asked).output
    assert pipeline.load("run").schema.columns["age"] == age
    write_table(tmp_path / "people.csv", rows=60)
    assert "too few for this epsilon" in run(*asked[:7], "small", *asked[8:]).said


def test_the_schema_command_asks_for_each_fact(run, tmp_path):
    write_table(tmp_path / "people.csv")
    told = run("schema", "people.csv", "--label", "ill", stdin="no|yes\ny\n0\n120\nnorth|south\n")
    assert told.exit_code == 0, told.said
    text = (tmp_path / "people.schema.toml").read_text()
    assert "high = 120.0" in text
    assert "\nconfirmed = false" not in text
    assert '["north", "south"]' in text


def test_a_schema_without_a_label_asks_for_it_or_takes_the_last_column(run, tmp_path):
    write_table(tmp_path / "people.csv")
    told = run("schema", "people.csv", stdin="ill\nno|yes\ny\n0\n120\nnorth|south\n")
    assert told.exit_code == 0, told.said
    assert 'name = "ill"' in (tmp_path / "people.schema.toml").read_text()
    assert run("schema", "people.csv", "--yes", "--out", "other.toml").exit_code == 0
    assert 'name = "ill"' in (tmp_path / "other.toml").read_text()
    assert "no such column" in run("schema", "people.csv", "--out", "wrong.toml", stdin="il\n").said


@pytest.mark.parametrize("room", [250, 3000, 40_000])  # no room for the coins, the first checkpoint, the report
def test_a_run_that_finds_no_room_says_so_and_can_go_on(table, tmp_path, room):
    code = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}));"
        "sys.argv = ['terrine', 'train', 'people.csv', '--label', 'ill', '--epsilon', '4', '--out', 'run',"
        " '--epochs', '4', '--lot', '100']; from terrine.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    counted, told, error = sorted(done.stderr.strip().splitlines())
    assert counted.startswith("counted nowhere")
    assert told.startswith("no accuracy will be measured")
    assert "could not be written" in error
    again = subprocess.run(
        [sys.executable, "-c", code.split(";", 2)[2].replace("sys.argv", "import sys; sys.argv")],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("learning-rate", 1e300), ("learning-rate", 1e-300), ("clip", 1e300), ("clip", 1e-300), ("epochs", 1e12),
        ("epochs", 1e300), ("epochs", 1e-300), ("tune", 10**9), ("accuracy-within", 1e-300), ("accuracy-within", 1e300),
    ],
)  # fmt: skip
def test_settings_that_no_training_survives_are_refused_before_the_charge(run, table, tmp_path, option, value):
    with Ledger.open(tmp_path / "b.db") as book:
        account = book.account("a", budget=Budget(2.0, 1e-5), unit=Unit.EXAMPLE)
        told = ("--ledger", "b.db", "--account", "a", "--out", "run")
        said = run("train", "people.csv", "--label", "ill", "--epsilon", 1, f"--{option}", value, *told).said
        assert option.replace("-", "_") in said
        assert "want between" in said
        assert not list(account.history())
    assert not (tmp_path / "run").exists()


def test_more_steps_than_anybody_waits_for_are_refused_by_the_number_of_epochs():
    settings = pipeline.Settings(table="people.csv", label="ill", epsilon=1.0, lot=1, epochs=9e5)
    with pytest.raises(InvalidArgument, match=r"epochs=900000.0: want at most .* steps in all"):
        recipes.recipe(settings, "linear", 10_000)

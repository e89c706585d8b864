"""What somebody does who has a table, a budget and no time: the whole walk, as the README tells it."""

import csv
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from terrine.cli import interrupted
from terrine.cli.app import main
from terrine.datasets.files import read
from terrine.ledger import Ledger

COLUMNS = ("person", "age", "workclass", "sex", "hours", "income")


def write_adult_like(path, rows=3000, seed=0):
    """Rows as Adult's, made up; a person is an age, a work class and a sex with a number."""
    draw = np.random.default_rng(seed)
    age, hours = draw.integers(17, 91, rows), draw.integers(1, 100, rows)
    work, sex = draw.choice(["Private", "State-gov", "?"], rows), draw.choice(["Female", "Male"], rows)
    income = np.where(age + hours + 10 * draw.normal(size=rows) > 110, ">50K", "<=50K")
    person = [f"{a}-{w}-{s}-{n}" for a, w, s, n in zip(age, work, sex, draw.integers(0, 3, rows), strict=True)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(zip(person, age, work, sex, hours, income, strict=True))


def write_adult(path):
    """The published rows; whoever agrees in age, work class, education, race and sex is taken for one person."""
    content = read("adult/adult.data", "5d7c39d7b8804f071cdd1f2a7c460872").decode("ascii")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for line in content.splitlines():
            if line.count(",") == 14:
                cells = line.split(", ")
                writer.writerow(["-".join(cells[i] for i in (0, 1, 3, 8, 9)), *(cells[i] for i in (0, 1, 9, 12, 14))])


def confirm(path):
    """What an owner does in an editor, who knows the form's limits."""
    path.write_text(path.read_text().replace("confirmed = false", "confirmed = true"))


def walk(run, tmp_path, dying_at, *options):
    assert run("schema", "adult.csv", "--label", "income", "--yes").exit_code == 0
    refused = run("train", "adult.csv", "--label", "income", "--epsilon", 2, "--person", "person", "--out", "run")
    assert "not confirmed" in refused.said
    confirm(tmp_path / "adult.schema.toml")
    assert run("ledger", "create", "budget.db", "--account", "patients", "--epsilon", 2, "--delta", 1e-6,
               "--unit", "person").exit_code == 0  # fmt: skip
    account = ("--ledger", "budget.db", "--account", "patients")
    asked = ("train", "adult.csv", "--label", "income", "--person", "person", *account, *options)
    with dying_at(7):
        run(*asked, "--epsilon", 2, "--out", "run").read()
    assert not (tmp_path / "run" / "manifest.json").exists()
    done = run(*asked, "--epsilon", 2, "--out", "run")
    assert done.exit_code == 0, done.said
    assert "at delta 1e-06" in done.output
    told = run("predict", "run", "adult.csv", "--out", "told.csv")
    assert told.exit_code == 0, told.said
    assert (tmp_path / "told.csv").read_text().count("\n") == (tmp_path / "adult.csv").read_text().count("\n")
    assert run("verify", "run", "--ledger", "budget.db").exit_code == 0
    with Ledger.open("budget.db", create=False) as book:
        assert len(list(book.account("patients").history())) == 1  # charged once, interrupted and all
    again = run(*asked, "--epsilon", 1, "--out", "more")
    assert again.exit_code != 0
    assert "left; nothing was charged" in again.said
    assert not (tmp_path / "more").exists()
    claim = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert (claim["unit"], claim["delta"]) == ("person", 1e-6)


def test_the_walk_on_rows_like_adults(run, tmp_path, dying_at):
    write_adult_like(tmp_path / "adult.csv")
    walk(run, tmp_path, dying_at, "--lot", 60, "--epochs", 10, "--accuracy-within", 0)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("TERRINE_DATA"), reason="TERRINE_DATA names no folder with Adult")
def test_the_walk_on_adult(run, tmp_path, dying_at):
    write_adult(tmp_path / "adult.csv")
    walk(run, tmp_path, dying_at, "--epochs", 10)


def test_ctrl_c_says_what_is_kept_what_was_charged_and_how_to_go_on(
    run, tmp_path, table, dying_at, capsys, monkeypatch
):
    run("ledger", "create", "budget.db", "--account", "patients", "--epsilon", 4, "--delta", 1e-6)
    account = ["--ledger", "budget.db", "--account", "patients"]
    words = ["train", "people.csv", "--label", "ill", "--epsilon", "3", "--epochs", "8", "--out", "run", *account]
    monkeypatch.setattr(sys, "argv", ["terrine", *words])
    codes = []
    with dying_at(5):
        try:
            main()
        except SystemExit as left:
            codes.append(left.code)
            raise
    assert codes == [130]
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(
        "terrine: interrupted: run keeps the model as it was last saved, and counts the steps since as spent; "
    )
    assert "the whole run was charged to 'patients', once: going on charges nothing more" in said
    assert said.endswith("the same terrine train command goes on from there")


def test_an_interruption_before_the_charge_says_so(tmp_path):
    stopped = pytest.raises(interrupted.Interrupted, match="nothing was charged")
    with stopped, interrupted.explained(tmp_path / "run", "terrine train"):
        raise KeyboardInterrupt


def test_an_account_that_has_too_little_left_proposes_what_fits(run, tmp_path, table):
    run("ledger", "create", "budget.db", "--account", "patients", "--epsilon", 1, "--delta", 1e-6)
    asked = ("train", "people.csv", "--label", "ill", "--ledger", "budget.db", "--account", "patients")
    refused = run(*asked, "--epsilon", 2, "--out", "run")
    assert refused.exit_code != 0
    assert not (tmp_path / "run").exists()
    fits = re.search(r"--epsilon (\S+) would fit", refused.said)
    assert fits, refused.said
    assert run(*asked, "--epsilon", fits[1], "--out", "run").exit_code == 0


def test_too_few_rows_for_an_accuracy_are_said_before_training(run, tmp_path, table):
    said = run("train", "people.csv", "--label", "ill", "--epsilon", 3, "--out", "run")
    assert "no accuracy will be measured within 2 points: 400 private rows at epsilon 3 are too few" in said.output
    assert "%" not in next(line for line in said.output.splitlines() if line.startswith("accuracy"))
    events = json.loads((tmp_path / "run" / "events.json").read_text())
    assert "Laplace" not in json.dumps(events)  # and nothing was paid for it
    quiet = run("train", "people.csv", "--label", "ill", "--epsilon", 3, "--accuracy-within", 0, "--out", "silent")
    assert "no accuracy will be" not in quiet.output


@pytest.mark.slow
def test_a_real_ctrl_c_leaves_with_130_and_the_same_command_goes_on(tmp_path):
    write_adult_like(tmp_path / "adult.csv")
    command = [sys.executable, "-m", "terrine"]
    subprocess.run([*command, "schema", "adult.csv", "--label", "income", "--yes"], cwd=tmp_path, check=True)
    confirm(tmp_path / "adult.schema.toml")
    words = ["train", "adult.csv", "--label", "income", "--epsilon", "2", "--lot", "60", "--epochs", "20"]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell may have it ignored
    begun = subprocess.Popen(
        [*command, *words, "--out", "run"], cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    )
    while not (tmp_path / "run" / "owner" / "checkpoint.pt").exists() and begun.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    begun.send_signal(signal.SIGINT)
    _, said = begun.communicate(timeout=300)
    assert begun.returncode == 130, said
    assert "interrupted: run keeps the model as it was last saved" in said.splitlines()[-1]
    assert subprocess.run([*command, *words, "--out", "run"], cwd=tmp_path).returncode == 0
    assert Path(tmp_path / "run" / "manifest.json").exists()

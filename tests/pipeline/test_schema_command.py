"""`terrine schema`: a bound is typed or unknown, never confirmed by Enter; answers are kept when interrupted."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from terrine import tables
from terrine.tables import Category, Date, Hashed, Ignored, Number, Schema, Text
from tests.pipeline.conftest import write_table

ASKED = ("schema", "people.csv", "--label", "ill")


@pytest.fixture
def people(tmp_path):
    return write_table(tmp_path / "people.csv")


def columns(tmp_path, name="people"):
    return Schema.load(tmp_path / f"{name}.schema.toml")


def answered(*lines):
    return "\n".join(lines) + "\n"


def test_enter_does_not_confirm_a_bound_that_was_guessed(run, people, tmp_path):
    told = run(*ASKED, stdin=answered("", "=", "", "", "0", "", "120", "", "north|south"))
    assert told.exit_code == 0, told.said
    assert told.output.count("Enter does not take it from the rows") == 2
    assert columns(tmp_path).columns == {
        "name": Ignored(), "age": Number(0, 120), "city": Category(("north", "south"))
    }  # fmt: skip
    assert columns(tmp_path).classes == ("no", "yes")


def test_low_above_high_is_asked_again(run, people, tmp_path):
    told = run(*ASKED, stdin=answered("=", "", "120", "0", "0", "many", "120", "="))
    assert "120 is not below 0: once more" in told.output
    assert columns(tmp_path).columns["age"] == Number(0, 120)


def test_unknown_is_an_answer_and_drops_the_guess(run, people, tmp_path):
    told = run(*ASKED, stdin=answered("=", "", "unknown", "unknown", "16"))
    assert told.exit_code == 0, told.said
    found = columns(tmp_path)
    assert found.columns["age"] == Number(confirmed=False, unknown=True)
    assert found.columns["city"] == Hashed(16)
    assert "bounds unknown: age" in told.output
    assert "100" not in (tmp_path / "people.schema.toml").read_text()
    refused = run("train", "people.csv", "--label", "ill", "--epsilon", 1, "--out", "run")
    assert "bounds of age are unknown; want --private-bounds" in refused.said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("word", ["-", "leave out"])
def test_a_number_can_be_left_out(run, people, tmp_path, word):
    assert run(*ASKED, stdin=answered("=", "", word, "=")).exit_code == 0
    assert columns(tmp_path).columns["age"] == Ignored()


def test_a_column_can_be_of_another_kind(run, people, tmp_path):
    told = run(*ASKED, stdin=answered("=", "text", "32", "category", "young|old", "date", "2020-01-01", "2019-01-01",
                                      "2020-01-01", "2021-01-01"))  # fmt: skip
    assert told.exit_code == 0, told.said
    assert columns(tmp_path).columns == {
        "name": Text(32), "age": Category(("young", "old")), "city": Date("2020-01-01", "2021-01-01")
    }  # fmt: skip


def test_answers_are_kept_and_the_same_command_goes_on(run, people, tmp_path):
    cut = run(*ASKED, stdin=answered("=", "", "0"))  # the input ends before the answer
    assert "no more answers came" in cut.said
    assert "--yes" in cut.said
    assert "The answers so far are kept in people.schema.toml; the same command goes on." in cut.output
    assert set(columns(tmp_path).unconfirmed) == {"age", "city"}
    told = run(*ASKED, stdin=answered("0", "120", "="))
    assert told.exit_code == 0, told.said
    assert "Going on: 2 facts are still open." in told.output
    assert not columns(tmp_path).unconfirmed
    assert "is there already" in run(*ASKED).said
    assert "is for label 'ill'" not in run(*ASKED, "--force", "--yes").said
    assert "is for label 'ill', not 'city'" in run("schema", "people.csv", "--label", "city").said


def test_control_c_keeps_the_answers(people, tmp_path):
    """Driven through a pseudo-terminal, as a user would."""
    code = "import sys; from terrine.cli import main; sys.argv = ['terrine', *sys.argv[1:]]; main()"
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", code, *ASKED], cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=lambda: (signal.signal(signal.SIGINT, signal.SIG_DFL), os.dup2(theirs, 0)),
    )  # fmt: skip
    os.close(theirs)
    seen = until(ours, "its classes")
    os.write(ours, b"no|yes\n")
    until(ours, "leave it out")
    os.write(ours, b"\n")
    until(ours, "the lowest it can be")
    for _ in range(20):  # a signal between the prompt and the read of its answer is noticed with the next one
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=5)
            break
    seen += until(ours, "the same command goes on")
    assert child.wait(timeout=60) == 130
    os.close(ours)
    assert "Traceback" not in seen
    found = columns(tmp_path)
    assert set(found.unconfirmed) == {"age", "city"}
    assert found.columns["name"] == Ignored()


def until(end, text, patience=90):
    """What the terminal shows, up to some text."""
    seen, late = "", time.monotonic() + patience
    while text not in seen:
        assert time.monotonic() < late, seen
        if select.select([end], [], [], 1)[0]:
            seen += os.read(end, 4096).decode(errors="replace")
    return seen


def test_accepted_guesses_are_told_to_everybody(run, people, tmp_path):
    told = run(*ASKED, "--accept-guesses")
    assert "taken from the rows, which leaks: age, city, ill" in told.output
    found = columns(tmp_path)
    assert not found.unconfirmed
    assert found.guessed == ("age", "city", "ill")
    quick = ("--epsilon", 4, "--epochs", 2, "--lot", 100)
    assert run("train", "people.csv", "--label", "ill", "--out", "run", *quick).exit_code == 0
    for page in ("privacy.json", "model_card.md", "report.html"):
        assert "GUESSED FROM THE PRIVATE ROWS" in (tmp_path / "run" / page).read_text()


def test_a_file_in_another_encoding_asks_for_it(run, tmp_path):
    (tmp_path / "t.csv").write_bytes("ort;ill\nKöln;no\nRom;yes\n".encode("cp1252"))
    told = run("schema", "t.csv", stdin=answered("ill", "", "utf8000", "latin-1", "=", "="))
    assert told.exit_code == 0, told.said
    found = columns(tmp_path, "t")
    assert found.file == tables.FileFormat("latin-1", ";")
    assert found.columns["ort"] == Category(("Köln", "Rom"))


def test_what_is_given_need_not_be_asked(run, tmp_path):
    (tmp_path / "t.csv").write_bytes("pid|ort|ill\n1|Köln|no\n1|Rom|yes\n".encode("cp1252"))
    told = run(
        "schema",
        "t.csv",
        "--encoding",
        "cp1252",
        "--separator",
        "pipe",
        "--person",
        "pid",
        stdin=answered("", "=", "="),
    )
    assert told.exit_code == 0, told.said
    assert columns(tmp_path, "t").columns["pid"] == Ignored()
    assert "want one of utf-8" in run("schema", "t.csv", "--encoding", "x", "--force").said
    assert "want one character" in run("schema", "t.csv", "--separator", "ab", "--force").said
    assert "want a column of the table" in run("schema", "t.csv", "--person", "x", "--force", "--yes").said


def test_a_label_that_is_a_number_has_its_bounds_asked(run, people, tmp_path):
    told = run(
        "schema",
        "people.csv",
        "--label",
        "age",
        "--target",
        "number",
        stdin=answered("unknown", "0", "120", "", "=", "="),
    )
    assert told.exit_code == 0, told.said
    assert "have to be known" in told.output
    found = columns(tmp_path)
    assert (found.classes, found.target) == ((), Number(0, 120))

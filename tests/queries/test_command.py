"""`terrine query`: what it prints, what it refuses with one line and exit code 2, and what it charges."""

import json
import sys
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from terrine.cli.app import main

SQL = "SELECT region, COUNT(*) AS n, AVG(cost) AS mean FROM visits GROUP BY region"
USUAL = ["--person", "patient_id", "--epsilon", "1", "--bounds", "cost=0:10000", "--keys", "region=N,S"]


@pytest.fixture
def folder(tmp_path):
    generator = np.random.default_rng(0)
    regions = np.array(["N", "S", "E"])[generator.integers(0, 3, 6000)]
    made = {"patient_id": generator.integers(0, 2000, 6000), "region": regions, "cost": generator.gamma(2, 1000, 6000)}
    pyarrow.parquet.write_table(pa.table(made), tmp_path / "visits.parquet")
    return tmp_path


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """The command in this process, from the folder: starting one anew takes seconds."""
    monkeypatch.chdir(folder)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["terrine", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        shown = capsys.readouterr()
        return Done(left.value.code, shown.out, shown.err)

    return run


def test_json(run):
    done = run("query", "visits.parquet", "--sql", SQL, *USUAL, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["columns"] == ["region", "n", "n_half_width", "mean", "mean_half_width"]
    assert [row[0] for row in found["rows"]] == ["N", "S"]
    assert set(found["half_widths"]) == {"n", "mean"}
    assert all(width > 0 for width in found["half_widths"].values())
    assert 0 < found["epsilon"] <= 1
    assert found["delta"] == 0


def test_text_explain_and_mock(run):
    shown = run("query", "visits.parquet", "--sql", SQL, *USUAL)
    assert "half-widths hold with 95%" in shown.stdout
    explained = run("query", "visits.parquet", "--sql", SQL, *USUAL, "--explain")
    assert "price: epsilon 1, delta 0" in explained.stdout
    mocked = json.loads(run("query", "visits.parquet", "--sql", SQL, *USUAL, "--mock", "--json").stdout)
    assert mocked["mock"] is True
    assert len(mocked["rows"]) == 2


def test_what_is_asked_is_charged_and_what_is_free_is_not(run):
    opened = run(
        "ledger", "create", "ledger.db", "--epsilon", "1.5", "--delta", "0", "--unit", "person", "--account", "p"
    )
    assert opened.returncode == 0, opened.stderr
    paying = ["--ledger", "sqlite:///ledger.db", "--account", "p", "--json"]
    for free in ("--explain", "--mock"):
        assert run("query", "visits.parquet", "--sql", SQL, *USUAL, *paying, free).returncode == 0
    refused = run("query", "visits.parquet", "--sql", "SELECT * FROM visits", *USUAL, *paying)
    assert (refused.returncode, len(refused.stderr.strip().splitlines())) == (2, 1)
    first = run("query", "visits.parquet", "--sql", SQL, *USUAL, *paying)
    assert first.returncode == 0, first.stderr
    second = run("query", "visits.parquet", "--sql", SQL, *USUAL, *paying)
    assert second.returncode == 2
    assert second.stdout == ""
    assert "nothing was charged" in second.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere.parquet", "--sql", SQL, *USUAL],
        [
            "visits.parquet",
            "--sql",
            "SELECT region, COUNT(*) FROM visits GROUP BY region",
            "--person",
            "patient_id",
            "--epsilon",
            "1",
        ],
        ["visits.parquet", "--sql", SQL, *USUAL[:-4], "--keys", "region=N,S"],
        ["visits.parquet", "--sql", SQL, *USUAL, "--bounds", "cost=5"],
        ["visits.parquet", "--sql", SQL, *USUAL, "--keys", "region"],
        ["visits.parquet", "--sql", SQL.replace("visits", "other"), *USUAL],
        ["visits.parquet", "--sql", SQL, "--person", "nobody", *USUAL[2:]],
        ["visits.parquet", "--sql", SQL, *USUAL[:2], "--epsilon", "0", *USUAL[4:]],
        ["visits.parquet", "--sql", SQL, *USUAL[:2], "--epsilon", "100", *USUAL[4:]],
    ],
)
def test_refused_with_one_line(run, arguments):
    done = run("query", *arguments, "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("terrine: ")


def test_private_keys_and_a_histogram(run):
    private = [*USUAL[:-1], "region=private"]
    found = json.loads(run("query", "visits.parquet", "--sql", SQL, *private, "--json").stdout)
    assert [row[0] for row in found["rows"]] == ["E", "N", "S"]
    assert 0 < found["delta"] < 1e-6
    sql = "SELECT cost, COUNT(*) AS n FROM visits GROUP BY cost"
    told = ["--person", "patient_id", "--epsilon", "1", "--rows", "5", "--bins", "cost=0,1000,5000"]
    found = json.loads(run("query", "visits.parquet", "--sql", sql, *told, "--json").stdout)
    assert [row[0] for row in found["rows"]] == ["[0, 1000)", "[1000, 5000]"]


@pytest.fixture
def ask(run, folder):
    """Ask about a small CSV file, made of these bytes."""

    def ask(content, sql, *more, epsilon="1"):
        (folder / "v.csv").write_bytes(content)
        return run("query", "v.csv", "--person", "p", "--epsilon", epsilon, "--sql", sql, *more)

    return ask


COUNT = "SELECT COUNT(*) AS n FROM v"
PLAIN = b"p,age,city\n1,2,N\n"


@pytest.mark.parametrize(
    ("content", "more"),
    [
        (b"\xef\xbb\xbfp,age\n1,2\n", ()),
        (b"p;age\n1;2\n", ()),
        (b"p!age\n1!2\n", ("--separator", "!")),
        ("p,caf\u00e9\n1,2\n".encode("cp1252"), ("--encoding", "cp1252")),
    ],
    ids=["byte order mark", "semicolons", "another separator", "cp1252"],
)
def test_csv_files_as_spreadsheets_write_them(ask, content, more):
    assert ask(content, COUNT, *more, "--json").returncode == 0


@pytest.mark.parametrize(
    ("content", "sql", "more", "said"),
    [
        ("p,caf\u00e9\n1,2\n".encode("cp1252"), COUNT, (), "want --encoding"),
        (b"", COUNT, (), "the file is empty"),
        (b"p,x,X\n1,2,3\n", COUNT, (), "'x' and 'X'"),
        (PLAIN, COUNT, ("--public", "nosuch.csv"), "--public nosuch.csv"),
        (PLAIN, COUNT, ("--delta", "2"), "delta=2.0: want 0 <= delta < 1"),
        (PLAIN, "SELECT AVG(age) AS m FROM v", (), "want --bounds age=LOW:HIGH"),
        (PLAIN, "SELECT AVG(age) AS m FROM v", ("--bounds", "age=5:1"), "--bounds age=(5.0, 1.0): want LOW:HIGH"),
        (PLAIN, f"SELECT city, {COUNT[7:]} GROUP BY city", (), "want --keys city=A,B"),
        (PLAIN, f"SELECT city, {COUNT[7:]} GROUP BY city", ("--keys", "town=N"), "--keys town: no GROUP BY column"),
        (PLAIN, f"{COUNT} WHERE when > 1", (), "not understood at 'when' after"),
        (PLAIN, f"{COUNT} WHERE age = 'a", (), "is a quote open"),
    ],
)
def test_a_refusal_says_the_next_step_in_the_words_of_the_command(ask, content, sql, more, said):
    done = ask(content, sql, *more)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert said in done.stderr
    assert not [word for word in ("bounds={", "keys={", "bounds[", "keys[", "sqlglot", "--weak") if word in done.stderr]


def test_an_answer_that_no_ledger_counts_says_so(ask):
    assert ask(PLAIN, COUNT).stderr.splitlines() == [
        "counted nowhere: --ledger and --account would charge this answer to a budget"
    ]
    assert ask(PLAIN, COUNT, "--mock").stderr == ""
    assert ask(PLAIN, COUNT, "--explain").stderr == ""


def test_private_keys_say_whose_the_delta_is(ask):
    told = ask(PLAIN, f"SELECT city, {COUNT[7:]} GROUP BY city", "--keys", "private", "--explain").stdout
    assert "delta 1e-08 is what private keys may fail by" in told

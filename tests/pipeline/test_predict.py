"""`terrine predict` reads what `train` reads, keeps columns, and works on what is handed on."""

import csv
import shutil
import sqlite3

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from terrine import pipeline
from terrine.pipeline.folder import PUBLIC_FILES
from tests.pipeline.conftest import SCHEMA, write_table

NEW = {"id": ["07", "7", "NA"], "age": ["95", "2", ""], "city": ["south", "north", "Köln"], "extra": ["x", "y", "z"]}
QUICK = ("--epsilon", 8, "--epochs", 3, "--lot", 100, "--audit", 0)


@pytest.fixture(scope="module")
def handed_on(tmp_path_factory):
    """A finished run, of which only what may be handed on is left."""
    home = tmp_path_factory.mktemp("home")
    table = write_table(home / "people.csv")
    (home / "people.schema.toml").write_text(SCHEMA)
    settings = pipeline.Settings(table=str(table), label="ill", epsilon=8.0, epochs=3, lot=100, audit=0)
    pipeline.train(settings, home / "run")
    there = home / "handed-on"
    there.mkdir()
    for name in PUBLIC_FILES:
        if (home / "run" / name).exists():
            shutil.copy(home / "run" / name, there)
    return there


def write(folder, form):
    """The new rows in a format; gives the words that name them."""
    lines = [list(NEW), *zip(*NEW.values(), strict=True)]
    text = "\n".join(";".join(line) for line in lines) + "\n"
    match form:
        case "csv":
            (folder / "n.csv").write_text(text.replace(";", ","), encoding="utf-8")
            return ("n.csv",)
        case "latin-1":
            (folder / "n.csv").write_text(text, encoding="latin-1")
            return ("n.csv", "--encoding", "latin-1")
        case "utf-16":
            (folder / "n.tsv").write_text(text.replace(";", "\t"), encoding="utf-16")
            return ("n.tsv",)
        case "sqlite":
            with sqlite3.connect(folder / "n.db") as opened:
                opened.execute(f"create table fresh ({', '.join(NEW)})")
                opened.executemany("insert into fresh values (?, ?, ?, ?)", lines[1:])
            opened.close()
            return ("n.db", "--table", "fresh")
        case "folder":
            (folder / "n").mkdir()
            for place, line in enumerate(lines[1:]):
                feather.write_feather(pa.table({name: [cell] for name, cell in zip(NEW, line, strict=True)}),
                                      folder / "n" / f"{place}.arrow")  # fmt: skip
            return ("n",)
        case _:
            parquet.write_table(pa.table(NEW), folder / "n.parquet")
            return ("n.parquet",)


@pytest.mark.parametrize("form", ["csv", "latin-1", "utf-16", "sqlite", "folder", "parquet"])
def test_every_format_gives_the_same_answer(run, handed_on, tmp_path, form):
    told = run("predict", handed_on, *write(tmp_path, form), "--keep", "id", "--keep", "extra", "--probabilities")
    assert told.exit_code == 0, told.said
    answer = list(csv.DictReader(told.output.splitlines()))
    assert list(answer[0]) == ["id", "extra", "prediction", "no", "yes"]
    assert [row["id"] for row in answer] == ["07", "7", "NA"]
    assert [row["prediction"] for row in answer[:2]] == ["yes", "no"]
    model = pipeline.load(handed_on)
    shares = model.probabilities(pa.table(NEW))
    assert np.allclose([[float(row["no"]), float(row["yes"])] for row in answer], shares, atol=1e-6)


def test_answers_go_into_a_file_for_their_owner(run, handed_on, tmp_path):
    assert run("predict", handed_on, *write(tmp_path, "csv"), "--keep", "id", "--out", "told.csv").exit_code == 0
    assert (tmp_path / "told.csv").read_text().splitlines()[:2] == ["id,prediction", "07,yes"]
    assert (tmp_path / "told.csv").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--keep", "ID"), "--keep ID: no such column; want one of id, age"),
        (("--keep", "id", "--keep", "id"), "has such a column already"),
        (("--encoding", "x"), "want one of utf-8"),
        (("--table", "t"), "neither a SQLite nor a DuckDB file"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_file(run, handed_on, tmp_path, more, said):
    told = run("predict", handed_on, *write(tmp_path, "csv"), *more, "--out", "told.csv")
    assert told.exit_code != 0
    assert said in told.said
    assert not (tmp_path / "told.csv").exists()


def test_a_table_without_a_column_of_the_schema_is_refused(run, handed_on, tmp_path):
    (tmp_path / "n.csv").write_text("age\n3\n")
    assert "the table lacks city" in run("predict", handed_on, "n.csv").said
    (tmp_path / "n.npy").write_bytes(b"no array")
    assert "not an array of numbers" in run("predict", handed_on, "n.npy").said


@pytest.mark.parametrize("form", ["latin-1", "sqlite", "folder", "parquet"])
def test_a_run_on_every_format_is_the_same_run(run, tmp_path, form):
    """Seeded, so that models can be compared."""
    rows = write_table(tmp_path / "plain.csv", rows=60).read_text().replace("north", "nörth").splitlines()
    cells = [line.split(",") for line in rows]
    table = pa.table({name: [line[at] for line in cells[1:]] for at, name in enumerate(cells[0])})
    schema = SCHEMA.replace("north", "nörth")
    (tmp_path / "plain.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    words = ["t.csv"]
    match form:
        case "latin-1":
            (tmp_path / "t.csv").write_text("\n".join(";".join(line) for line in cells) + "\n", encoding="latin-1")
            schema = '[file]\nencoding = "latin-1"\nseparator = ";"\n' + schema
        case "sqlite":
            with sqlite3.connect(tmp_path / "t.db") as opened:
                opened.execute("create table rows (name, age, city, ill)")
                opened.executemany("insert into rows values (?, ?, ?, ?)", cells[1:])
            opened.close()
            words = ["t.db", "--table", "rows"]
        case "folder":
            (tmp_path / "t").mkdir()
            for place in range(2):
                feather.write_feather(table.slice(30 * place, 30), tmp_path / "t" / f"{place}.feather")
            words = ["t"]
        case "parquet":
            parquet.write_table(table, tmp_path / "t.parquet")
            words = ["t.parquet"]
    (tmp_path / "s.toml").write_text(schema, encoding="utf-8")
    (tmp_path / "plain.schema.toml").write_text(SCHEMA.replace("north", "nörth"), encoding="utf-8")
    asked = ("--label", "ill", "--seed", 1, *QUICK)
    for out, given in (("one", ["plain.csv"]), ("two", [*words, "--schema", "s.toml"])):
        told = run("train", *given, *asked, "--out", out)
        assert told.exit_code == 0, told.said
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()


def test_predict_writes_over_nothing(run, handed_on, tmp_path):
    """The new rows themselves were lost to `--out` with their own name."""
    write(tmp_path, "csv")
    before = (tmp_path / "n.csv").read_bytes()
    for more in ((), ("--force",)):
        assert "is the table itself" in run("predict", handed_on, "n.csv", "--out", "n.csv", *more).said
    assert (tmp_path / "n.csv").read_bytes() == before
    assert run("predict", handed_on, "n.csv", "--out", "told.csv").exit_code == 0
    told = (tmp_path / "told.csv").read_bytes()
    assert "--force" in run("predict", handed_on, "n.csv", "--out", "told.csv", "--probabilities").said
    assert (tmp_path / "told.csv").read_bytes() == told
    assert run("predict", handed_on, "n.csv", "--out", "told.csv", "--probabilities", "--force").exit_code == 0
    assert (tmp_path / "told.csv").read_bytes() != told
    assert "no folder nowhere; want" in run("predict", handed_on, "n.csv", "--out", "nowhere/told.csv").said


def test_a_column_that_is_lacking_is_said_with_those_that_are_there(run, handed_on, tmp_path):
    (tmp_path / "n.csv").write_text("AGE,City\n1,north\n")
    said = run("predict", handed_on, "n.csv").said
    assert "lacks age, city" in said
    assert "it has 'AGE', 'City'" in said

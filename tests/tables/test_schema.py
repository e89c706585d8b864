"""A row becomes features by public facts alone; what is not confirmed or not listed has a defined treatment."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from terrine import tables
from terrine.errors import InvalidArgument
from terrine.tables import Category, Ignored, Number, Schema

SCHEMA = Schema(
    "income",
    ("low", "high"),
    {"age": Number(0, 100), "work": Category(("private", "state")), "row": Ignored()},
)


def table(**columns):
    return pa.table(columns)


def test_numbers_are_clamped_and_scaled_and_gaps_have_a_feature():
    found = SCHEMA.encode(table(age=[0, 50, 100, 400, None], work=["private"] * 5))
    assert found[:, 0].tolist() == [-1, 0, 1, 1, 0]
    assert found[:, 1].tolist() == [0, 0, 0, 0, 1]


def test_text_where_a_number_should_be_counts_as_missing():
    found = SCHEMA.encode(table(age=["12", "many", " 50 "], work=["state"] * 3))
    assert found[:, 1].tolist() == [0, 1, 0]


def test_unlisted_and_missing_categories_count_as_other():
    found = SCHEMA.encode(table(age=[1, 1, 1, 1], work=["private", " state ", "church", None]))
    assert found[:, 2:].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]


def test_a_row_does_not_depend_on_the_other_rows():
    rows = table(age=[3, None, 900, 40], work=["private", "x", None, "state"])
    alone = [SCHEMA.encode(rows.slice(place, 1))[0] for place in range(4)]
    assert np.array_equal(np.stack(alone), SCHEMA.encode(rows))


def test_labels_are_places_among_the_classes():
    assert SCHEMA.labels(table(income=["high", "low"])).tolist() == [1, 0]
    assert Schema("y", ("0", "1")).labels(table(y=[0.0, 1.0])).tolist() == [0, 1]
    assert Schema("y", ("false", "true")).labels(table(y=[True, False])).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("label", "values", "said"),
    [
        ("incme", ["low"], "did you mean 'income'"),
        ("income", ["low", "huge"], "holds 'huge'"),
        ("income", ["low", None], "is missing in some rows"),
    ],
)
def test_a_label_that_does_not_fit_is_refused(label, values, said):
    schema = Schema(label, ("low", "high"))
    with pytest.raises(InvalidArgument, match=said):
        schema.labels(table(income=values))


def test_toml_round_trips(tmp_path):
    odd = Schema('a "b"\n', ("x\\", "é"), {"c d": Number(-1.5, 2), "e": Category(("1", "|"), confirmed=False)}, False)
    (tmp_path / "s.toml").write_text(odd.to_toml(), encoding="utf-8")
    assert Schema.load(tmp_path / "s.toml") == odd
    assert odd.unconfirmed == ("e", 'a "b"\n')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[label", "not TOML"),
        ("[label]\nname = 'y'\n", "missing or malformed"),
        ("[label]\nname='y'\nclasses=['a']\n[columns]\n", "two or more"),
        ("[label]\nname='y'\nclasses=['a','b']\n[columns.x]\nkind='numbr'\n", "want one of number"),
        ("[label]\nname='y'\nclasses=['a','b']\n[columns.x]\nkind='number'\nlow=1\n", "want low and high"),
        ("[label]\nname='y'\nclasses=['a','b']\n[columns.x]\nkind='number'\nlow=3\nhigh=1\n", "want low < high"),
    ],
)
def test_a_schema_that_is_not_one_is_refused(tmp_path, text, said):
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(InvalidArgument, match=said) as caught:
        Schema.load(tmp_path / "s.toml")
    assert "s.toml" in str(caught.value)


def test_a_draft_is_all_unconfirmed_and_rounds_outward():
    rows = table(
        income=["a", "b"] * 60,
        age=list(range(17, 77)) * 2,
        work=["x", "y", None] * 40,
        name=[f"person {place}" for place in range(120)],
    )
    found = tables.draft(rows, "income")
    assert found.columns["age"] == Number(0, 80, confirmed=False)
    assert found.columns["work"] == Category(("x", "y"), confirmed=False)
    assert found.columns["name"] == Ignored(confirmed=False)
    assert set(found.unconfirmed) == {"age", "work", "name", "income"}


def test_a_label_of_one_class_is_refused():
    with pytest.raises(InvalidArgument, match="one class"):
        tables.draft(table(income=["a", "a"]), "income")


def test_every_format_reads_the_same(tmp_path):
    rows = table(age=[1, 2], work=["a", "b"])
    schema = tables.Schema("y", ("0", "1"), {"age": tables.Number(0, 10), "work": tables.Category(("a", "b"))})
    (tmp_path / "t.csv").write_text("age,work\n1,a\n2,b\n")
    (tmp_path / "t.tsv").write_text("age\twork\n1\ta\n2\tb\n")
    parquet.write_table(rows, tmp_path / "t.parquet")
    feather.write_feather(rows, tmp_path / "t.arrow")
    for ending in ("csv", "tsv", "parquet", "arrow"):
        read = tables.read(tmp_path / f"t.{ending}")
        assert read.column_names == ["age", "work"]
        assert np.array_equal(schema.encode(read), schema.encode(rows))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.csv", b"", "the file is empty"),
        ("t.csv", b"a,b\n", "no rows"),
        ("t.csv", b"a,a\n1,2\n", "two columns are named 'a'"),
        ("t.csv", b"a,b\n1\n1,2,3\n", "not readable as csv"),
        ("t.parquet", b"no parquet", "not readable as parquet"),
        ("t.xlsx", b"x", "ending in .csv"),
    ],
)
def test_a_file_that_is_not_a_table_is_one_clear_line(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidArgument, match=said) as caught:
        tables.read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="no such file"):
        tables.read(tmp_path / "t.csv")

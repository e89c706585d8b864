"""Files as they come: encodings, separators, many files, databases. A row changes only its own reading."""

import gzip
import sqlite3

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from terrine import tables
from terrine.errors import InvalidArgument
from terrine.tables import Category, Date, FileFormat, Number, Schema

SCHEMA = Schema("ill", ("no", "yes"), {"âge": Number(0, 100), "ort": Category(("Köln", "Rom"))})
ROWS = [("30", "Köln", "no"), ("70", "Rom", "yes"), ("", "Wien", "no")]
EXPECTED = [[-0.4, 0, 1, 0, 0], [0.4, 0, 0, 1, 0], [0, 1, 0, 0, 1]]


def text(separator=",", end="\n"):
    return end.join(separator.join(row) for row in [("âge", "ort", "ill"), *ROWS]) + end


def check(source, schema=SCHEMA):
    assert np.allclose(schema.encode(source), EXPECTED)
    assert schema.labels(source).tolist() == [0, 1, 0]
    assert source.num_rows == 3


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "latin-1", "cp1252"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_text_file_is_read_as_it_was_sniffed(tmp_path, encoding, separator, packed):
    path = tmp_path / ("t.csv.gz" if packed else "t.csv")
    data = text(separator, "\r\n").encode(encoding)
    path.write_bytes(gzip.compress(data) if packed else data)
    source, form = tables.sniffed_table(path)
    assert (form.separator, form.confirmed) == (separator, True)  # told by the line of column names
    check(source)
    kept = Schema("ill", SCHEMA.classes, SCHEMA.columns, file=form)
    (tmp_path / "s.toml").write_text(kept.to_toml(), encoding="utf-8")
    loaded = Schema.load(tmp_path / "s.toml")
    assert loaded == kept
    check(tables.open_table(path, loaded.file))


def test_an_encoding_that_the_rows_told_waits_for_its_owner(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"name,ill\nM\xfcller,no\nRoss,yes\n")
    source, form = tables.sniffed_table(tmp_path / "t.csv")
    assert (form.encoding, form.confirmed) == ("cp1252", False)
    assert source.column("name").to_pylist() == ["Müller", "Ross"]
    drafted = tables.draft(source, "ill", form=form)
    assert "the encoding" in drafted.unconfirmed


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "utf-16"])
def test_a_cell_that_cannot_be_decoded_is_missing_and_no_other_is(tmp_path, encoding):
    good, odd = "a,b\nö,1\n".encode(encoding), {"utf-8": b"\xff", "cp1252": b"\x81", "utf-16": b"\x00\xd8"}[encoding]
    tail = ",2\nü,3\n".encode("utf-16-le" if encoding == "utf-16" else encoding)
    (tmp_path / "t.csv").write_bytes(good + odd + tail)
    source = tables.open_table(tmp_path / "t.csv", FileFormat(encoding))
    assert source.column("a").to_pylist() == ["ö", None, "ü"]
    assert source.column("b").to_pylist() == ["1", "2", "3"]


@pytest.mark.parametrize("first", ["", "\n", "sep=;\n", "\ufeff"])
def test_lines_before_the_names_are_passed_over(tmp_path, first):
    (tmp_path / "t.csv").write_text(first + text(";"), encoding="utf-8")
    check(tables.open_table(tmp_path / "t.csv"))


def test_quotes_hold_separators_and_line_breaks(tmp_path):
    (tmp_path / "t.csv").write_text('"a;b",c\n"x, ""y""\nz",1\n', encoding="utf-8")
    source = tables.open_table(tmp_path / "t.csv")
    assert source.column_names == ["a;b", "c"]
    assert source.column("a;b").to_pylist() == ['x, "y"\nz']


def test_an_index_without_a_name_has_one(tmp_path):
    (tmp_path / "t.csv").write_text(",a\n0,1\n")
    assert tables.open_table(tmp_path / "t.csv").column_names == ["column 1", "a"]


def typed():
    columns = {"âge": [30.0, 70.0, None], "ort": ["Köln", "Rom", "Wien"], "ill": ["no", "yes", "no"]}
    return pa.table(columns)


@pytest.mark.parametrize("ending", ["parquet", "arrow", "feather"])
@pytest.mark.parametrize("many", [False, True])
def test_typed_files_one_or_many(tmp_path, ending, many):
    folder, table = tmp_path / "set", typed()
    folder.mkdir()
    parts = [table.slice(0, 2), table.slice(2)] if many else [table]
    for place, part in enumerate(parts):
        (parquet.write_table if ending == "parquet" else feather.write_feather)(part, folder / f"p{place}.{ending}")
    check(tables.open_table(folder))
    check(tables.open_table(folder / f"p*.{ending}"))


def test_an_arrow_stream_and_a_categorical_column(tmp_path):
    table = typed().set_column(1, "ort", typed()["ort"].dictionary_encode())
    with pa.ipc.new_stream(str(tmp_path / "t.arrow"), table.schema) as stream:
        stream.write_table(table)
    check(tables.open_table(tmp_path / "t.arrow"))


def sqlite(path):
    with sqlite3.connect(path) as opened:
        opened.execute('create table visits ("âge", ort text, ill text)')
        opened.executemany(
            "insert into visits values (?, ?, ?)", [(30, *ROWS[0][1:]), ("70", *ROWS[1][1:]), (None, *ROWS[2][1:])]
        )
    opened.close()
    return path


def duck(path):
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect(str(path)) as opened:
        opened.execute('create table visits ("âge" integer, ort varchar, ill varchar)')
        opened.execute("insert into visits values (30,'Köln','no'), (70,'Rom','yes'), (null,'Wien','no')")
    return path


@pytest.mark.parametrize("made", [sqlite, duck])
def test_tables_of_databases(tmp_path, made):
    path = made(tmp_path / "clinic.db")
    check(tables.open_table(f"{path}::visits"))
    check(tables.open_table(path))  # its only table
    assert tables.schema_path(f"{path}::visits") == tmp_path / "clinic.visits.schema.toml"
    with pytest.raises(InvalidArgument, match="want one of visits"):
        tables.open_table(f"{path}::visit")


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("a.csv", "a"),
        ("a.csv.gz", "a"),
        ("d/", "d"),
        ("d/p*.parquet", "p_"),
        ("x.db::t", "x.t"),
        ("x.db::a b;", "x.a_b_"),
    ],
)
def test_where_a_schema_lies(where, name):
    assert tables.schema_path(where).name == f"{name}.schema.toml"


def test_rows_are_read_in_parts(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n" + "".join(f"{place},x\n" for place in range(100_000)))
    source = tables.open_table(tmp_path / "t.csv")
    assert max(batch.num_rows for batch in source.batches()) <= 2**15
    schema = Schema("b", ("x", "y"), {"a": Number(0, 99_999)})
    assert np.allclose(schema.encode(source)[:, 0], np.linspace(-1, 1, 100_000), atol=1e-6)


def test_a_table_that_changes_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a\n1\n2\n")
    source = tables.open_table(path)
    path.write_text("a\n1\n2\n3\n")
    with pytest.raises(InvalidArgument, match="3 rows now, 2 before"):
        list(source.batches())


def test_rows_without_a_label_are_no_rows(tmp_path):
    (tmp_path / "t.csv").write_text("a,y\n1,x\n2,\n3,NA\n4,None\n5,z\n")
    source = tables.open_table(tmp_path / "t.csv")
    assert source.labelled("y", ("x", "z")).column("a").to_pylist() == ["1", "5"]
    assert source.labelled("y", ("x", "None")).column("a").to_pylist() == ["1", "4", "5"]


@pytest.mark.parametrize(
    ("kind", "value", "odd"),
    [
        (Number(0, 9), "1", "x"),
        (Number(0, 9), "1", "1e999"),
        (Number(0, 9), "1", "\u0661"),
        (Number(0, 9), "1", "1_0"),
        (Number(0, 9, decimal=","), "1,5", "1.5"),
        (Date("2000-01-01", "2030-01-01", ("weekday", "hour")), "2020-02-03", "99999-01-01"),
        (Date("2000-01-01", "2030-01-01", format="%d.%m.%Y"), "03.02.2020", "2020-02-03"),
        (tables.Text(16), "some words", "\x00"),
        (tables.Hashed(8), "01", "1"),
        (Category(("01", "1")), "01", "1"),
    ],
)
def test_a_stranger_changes_nobody_elses_features(kind, value, odd):
    schema = Schema("y", ("a", "b"), {"x": kind})
    alone, beside = (schema.encode(pa.table({"x": cells})) for cells in ([value] * 3, [value, odd, value, value]))
    assert np.array_equal(np.delete(beside, 1, axis=0), alone)
    assert np.isfinite(beside).all()


def whose(ids):
    """Which rows are of one person, as sets of rows."""
    found = {}
    for row, one in enumerate(ids):
        found.setdefault(one, set()).add(row)
    return sorted(map(sorted, found.values()))


@pytest.mark.parametrize("form", ["csv", "utf-16", "texts", "numbers", "categories", "sqlite", "folder"])
def test_people_are_the_same_in_every_format(tmp_path, form):
    ids = ["3", "10", "3", "7", "10", "3"]
    match form:
        case "csv" | "utf-16":
            text = "id,y\n" + "".join(f"{one},p\n" for one in ids)
            (tmp_path / "t.csv").write_text(text, encoding="utf-16" if form == "utf-16" else "utf-8")
            where = tmp_path / "t.csv"
        case "sqlite":
            where = f"{tmp_path / 't.db'}::t"
            with sqlite3.connect(tmp_path / "t.db") as opened:
                opened.execute("create table t (id integer, y)")
                opened.executemany("insert into t values (?, 'p')", [(int(one),) for one in ids])
            opened.close()
        case "folder":
            where = tmp_path / "set"
            where.mkdir()
            for place in range(3):
                feather.write_feather(pa.table({"id": ids[2 * place : 2 * place + 2]}), where / f"{place}.arrow")
        case _:
            column = pa.array(ids)
            column = {"numbers": column.cast("int64"), "categories": column.dictionary_encode()}.get(form, column)
            parquet.write_table(pa.table({"id": column}), tmp_path / "t.parquet")
            where = tmp_path / "t.parquet"
    found = tables.ids_of(tables.open_table(where), "id")
    assert whose(np.asarray(found).tolist()) == whose(ids)

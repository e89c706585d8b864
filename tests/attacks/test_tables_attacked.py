"""Attacks by whoever makes a table: files that hang, crash, fill memory, or let one row steer others."""

import gzip
import os
import sqlite3

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from terrine import tables
from terrine.errors import InvalidArgument
from terrine.tables import FileFormat, Number, Schema, Text


def drafted(path):
    """All that `terrine schema` and `train` do with a table before and after the charge."""
    source, form = tables.sniffed_table(path)
    schema = tables.draft(source, source.column_names[-1], form=form)
    return schema, schema.encode(source)


WARTS = {
    "zeros in a name": (b"a\0,b\n1,x\n2,y\n", "control character"),
    "zeros alone": (b"\0" * 1000, "control character"),
    "a name of 5 MB": (b"a" * 5_000_000 + b",b\n1,x\n", "first line is longer"),
    "a name of 900 kB": (b"a" * 900_000 + b",b\n1,x\n2,y\n", "field limit"),
    "a cell of 20 MB": (b"a,b\n1,x\n" + b"z" * 20_000_000 + b",y\n", "a row is longer than"),
    "two names alike": (b"a, a,b\n1,2,x\n", "two columns are named 'a'"),
    "a short row": (b"a,b\n1,x\nSECRET\n", "a row( .row #3.)? has 1 cells"),
    "a long row": (b"a,b\n1,x\nSECRET,2,3\n", "a row( .row #3.)? has 3 cells"),
    "an open quote in the names": (b'"a,b\n1,x\n2,y\n', "holds a control character"),
    "nothing but a mark": (b"\xef\xbb\xbf", "the file is empty"),
    "nothing but line ends": (b"\n\n\n", "the file is empty"),
    "nothing but a separator": (b"sep=;\n", "the file is empty"),
    "names alone": (b"a,b\n", "no rows"),
    "names alone, no line end": (b"a,b", "no rows"),
}


@pytest.mark.parametrize("name", WARTS)
def test_a_file_with_a_wart_is_one_line_without_its_rows(tmp_path, name):
    data, said = WARTS[name]
    (tmp_path / "t.csv").write_bytes(data)
    with pytest.raises(InvalidArgument, match=said) as caught:
        drafted(tmp_path / "t.csv")
    assert "SECRET" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a,b\n1,x\n", "zlib"),
        (gzip.compress(b"a,b\n" + b"1,x\n2,y\n" * 1000)[:-15], "Truncated"),
        (gzip.compress(b""), "is empty"),
        (gzip.compress(b"a,b\n" + b"1" * 60_000_000), "a row is longer than"),  # a bomb of 60 kB
        (gzip.compress(b"0" * 60_000_000), "first line is longer"),
    ],
    ids=["not gzip", "cut", "empty", "long row", "long header"],  # packed bytes hold the time: no id for two processes
)
def test_packed_files_that_are_damaged_or_bombs(tmp_path, data, said):
    (tmp_path / "t.csv.gz").write_bytes(data)
    with pytest.raises(InvalidArgument, match=said):
        drafted(tmp_path / "t.csv.gz")


def test_many_parts_of_a_packed_file_are_one_table(tmp_path):
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"a,b\n1,x\n") + gzip.compress(b"2,y\n"))
    assert tables.open_table(tmp_path / "t.csv.gz").num_rows == 2


def test_zeros_in_cells_are_part_of_their_texts(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"a,b\n\0,x\n2\0,y\n2,y\n")
    assert len(set(tables.ids_of(tables.open_table(tmp_path / "t.csv"), "a").tolist())) == 3


def test_a_row_of_many_columns_takes_no_square_of_their_number(tmp_path):
    wide = 400
    lines = [[f"c{place}" for place in range(wide)], ["1"] * wide, ["2"] * wide]
    (tmp_path / "t.csv").write_text("\n".join(",".join(line) for line in lines) + "\n")
    assert drafted(tmp_path / "t.csv")[1].shape == (2, 2 * (wide - 1))


@pytest.fixture
def clinic(tmp_path):
    with sqlite3.connect(tmp_path / "c.db") as opened:
        opened.execute('create table "a; drop table b" (x, y)')
        opened.execute("create table b (x, y)")
        opened.executemany("insert into b values (?, ?)", [(7, "p"), ("7", "q"), ("07", "p")])
        opened.executemany('insert into "a; drop table b" values (?, ?)', [(1, "p"), (2, "q")])
    opened.close()
    return tmp_path / "c.db"


@pytest.mark.parametrize(
    "name", ["b; drop table b", 'b" union select * from sqlite_master --', "sqlite_master", "B'", "x"]
)
def test_a_table_is_looked_up_and_never_run(clinic, name):
    with pytest.raises(InvalidArgument, match="no table"):
        tables.open_table(f"{clinic}::{name}")
    assert tables.open_table(f"{clinic}::b").num_rows == 3
    assert tables.open_table(f"{clinic}::a; drop table b").num_rows == 2


def test_ids_of_two_types_are_refused_as_they_could_merge_two_people(clinic):
    with pytest.raises(InvalidArgument, match="ids of integer, text"):
        tables.ids_of(tables.open_table(f"{clinic}::b"), "x")


@pytest.mark.parametrize("cells", [["7", "07", "7.0", " 7"], ["7", "7\0", "７", "+7"]])
def test_ids_that_look_alike_stay_apart(tmp_path, cells):
    (tmp_path / "t.csv").write_text("id,y\n" + "".join(f"{cell},p\n" for cell in cells), encoding="utf-8")
    assert len(set(tables.ids_of(tables.open_table(tmp_path / "t.csv"), "id").tolist())) == 4


@pytest.mark.parametrize("gap", ["", "NA", "null", b"\xff"])
def test_a_missing_id_is_nobody(tmp_path, gap):
    cell = gap if isinstance(gap, bytes) else gap.encode()
    (tmp_path / "t.csv").write_bytes(b"id,y\n1,p\n" + cell + b",q\n")
    with pytest.raises(InvalidArgument, match="missing"):
        tables.ids_of(tables.open_table(tmp_path / "t.csv"), "id")


@pytest.mark.parametrize("head", [b"SQLite format 3\0", b"12345678DUCK"])
def test_a_damaged_database_is_one_line(tmp_path, head):
    (tmp_path / "t.db").write_bytes(head + bytes(range(256)) * 20)
    with pytest.raises(InvalidArgument, match="not readable as"):
        tables.open_table(f"{tmp_path / 't.db'}::t")


def test_a_view_of_a_database_opens_no_other_file(tmp_path):
    duckdb = pytest.importorskip("duckdb")
    (tmp_path / "other.csv").write_text("secret\n1\n")
    with duckdb.connect(str(tmp_path / "t.db")) as opened:
        opened.execute(f"create view v as select * from read_csv('{tmp_path / 'other.csv'}')")
    with pytest.raises(InvalidArgument, match="not readable as DuckDB"):
        tables.open_table(f"{tmp_path / 't.db'}::v")


def test_pipes_devices_and_links_to_nothing_are_no_tables(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "gone.csv").symlink_to(tmp_path / "nowhere.csv")
    for name in ("pipe.csv", "gone.csv", "nix*.csv", "a[.csv"):
        with pytest.raises(InvalidArgument, match=r"no such file|no file fits"):
            tables.open_table(tmp_path / name)
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.csv")
    with pytest.raises(InvalidArgument, match="no table in this folder"):
        tables.open_table(folder)
    (folder / "a.csv").write_text("a,b\n1,x\n")
    assert tables.open_table(folder).num_rows == 1


@pytest.mark.parametrize("second", ["b.tsv", "b.csv"])
def test_files_that_do_not_belong_together_are_refused(tmp_path, second):
    (tmp_path / "a.csv").write_text("a,b\n1,x\n")
    (tmp_path / second).write_text("a;c\n2;y\n")
    with pytest.raises(InvalidArgument, match=r"all of one format|other columns"):
        tables.open_table(tmp_path)


def of_bytes(places, data):
    """A column of texts at places that nobody checked."""
    bounds = pa.array(places, pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), len(places) - 1, [None, bounds, pa.py_buffer(data)])


def test_an_arrow_file_whose_texts_lie_outside_of_it_is_refused(tmp_path):
    """It crashed the process: pyarrow trusts the places in such a file."""
    for place, column in enumerate(
        [
            of_bytes([0, 1_000_000, 2], b"xy"),
            pa.DictionaryArray.from_arrays(pa.array([0, 77], pa.int32()), pa.array(["p"]), safe=False),
        ]
    ):
        path = tmp_path / f"{place}.arrow"
        feather.write_feather(pa.table({"a": column, "y": ["p", "q"]}), path, compression="uncompressed")
        with pytest.raises(InvalidArgument, match="out of bounds"):
            tables.open_table(path)


def test_a_text_that_is_not_utf8_is_missing_and_no_other_is(tmp_path):
    odd = pa.table({"a": of_bytes([0, 1, 2], b"\xffx")})
    feather.write_feather(odd, tmp_path / "t.arrow", compression="uncompressed")
    assert tables.open_table(tmp_path / "t.arrow").column("a").to_pylist() == [None, "x"]
    parquet.write_table(pa.table({"a": [b"\xff", b"x"]}), tmp_path / "t.parquet")
    assert tables.open_table(tmp_path / "t.parquet").column("a").to_pylist() == [None, "x"]


@pytest.mark.parametrize("odd", [b"M\xfcller", b"\xff\xfe", b"a;b;c;d", b"sep=;", b'""', b"\0"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_row_does_not_flip_how_the_file_is_read(tmp_path, odd, place):
    """`train` asks the schema, and where that says nothing, the column names; never the rows."""
    schema = Schema("y", ("p", "q"), {"a": Text(16), "n": Number(0, 9)})
    rows = ["Köln und Rom,3,p".encode(), "früh,4,q".encode()]

    def encoded(lines):
        (tmp_path / "t.csv").write_bytes(b"\n".join([b"a,n,y", *lines]) + b"\n")
        return schema.encode(tables.open_table(tmp_path / "t.csv", schema.file))

    stranger = [*rows[:place], b"".join([odd, b",5,p"]), *rows[place:]]
    assert np.array_equal(np.delete(encoded(stranger), place, axis=0), encoded(rows))


def test_a_column_named_like_anothers_part_is_its_own(tmp_path):
    table = pa.table({"a.b": [1.0, 2.0], "a": [{"b": 9}, {"b": 8}], "seen": ["2020-01-01"] * 2, "seen.weekday": [3, 4]})
    parquet.write_table(table, tmp_path / "t.parquet")
    seen = tables.Date("2019-01-01", "2021-01-01", ("weekday",))
    schema = Schema("y", ("p", "q"), {"a.b": Number(0, 4), "seen": seen, "seen.weekday": Number(0, 6)})
    source = tables.open_table(tmp_path / "t.parquet")
    made = schema.encode(source)
    assert made.shape == (2, 2 + 9 + 2)
    assert made[:, 0].tolist() == [-0.5, 0]
    assert made[:, -2].tolist() == pytest.approx([0, 1 / 3])


@pytest.mark.parametrize(
    "cell", ["nan", "inf", "-inf", "1e999", "-1e999", "99999999999-01-01", "0000-00-00", "٣", "1_0"]
)
def test_odd_numbers_and_dates_are_clamped_or_missing(tmp_path, cell):
    (tmp_path / "t.csv").write_text(f"n,d\n{cell},{cell}\n", encoding="utf-8")
    schema = Schema("y", ("p", "q"), {"n": Number(0, 9), "d": tables.Date("2000-01-01", "2001-01-01", ("month",))})
    made = schema.encode(tables.open_table(tmp_path / "t.csv"))
    assert np.isfinite(made).all()
    assert np.abs(made).max() <= 1


@pytest.mark.parametrize("name", ["utf-7", "rot13", "idna", "unicode_escape", "undefined", "hex", "", "\0", "x" * 5000])
def test_an_encoding_that_is_none_is_refused(name):
    with pytest.raises(InvalidArgument, match="want one of utf-8"):
        FileFormat(name)

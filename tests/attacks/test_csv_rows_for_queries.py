"""One person's row in a CSV file: whatever its bytes, questions do not fail by it and other rows are read as before."""

import io
import random

import pytest

pytest.importorskip("duckdb")
pytest.importorskip("ibis")

from terrine import queries
from terrine.errors import InvalidArgument
from terrine.queries import csv_files

HEADER = b"p,x,note\n"
OTHERS = [b"%d,%d,plain\n" % (place, place % 10) for place in range(60)]
OTHERS += [b'"60",7,"said ""no"", and left"\r\n', b'61,8,"two\nlines"\n', b"62,9,\n", b'63,1,""\n']
ODD = [
    b"\r\n",
    b"\r",
    b"\n",
    b'"',
    b'""',
    b'",',
    b",",
    b"\0",
    b"\xff",
    b"\xc3",
    b"\xef\xbb\xbf",
    b"\x1a",
    b"\\",
    b";",
    b"e",
]
TABLES = {"v": queries.Private(person="p", rows=1)}
SUM = "SELECT COUNT(*) AS n, SUM(x) AS s FROM v WHERE note <> 'rare'"


def rows_of(content):
    cells = [cell for some in csv_files.cut(io.BytesIO(content), b",", 3) for cell in some]
    return list(zip(cells[::3], cells[1::3], cells[2::3], strict=True))


def asked(path, body, sql=SUM):
    path.write_bytes(HEADER + body)
    session = queries.Session(path, None, TABLES)
    return session.sql(sql, epsilon=20.0, bounds={"x": (0, 10)}).table.to_pylist()[0]


def mutated(dice):
    return b"".join(dice.choice(ODD) if dice.random() < 0.6 else b"%d" % dice.randrange(100) for _ in range(9))


def test_no_bytes_of_one_row_change_how_the_others_are_read(monkeypatch):
    """Of plain rows, and of quoted ones that close no quote of another row: see docs/queries.md."""
    monkeypatch.setattr(csv_files, "LONGEST", 200)
    monkeypatch.setattr(csv_files, "_BLOCK", 97)
    dice, alone = random.Random(5), rows_of(b"".join(OTHERS))
    assert len(alone) == 64
    for _ in range(1_500):
        place, row = dice.randrange(len(OTHERS) + 1), mutated(dice) + b"\n"
        seen = rows_of(b"".join([*OTHERS[:place], row, *OTHERS[place:]]))
        kept = list(seen)
        for one in alone:
            assert one in kept, row
            kept.remove(one)


def test_pieces_of_any_size_are_cut_alike(monkeypatch):
    dice = random.Random(6)
    monkeypatch.setattr(csv_files, "LONGEST", 40)
    for _ in range(300):
        content = b"".join(mutated(dice) + dice.choice([b"\n", b"\r\n", b""]) for _ in range(dice.randrange(12)))
        found = []
        for size in (1, 7, 64, 10**6):
            monkeypatch.setattr(csv_files, "_BLOCK", size)
            found.append(rows_of(content))
        assert found.count(found[0]) == len(found), content


def test_no_bytes_of_one_row_make_a_question_fail(tmp_path):
    dice = random.Random(7)
    for _ in range(12):
        row = mutated(dice) + b"\n"
        found = asked(tmp_path / "v.csv", b"".join([*OTHERS, row]))
        assert abs(found["n"] - 65) < 15, row


@pytest.mark.parametrize(
    "row",
    [
        b"70,1,x\r\n", b"70,1\r,x\n", b"70,1,x", b"70,\xff,x\n", b'"70,1,x\n', b"70,1,x\0\n", b"70\n", b"70,1,x,y\n",
        b'70,1,"' + b"a\n" * 2_200_000 + b"\n", b'70,"' + b"," * 1_000_000 + b"\n",
        b"70,1," + b"a" * 9_000_000 + b"\n", b"70,1e999,x\n", b"\n\n\n",
    ],
    ids=lambda row: repr(row[:12]),
)  # fmt: skip
def test_rows_that_made_a_file_unreadable_are_read_or_dropped_alone(tmp_path, row):
    found = asked(tmp_path / "v.csv", b"".join([*OTHERS[:30], row, *OTHERS[30:]]))
    assert abs(found["n"] - 64) < 15


@pytest.mark.parametrize("ends", [(b"\n", b"\r\n"), (b"\r\n", b"\n")], ids=["header LF", "header CRLF"])
def test_the_line_of_names_may_end_otherwise_than_the_rows(tmp_path, ends):
    (tmp_path / "v.csv").write_bytes(b"p,x" + ends[0] + b"".join(b"%d,1" % one + ends[1] for one in range(100)))
    session = queries.Session(tmp_path / "v.csv", None, TABLES)
    assert (
        abs(session.sql("SELECT SUM(x) AS s FROM v", epsilon=20.0, bounds={"x": (0, 1)}).table["s"][0].as_py() - 100)
        < 15
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"), (b"p,x,x\n1,2,3\n", "'x' and 'x'"), (b"P,p,x\n1,2,3\n", "'P' and 'p'"),
        (b"p,caf\xe9\n1,2\n", "--encoding"), ("p,x\n1,2\n".encode("utf-16"), "utf-16"),
        (b"p,x\r1,2\r", "carriage return"),
    ],
    ids=["empty", "twice", "case", "cp1252", "utf-16", "old Mac"],
)  # fmt: skip
def test_what_is_wrong_with_the_line_of_names_is_said(tmp_path, content, said):
    (tmp_path / "v.csv").write_bytes(content)
    with pytest.raises(InvalidArgument, match=said) as refused:
        queries.Session(tmp_path / "v.csv", None, TABLES)
    assert str(tmp_path) not in str(refused.value)  # a gateway's owner need not know where the server keeps it


def test_marks_separators_and_schemas_tell_how_a_file_is_written(tmp_path):
    from terrine import tables

    path = tmp_path / "v.csv"
    path.write_bytes("\ufeffp;x;stadt\n1;2;Köln\n".encode())
    assert list(queries.Session(path, None, TABLES).schemas["v"]) == ["p", "x", "stadt"]
    path.write_bytes("p;x;stadt\n1;2;Köln\n".encode("cp1252"))
    schema = tables.Schema("x", ("1", "2"), {"p": tables.Ignored()}, file=tables.FileFormat("cp1252", ";"))
    (tmp_path / "v.schema.toml").write_text(schema.to_toml())
    found = pa_rows(path)
    assert found == [{"p": "1", "x": "2", "stadt": "Köln"}]


def pa_rows(path):
    import pyarrow as pa

    return [row for part in csv_files.CsvFile(path)._batches() for row in pa.Table.from_batches([part]).to_pylist()]

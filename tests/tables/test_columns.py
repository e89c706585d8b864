"""What cells become: dates and their parts, texts, hashed categories, gaps. Every feature is bounded."""

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrine import tables
from terrine.errors import InvalidArgument
from terrine.tables import Category, Date, Hashed, Ignored, Number, Schema, Text, cells
from terrine.tables.columns import bucket

HASHES = [(604, 1.0), (712, -1.0), (326, 1.0), (938, -1.0)]


def encoded(column, values):
    return column.encode(pa.array(values))


def test_a_date_is_a_number_with_parts():
    column = Date("2000-01-01", "2020-01-01", ("weekday", "month", "hour"))
    made = encoded(column, ["2010-01-01", "2020-02-29T13:30", "1990-12-31", "no date", None])
    assert column.width == made.shape[1] == 2 + 7 + 12 + 24
    assert made[:, 0] == pytest.approx([0, 1, -1, 0, 0], abs=1e-3)
    assert made[:, 1].tolist() == [0, 0, 0, 1, 1]
    assert made[:3, 2:9].argmax(1).tolist() == [4, 5, 0]  # Friday, Saturday, Monday
    assert made[:3, 9:21].argmax(1).tolist() == [0, 1, 11]
    assert made[:3, 21:].argmax(1).tolist() == [0, 13, 0]
    assert not made[3:, 2:].any()


def test_dates_of_every_type_are_the_same():
    column = Date("2000-01-01", "2030-01-01", ("weekday", "hour"))
    texts = encoded(column, ["2020-02-03T05:06:07", None])
    stamps = pa.array([1580706367, None], pa.timestamp("s"))
    for kind in (pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("ns")):
        assert np.array_equal(column.encode(stamps.cast(kind)), texts)
    assert np.array_equal(encoded(column, ["2020-02-03T06:06:07+01:00", ""]), texts)
    days = pa.array([18295, None], pa.date32())
    assert np.array_equal(column.encode(days), encoded(column, ["2020-02-03", None]))
    assert np.array_equal(encoded(Date("2000-01-01", "2030-01-01", format="%d.%m.%y"), ["03.02.20"]),
                          encoded(Date("2000-01-01", "2030-01-01"), ["2020-02-03"]))  # fmt: skip


def test_a_time_of_day():
    made = encoded(Date("00:00", "23:59:59", ("hour",)), ["12:00", "25:00"])
    assert made[0, 0] == pytest.approx(0, abs=1e-4)
    assert made[:, 1].tolist() == [0, 1]
    assert made[0, 2:].argmax() == 12


def test_a_moment_that_no_calendar_has_ends_nothing():
    far = pa.array([2**62, -(2**62), 0], pa.timestamp("s"))
    made = Date("2000-01-01", "2030-01-01", ("month",)).encode(far)
    assert np.isfinite(made).all()
    assert made[:, 0].tolist() == [1, -1, -1]
    assert Category(("a",)).encode(far).tolist() == [[0, 1]] * 3


def test_texts_are_hashed_by_a_fixed_public_hash():
    made = encoded(Text(64), ["Chest pain, chest PAIN", "", None, "NA", "!?"])
    assert np.linalg.norm(made[0]) == pytest.approx(1)
    assert made[:, -1].tolist() == [0, 1, 1, 1, 0]
    assert not made[1:, :-1].any()
    assert np.array_equal(made[0], encoded(Text(64), ["chest pain chest pain"])[0])


def test_the_hash_never_changes():
    found = [bucket(word, 1000) for word in ("fever", "Köln", "chest pain", "")]
    assert found == HASHES


def test_wide_categories_fall_into_buckets():
    made = encoded(Hashed(16), ["C34.1", " C34.1 ", "J18", None, "null"])
    assert made.shape == (5, 17)
    assert (made.sum(axis=1) == 1).all()
    assert np.array_equal(made[0], made[1])
    assert made[3:, -1].tolist() == [1, 1]


def test_a_gap_has_an_indicator_and_a_public_fill():
    assert encoded(Number(0, 10), ["NA", "?"]).tolist() == [[0, 1]] * 2
    assert encoded(Number(0, 10, fill=0), [None, "10"]).tolist() == [[-1, 1], [1, 0]]
    with pytest.raises(InvalidArgument, match="fill=11"):
        Number(0, 10, fill=11)


def test_a_listed_value_may_look_like_a_gap():
    assert encoded(Category(("NA", "DE")), ["NA", "DE", ""]).argmax(1).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "column",
    [Number(0, 1), Number(0, 1, fill=0), Category(("a",)), Hashed(4), Text(8), Ignored(),
     Date("2000-01-01", "2001-01-01", ("weekday", "month", "hour"))],
)  # fmt: skip
@given(cells=st.lists(st.one_of(st.none(), st.text(max_size=8), st.sampled_from(
    ["nan", "inf", "-inf", "1e400", "2000-06-06", "00:00", "0001-01-01", "9999-12-31T23:59:59-23:59", "1_0", "a b a"]
)), min_size=1, max_size=5))  # fmt: skip
def test_whatever_a_cell_holds_its_features_are_short(column, cells):
    made = column.encode(pa.array(cells, pa.string()))
    assert made.shape == (len(cells), column.width)
    assert np.isfinite(made).all()
    assert (np.square(made, dtype=np.float64).sum(axis=1) <= column.square + 1e-5).all()
    for place, cell in enumerate(cells):
        assert np.array_equal(column.encode(pa.array([cell], pa.string()))[0], made[place])


@given(st.lists(st.one_of(st.text(max_size=6), st.floats().map(repr), st.integers().map(str)), max_size=6))
def test_many_numbers_at_once_are_read_as_each_alone(texts):
    slow = [math.nan if one.strip() in cells.GAPS else cells.as_number(one) for one in texts]
    assert np.array_equal(cells.numbers(pa.array(texts, pa.string())), np.array(slow, dtype=float), equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("kind = 'date'\nlow = '2020-01-01'\nhigh = '2019-01-01'", "want low < high"),
        ("kind = 'date'\nlow = 2020-01-01\nhigh = 2021-01-01\nparts = ['decade']", "want some of weekday"),
        ("kind = 'date'\nlow = 3\nhigh = 4\nformat = 7", "want low < high"),
        ("kind = 'hashed'\nbuckets = 1", "want 2 to"),
        ("kind = 'hashed'\nbuckets = 'many'", "buckets"),
        ("kind = 'text'\nngrams = 9", "want 1 to 5"),
        ("kind = 'text'\nencoder = 'x'", "want it with sha256"),
        ("kind = 'number'\nlow = 1\nhigh = 2\ndecimal = 'x'", "want '.' or ','"),
        ("kind = 'number'", "want low and high"),
        ("kind = 'number'\nlow = 1\nhigh = 2\nconfirmed = 'yes'", "want true or false"),
        ("kind = 'text'\ncolour = 1", "want buckets"),
    ],
)
def test_facts_that_do_not_fit_are_refused(tmp_path, kind, said):
    (tmp_path / "s.toml").write_text(f"[label]\nname='y'\nclasses=['a','b']\n[columns.x]\n{kind}\n")
    with pytest.raises(InvalidArgument, match=said) as caught:
        Schema.load(tmp_path / "s.toml")
    assert "\n" not in str(caught.value)


def test_every_kind_round_trips(tmp_path):
    columns = {
        "a": Number(0, 1, fill=0.5, decimal=","), "b": Number(confirmed=False, unknown=True), "c": Hashed(7),
        "d": Date("2000-01-01", "2001-01-01", ("hour",), "%d.%m.%Y"), "e": Text(8, 3), "f": Ignored(),
        "g": Category(("\U0001f600", "x"), guessed=True), "h": Text(encoder="m", sha256="0" * 64, dimensions=4),
    }  # fmt: skip
    schema = Schema("y", ("a", "b"), columns, file=tables.FileFormat("cp1252", ";"))
    (tmp_path / "s.toml").write_text(schema.to_toml(), encoding="utf-8")
    assert Schema.load(tmp_path / "s.toml") == Schema.from_dict(schema.as_dict()) == schema
    assert schema.unknown == ("b",)
    assert schema.guessed == ("g",)


@pytest.mark.parametrize("text", ["version = 3", "version = true", "version = 'x'", "colour = 'red'"])
def test_a_later_version_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "s.toml").write_text(f"{text}\n[label]\nname='y'\nclasses=['a','b']\n[columns]\n")
    with pytest.raises(InvalidArgument, match=r"version|no part"):
        Schema.load(tmp_path / "s.toml")


def test_a_schema_of_the_first_version_loads(tmp_path):
    (tmp_path / "s.toml").write_text(
        "[label]\nname='y'\nclasses=['a','b']\n[columns.x]\nkind='number'\nlow=0\nhigh=1\n"
    )
    assert Schema.load(tmp_path / "s.toml").columns == {"x": Number(0.0, 1.0)}


def test_a_draft_knows_every_kind():
    rows = 300
    drafted = tables.draft(
        pa.table(
            {
                "iso": [f"2020-{1 + place % 12:02}-03" for place in range(rows)],
                "german": [f"{1 + place % 28:02}.03.2020" for place in range(rows)],
                "comma": [f"{place % 7},5" for place in range(rows)],
                "time": [f"{place % 24:02}:15" for place in range(rows)],
                "code": [f"C{place % 30}.{place % 4 * 10}" + "x" * (place % 3) for place in range(rows)],
                "note": [f"patient {place} came with fever number {place}" for place in range(rows)],
                "name": [f"n{place}" for place in range(rows)],
                "stamp": pa.array(range(rows), pa.timestamp("s")),
                "y": ["a", "b"] * (rows // 2),
            }
        ),
        "y",
    )
    kinds = {name: type(column) for name, column in drafted.columns.items()}
    assert kinds == {
        "iso": Date, "german": Date, "comma": Number, "time": Date, "code": Category, "note": Text, "name": Ignored,
        "stamp": Date,
    }  # fmt: skip
    assert drafted.columns["iso"].low == "2020-01-01"
    assert drafted.columns["german"].format == "%d.%m.%Y"
    assert drafted.columns["comma"].decimal == ","
    assert drafted.columns["time"].low == "00:00"
    assert set(drafted.unconfirmed) == {*kinds, "y"}

"""Attack: one row of a CSV file that changes what everybody else's rows mean, or who they are."""

import numpy as np
import pytest

from terrine import tables
from terrine.common.people import People
from terrine.pipeline.units import Units

SCHEMA = tables.Schema("y", ("0", "1"), {"code": tables.Category(("1", "2")), "age": tables.Number(0, 100)})
ROWS = ["7,01,1,30,1", "07,1,1,40.0,0", "7.0,02,2,,1", "8,2,2,5e1,0"]


def read(path, rows):
    path.write_text("pid,word,code,age,y\n" + "\n".join(rows) + "\n")
    return tables.read(path)


@pytest.mark.parametrize("stranger", ["zed,x,x,x,1", "9,true,true,true,1", "9,2020-01-01,1,2020-01-01,1", "9,,,,0"])
def test_a_stranger_does_not_change_how_others_are_encoded(tmp_path, stranger):
    alone, beside = (read(tmp_path / "t.csv", rows) for rows in (ROWS, [*ROWS, stranger]))
    assert np.array_equal(SCHEMA.encode(alone), SCHEMA.encode(beside)[:4])
    assert np.array_equal(SCHEMA.labels(alone), SCHEMA.labels(beside)[:4])
    assert len(People(tables.column_of(alone, "pid"), 4)) == 4
    assert len(People(tables.column_of(beside, "pid"), 5)) == 5


def test_numbers_are_read_from_their_texts(tmp_path):
    ages = SCHEMA.encode(read(tmp_path / "t.csv", ROWS))[:, -2:]
    assert np.allclose(ages, [[-0.4, 0], [-0.2, 0], [0, 1], [0, 0]])
    drafted = tables.draft(read(tmp_path / "t.csv", ROWS), "y")
    assert isinstance(drafted.columns["age"], tables.Number)


def test_seven_and_zero_seven_are_two_people(tmp_path):
    table = read(tmp_path / "t.csv", [row for row in ROWS for _ in range(3)])
    units = Units(12, People(tables.column_of(table, "pid"), 12), 2)
    assert units.count == 4

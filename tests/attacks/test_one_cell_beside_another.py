"""A cell that is no number must not change how another row's cell is read; odd facts must be refused as facts."""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from terrine import tables
from terrine.errors import InvalidArgument
from terrine.pipeline.predicting import _written


@pytest.mark.parametrize("blank", ["\x1c", "\x1d", "\x1e", "\x1f", "\x85", "\u2028", "\u3000", "\t"])
def test_blanks_are_trimmed_alike_beside_a_number_and_beside_a_word(blank):
    schema = tables.Schema("y", classes=("a", "b"), columns={"n": tables.Number(0, 100)})
    for cell in (blank + "12", "12" + blank):
        beside = [schema.encode(pyarrow.table({"n": [cell, other]}))[0] for other in ("7", "word")]
        np.testing.assert_array_equal(beside[0], beside[1])


@pytest.mark.parametrize("form", ["%Y%Y", "%Q", "%", "%G"])
def test_a_date_format_that_reads_nothing_is_refused_before_any_row(form):
    with pytest.raises(InvalidArgument):
        tables.Date("2010-01-01", "2030-01-01", format=form)


@pytest.mark.parametrize("form", ["%d.%m.%Y", "%Y-%m-%dT%H:%M:%S%z", "%d.%m.", "%I:%M %p", "%G-%V-%u", "%c", "%j %y"])
def test_a_date_format_that_reads_is_taken(form):
    assert tables.Date("0001-01-01", "2030-01-01", format=form).format == form


def test_bounds_too_near_for_a_scale_are_refused():
    with pytest.raises(InvalidArgument):
        tables.Number(0, 5e-324)
    column = tables.Number(0, 1e-323)
    assert np.isfinite(column.encode(pyarrow.array([None, 0.0, 1.0]))).all()


def test_ids_of_another_type_in_each_file_are_an_error_of_ours(tmp_path):
    (tmp_path / "t").mkdir()
    for name, ids in (("a", [1, 2]), ("b", ["1", "2"])):
        pyarrow.parquet.write_table(pyarrow.table({"p": ids, "y": ["a", "b"]}), tmp_path / "t" / f"{name}.parquet")
    with pytest.raises(InvalidArgument, match="one type in all files"):
        tables.ids_of(tables.open_table(tmp_path / "t"), "p")


def test_a_kept_moment_without_a_year_of_python_changes_no_other_cell():
    moments = pyarrow.array([2**62, 0, None], pyarrow.timestamp("us"))
    lone = _written(moments.slice(1))
    assert _written(moments)[1:] == lone == ["1970-01-01 00:00:00", ""]

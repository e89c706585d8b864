"""Any text file either becomes features and labels or gets one line before anything is charged."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terrine import pipeline, tables
from terrine.cli.schema import _accepted
from terrine.errors import InvalidArgument
from terrine.pipeline import planning
from terrine.pipeline.material import open_data
from tests.thorough import examples

EXAMPLES = examples(25)
ODD = [
    "", "NA", "nan", "inf", "-1e400", "1,5", "0x1F", "01", "1", "2020-02-30", "2020-02-29", "99:99", "\x00", '"', "'",
    "ü", "\ufeff", "\u202e", "=1+1", "sep=;", "a\nb", "x" * 300, "true", "1_000", "٣", "\ud800",
]  # fmt: skip
CELLS = st.one_of(st.sampled_from(ODD), st.text(max_size=5), st.integers().map(str), st.floats().map(repr))
PAIRS = st.lists(CELLS, min_size=2, max_size=2)


@st.composite
def files(draw):
    """A text file with some columns and rows, perhaps damaged."""
    width, separator = draw(st.integers(1, 4)), draw(st.sampled_from([",", ";", "\t", "|"]))
    names = draw(st.lists(CELLS, min_size=width, max_size=width))
    rows = draw(st.lists(st.lists(CELLS, min_size=width, max_size=width), min_size=1, max_size=6))
    quoted = draw(st.booleans())

    def line(cells):
        return separator.join('"' + one.replace('"', '""') + '"' if quoted else one for one in cells)

    text = "\n".join([line(names), *(line(row) for row in rows * draw(st.sampled_from([1, 12])))]) + draw(
        st.sampled_from(["", "\n", "\r\n", "\n\n", '\n"'])
    )
    data = text.encode(draw(st.sampled_from(["utf-8", "utf-16", "latin-1", "cp1252"])), "replace")
    return data[: len(data) - draw(st.integers(0, 3))] + draw(st.binary(max_size=3))


def tried(path):
    """Encoded rows, or None where the file was refused in one line."""
    try:
        opened = opened_from(path)
    except InvalidArgument as error:
        said = str(error)
    else:
        return opened.look({}) if hasattr(opened, "look") else opened  # after the charge nothing may be wrong any more
    assert "\n" not in said
    assert len(said) < 2000
    return None


def opened_from(path):
    """The table by a schema that was drafted from it, as `train` opens it before the charge."""
    source, form = tables.sniffed_table(path)
    schema = _accepted(tables.draft(source, source.column_names[-1], form=form))
    path.with_name("s.toml").write_text(schema.to_toml(), encoding="utf-8")
    asked = settings_of(path, schema.label)
    if schema.target is not None:
        return schema.encode(source)
    opened = open_data(asked)
    planning.plan(asked, opened)
    return opened


def settings_of(path, label):
    """A quick run."""
    return pipeline.Settings(
        table=str(path), label=label, schema=str(path.with_name("s.toml")), epsilon=2.0, epochs=1, audit=0, lot=4
    )


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.one_of(files(), st.binary(max_size=60)))
def test_any_file_becomes_rows_or_one_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "t.csv"
    path.write_bytes(data)
    found = tried(path)
    if found is not None:
        inputs = getattr(found, "inputs", found)
        assert np.isfinite(inputs).all()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(st.lists(CELLS, min_size=2, max_size=2), min_size=2, max_size=6),
    odd=st.lists(CELLS, min_size=2, max_size=2),
)
def test_one_row_changes_only_its_own_features(tmp_path_factory, rows, odd):
    """The facts stay what the schema says; the changed row may hold anything that a row can hold."""
    folder = tmp_path_factory.mktemp("any")

    def encoded(lines):
        text = "a;b\n" + "".join(";".join('"' + one.replace('"', '""') + '"' for one in line) + "\n" for line in lines)
        (folder / "t.csv").write_bytes(text.encode("utf-8", "replace"))
        return schema.encode(tables.open_table(folder / "t.csv", tables.FileFormat()))

    kinds = {"a": tables.Number(-5, 5), "b": tables.Date("2000-01-01", "2030-01-01", ("weekday",))}
    texts = {"a": tables.Text(8), "b": tables.Hashed(4)}
    for columns in (kinds, texts):
        schema = tables.Schema("y", ("0", "1"), columns)
        one, other = encoded(rows), encoded([*rows[:-1], odd])
        assert np.array_equal(one[:-1], other[:-1])


@pytest.mark.slow
@settings(max_examples=max(5, EXAMPLES // 10), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=files())
def test_any_file_trains_or_is_refused_with_nothing_left(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("any")
    (folder / "t.csv").write_bytes(data)
    found = tried(folder / "t.csv")
    if found is None or not hasattr(found, "inputs"):
        return
    asked = settings_of(folder / "t.csv", found.schema.label)
    assert pipeline.train(asked, folder / "run").done

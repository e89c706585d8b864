"""What a hostile reader did to questions: a failure, a merge or a race that one person's row decides."""

from __future__ import annotations

import threading

import pytest

duckdb = pytest.importorskip("duckdb")
pytest.importorskip("ibis")

from terrine import queries  # noqa: E402
from terrine.errors import InvalidArgument  # noqa: E402


def session(connection, person="p", **more):
    return queries.Session(connection, None, tables={"t": queries.Private(person=person, rows=3), **more})


@pytest.mark.parametrize("kind", ["TIMESTAMP_NS", "TIMESTAMP_S", "TIMESTAMP_MS"])
@pytest.mark.parametrize(
    "where",
    ["v = 'rare' AND seen < DATE '9999-12-31'", "v = 'rare' AND seen = other", "seen IN (DATE '9999-12-31')"],
)
def test_a_cast_that_fails_on_one_row_is_refused_before_the_charge(kind, where):
    """DuckDB casts a constant only where a row passes the rest: the failure told whether one did."""
    connection = duckdb.connect()
    connection.execute(f"CREATE TABLE t (p BIGINT, v VARCHAR, seen {kind}, other TIMESTAMP)")
    with pytest.raises(InvalidArgument):
        session(connection).sql(f"SELECT COUNT(*) AS n FROM t WHERE {where}", epsilon=1.0)


@pytest.mark.parametrize("collate", ["COLLATE NOCASE", ""])
def test_people_whom_a_collation_takes_for_one_are_refused(collate):
    connection = duckdb.connect()
    if not collate:
        connection.execute("PRAGMA default_collation='nocase'")
    connection.execute(f"CREATE TABLE t (p VARCHAR {collate}, x DOUBLE)")
    with pytest.raises(InvalidArgument, match="different texts for equal"):
        session(connection).sql("SELECT SUM(x) AS s FROM t", epsilon=1.0, bounds={"x": (-100, 100)})


def test_threads_of_one_session_lose_no_answer():
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t AS SELECT i AS p, i % 7 AS x FROM range(100) r(i)")
    asked, failed = session(connection), []

    def ask():
        for _ in range(15):
            try:
                answer = asked.sql("SELECT COUNT(*) AS n FROM t", epsilon=15.0)
                if abs(answer.table["n"][0].as_py() - 100) > 50:
                    failed.append("another answer")
            except Exception as error:
                failed.append(repr(error))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_declarations_that_contradict_each_other_are_refused():
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t (p BIGINT, v INTEGER)")
    with pytest.raises(InvalidArgument, match="two of one name"):
        session(connection, T=queries.Public())
    with pytest.raises(InvalidArgument, match="bins and keys"):
        session(connection).sql(
            "SELECT v, COUNT(*) AS n FROM t GROUP BY v", epsilon=1.0, keys={"v": [1]}, bins={"v": [0, 5, 10]}
        )
    with pytest.raises(InvalidArgument, match="no such file"):
        queries.Session("missing.parquet", None, tables={"missing": queries.Private(person="p", rows=1)})


def test_half_a_character_as_a_key_is_refused_before_the_charge():
    """A lone surrogate cannot be sent to an engine: the question failed after it was paid."""
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t (p BIGINT, v VARCHAR)")
    with pytest.raises(InvalidArgument):
        session(connection).sql("SELECT v, COUNT(*) AS n FROM t GROUP BY v", epsilon=1.0, keys={"v": ["a", "\ud800"]})

"""Engines behind one seam, Ibis: DuckDB (embedded: CSV, Parquet, its own files), PostgreSQL and Spark.

What may differ between them is written down here and nowhere else. Errors of an engine can quote private values, so
they are replaced by one line that does not.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ibis
import pyarrow as pa

from terrine import check
from terrine.errors import EngineFailed, InvalidArgument, MissingExtra
from terrine.queries.csv_files import CsvFile

log = logging.getLogger(__name__)
_FILES = {".parquet", ".pq", ".csv"}
_DIFFERENT = ("a", "A", "a ", "\u00e1", "a\u0301")
_DATABASES = {".duckdb", ".ddb", ".db"}


@dataclass(frozen=True)
class Traits:
    """Where an engine differs: whether sums of 64-bit numbers stay in 64 bits, and whether casts of text can fail.

    `why` is where the owner of the data finds what an engine said when it failed.
    """

    wide: bool
    casts: bool
    why: str


_ENGINES = {
    "duckdb": Traits(wide=False, casts=True, why="SELECT the question's columns of each table in DuckDB itself"),
    "postgres": Traits(wide=False, casts=False, why="look into the PostgreSQL server's log"),
    "pyspark": Traits(wide=True, casts=True, why="look into the Spark driver's log"),
}


_LOCKS: dict[int, threading.RLock] = {}
"""A connection answers one thread at a time, whichever session asks; by the connection's id."""


class Engine:
    """One connection. Expressions in, small Arrow tables of aggregates out."""

    def __init__(self, connection: Any) -> None:
        self._backend = backend_of(connection)
        self.name = str(self._backend.name)
        if self.name not in _ENGINES:
            raise InvalidArgument(f"engine {self.name}: contributions are not proven bounded there; want {_known()}")
        self.traits = _ENGINES[self.name]
        self._lock = _LOCKS.setdefault(id(getattr(self._backend, "con", self._backend)), threading.RLock())

    def table(self, name: str) -> Any:
        """The table called `name`, of which only the schema is read.

        Raises:
            InvalidArgument: there is none.
        """
        try:
            return self._backend.table(name)
        except Exception as error:
            raise InvalidArgument(f"table {check.shown(name)}: not in {self.name} ({type(error).__name__})") from None

    def run(self, expression: Any) -> pa.Table:
        """The result of `expression`.

        Raises:
            EngineFailed: the engine failed; its own words are not handed on.
        """
        try:
            with self._lock:
                return self._backend.to_pyarrow(expression)
        except Exception as error:
            kind = type(error).__name__
        raise EngineFailed(
            f"{self.name} failed ({kind}); its message is withheld, because it may quote private rows; what was "
            f"charged stays charged; to see why, its owner may {self.traits.why}, and clean the table by a public rule"
        )

    def rehearsal(self) -> Engine:
        """This engine, but it compiles what it is asked and answers with no rows."""
        return _Rehearsal(self._backend)

    def must_tell_apart(self, table: Any, column: str) -> None:
        """Refuse a column of text whose collation takes different texts for equal; looks at none of its rows.

        A group of several texts would be called by whichever of them comes first, and one person's row could rename it.
        """
        texts = table.select(text=table[column].cast("string")).filter(ibis.literal(False))
        for one in _DIFFERENT:
            texts = texts.union(ibis.literal(one).name("text").as_table())
        found = self._public(texts.group_by("text").aggregate(times=texts.count()))
        if found.num_rows != len(_DIFFERENT) or self._stored_as(table, column) in ("citext", "bpchar"):
            raise InvalidArgument(
                f"column {column}: its collation or type takes different texts for equal; "
                "want a view that casts it to plain text with a binary collation"
            )

    def _public(self, expression: Any) -> pa.Table:
        """The result of an expression that looks at no private row."""
        try:
            with self._lock:
                return self._backend.to_pyarrow(expression)
        except Exception as error:
            kind = type(error).__name__
        raise InvalidArgument(
            f"{self.name}: failed on no rows ({kind}); nothing was charged; is the table still there?"
        )

    def _stored_as(self, table: Any, column: str) -> str:
        """PostgreSQL's own name of a column's type, from its catalogue; elsewhere nothing."""
        if self.name != "postgres":
            return ""
        columns = self._backend.table("columns", database="information_schema")
        mine = (columns["table_name"] == table.get_name()) & (columns["column_name"] == column)
        kinds = self._public(columns.filter(mine).select(kind=columns["udt_name"].cast("string")))["kind"].to_pylist()
        return next((kind for kind in kinds if kind in ("citext", "bpchar")), "")


class _Rehearsal(Engine):
    def run(self, expression: Any) -> pa.Table:
        try:
            self._backend.compile(expression)
            return expression.schema().to_pyarrow().empty_table()
        except Exception as error:
            kind = type(error).__name__
        raise InvalidArgument(f"{self.name}: cannot do this ({kind}); nothing was charged; want a simpler question")


def backend_of(connection: Any) -> Any:
    """The Ibis backend for a backend, a connection of DuckDB or psycopg, a Spark session, a path or a URL.

    Raises:
        InvalidArgument: none of these, or it cannot be opened.
    """
    if isinstance(connection, str | Path):
        return _opened(str(connection))
    if hasattr(connection, "to_pyarrow") and hasattr(connection, "name") and hasattr(connection, "table"):
        return connection
    module = type(connection).__module__.split(".")[0]
    if module in ("duckdb", "_duckdb"):
        return ibis.duckdb.from_connection(connection)
    if module == "psycopg":
        return ibis.postgres.from_connection(connection)
    if module == "pyspark":
        return ibis.pyspark.connect(connection)
    raise check.refuse("connection", connection, f"a connection of {_known()}, a file or a URL")


def _opened(where: str) -> Any:
    if where.startswith(("postgres://", "postgresql://", "postgresql+psycopg://")):
        return _postgres(where.replace("postgresql+psycopg://", "postgresql://", 1))
    path = Path(where.removeprefix("duckdb://"))
    suffix = path.suffix.lower()
    if suffix in _FILES | _DATABASES and not path.is_file():
        raise InvalidArgument(f"{check.shown(where)}: no such file; want one that is there")
    if not path.is_file() or suffix not in _FILES | _DATABASES:
        wanted = f"a file that ends in {', '.join(sorted(_FILES | _DATABASES))}, or postgresql://..."
        raise check.refuse("connection", where, wanted)
    if suffix in _DATABASES:
        wanted = "a DuckDB file that nothing else has open for writing"
        return _tried(where, lambda: ibis.duckdb.connect(str(path), read_only=True), wanted)
    return csv_backend(path) if suffix == ".csv" else _tried(where, lambda: _parquet_backend(path), "a Parquet file")


def _postgres(url: str) -> Any:
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise MissingExtra("psycopg", extra="postgres") from None
    return _tried(url.split("@")[-1], lambda: ibis.connect(url), "a server that answers, and a login that it knows")


def _tried(where: str, connect: Any, wanted: str) -> Any:
    try:
        return connect()
    except Exception as error:
        kind = type(error).__name__
    raise InvalidArgument(f"{check.shown(where)}: could not be opened ({kind}); want {wanted}")


def _parquet_backend(path: Path) -> Any:
    backend = ibis.duckdb.connect()
    backend.read_parquet(str(path), table_name=path.stem)
    return backend


def csv_backend(path: Path, *, encoding: str | None = None, separator: str | None = None) -> Any:
    """A DuckDB backend with a CSV file as its one table, called by the file's stem; every column is text.

    Types guessed from rows would tell about rows. What is not said of how the file is written, the schema beside it or
    its first line tells.

    Raises:
        InvalidArgument: the file is not there, or its line of column names is not as it should be.
    """
    if not path.is_file():
        raise InvalidArgument(f"{check.shown(str(path))}: no such file; want one that is there")
    backend = ibis.duckdb.connect()
    backend.con.register(path.stem, CsvFile(path, encoding=encoding, separator=separator))
    return backend


def _known() -> str:
    return "DuckDB, PostgreSQL or Spark"

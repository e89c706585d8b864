"""Engines behind one seam, Ibis: DuckDB (embedded: CSV, Parquet, its own files), PostgreSQL and Spark.

What may differ between them is written down here and nowhere else. Errors of an engine can quote private values, so
they are replaced by one line that does not.
"""

from __future__ import annotations

import csv
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ibis
import pyarrow as pa

from terrine import check
from terrine.errors import EngineFailed, InvalidArgument, MissingExtra

log = logging.getLogger(__name__)
_FILES = {".parquet", ".pq", ".csv"}
_DIFFERENT = ("a", "A", "a ", "\u00e1", "a\u0301")
_DATABASES = {".duckdb", ".ddb", ".db"}


@dataclass(frozen=True)
class Traits:
    """Where an engine differs: whether sums of 64-bit numbers stay in 64 bits, and whether casts of text can fail."""

    wide: bool
    casts: bool


_ENGINES = {
    "duckdb": Traits(wide=False, casts=True),
    "postgres": Traits(wide=False, casts=False),
    "pyspark": Traits(wide=True, casts=True),
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
            "charged stays charged; look into the engine's own log, and clean the table by a public rule"
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
        return _tried(where, lambda: ibis.duckdb.connect(str(path), read_only=True))
    backend = ibis.duckdb.connect()
    read = _read_csv if suffix == ".csv" else _read_parquet
    _tried(where, lambda: read(backend, path))
    return backend


def _postgres(url: str) -> Any:
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise MissingExtra("psycopg", extra="postgres") from None
    return _tried(url.split("@")[-1], lambda: ibis.connect(url))


def _tried(where: str, connect: Any) -> Any:
    try:
        return connect()
    except Exception as error:
        kind = type(error).__name__
    raise InvalidArgument(f"{check.shown(where)}: could not be opened ({kind}); want a file or a server that answers")


def _read_parquet(backend: Any, path: Path) -> None:
    backend.read_parquet(str(path), table_name=path.stem)


def _read_csv(backend: Any, path: Path) -> None:
    """Every column as text, by the names of the first line: types guessed from rows would tell about rows.

    Lines that do not have as many fields as the first are dropped. A file is private as it is parsed: a stray quote
    that swallows other people's lines is the owner's to mend, and so are bytes that are no UTF-8 and lone carriage
    returns, at which DuckDB fails whatever is asked.
    """
    with path.open("rb") as file:
        names = next(csv.reader([file.readline().decode("utf-8", "replace")]), [])
    if not names or len({name.casefold() for name in names}) != len(names) or not all(names):
        raise InvalidArgument(f"{path.name}: want a first line of different column names")
    options = {"header": True, "auto_detect": False, "delim": ",", "quote": '"', "escape": '"', "ignore_errors": True}
    columns = dict.fromkeys(names, "VARCHAR")
    backend.read_csv(str(path), table_name=path.stem, columns=columns, **options)


def _known() -> str:
    return "DuckDB, PostgreSQL or Spark"

"""Tables in SQLite and DuckDB files, in parts. A table's name is looked up among those that are there, never run.

A SQLite cell has a type of its own: it becomes its text, one by one. DuckDB's columns have the types that their table
declares.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from terrine.errors import InvalidArgument, MissingExtra

_ROWS = 2**16


def kind_of(path: Path) -> str | None:
    """'sqlite' or 'duckdb' by the file's first bytes, otherwise nothing."""
    if not path.is_file():  # a pipe would wait for ever
        return None
    with contextlib.suppress(OSError), path.open("rb") as file:
        head = file.read(16)
        if head == b"SQLite format 3\0":
            return "sqlite"
        if head[8:12] == b"DUCK":
            return "duckdb"
    return None


class DatabaseTable:
    """One table of a file, read only.

    Raises:
        InvalidArgument: the file is no database, or has no such table.
    """

    def __init__(self, path: Path, table: str | None) -> None:
        found = kind_of(path)
        if found is None:
            raise InvalidArgument(f"{path}: neither a SQLite nor a DuckDB file; want one of the two before ::")
        self._path, self._duck = path, found == "duckdb"
        with self._open() as opened:
            self.table = self._named(opened, table)
            self.column_names = self._columns(opened)

    def count(self) -> int:
        """How many rows there are."""
        with self._open() as opened:
            return int(opened.execute(f"select count(*) from {_quoted(self.table)}").fetchone()[0])

    def kinds(self, column: str) -> set[str]:
        """The types of a column's cells: one in DuckDB, any number in SQLite."""
        if self._duck:
            return {"declared"}
        with self._open() as opened:
            asked = f"select distinct typeof({_quoted(column)}) from {_quoted(self.table)}"
            return {_text(row[0]) or "" for row in opened.execute(asked)} - {"null"}

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """The rows as record batches, only the columns asked for."""
        import pyarrow

        names = list(self.column_names if columns is None else columns)
        asked = f"select {', '.join(map(_quoted, names))} from {_quoted(self.table)}"
        with self._open() as opened:
            if self._duck:
                yield from opened.execute(asked).to_arrow_reader(_ROWS)
                return
            rows = opened.execute(asked)
            while part := rows.fetchmany(_ROWS):
                cells = [
                    pyarrow.array([_text(one) for one in column], pyarrow.string())
                    for column in zip(*part, strict=True)
                ]
                yield pyarrow.record_batch(cells, names=names)

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        if self._duck:
            with self._duckdb() as opened:
                yield opened
            return
        try:
            opened = sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True)
            opened.text_factory = bytes
            with contextlib.closing(opened):
                opened.execute("pragma trusted_schema = off")
                yield opened
        except sqlite3.Error as error:
            raise InvalidArgument(f"{self._path}: not readable as SQLite ({error})") from None

    @contextlib.contextmanager
    def _duckdb(self) -> Iterator[Any]:
        try:
            import duckdb
        except ImportError:
            raise MissingExtra("duckdb", extra="queries") from None
        safe = {"enable_external_access": "false", "autoload_known_extensions": "false"}
        try:
            with contextlib.closing(duckdb.connect(str(self._path), read_only=True, config=safe)) as opened:
                yield opened
        except duckdb.Error as error:
            reason = str(error).splitlines()[0]
            raise InvalidArgument(f"{self._path}: not readable as DuckDB ({reason[:200]})") from None

    def _named(self, opened: Any, table: str | None) -> str:
        known = self._tables(opened)
        if table is None and len(known) == 1:
            return known[0]
        if table is None:
            raise InvalidArgument(f"{self._path}: holds {_some(known)}; want --table with one of them")
        if table not in known:
            raise InvalidArgument(f"{self._path}: no table {table!r}; want one of {_some(known)}")
        return table

    def _tables(self, opened: Any) -> list[str]:
        if self._duck:
            asked = "select table_name from information_schema.tables where table_schema = 'main' order by 1"
        else:
            known = "type in ('table', 'view') and name not like 'sqlite%'"
            asked = f"select name from sqlite_master where {known} order by name"
        return [_text(row[0]) or "" for row in opened.execute(asked).fetchall()]

    def _columns(self, opened: Any) -> list[str]:
        found = opened.execute(f"select * from {_quoted(self.table)} limit 0").description
        return [str(one[0]) for one in found]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(cell: Any) -> str | None:
    """A cell's text; what is no text is missing."""
    if isinstance(cell, bytes):
        try:
            return cell.decode()
        except UnicodeDecodeError:
            return None
    return None if cell is None else cell if isinstance(cell, str) else repr(cell)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) or "no table"

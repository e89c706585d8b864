"""A whole table in memory: what small ones need, and nothing that has to be streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from terrine.tables.formats import FileFormat
from terrine.tables.sources import TableSource, of_arrow, open_table


def read(path: str | Path, form: FileFormat | None = None) -> Any:
    """The table at a path, as a `pyarrow.Table`; `open_table` reads it in parts instead.

    Raises:
        InvalidArgument: there is no such table, it is empty, or it is not what its ending says.
        MissingExtra: pyarrow is not installed.
    """
    import pyarrow

    source = open_table(path, form)
    return pyarrow.Table.from_batches(list(source.batches()))


def batches_of(table: Any, columns: Sequence[str]) -> Iterator[Any]:
    """Some columns of a `TableSource` or a `pyarrow.Table`, in record batches."""
    return table.batches(columns) if isinstance(table, TableSource) else of_arrow(table.select(list(columns)))

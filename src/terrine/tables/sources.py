"""A table where it lies, read in parts, so that it may be larger than memory.

    patients.csv, .tsv (also .gz, .bz2, .zst)     texts, read as a `FileFormat` says
    patients.parquet, .arrow, .feather            columns of declared types
    patients/ or patients/*.parquet               many files of one format, in the order of their names
    clinic.db::patients                           a table of a SQLite or DuckDB file

Reading twice gives the same rows in the same order, or is refused.
"""

from __future__ import annotations

import dataclasses
import glob
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from terrine.errors import InvalidArgument, MissingExtra
from terrine.tables import cells, delimited
from terrine.tables.databases import DatabaseTable, kind_of
from terrine.tables.formats import FileFormat, marked

TEXT = (".csv", ".tsv", ".txt")
TYPED = (".parquet", ".arrow", ".feather")
_COMPRESSED = (".gz", ".bz2", ".zst")
ENDINGS = (*TEXT[:2], ".csv.gz", *TYPED)
_ROWS = 2**15
WANTED = f"a table ({', '.join(ENDINGS)}), a folder or a pattern of such files, or file.db::table"


class _Reader(Protocol):
    """One file, or one table of a database."""

    column_names: list[str]

    def count(self) -> int: ...

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[Any]: ...


@dataclass(frozen=True, eq=False)
class TableSource:
    """A table's columns, how many rows it has, and the rows in parts."""

    name: str
    column_names: list[str]
    num_rows: int
    form: FileFormat | None
    """How it is written, where it is a text file."""
    _parts: Callable[[Sequence[str]], Iterator[Any]]
    _kinds: Callable[[str], set[str]] = lambda _: {"declared"}
    _labelled: tuple[str, frozenset[str]] | None = None

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """The rows as record batches of a few ten thousand, with all or some of the columns.

        Raises:
            InvalidArgument: the table cannot be read, or has other rows than before.
        """
        wanted, seen = list(self.column_names if columns is None else columns), 0
        asked = wanted if self._labelled is None or self._labelled[0] in wanted else [*wanted, self._labelled[0]]
        for batch in self._parts(asked):
            part = _with_labels(batch, self._labelled).select(wanted)
            seen += part.num_rows
            for at in range(0, part.num_rows, _ROWS):
                yield part.slice(at, _ROWS)
        if seen != self.num_rows:
            raise InvalidArgument(f"{self.name}: {seen:,} rows now, {self.num_rows:,} before; want a table that stays")

    def column(self, name: str) -> Any:
        """All cells of a column.

        Raises:
            InvalidArgument: files have it in several types.
        """
        import pyarrow

        found = [cells.sound(batch.column(0)) for batch in self.batches([name])]
        if len(types := {str(one.type) for one in found}) > 1:
            raise InvalidArgument(f"{self.name}: {name!r} is {', '.join(sorted(types))}; want one type in all files")
        return pyarrow.chunked_array(found) if found else pyarrow.chunked_array([[]], pyarrow.string())

    def ids(self, name: str) -> Any:
        """Whose each row is: whole numbers, or texts, as numbers that differ where they do.

        Raises:
            InvalidArgument: cells of several types could be one person or two; or one is missing.
        """
        import pyarrow

        if len(kinds := self._kinds(name)) > 1 or kinds & {"real", "blob"}:
            raise InvalidArgument(
                f"ids of {', '.join(sorted(kinds))}; want whole numbers or texts, none of them missing"
            )
        found = self.column(name)
        if pyarrow.types.is_string(found.type):
            coded = found.dictionary_encode().unify_dictionaries()
            gaps = {place for place, one in enumerate(_dictionary(coded)) if one is None or one.strip() in cells.GAPS}
            places = np.concatenate(
                [np.asarray(chunk.indices.fill_null(-1)) for chunk in coded.chunks] or [np.empty(0)]
            )
            if found.null_count or np.isin(places, list(gaps)).any():
                raise InvalidArgument("ids are missing; want whole numbers or texts, none of them missing")
            return places.astype(np.int64)
        return found.to_numpy() if pyarrow.types.is_integer(found.type) and not found.null_count else found.to_pylist()

    def labelled(self, name: str, classes: Sequence[str] = ()) -> TableSource:
        """The rows that have something in this column; the others are no rows of this table.

        A class that is written like a missing cell, such as None, is none.

        Raises:
            InvalidArgument: none has.
        """
        listed = frozenset(classes)
        count = sum(int((~cells.missing(batch.column(0), listed)).sum()) for batch in self.batches([name]))
        if not count:
            raise InvalidArgument(f"{self.name}: {name!r} is missing in every row; want rows with it")
        return dataclasses.replace(self, num_rows=count, _labelled=(name, listed)) if count < self.num_rows else self


def open_table(where: str | Path, form: FileFormat | None = None) -> TableSource:
    """The table at a path, pattern or `file::table`; no more of its rows is kept than their number.

    Raises:
        InvalidArgument: there is no such table, it is empty, or it is not what its ending says.
        MissingExtra: pyarrow is not installed.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise MissingExtra("pyarrow", extra="tables") from None
    path, table = split(where)
    if table is not None or kind_of(path) is not None:
        _check_there(path)
        base = DatabaseTable(path, table)
        return _source(f"{path.name}::{base.table}", str(where), [base], None, base.kinds)
    paths = files_of(path)
    written = None
    if _ending(paths[0]) in TEXT:
        written = form or FileFormat()
        head = delimited.first_bytes(paths[0], FileFormat())
        if form is None and (mark := marked(head)):
            written = FileFormat(mark)
        if written.separator is not None and form is not None:
            written = _fitting(paths[0], written)
    readers: list[_Reader] = [_reader(one, written) for one in paths]
    return _source(path.name, str(where), readers, written)


def sniffed_table(
    where: str | Path, *, encoding: str | None = None, separator: str | None = None
) -> tuple[TableSource, FileFormat | None]:
    """The table, and how it is written where it is a text file: as said, or as the file tells.

    An encoding that was told by the rows is not confirmed: it waits for the owner.
    """
    path, _ = split(where)
    if not is_text(where):
        return open_table(where), None
    form = delimited.sniffed(files_of(path), encoding, separator)
    return open_table(where, form), form


def split(where: str | Path) -> tuple[Path, str | None]:
    """The path, and the name of a database's table where `file::table` names one."""
    before, mark, table = str(where).rpartition("::")
    return (Path(before), table) if mark and before and table else (Path(where), None)


def named(where: str, table: str | None) -> str:
    """The path with the name of a database's table."""
    if table is None:
        return where
    if split(where)[1] is not None:
        raise InvalidArgument(f"{where} names a table, and so does --table {table}: want one of the two")
    return f"{where}::{table}"


def schema_path(where: str | Path) -> Path:
    """Where a table's schema lies unless one is named: beside it."""
    path, table = split(where)
    name = path.name
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    stem = re.sub(r"[*?\[\]]+", "_", Path(name).stem) or "table"
    end = "" if table is None else "." + re.sub(r"[^\w-]+", "_", table)
    return path.with_name(f"{stem}{end}.schema.toml")


def files_of(path: Path) -> list[Path]:
    """The files of a table: one, or those of a folder or pattern, which are of one format.

    Raises:
        InvalidArgument: there are none, or of several formats.
    """
    if path.is_dir():
        inside = sorted(one for one in path.rglob("*") if one.is_file() and not _hidden(one.relative_to(path)))
        paths = [one for one in inside if _ending(one) in (*TEXT, *TYPED)]
        what = "no table in this folder"
    elif glob.has_magic(str(path)) and not path.exists():
        paths = [one for one in map(Path, sorted(glob.glob(str(path), recursive=True))) if one.is_file()]
        what = "no file fits this pattern"
    else:
        _check_there(path)
        paths, what = [path], ""
    if not paths:
        raise InvalidArgument(f"{path}: {what}; want {WANTED}")
    for one in paths:
        if _ending(one) not in (*TEXT, *TYPED):
            raise InvalidArgument(f"{one}: not a table by its ending; want a file ending in {', '.join(ENDINGS)}")
        if not one.stat().st_size:
            raise InvalidArgument(f"{one}: the file is empty; want a table with a line of column names and some rows")
    if len(kinds := {_ending(one) for one in paths}) > 1:
        raise InvalidArgument(f"{path}: files ending in {', '.join(sorted(kinds))}; want all of one format")
    return paths


def is_text(where: str | Path) -> bool:
    """Whether the table is a text file, or many."""
    path, table = split(where)
    return table is None and kind_of(path) is None and _ending(files_of(path)[0]) in TEXT


def _check_there(path: Path) -> None:
    if not path.is_file():
        raise InvalidArgument(f"{path}: no such file; want {WANTED}")


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _ending(path: Path) -> str:
    name = path.name.lower()
    for ending in _COMPRESSED:
        bare = name.removesuffix(ending)
        if bare != name and Path(bare).suffix in TEXT:
            return Path(bare).suffix
    return Path(name).suffix


def _fitting(path: Path, form: FileFormat) -> FileFormat:
    """The format; where another file has another separator, what its line of column names tells."""
    found = delimited.header_of(path, form)
    return dataclasses.replace(form, separator=None) if len(found.names) == 1 else form


def _source(
    name: str, where: str, readers: Sequence[_Reader], form: FileFormat | None, kinds: Any = None
) -> TableSource:
    first = readers[0].column_names
    names = [one.strip() for one in first]
    if twice := sorted(one for one, count in Counter(names).items() if count > 1):
        raise InvalidArgument(f"{where}: two columns are named {twice[0]!r}; want each name once")
    for reader in readers:
        if sorted(reader.column_names) != sorted(first):
            odd = sorted(set(reader.column_names) ^ set(first))
            raise InvalidArgument(
                f"{where}: {getattr(reader, 'path', name)} has other columns ({odd[:3]}); want the same"
            )
    count = sum(reader.count() for reader in readers)
    if not count:
        raise InvalidArgument(f"{where}: column names but no rows; want some rows")
    own = dict(zip(names, first, strict=True))

    def parts(columns: Sequence[str]) -> Iterator[Any]:
        for reader in readers:
            for batch in reader.parts([own[one] for one in columns]):
                yield batch.rename_columns(list(columns))

    source = TableSource(name, names, count, form, parts)
    return source if kinds is None else dataclasses.replace(source, _kinds=lambda one: kinds(own[one]))


def _with_labels(batch: Any, label: tuple[str, frozenset[str]] | None) -> Any:
    if label is None:
        return batch
    import pyarrow

    name, listed = label
    return batch.filter(pyarrow.array(~cells.missing(batch.column(name), listed)))


def _dictionary(coded: Any) -> list[str | None]:
    found: list[str | None] = coded.chunk(0).dictionary.to_pylist() if coded.num_chunks else []
    return found


def _reader(path: Path, form: FileFormat | None) -> Any:
    match _ending(path):
        case ".parquet":
            return _Parquet(path)
        case ".arrow" | ".feather":
            return _Arrow(path)
        case _:
            return _Delimited(path, form or FileFormat())


class _Delimited:
    def __init__(self, path: Path, form: FileFormat) -> None:
        self.path, self._form = path, form
        self.column_names = list(delimited.header_of(path, form).names)

    def count(self) -> int:
        if len(set(self.column_names)) < len(self.column_names):
            return 1  # refused for its names
        return sum(part.num_rows for part in self.parts(self.column_names[:1]))

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        return delimited.read_parts(self.path, self._form, columns)


class _Parquet:
    def __init__(self, path: Path) -> None:
        self.path = path
        with delimited.readable(path), self._open() as file:
            self.column_names = list(file.schema_arrow.names)
            self._types = file.schema_arrow
            self._rows = int(file.metadata.num_rows)

    def count(self) -> int:
        return self._rows

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        with delimited.readable(self.path), self._open() as file:
            for batch in file.iter_batches(batch_size=_ROWS, columns=None if columns is None else list(columns)):
                yield batch if columns is None else batch.select(list(columns))

    def _open(self) -> Any:
        from pyarrow import parquet

        return parquet.ParquetFile(self.path)


class _Arrow:
    def __init__(self, path: Path) -> None:
        self.path = path
        with delimited.readable(path):
            self.column_names = list(self._names())

    def count(self) -> int:
        return sum(part.num_rows for part in self.parts())

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        with delimited.readable(self.path):
            for batch in self._batches():
                for column in batch.columns:
                    _check_places(column)  # a damaged one would read memory that is not its own
                yield batch if columns is None else batch.select(list(columns))

    def _names(self) -> list[str]:
        import pyarrow

        with pyarrow.memory_map(str(self.path)) as file:
            opened = pyarrow.ipc.open_file(file) if self._is_file() else pyarrow.ipc.open_stream(file)
            names: list[str] = opened.schema.names
        return names

    def _is_file(self) -> bool:
        with self.path.open("rb") as file:
            return file.read(6) == b"ARROW1"

    def _batches(self) -> Iterator[Any]:
        import pyarrow

        with pyarrow.memory_map(str(self.path)) as file:
            if self._is_file():
                opened = pyarrow.ipc.open_file(file)
                for place in range(opened.num_record_batches):
                    yield opened.get_batch(place)
            else:
                yield from pyarrow.ipc.open_stream(file)


def _check_places(column: Any) -> None:
    """Refuse an array whose parts lie outside of its bytes; whether texts are UTF-8 is looked at later, cell by cell.

    Raises:
        ArrowInvalid: they do.
    """
    import pyarrow

    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        _check_places(column.dictionary)
        places = column.indices
        places.validate(full=True)
        known = pyarrow.array(range(len(column.dictionary)), pyarrow.int64())
        pyarrow.DictionaryArray.from_arrays(places, known, safe=True).validate(full=True)
        return
    bare = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}.get(kind)
    (column if bare is None else column.view(bare)).validate(full=True)


def of_arrow(table: Any) -> Iterator[Any]:
    """A `pyarrow.Table` as a source reads: in parts."""
    return iter(table.to_batches(max_chunksize=_ROWS))


__all__ = [
    "ENDINGS",
    "TableSource",
    "files_of",
    "is_text",
    "named",
    "of_arrow",
    "open_table",
    "schema_path",
    "sniffed_table",
    "split",
]

r"""CSV files as engines scan them: nothing that one row holds makes reading fail, or changes how others are read.

An engine's own reader takes line ends and encodings as facts of the whole file, and fails on the first row that has
others: that a question failed would tell that the row is there. Here

    line ends   \n or \r\n ends a row, whatever other rows end in; a carriage return elsewhere is a character
    quotes      a cell is quoted if it begins with a quote, and the next quote that is not doubled stands before a
                separator or a line end, within `LONGEST` bytes of the row; else its quotes are characters like others
    cells       one that is empty, or not in the file's encoding, is NULL
    rows        one with more or fewer cells than there are column names, or longer than `LONGEST`, is none

What is left: a quoted cell may hold line ends, so a quote that was never closed takes following rows into its own
where one of them holds a quote that closes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from pyarrow import compute

from terrine import check
from terrine.errors import InvalidArgument
from terrine.tables import FileFormat, Schema, delimited, schema_path
from terrine.tables.formats import Header, header, marked

LONGEST = 2**22
"""How many bytes a row may have."""
_BLOCK = 2**22
Cells = list[bytes]


class CsvFile:
    """A CSV file with its columns, all of text; the engine streams its rows anew for every question.

    Raises:
        InvalidArgument: there is no such file, or it has no line of column names that engines can tell apart.
    """

    def __init__(self, path: Path, *, encoding: str | None = None, separator: str | None = None) -> None:
        head = delimited.first_bytes(path)
        self._path, self._form = path, _settled(path, head, encoding, separator)
        self._top = header(head, self._form, path.name)
        self._start = _end_of(self._top, head, path)
        _must_differ(self._top.names, path)
        self.schema = pa.schema([(name, pa.string()) for name in self._top.names])

    def __arrow_c_schema__(self) -> Any:
        return self.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return pa.RecordBatchReader.from_batches(self.schema, self._batches()).__arrow_c_stream__()

    def _batches(self) -> Iterator[Any]:
        width = len(self._top.names)
        with self._path.open("rb") as file:
            file.seek(self._start)
            for cells in cut(file, self._top.separator.encode(), width):
                columns = [self._texts(cells[place::width]) for place in range(width)]
                yield pa.record_batch(columns, schema=self.schema)

    def _texts(self, cells: Cells) -> Any:
        found = delimited.decoded(pa.array(cells, pa.binary()), self._form)
        return compute.if_else(compute.equal(found, ""), pa.scalar(None, pa.string()), found)


def cut(file: IO[bytes], separator: bytes, width: int) -> Iterator[Cells]:
    """The cells of a file's rows of `width` cells, from where it stands: row after row, some rows at a time."""
    held, ended, too_long = b"", False, False
    while not ended:
        part = file.read(_BLOCK)
        held, ended = held + (part or b"\n"), not part
        if too_long:  # the rest of that row is left out
            end = held.find(b"\n") + 1
            held, too_long = held[end:] if end else b"", not end
        cells, rest = _cut(held, separator, width, ended)
        yield cells
        held, too_long = (b"", True) if rest is None else (rest, too_long)


def _cut(held: bytes, separator: bytes, width: int, ended: bool) -> tuple[Cells, bytes | None]:
    """Cells that no more bytes would change, and the rest; None is the rest of a row that is too long already."""
    cells: Cells = []
    at = 0
    while True:
        quote = held.find(b'"', at)
        if end := held.rfind(b"\n", at, quote if quote >= 0 else len(held)) + 1:
            cells += _plain(held[at : end - 1], separator, width)
            at = end
        decided = ended or len(held) - at > LONGEST + 2
        if quote < 0 or not decided:
            long = len(held) - at > LONGEST and held.find(b"\n", at) < 0
            return cells, None if long else held[at:]
        row, end = _quoted(held, at, separator)
        if not end:
            return cells, None
        cells += row if len(row) == width and end - at <= LONGEST else []
        at = end


def _plain(lines: bytes, separator: bytes, width: int) -> Cells:
    """The cells of lines without a quote."""
    whole = [line.removesuffix(b"\r") for line in lines.split(b"\n")] if b"\r" in lines else lines.split(b"\n")
    kept = [line for line in whole if line.count(separator) == width - 1 and len(line) < LONGEST]
    return separator.join(kept).split(separator) if kept else []


def _quoted(held: bytes, at: int, separator: bytes) -> tuple[Cells, int]:
    """The row that begins at `at`, and where the next one does: 0 where no end of it is there."""
    row: Cells = []
    stop, line = at + LONGEST, -1
    while True:
        closing = _closing(held, at, stop, separator) if held[at : at + 1] == b'"' else -1
        if closing >= 0:
            cell, at = held[at + 1 : closing].replace(b'""', b'"'), closing + 1
        else:
            line = line if line >= at else held.find(b"\n", at)
            if line < 0:
                return row, 0
            end = held.find(separator, at, line)
            cell, at = (held[at:line].removesuffix(b"\r"), line) if end < 0 else (held[at:end], end)
        row.append(cell)
        if held[at : at + 1] != separator:
            return row, held.find(b"\n", at) + 1
        at += 1


def _closing(held: bytes, at: int, stop: int, separator: bytes) -> int:
    """Where the quote is that closes the one at `at`; -1 where there is none."""
    place = held.find(b'"', at + 1, stop)
    while place >= 0 and held[place + 1 : place + 2] == b'"':
        place = held.find(b'"', place + 2, stop)
    closed = held[place + 1 : place + 2] in (separator, b"\n") or held[place + 1 : place + 3] == b"\r\n"
    return place if place >= 0 and closed else -1


def _settled(path: Path, head: bytes, encoding: str | None, separator: str | None) -> FileFormat:
    """How the file is written: as told, as its schema says, or as its first bytes and line of column names tell."""
    mark, beside = marked(head), schema_path(path)
    known = Schema.load(beside).file if beside.is_file() else None
    if known is not None and encoding is None and not known.confirmed:
        raise InvalidArgument(f"{beside.name}: the encoding waits for a confirmation; want it confirmed, or --encoding")
    known = known or FileFormat(mark or "utf-8")
    form = FileFormat(encoding or known.encoding, separator or known.separator)
    for one in (form, FileFormat(mark or form.encoding)):
        if not one.by_cell:
            raise InvalidArgument(
                f"{path.name}: is written in {one.encoding}, in which one row's bytes could change how others are "
                "read; want it saved as UTF-8"
            )
    return form


def _end_of(top: Header, head: bytes, path: Path) -> int:
    """Where the line of column names ends.

    Raises:
        InvalidArgument: it ends in a carriage return alone, as no row may.
    """
    ends = list(re.finditer(rb"\r\n|\n|\r", head))[: top.lines]
    if len(ends) < top.lines:
        return len(head)
    if any(end[0] == b"\r" for end in ends):
        raise InvalidArgument(f"{path.name}: the line of column names ends in a carriage return alone; want line feeds")
    return ends[-1].end()


def _must_differ(names: tuple[str, ...], path: Path) -> None:
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(name.casefold(), name)) != name or names.count(name) > 1:
            raise InvalidArgument(
                f"{path.name}: columns {check.shown(other)} and {check.shown(name)} are one to an engine; want each "
                "name once, whatever the case of its letters"
            )

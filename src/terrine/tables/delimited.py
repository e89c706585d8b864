"""CSV and its like, in parts: every cell is a text, whatever the other rows hold.

The line of column names is read here, the rows are cut into cells by pyarrow as they stream past. What is wrong is
said without a row's content: an error ends up in logs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from terrine.errors import InvalidArgument
from terrine.tables.formats import _HEAD, FileFormat, Header, header, marked, transcoded

_BLOCK = 2**22
"""How many bytes are cut at a time; one row has to fit."""


def opened(path: Path, form: FileFormat) -> Any:
    """The file as a stream of bytes, decompressed by its ending, in UTF-8 where cells are not decoded one by one."""
    import pyarrow

    stream = pyarrow.input_stream(str(path), compression="detect", buffer_size=2**20)
    return stream if form.by_cell else transcoded(stream, form.encoding)


def first_bytes(path: Path, form: FileFormat | None = None) -> bytes:
    """What the line of column names is in."""
    with readable(path), contextlib.closing(opened(path, form or FileFormat())) as stream:
        found: bytes = stream.read(_HEAD)
    return found


def header_of(path: Path, form: FileFormat) -> Header:
    """The column names of a file."""
    return header(first_bytes(path, form), form, path)


def read_parts(path: Path, form: FileFormat, wanted: Sequence[str] | None = None) -> Iterator[Any]:
    """The rows as record batches of texts, only the columns `wanted`.

    Raises:
        InvalidArgument: a row has more or fewer cells than there are column names, or one is too long.
    """
    import pyarrow
    from pyarrow import csv

    top = header_of(path, form)
    known = {name: place for place, name in enumerate(top.names)}
    places = [known[name] for name in (top.names if wanted is None else wanted)]
    keys = [str(place) for place in range(len(top.names))]
    with readable(path), contextlib.closing(opened(path, form)) as stream:
        try:
            reader = csv.open_csv(
                stream,
                read_options=csv.ReadOptions(block_size=_BLOCK, column_names=keys, skip_rows=top.lines),
                parse_options=csv.ParseOptions(delimiter=top.separator, newlines_in_values=True),
                convert_options=csv.ConvertOptions(
                    column_types=dict.fromkeys(keys, pyarrow.binary()), include_columns=[keys[at] for at in places],
                    null_values=[], strings_can_be_null=False,
                ),
            )  # fmt: skip
        except pyarrow.ArrowInvalid as error:
            if "Could not skip initial" in str(error) or "Empty CSV" in str(error):  # nothing after the names
                return
            raise
        for part in reader:
            cells = [decoded(column, form) for column in part.columns]
            yield pyarrow.record_batch(cells, names=[top.names[at] for at in places])


def decoded(cells: Any, form: FileFormat) -> Any:
    """Cells of bytes as texts; one that is not in the encoding is missing."""
    import pyarrow

    if form.encoding == "utf-8" or not form.by_cell:
        with contextlib.suppress(pyarrow.ArrowInvalid):
            texts = cells.cast(pyarrow.string())
            return texts if form.by_cell else _unmarked(texts)
    coded = cells.dictionary_encode()
    values = [_decoded(value, form.encoding if form.by_cell else "utf-8") for value in coded.dictionary.to_pylist()]
    return pyarrow.array(values, pyarrow.string()).take(coded.indices)


def _decoded(value: bytes, encoding: str) -> str | None:
    try:
        return value.decode(encoding)
    except UnicodeDecodeError:
        return None


def _unmarked(texts: Any) -> Any:
    """A cell with the mark of what could not be decoded is missing."""
    import pyarrow
    from pyarrow import compute

    return compute.if_else(compute.match_substring(texts, "\ufffd"), pyarrow.scalar(None, pyarrow.string()), texts)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what pyarrow and the file system say of a file into one line that holds no row.

    Raises:
        InvalidArgument: the file cannot be read.
    """
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, EOFError) as error:
        raise InvalidArgument(f"{path}: not readable as {path.suffix[1:]} ({_reason(str(error))})") from None


def _reason(said: str) -> str:
    if match := re.search(r"(Row #\d+: )?Expected (\d+) columns, got (\d+)", said):
        where = f" ({match[1][:-2].lower()})" if match[1] else ""
        return f"a row{where} has {match[3]} cells, the line of column names has {match[2]}; a quote may be open"
    if "straddling" in said:
        return f"a row is longer than {_BLOCK:,} bytes; a quote may be open"
    return re.sub(r"\s+", " ", said.splitlines()[0])[:120] if said else "damaged"


def undecodable(path: Path, encoding: str) -> bool:
    """Whether any byte of the file is not in the encoding: an answer about the rows, for their owner."""
    import codecs

    decoder = codecs.getincrementaldecoder(encoding)()
    with readable(path), contextlib.closing(opened(path, FileFormat())) as stream:
        try:
            while part := stream.read(2**20):
                decoder.decode(part)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return True
    return False


def sniffed(paths: Sequence[Path], encoding: str | None = None, separator: str | None = None) -> FileFormat:
    """How these files are written, as far as they tell; an encoding that the rows told is not confirmed."""
    head = first_bytes(paths[0])
    known = encoding or marked(head)
    if known is None:
        line = head.split(b"\n", 1)[0]
        try:
            line.decode("utf-8")
        except UnicodeDecodeError:
            known = "cp1252"  # told by the column names, which are public
    odd = known is None and any(undecodable(path, "utf-8") for path in paths)
    form = FileFormat(known or ("cp1252" if odd else "utf-8"), separator, confirmed=not odd)
    return FileFormat(form.encoding, header_of(paths[0], form).separator, form.confirmed)

"""How the cells of a text file are written: its encoding and its separator.

Both are public facts of a file, settled once and kept in the schema: were they guessed anew from the rows, one row
could change how everybody else's are read. Only two guesses are free: the separator is told by the line of column
names, and the encoding by a byte order mark or by that line. Whatever else `terrine schema` finds in the rows waits
for a confirmation. A cell that cannot be decoded is missing, and only that cell.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from terrine.check import shown
from terrine.errors import InvalidArgument

SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|", "\\t": "\t"}
_SNIFFED = (",", ";", "\t", "|")
_BY_CELL = re.compile(r"utf-8|iso8859-\d+|cp(125\d|437|85\d|86\d|874|737|775)|koi8-[rtu]|mac-\w+|hp-roman8|tis-620")
_BY_STREAM = re.compile(r"utf-(16|32)(-[lb]e)?|gb2312|gbk|gb18030|big5\w*|shift_jis\w*|euc_\w+|cp(932|949|950)")
"""Encodings in which a byte below 128 may be a part of another letter: read as a whole, what is odd becomes a mark."""
_MARKS = ((b"\xff\xfe\x00\x00", "utf-32"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"), (b"\xef\xbb\xbf", "utf-8"))
_HEAD = 2**20
"""The line of column names has to end within so many bytes."""


@dataclass(frozen=True)
class FileFormat:
    """How a text file is written. Without a separator, the line of column names tells it.

    Raises:
        InvalidArgument: no such encoding, or not one character of ASCII between cells.
    """

    encoding: str = "utf-8"
    separator: str | None = None
    confirmed: bool = True
    """Whether the encoding is known without the rows."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoding", _encoding(self.encoding))
        if self.separator is not None:
            object.__setattr__(self, "separator", _separator(self.separator))

    @property
    def by_cell(self) -> bool:
        """Whether every cell is decoded by itself; otherwise the stream is, before it is cut into cells."""
        return _BY_CELL.fullmatch(self.encoding) is not None


@dataclass(frozen=True)
class Header:
    """The line of column names, how many lines of the file it takes, and what separates its cells."""

    names: tuple[str, ...]
    lines: int
    separator: str


def marked(head: bytes) -> str | None:
    """The encoding that a file's first bytes tell by themselves: a byte order mark, or zeros of UTF-16."""
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding
    even, odd = head[:64:2], head[1:64:2]
    if len(odd) >= 2 and 0 not in even and odd.count(0) == len(odd):
        return "utf-16-le"
    return "utf-16-be" if len(odd) >= 2 and 0 not in odd and even.count(0) == len(even) else None


def transcoded(stream: IO[bytes], encoding: str) -> Transcoded:
    """The stream in UTF-8; what cannot be decoded becomes U+FFFD."""
    return Transcoded(stream, encoding)


class Transcoded(io.RawIOBase):
    """A stream of bytes in UTF-8, made from one in another encoding as it is read."""

    def __init__(self, stream: IO[bytes], encoding: str) -> None:
        self._stream, self._decoder = stream, codecs.getincrementaldecoder(encoding)(errors="replace")
        self._ready, self._ended = b"", False

    def readable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int | None = -1) -> bytes:
        """At most `size` bytes; none at the end."""
        parts = [self._ready]
        held = len(self._ready)
        while not self._ended and (size is None or size < 0 or held < size):
            part = self._stream.read(2**20)
            self._ended = not part
            parts.append(self._decoder.decode(part, final=self._ended).encode("utf-8", "replace"))
            held += len(parts[-1])
        whole, end = b"".join(parts), held if size is None or size < 0 else size
        self._ready = whole[end:]
        return whole[:end]

    def close(self) -> None:
        """Close the stream underneath."""
        self._stream.close()
        super().close()


def header(head: bytes, form: FileFormat, where: Any) -> Header:
    """The column names at the head of a file that `form` describes; `head` is in UTF-8 where it is not by cell.

    Raises:
        InvalidArgument: there are none, they cannot be decoded, or two are the same.
    """
    encoding = form.encoding if form.by_cell else "utf-8"
    end = max(head.rfind(b"\n"), head.rfind(b"\r")) + 1
    if len(head) >= _HEAD and not end:
        raise InvalidArgument(f"{where}: the first line is longer than {_HEAD:,} bytes; want a line of column names")
    head = head.removeprefix(codecs.BOM_UTF8)[: _HEAD if len(head) < _HEAD else end]
    lines = iter(io.StringIO(_text_of(head, encoding), newline=""))
    told, skipped = re.compile(r"sep=(.)\r?\n?"), 0
    first = next(lines, "")
    separator = form.separator
    while first and (not first.strip() or told.fullmatch(first)):  # an empty line, or what Excel writes
        match = told.fullmatch(first)
        separator = separator or (match[1] if match else None)
        first, skipped = next(lines, ""), skipped + 1
    separator = separator or _told_by(first)
    read = csv.reader(_again(first, lines), delimiter=separator)
    try:
        names = next(read, [])
    except csv.Error as error:
        raise InvalidArgument(f"{where}: the line of column names is not readable ({error})") from None
    _check_names(names, encoding, where)
    return Header(tuple(name.strip() or f"column {place + 1}" for place, name in enumerate(names)),
                  skipped + read.line_num, separator)  # fmt: skip


def _text_of(head: bytes, encoding: str) -> str:
    """The text; what cannot be decoded is a mark, which matters in the line of column names alone."""
    return head.decode(encoding, errors="replace")


def _again(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _check_names(names: list[str], encoding: str, where: Any) -> None:
    if not names:
        raise InvalidArgument(f"{where}: the file is empty; want a line of column names and some rows")
    if odd := next((name for name in names if "\ufffd" in name), None):
        raise InvalidArgument(
            f"{where}: the column name {shown(odd)} is not {encoding}; want --encoding, such as cp1252 or utf-16"
        )
    if odd := next((name for name in names if not name.isprintable()), None):
        raise InvalidArgument(f"{where}: the column name {shown(odd)} holds a control character; rename it")


def _told_by(line: str) -> str:
    """The separator that occurs most often in the line of column names, outside quotes."""
    bare = re.sub(r'"[^"]*"', "", line)
    counts = {one: bare.count(one) for one in _SNIFFED}
    return max(_SNIFFED, key=lambda one: counts[one])


def _encoding(name: str) -> str:
    try:
        known = codecs.lookup(str(name)).name
    except (LookupError, ValueError):
        known = ""
    known = {"utf-8-sig": "utf-8", "ascii": "utf-8", "utf_8_sig": "utf-8"}.get(known, known)
    if not (_BY_CELL.fullmatch(known) or _BY_STREAM.fullmatch(known)):
        raise InvalidArgument(
            f"encoding={name!r}: want one of utf-8, utf-16, latin-1, cp1252, ... as Python names them"
        )
    return known


def _separator(told: str) -> str:
    one = SEPARATORS.get(str(told).lower(), str(told))
    if len(one) != 1 or not one.isascii() or one.isalnum() or one in '"\n\r\0':
        raise InvalidArgument(f"separator={told!r}: want one character, such as ',' or ';', or one of comma, tab")
    return one

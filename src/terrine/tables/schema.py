"""The public facts about a table: bounds of its numbers, values of its categories, classes of its label.

A row becomes features by these facts alone, whatever the other rows hold; `columns.py` says how. A label is a class,
or a number with public bounds (a `target`), to which a label outside is moved. A label outside the classes is refused.
A fact is `confirmed` once somebody said that it is known without this table: bounds taken from the rows tell about the
row that is largest. Where they are accepted all the same, the fact is `guessed`, and every page of a run says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine.errors import InvalidArgument
from terrine.tables import cells
from terrine.tables.columns import KINDS, Column, Number, Text, wanted
from terrine.tables.formats import FileFormat
from terrine.tables.reading import batches_of
from terrine.tables.sentences import Encoder
from terrine.tables.sources import TableSource, is_text, open_table

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
VERSION = 2
"""Version 1 had numbers, categories and ignored columns, and says no version; it reads as this one."""
FILE = "file"


@dataclass(frozen=True)
class Schema:
    """A label with its classes, the columns by name, and how a text file is written."""

    label: str
    classes: tuple[str, ...]
    columns: dict[str, Column] = field(default_factory=dict)
    classes_confirmed: bool = True
    target: Number | None = None
    """The bounds of a label that is a number; there are no classes then."""
    file: FileFormat | None = None
    classes_guessed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(str(one) for one in self.classes))
        if self.target is not None:
            if self.classes:
                raise InvalidArgument(f"label {self.label!r}: has classes and bounds; want one of the two")
            return
        if len(set(self.classes)) < 2:
            raise InvalidArgument(
                f"label {self.label!r} has {len(set(self.classes))} class; want two or more, or nothing can be learned"
            )
        if len(set(self.classes)) < len(self.classes):
            raise InvalidArgument(f"classes={list(self.classes)}: want each once")

    @property
    def width(self) -> int:
        """How many features a row becomes."""
        return sum(column.width for column in self.columns.values())

    @property
    def length(self) -> float:
        """The most that a row's features can be long, whatever the row."""
        return math.sqrt(sum(column.square for column in self.columns.values()))

    @property
    def unconfirmed(self) -> tuple[str, ...]:
        """The columns whose facts were drafted from the rows and that nobody has confirmed."""
        open_ones = [name for name, column in self.columns.items() if not column.confirmed]
        encoding = () if self.file is None or self.file.confirmed else ("the encoding",)
        return (*open_ones, *(() if self.classes_confirmed else (self.label,)), *encoding)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The numbers whose bounds nobody knows."""
        return tuple(name for name, one in self.columns.items() if isinstance(one, Number) and one.unknown)

    @property
    def guessed(self) -> tuple[str, ...]:
        """The columns whose facts were taken from the rows and accepted all the same."""
        accepted = [name for name, column in self.columns.items() if column.guessed and column.width]
        return (*accepted, *((self.label,) if self.classes_guessed else ()))

    @property
    def encoder(self) -> str:
        """The name of the sentence encoder that its texts want, or nothing."""
        return next((one.encoder for one in self.columns.values() if isinstance(one, Text) and one.encoder), "")

    def encode(
        self,
        table: Any,
        *,
        encoder: Encoder | None = None,
        room: Callable[[tuple[int, int]], Floats] = lambda shape: np.empty(shape, np.float32),
    ) -> Floats:
        """The features (rows, width), each row's from that row alone; a `TableSource` is read in parts.

        `room` makes the array that they go into.

        Raises:
            InvalidArgument: the table lacks a column.
        """
        self.check_columns(table)
        self.check_encoder(encoder)
        used = {name: column for name, column in self.columns.items() if column.width}
        made, row = room((table.num_rows, self.width)), 0
        for batch in batches_of(table, list(used)):
            place, end = 0, row + batch.num_rows
            for at, column in enumerate(used.values()):
                given = {"encoder": encoder} if isinstance(column, Text) else {}
                made[row:end, place : place + column.width] = column.encode(batch.column(at), **given)
                place += column.width
            row = end
        return made

    def open_table(self, where: str | Path) -> TableSource:
        """Another table with these columns, written as the schema says, or else as it tells by itself."""
        if self.file is not None and is_text(where):
            with contextlib.suppress(InvalidArgument):
                found = open_table(where, self.file)
                self.check_columns(found)
                return found
        return open_table(where)

    def check_columns(self, table: Any) -> None:
        """Refuse a table without the schema's columns; no row is looked at.

        Raises:
            InvalidArgument: it lacks one, or the schema uses none.
        """
        used = [name for name, column in self.columns.items() if column.width]
        if missing := [name for name in used if name not in table.column_names]:
            there = ", ".join(repr(name) for name in table.column_names[:12])
            raise InvalidArgument(
                f"the table lacks {_listed(missing)}: want every column of the schema, by its name in the same case; "
                f"it has {there}"
            )
        if not used:
            raise InvalidArgument("the schema uses no column: want at least one number, category, date or text")

    def check_encoder(self, encoder: Encoder | None) -> None:
        """Refuse to go on without the sentence encoder that the schema names, or with another.

        Raises:
            InvalidArgument: none is there, or another.
        """
        for column in self.columns.values():
            if isinstance(column, Text) and column.encoder:
                wanted(encoder, column.encoder, column.sha256)

    def numbers(self, table: Any) -> NDArray[np.float64]:
        """The label of each row as a number within the target's bounds.

        Raises:
            InvalidArgument: the label is a class; no such column, or a value that is no number.
        """
        if self.target is None:
            raise InvalidArgument(f"label {self.label!r} is a class: want a schema whose label is a number")
        check_label(table, self.label)
        parts = [cells.numbers(batch.column(0), self.target.decimal) for batch in batches_of(table, [self.label])]
        read = np.concatenate([np.empty(0), *parts])
        if np.isnan(read).any():
            raise InvalidArgument(
                f"label {self.label!r} is missing or no number in some rows: want a number for each; drop those rows"
            )
        return np.asarray(np.clip(read, self.target.low, self.target.high))

    def labels(self, table: Any) -> Integers:
        """The class of each row, as its place in `classes`.

        Raises:
            InvalidArgument: no such column, or a value that is not among the classes.
        """
        check_label(table, self.label)
        places = {value: place for place, value in enumerate(self.classes)}
        parts = [self._classes_of(batch.column(0), places) for batch in batches_of(table, [self.label])]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def _classes_of(self, column: Any, places: dict[str, int]) -> Integers:
        values, chosen = cells.texts(column)
        found = np.array([places.get(value, -1) for value in values], dtype=np.int64)[chosen]
        if (found >= 0).all():
            return found
        strange = values[chosen[np.flatnonzero(found < 0)[0]]]
        if strange in cells.GAPS:
            raise InvalidArgument(
                f"label {self.label!r} is missing in some rows: want a class for each; drop those rows"
            )
        raise InvalidArgument(
            f"label {self.label!r} holds {strange!r}: want one of {_listed(self.classes)}; add it to the schema"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as TOML and JSON hold them."""
        label: dict[str, Any] = {"name": self.label, "classes": list(self.classes), "confirmed": self.classes_confirmed}
        if self.target is not None:
            label = {"name": self.label, **as_dict(self.target), "confirmed": self.classes_confirmed}
        record: dict[str, Any] = {"version": VERSION}
        if self.file is not None:
            record[FILE] = _of_file(self.file)
        return record | {
            "label": label | ({"guessed": True} if self.classes_guessed else {}),
            "columns": {name: as_dict(column) for name, column in self.columns.items()},
        }

    @classmethod
    def from_dict(cls, record: Any, *, source: str = "schema") -> Schema:
        """The schema in plain values.

        Raises:
            InvalidArgument: a part is missing, unknown or out of range.
        """
        try:
            _check_version(record)
            label = record["label"]
            columns = {str(name): _column(name, one) for name, one in record["columns"].items()}
            columns.pop(label["name"], None)
            if label.get("kind", "class") not in ("class", "number"):
                raise InvalidArgument(f"label: kind={label['kind']!r}: want class or number")
            target = _target(label) if label.get("kind") == "number" else None
            label = label if target is None else label | {"classes": []}
            return cls(
                label["name"], tuple(label["classes"]), columns, _flag(label, "confirmed", True), target,
                None if FILE not in record else FileFormat(**record[FILE]), _flag(label, "guessed", False),
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"{source}: {error} is missing or malformed; terrine schema drafts one") from None
        except InvalidArgument as error:
            raise InvalidArgument(f"{source}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Schema:
        """The schema in a TOML file."""
        try:
            return cls.from_dict(tomllib.loads(Path(path).read_text(encoding="utf-8")), source=str(path))
        except FileNotFoundError:
            raise InvalidArgument(f"{path}: no such schema; terrine schema TABLE --label NAME drafts it") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{path}: not TOML ({error})") from None

    def to_toml(self) -> str:
        """The schema as a TOML file's text."""
        record = self.as_dict()
        lines = [
            "# Public facts about a table: known without looking at its rows.",
            "# A fact with confirmed = false was drafted from the rows; training refuses it until you confirm it.",
            *(["# A fact with guessed = true was taken from the rows and accepted: it leaks."] if self.guessed else []),
            "",
            f"version = {VERSION}",
        ]
        for name in (FILE, "label"):
            if name in record:
                lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in record[name].items())]
        for name, column in record["columns"].items():
            lines += ["", f"[columns.{_toml(name)}]"]
            lines += [f"{key} = {_toml(value)}" for key, value in column.items()]
        return "\n".join(lines) + "\n"


def column_of(table: Any, name: str) -> list[Any]:
    """The values of a column.

    Raises:
        InvalidArgument: no such column; names one that is close.
    """
    check_label(table, name)
    values: list[Any] = table.column(name).to_pylist()
    return values


def ids_of(table: Any, name: str) -> Any:
    """Whose each row is, by a column.

    Raises:
        InvalidArgument: no such column, a row is nobody's, or cells are of several types.
    """
    check_label(table, name)
    return table.ids(name) if isinstance(table, TableSource) else column_of(table, name)


def check_label(table: Any, name: str) -> None:
    """Refuse a label that is no column of the table; no row is looked at.

    Raises:
        InvalidArgument: no such column; names one that is close.
    """
    if name not in table.column_names:
        near = difflib.get_close_matches(name, table.column_names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidArgument(f"label={name!r}: no such column; want one of {_listed(table.column_names)}{hint}")


def _check_version(record: Any) -> None:
    version = record.get("version", 1)
    if version not in (1, VERSION) or isinstance(version, bool):
        raise InvalidArgument(
            f"version={version!r}: want at most {VERSION}; update Terrine, or run terrine schema again"
        )
    if odd := sorted(set(record) - {"version", FILE, "label", "columns"}):
        raise InvalidArgument(f"{odd[0]!r} is no part of a schema; want version, file, label and columns")


def _flag(record: dict[str, Any], name: str, usual: bool) -> bool:
    found = record.get(name, usual)
    if not isinstance(found, bool):
        raise InvalidArgument(f"{name}={found!r}: want true or false")
    return found


def _target(label: dict[str, Any]) -> Number:
    """The bounds of a label that is a number."""
    bounds = {key: label[key] for key in ("low", "high", "decimal") if key in label}
    found = _column(label["name"], {"kind": "number", **bounds, "confirmed": _flag(label, "confirmed", True)})
    assert isinstance(found, Number)
    return found


def _column(name: str, record: Any) -> Column:
    kind = KINDS.get(record.get("kind"))
    if kind is None:
        raise InvalidArgument(f"column {name!r}: kind={record.get('kind')!r}: want one of {', '.join(KINDS)}")
    fields = {key: value for key, value in record.items() if key != "kind"}
    for flag in {"confirmed", "guessed", "unknown"} & set(fields):
        _flag(fields, flag, False)
    if kind is Number and fields.get("unknown"):
        fields["confirmed"] = False
    try:
        _check_bounds(kind, fields)
        return kind(**fields)
    except TypeError:
        raise InvalidArgument(f"column {name!r} has {_listed(fields)}: want {_WANTED[record['kind']]}") from None
    except InvalidArgument as error:
        raise InvalidArgument(f"column {name!r}: {error}") from None


_WANTED = {
    "number": "low and high (or unknown = true), and perhaps fill and confirmed",
    "category": "values, and perhaps confirmed",
    "hashed": "buckets, and perhaps confirmed",
    "date": "low and high, and perhaps parts, format and confirmed",
    "text": "buckets, and perhaps ngrams and confirmed",
    "ignored": "nothing else, and perhaps confirmed",
}


def _check_bounds(kind: type[Column], fields: dict[str, Any]) -> None:
    """Both bounds of a number are there, unless they are unknown."""
    if kind is Number and not fields.get("unknown") and not {"low", "high"} <= set(fields):
        raise TypeError


def as_dict(column: Column) -> dict[str, Any]:
    """A column's facts as plain values; what is usual is left out."""
    kind = next(name for name, one in KINDS.items() if type(column) is one)
    found: dict[str, Any] = {"kind": kind}
    for one in dataclasses.fields(column):
        value = getattr(column, one.name)
        if one.name == "confirmed" or (value == one.default and one.name not in _ALWAYS):
            continue
        if isinstance(column, Number) and column.unknown and one.name in ("low", "high"):
            continue
        if isinstance(column, Text) and column.encoder and one.name in ("buckets", "ngrams"):
            continue
        found[one.name] = list(value) if isinstance(value, tuple) else value
    return found | {"confirmed": column.confirmed}


_ALWAYS = frozenset({"low", "high", "values", "buckets", "ngrams", "parts"})


def _of_file(form: FileFormat) -> dict[str, Any]:
    told = {"encoding": form.encoding, "separator": form.separator, "confirmed": form.confirmed}
    return {name: value for name, value in told.items() if value is not None}


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            return '"' + "".join(one if one.isprintable() else _escaped(one) for one in escaped) + '"'
        case _:
            return "[" + ", ".join(_toml(one) for one in value) + "]"


def _escaped(one: str) -> str:
    return f"\\u{ord(one):04x}" if ord(one) < 2**16 else f"\\U{ord(one):08x}"


def _listed(names: Any) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "")


__all__ = ["VERSION", "Schema", "as_dict", "check_label", "column_of", "ids_of"]

"""The public facts about a table: bounds of its numbers, values of its categories, classes of its label.

A row becomes features by these facts alone, whatever the other rows hold:

    number      clamped to [low, high], scaled to [-1, 1]; one more feature is 1 where the value is missing (then 0)
    category    one feature to a value; one more is 1 where the value is missing or not listed
    ignored     nothing

A label is a class, or a number with public bounds (a `target`, to which a label outside is moved). A label outside the
classes is refused. A fact is `confirmed` once somebody said that it is known without this table:
bounds taken from the rows tell about the row that is largest.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine import check
from terrine.errors import InvalidArgument

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Number:
    """A number known to lie between `low` and `high`; what lies outside is moved to the nearer bound."""

    low: float
    high: float
    confirmed: bool = True

    def __post_init__(self) -> None:
        low, high = check.number("low", self.low), check.number("high", self.high)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InvalidArgument(f"low={self.low}, high={self.high}: want low < high, both finite")

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return 2

    def encode(self, values: list[Any]) -> Floats:
        """The features of each value."""
        read = np.array([as_number(value) for value in values], dtype=np.float64)
        missing = np.isnan(read)
        middle, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        scaled = (np.clip(np.where(missing, middle, read), self.low, self.high) - middle) / half
        return np.stack([scaled, missing], axis=1).astype(np.float32)


@dataclass(frozen=True)
class Category:
    """One of `values`; anything else counts as other."""

    values: tuple[str, ...]
    confirmed: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(str(value) for value in self.values))
        if not self.values or len(set(self.values)) < len(self.values):
            raise InvalidArgument(f"values={list(self.values)}: want at least one, each once")

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return len(self.values) + 1

    def encode(self, values: list[Any]) -> Floats:
        """The features of each value."""
        places = {value: place for place, value in enumerate(self.values)}
        chosen = [places.get(as_text(value), len(self.values)) for value in values]
        return np.eye(self.width, dtype=np.float32)[chosen]


@dataclass(frozen=True)
class Ignored:
    """A column that is not used, such as a row number."""

    confirmed: bool = True

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return 0

    def encode(self, values: list[Any]) -> Floats:
        """No features."""
        return np.zeros((len(values), 0), dtype=np.float32)


Column = Number | Category | Ignored
_KINDS: dict[str, type[Column]] = {"number": Number, "category": Category, "ignored": Ignored}


@dataclass(frozen=True)
class Schema:
    """A label with its classes, and the columns by name."""

    label: str
    classes: tuple[str, ...]
    columns: dict[str, Column] = field(default_factory=dict)
    classes_confirmed: bool = True
    target: Number | None = None
    """The bounds of a label that is a number; there are no classes then."""

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
    def unconfirmed(self) -> tuple[str, ...]:
        """The columns whose facts were drafted from the rows and that nobody has confirmed."""
        open_ones = [name for name, column in self.columns.items() if not column.confirmed]
        return (*open_ones, *(() if self.classes_confirmed else (self.label,)))

    def encode(self, table: Any) -> Floats:
        """The features (rows, width), each row's from that row alone.

        Raises:
            InvalidArgument: the table lacks a column.
        """
        self.check_columns(table)
        used = {name: column for name, column in self.columns.items() if column.width}
        return np.concatenate([one.encode(table.column(name).to_pylist()) for name, one in used.items()], axis=1)

    def check_columns(self, table: Any) -> None:
        """Refuse a table without the schema's columns; no row is looked at.

        Raises:
            InvalidArgument: it lacks one, or the schema uses none.
        """
        used = [name for name, column in self.columns.items() if column.width]
        if missing := [name for name in used if name not in table.column_names]:
            raise InvalidArgument(f"the table lacks {_listed(missing)}: want every column of the schema")
        if not used:
            raise InvalidArgument("the schema uses no column: want at least one number or category")

    def numbers(self, table: Any) -> NDArray[np.float64]:
        """The label of each row as a number within the target's bounds.

        Raises:
            InvalidArgument: the label is a class; no such column, or a value that is no number.
        """
        if self.target is None:
            raise InvalidArgument(f"label {self.label!r} is a class: want a schema whose label is a number")
        read = np.array([as_number(value) for value in column_of(table, self.label)], dtype=np.float64)
        if np.isnan(read).any():
            raise InvalidArgument(
                f"label {self.label!r} is missing or no number in some rows: want a number for each; drop those rows"
            )
        return np.clip(read, self.target.low, self.target.high)

    def labels(self, table: Any) -> Integers:
        """The class of each row, as its place in `classes`.

        Raises:
            InvalidArgument: no such column, or a value that is not among the classes.
        """
        places = {value: place for place, value in enumerate(self.classes)}
        values = [as_text(value) for value in column_of(table, self.label)]
        if strange := next((value for value in values if value not in places), None):
            raise InvalidArgument(
                f"label {self.label!r} holds {strange!r}: want one of {_listed(self.classes)}; add it to the schema"
            )
        if "" in values:
            raise InvalidArgument(
                f"label {self.label!r} is missing in some rows: want a class for each; drop those rows"
            )
        return np.array([places[value] for value in values], dtype=np.int64)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as TOML and JSON hold them."""
        label: dict[str, Any] = {"name": self.label, "classes": list(self.classes), "confirmed": self.classes_confirmed}
        if self.target is not None:
            number = {"kind": "number", "low": self.target.low, "high": self.target.high}
            label = {"name": self.label, **number, "confirmed": self.classes_confirmed}
        return {"label": label, "columns": {name: _as_dict(column) for name, column in self.columns.items()}}

    @classmethod
    def from_dict(cls, record: Any, *, source: str = "schema") -> Schema:
        """The schema in plain values.

        Raises:
            InvalidArgument: a part is missing, unknown or out of range.
        """
        try:
            label = record["label"]
            columns = {str(name): _column(name, one) for name, one in record["columns"].items()}
            columns.pop(label["name"], None)
            sure = bool(label.get("confirmed", True))
            if label.get("kind", "class") == "number":
                return cls(label["name"], (), columns, sure, Number(label["low"], label["high"], sure))
            return cls(label["name"], tuple(label["classes"]), columns, sure)
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
        lines = [
            "# Public facts about a table: known without looking at its rows.",
            "# A fact with confirmed = false was drafted from the rows; training refuses it until you confirm it.",
            "",
            "[label]",
            *(f"{key} = {_toml(value)}" for key, value in self.as_dict()["label"].items()),
        ]
        for name, column in self.columns.items():
            lines += ["", f"[columns.{_toml(name)}]"]
            lines += [f"{key} = {_toml(value)}" for key, value in _as_dict(column).items()]
        return "\n".join(lines) + "\n"


def column_of(table: Any, name: str) -> list[Any]:
    """The values of a column.

    Raises:
        InvalidArgument: no such column; names one that is close.
    """
    check_label(table, name)
    values: list[Any] = table.column(name).to_pylist()
    return values


def check_label(table: Any, name: str) -> None:
    """Refuse a label that is no column of the table; no row is looked at.

    Raises:
        InvalidArgument: no such column; names one that is close.
    """
    if name not in table.column_names:
        near = difflib.get_close_matches(name, table.column_names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidArgument(f"label={name!r}: no such column; want one of {_listed(table.column_names)}{hint}")


def as_text(value: Any) -> str:
    """A value as a category's name; '' where it is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def as_number(value: Any) -> float:
    """A value, or the text of one, as a number; nan where it is none."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _column(name: str, record: Any) -> Column:
    kind = _KINDS.get(record.get("kind"))
    if kind is None:
        raise InvalidArgument(f"column {name!r}: kind={record.get('kind')!r}: want one of {', '.join(_KINDS)}")
    fields = {key: value for key, value in record.items() if key != "kind"}
    try:
        return kind(**fields)
    except TypeError:
        wanted = {"number": "low and high", "category": "values", "ignored": "nothing else"}[record["kind"]]
        raise InvalidArgument(f"column {name!r} has {_listed(fields)}: want {wanted}, and perhaps confirmed") from None
    except InvalidArgument as error:
        raise InvalidArgument(f"column {name!r}: {error}") from None


def _as_dict(column: Column) -> dict[str, Any]:
    match column:
        case Number(low=low, high=high):
            found: dict[str, Any] = {"kind": "number", "low": low, "high": high}
        case Category(values=values):
            found = {"kind": "category", "values": list(values)}
        case Ignored():
            found = {"kind": "ignored"}
    return found | {"confirmed": column.confirmed}


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            return '"' + "".join(one if one.isprintable() else f"\\u{ord(one):04x}" for one in escaped) + '"'
        case _:
            return "[" + ", ".join(_toml(one) for one in value) + "]"


def _listed(names: Any) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "")

"""A first schema, guessed from a table for its owner to correct: every fact in it still wants a confirmation.

The table is read once, in parts. The draft itself tells about the rows. It stays with the owner until each fact is
confirmed to be known elsewhere.
"""

from __future__ import annotations

import datetime
import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from terrine import check
from terrine.errors import InvalidArgument
from terrine.tables import cells
from terrine.tables.cells import GAPS, as_moment, as_number
from terrine.tables.columns import Category, Column, Date, Hashed, Ignored, Number, Text
from terrine.tables.formats import FileFormat
from terrine.tables.reading import batches_of
from terrine.tables.schema import Schema, check_label
from terrine.tables.sentences import Encoder

_MOST_VALUES = 100
"""More different texts than this look like names, not like categories."""
_MOST_KEPT = 20_000
_FORMATS = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", "%d.%m.%y", "%d/%m/%y", "%m/%d/%y")
_WAYS = (None, *_FORMATS, *(f"{one} %H:%M" for one in _FORMATS), *(f"{one} %H:%M:%S" for one in _FORMATS))
"""How dates are written: ISO 8601 first."""
_ID_WORDS = frozenset({"id", "ids", "uid", "guid", "uuid", "pid", "ssn", "mrn", "nhs", "person", "patient", "user"})
_ID_WORDS |= {"subject", "participant", "member", "customer", "client", "employee", "student", "respondent"}
_ID_WORDS |= {"household", "userid", "patientid", "personid", "customerid", "subjectid"}


def draft(
    table: Any,
    label: str,
    *,
    target: str | None = None,
    form: FileFormat | None = None,
    encoder: Encoder | None = None,
) -> Schema:
    """A schema guessed from `table`, all of it unconfirmed; texts are for `encoder` where there is one.

    `target` says whether the label is a "class" or a "number"; left out, many different numbers are a number.

    Raises:
        InvalidArgument: no such label, or only one class in it.
    """
    if target not in (None, "class", "number"):
        raise check.refuse("target", target, "class or number")
    check_label(table, label)
    names = list(table.column_names)
    seen = {name: _Seen() for name in names}
    for batch in batches_of(table, names):
        for place, name in enumerate(names):
            seen[name].see(batch.column(place))
    classes = sorted(seen[label].values)
    if len(classes) < 2:
        raise InvalidArgument(f"label {label!r} has one class, {classes}: want two or more, or nothing can be learned")
    columns = {name: seen[name].guess(encoder) for name in names if name != label}
    if target == "number" or (target is None and len(classes) > _MOST_VALUES):
        return Schema(label, (), columns, False, target=_target(label, seen[label]), file=form)
    if len(classes) > _MOST_VALUES:
        raise InvalidArgument(
            f"label {label!r} has {len(classes)} values: want a class, at most {_MOST_VALUES} of them, or --target "
            "number"
        )
    return Schema(label, tuple(classes), columns, classes_confirmed=False, file=form)


def _target(label: str, seen: _Seen) -> Number:
    if not (seen.low < seen.high and (seen.typed == "number" or seen.decimals)):
        raise InvalidArgument(
            f"label {label!r} has {len(seen.values)} values, not all of them numbers: want a number, or a class of at "
            f"most {_MOST_VALUES} values"
        )
    return _number(seen.low, seen.high, "." if seen.typed else seen.decimals[0])


def repeated_ids(table: Any, *, without: str | None = None) -> str | None:
    """A column whose name looks like an id of people and whose values repeat; None where there is none.

    The answer is for the table's owner: it tells about the rows.
    """
    for name in table.column_names:
        words = set(re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()))
        if name != without and words & _ID_WORDS and len(table.column(name).unique()) < table.num_rows:
            return str(name)
    return None


@dataclass
class _Seen:
    """What a column's cells were so far."""

    values: set[str] = field(default_factory=set)
    many: bool = False
    count: int = 0
    words: int = 0
    low: float = math.inf
    high: float = -math.inf
    typed: str | None = None
    """'number' or 'date', where the column has that type."""
    decimals: list[str] = field(default_factory=lambda: [".", ","])
    """With which of them every text so far is a number."""
    ways: list[str | None] = field(default_factory=lambda: list(_WAYS))
    """In which of them every text so far is a date."""
    first: float = math.inf
    last: float = -math.inf
    by_hour: bool = False

    def see(self, column: Any) -> None:
        """Look at some cells."""
        import pyarrow

        column = cells.sound(column)
        kind = column.type
        if pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_decimal(kind):
            self.typed = "number"
            self._number(cells.numbers(column))
        elif pyarrow.types.is_temporal(kind) and not pyarrow.types.is_duration(kind):
            self.typed = "date"
            self._moment(cells.moments(column))
        elif pyarrow.types.is_nested(kind):
            self.many = True
            return
        if not (self.typed == "date" or self.many):
            self._texts(column)

    def guess(self, encoder: Encoder | None) -> Column:
        """What the column seems to stand for."""
        if self.typed == "number":
            return _number(self.low, self.high) if self.low <= self.high else Ignored(confirmed=False)
        if self.typed == "date":
            return self._date(None) if self.first <= self.last else Ignored(confirmed=False)
        if not self.values:
            return Ignored(confirmed=False)
        if self.decimals and math.isfinite(self.low) and math.isfinite(self.high):
            return _number(self.low, self.high, self.decimals[0])
        if self.ways:
            return self._date(self.ways[0])
        if len(self.values) <= _MOST_VALUES:
            return Category(tuple(sorted(self.values)), confirmed=False)
        if self.words >= 3 * max(self.count, 1):
            return _text(encoder)
        return Hashed(confirmed=False) if 5 * len(self.values) <= self.count else Ignored(confirmed=False)

    def _texts(self, column: Any) -> None:
        values, places = cells.texts(column)
        counts = np.bincount(places, minlength=len(values))
        for value, count in zip(values, counts.tolist(), strict=True):
            if value in GAPS or not count:
                continue
            self.count += count
            self.words += count * (1 + value.count(" "))
            if value not in self.values and len(self.values) < _MOST_KEPT:
                self._new(value)

    def _new(self, value: str) -> None:
        self.values.add(value)
        if self.typed is not None:
            return
        self.decimals = [one for one in self.decimals if math.isfinite(as_number(value, one))]
        if self.decimals:
            self._number(np.array([as_number(value, self.decimals[0])]))
        self.ways = [one for one in self.ways if math.isfinite(as_moment(value, one))]
        if self.ways:
            self._moment(np.array([as_moment(value, self.ways[0])]))

    def _number(self, found: Any) -> None:
        if len(known := found[np.isfinite(found)]):
            self.low, self.high = min(self.low, float(known.min())), max(self.high, float(known.max()))

    def _moment(self, found: Any) -> None:
        if len(known := found[np.isfinite(found)]):
            self.first, self.last = min(self.first, float(known.min())), max(self.last, float(known.max()))
            self.by_hour = self.by_hour or bool((known % 86_400 != 0).any())

    def _date(self, way: str | None) -> Date:
        low, high = (_year_of(moment) for moment in (self.first, self.last))
        if (low, high) == (1970, 1970) and self.by_hour and self.last < 86_400:
            return Date("00:00", "23:59:59", ("hour",), way, confirmed=False)
        parts = ("weekday", "month", *(("hour",) if self.by_hour else ()))
        return Date(f"{low:04}-01-01", f"{high:04}-12-31T23:59:59", parts, way, confirmed=False)


def _number(least: float, most: float, decimal: str = ".") -> Number:
    low, high = _round(least, up=False), _round(most, up=True)
    low = 0.0 if 0 <= low < high / 4 else low
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = least, most
    return Number(low, high if high > low else low + max(1.0, abs(low)), confirmed=False, decimal=decimal)


def _text(encoder: Encoder | None) -> Text:
    if encoder is None:
        return Text(confirmed=False)
    return Text(encoder=encoder.name, sha256=encoder.sha256, dimensions=encoder.dimensions, confirmed=False)


def _round(value: float, *, up: bool) -> float:
    """To one digit, outward: a round bound says less about the row that is largest."""
    if value == 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(abs(value)))
    return float((math.ceil if up else math.floor)(value / unit)) * unit if unit else value


def _year_of(seconds: float) -> int:
    """The year of a moment, within those that a calendar has."""
    earliest, latest = (as_moment(f"{year}-01-01") for year in ("0001", "9999"))
    days = int(min(max(seconds, earliest), latest) // 86_400)
    return (datetime.date(1970, 1, 1) + datetime.timedelta(days=days)).year

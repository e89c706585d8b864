"""A first schema, guessed from a table for its owner to correct: every fact in it still wants a confirmation.

The draft itself tells about the rows. It stays with the owner until each fact is confirmed to be known elsewhere.
"""

from __future__ import annotations

import math
import re
from typing import Any

from terrine import check
from terrine.errors import InvalidArgument
from terrine.tables.schema import Category, Column, Ignored, Number, Schema, as_number, as_text, column_of

_MOST_VALUES = 100
"""More different texts than this look like names, not like categories."""
_ID_WORDS = frozenset({"id", "ids", "uid", "guid", "uuid", "pid", "ssn", "mrn", "nhs", "person", "patient", "user"})
_ID_WORDS |= {"subject", "participant", "member", "customer", "client", "employee", "student", "respondent"}
_ID_WORDS |= {"household", "userid", "patientid", "personid", "customerid", "subjectid"}


def draft(table: Any, label: str, *, target: str | None = None) -> Schema:
    """A schema guessed from `table`, all of it unconfirmed.

    `target` says whether the label is a "class" or a "number"; left out, many different numbers are a number.

    Raises:
        InvalidArgument: no such label, or only one class in it.
    """
    if target not in (None, "class", "number"):
        raise check.refuse("target", target, "class or number")
    columns = {name: _column(table.column(name)) for name in table.column_names if name != label}
    classes = sorted({as_text(value) for value in column_of(table, label)} - {""})
    if len(classes) < 2:
        raise InvalidArgument(f"label {label!r} has one class, {classes}: want two or more, or nothing can be learned")
    if target == "number" or (target is None and len(classes) > _MOST_VALUES):
        numbers = [as_number(value) for value in classes]
        if not all(map(math.isfinite, numbers)):
            raise InvalidArgument(
                f"label {label!r} has {len(classes)} values, not all of them numbers: want a number, or a class of at "
                f"most {_MOST_VALUES} values"
            )
        return Schema(label, (), columns, classes_confirmed=False, target=_number(numbers))
    if len(classes) > _MOST_VALUES:
        raise InvalidArgument(
            f"label {label!r} has {len(classes)} values: want a class of at most {_MOST_VALUES}, or --target number"
        )
    return Schema(label, tuple(classes), columns, classes_confirmed=False)


def repeated_ids(table: Any, *, without: str | None = None) -> str | None:
    """A column whose name looks like an id of people and whose values repeat; None where there is none.

    The answer is for the table's owner: it tells about the rows.
    """
    for name in table.column_names:
        words = set(re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()))
        if name != without and words & _ID_WORDS and len(table.column(name).unique()) < table.num_rows:
            return str(name)
    return None


def _column(column: Any) -> Column:
    import pyarrow

    kind = column.type
    if pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_decimal(kind):
        values = [float(value) for value in column.to_pylist() if value is not None and math.isfinite(value)]
        return _number(values) if values else Ignored(confirmed=False)
    written = [as_number(value) for value in column.to_pylist() if value is not None]
    if written and all(map(math.isfinite, written)) and pyarrow.types.is_string(kind):
        return _number(written)
    texts = sorted({as_text(value) for value in column.to_pylist()} - {""})
    return Category(tuple(texts), confirmed=False) if 0 < len(texts) <= _MOST_VALUES else Ignored(confirmed=False)


def _number(values: list[float]) -> Number:
    low, high = _round(min(values), up=False), _round(max(values), up=True)
    low = 0.0 if 0 <= low < high / 4 else low
    return Number(low, high if high > low else low + 1, confirmed=False)


def _round(value: float, *, up: bool) -> float:
    """To one digit, outward: a round bound says less about the row that is largest."""
    if value == 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(abs(value)))
    return float((math.ceil if up else math.floor)(value / unit)) * unit

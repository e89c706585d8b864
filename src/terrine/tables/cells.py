"""Cells as texts, numbers or moments, each by itself: a fast way for many and a slow one agree on every cell.

A cell is missing where the file has none, or where its text is one of `GAPS` and the schema does not list that text.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

GAPS = frozenset({"", "?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "null", "NULL", "None"})
"""Texts that stand for a missing cell."""

Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(\.\d{3})+(,\d+)?")
_EPOCH = datetime.datetime(1970, 1, 1)
_MIDNIGHT = datetime.date(1970, 1, 1)


class Texts(NamedTuple):
    """The texts of many cells: `values` once each, and the place of each cell's among them. The last one is ''."""

    values: list[str]
    places: Integers


def texts(cells: Any) -> Texts:
    """The text of each cell; '' where it is missing."""
    import pyarrow

    array, found = _plain(cells), None
    if not pyarrow.types.is_nested(array.type):
        with contextlib.suppress(pyarrow.ArrowNotImplementedError):
            found = array.dictionary_encode()
    if found is None:
        every = [as_text(one) for one in array.to_pylist()]
        return Texts([*every, ""], np.arange(len(every)))
    values = [as_text(one) for one in found.dictionary.to_pylist()]
    places = found.indices.fill_null(len(values)).to_numpy(zero_copy_only=False)
    return Texts([*values, ""], places.astype(np.int64))


def missing(cells: Any, listed: frozenset[str] = frozenset()) -> NDArray[np.bool_]:
    """Which cells hold nothing."""
    values, places = texts(cells)
    return np.array([one in GAPS and (not one or one not in listed) for one in values])[places]


def numbers(cells: Any, decimal: str = ".") -> Doubles:
    """The number of each cell; nan where it is none."""
    import pyarrow
    from pyarrow import compute

    array = _plain(cells)
    kind = array.type
    if pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_boolean(kind):
        known = array.cast(pyarrow.float64(), safe=False) if not pyarrow.types.is_boolean(kind) else array.cast("int8")
        return _doubles(known.cast(pyarrow.float64()))
    if pyarrow.types.is_string(kind) and decimal == ".":
        trimmed = compute.utf8_trim_whitespace(array)
        gaps = compute.is_in(trimmed, value_set=_gaps())
        with contextlib.suppress(pyarrow.ArrowInvalid):
            return _doubles(compute.if_else(gaps, pyarrow.scalar(None, pyarrow.string()), trimmed).cast("float64"))
    return np.array([as_number(one, decimal) for one in array.to_pylist()], dtype=np.float64)


@functools.cache
def _gaps() -> Any:
    import pyarrow

    return pyarrow.array(sorted(GAPS))


def moments(cells: Any, form: str | None = None) -> Doubles:
    """The moment of each cell in seconds since 1970, by the clock that it was written in; nan where it is none.

    A time of day is one of the first day. A moment with an offset is moved to UTC.
    """
    import pyarrow

    array, kind = _whole(cells), _whole(cells).type
    if pyarrow.types.is_timestamp(kind):
        whole = array.cast(pyarrow.int64())
        parts = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
        return np.floor(_doubles(whole.cast("float64", safe=False)) / parts)
    if pyarrow.types.is_date32(kind):
        return _doubles(array.cast("int32").cast("float64")) * 86_400.0
    if pyarrow.types.is_date64(kind):
        return np.floor(_doubles(array.cast("int64").cast("float64", safe=False)) / 1000)
    if pyarrow.types.is_time(kind):
        return moments(array.cast(pyarrow.string()))
    if pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_boolean(kind):
        array = array.cast(pyarrow.string())  # 20240131, say
    values, places = texts(array)
    return np.array([as_moment(one, form) for one in values], dtype=np.float64)[places]


def as_text(value: Any) -> str:
    """A value as a category's name; '' where it is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, bytes):
        try:
            return value.decode().strip()
        except UnicodeDecodeError:
            return ""
    return str(value).strip()


def as_number(value: Any, decimal: str = ".") -> float:
    """A value, or the text of one, as a number; nan where it is none."""
    if isinstance(value, str):
        value = value.strip()  # float() leaves some of the blanks that pyarrow trims
        if decimal == ",":
            if "." in value and not _THOUSANDS.fullmatch(value):
                return math.nan
            value = value.replace(".", "").replace(",", ".")
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def as_moment(text: str, form: str | None = None) -> float:
    """A text as seconds since 1970: by `form` (of strptime), otherwise ISO 8601; nan where it is none."""
    text = text.strip()
    try:
        if form is not None:
            moment = datetime.datetime.strptime(text, form)
        elif ":" in text[:3]:  # a time of day
            moment = datetime.datetime.combine(_MIDNIGHT, datetime.time.fromisoformat(text))
        else:
            moment = datetime.datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            moment = (moment - (moment.utcoffset() or datetime.timedelta(0))).replace(tzinfo=None)
    except (ValueError, OverflowError):
        return math.nan
    return float((moment - _EPOCH) // datetime.timedelta(seconds=1))


def sound(cells: Any) -> Any:
    """The cells with every text readable: one that is not UTF-8 is missing, instead of ending the whole column."""
    import pyarrow

    array = _whole(cells)
    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        return sound(array.cast(kind.value_type)) if not _broken(array.dictionary) else sound(_taken(array))
    if pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind):
        array = array.cast(pyarrow.large_binary() if pyarrow.types.is_large_string(kind) else pyarrow.binary_view())
        return _from_bytes(array)
    if pyarrow.types.is_string(kind):
        return _from_bytes(array.cast(pyarrow.binary())) if _broken(array) else array
    if pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
        return _from_bytes(array)
    return array


def _taken(array: Any) -> Any:
    return sound(array.dictionary).take(array.indices)


def _broken(array: Any) -> bool:
    import pyarrow

    if not pyarrow.types.is_string(array.type):
        return bool(pyarrow.types.is_large_string(array.type))
    try:
        array.validate(full=True)
    except (pyarrow.ArrowInvalid, UnicodeDecodeError):
        return True
    return False


def _from_bytes(array: Any) -> Any:
    import pyarrow

    with contextlib.suppress(pyarrow.ArrowInvalid):
        return array.cast(pyarrow.string())
    values = []
    for one in array.to_pylist():
        try:
            values.append(None if one is None else one.decode())
        except UnicodeDecodeError:
            values.append(None)
    return pyarrow.array(values, pyarrow.string())


def _plain(cells: Any) -> Any:
    """Moments become their texts, so that no odd one of them ends in an exception; all else stays."""
    import pyarrow

    array = sound(cells)
    kind = array.type
    if pyarrow.types.is_temporal(kind):
        try:
            return array.cast(pyarrow.string())
        except (pyarrow.ArrowException, ValueError):
            return pyarrow.nulls(len(array), pyarrow.string())
    return array


def _whole(cells: Any) -> Any:
    """One array; what holds lists comes as it is."""
    import pyarrow

    if isinstance(cells, pyarrow.ChunkedArray):
        return cells.combine_chunks() if cells.num_chunks != 1 else cells.chunk(0)
    return cells if isinstance(cells, pyarrow.Array) else pyarrow.array(list(cells))


def _doubles(array: Any) -> Doubles:
    found: Doubles = array.to_numpy(zero_copy_only=False).astype(np.float64)
    return found

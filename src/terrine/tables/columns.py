"""What a column stands for, and the features that its cells become: each cell's from that cell and public facts alone.

    number      clamped to [low, high], scaled to [-1, 1]; one more feature is 1 where it is missing (then `fill`)
    category    one feature to a value; one more is 1 where it is missing or not listed
    hashed      one feature to a bucket that a fixed public hash chooses, one more where it is missing
    date        seconds clamped and scaled as a number; features for weekday, month and hour where asked for
    text        hashed n-grams of its words, scaled to length 1, or a sentence encoder's; one more where it is missing
    ignored     nothing

The hash is BLAKE2b of the text with the number of buckets: the same on every machine, and nothing of the rows in it.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine import check
from terrine.errors import InvalidArgument
from terrine.tables import cells
from terrine.tables.cells import GAPS, as_moment
from terrine.tables.sentences import Encoder

Floats = NDArray[np.float32]
PARTS = {"weekday": 7, "month": 12, "hour": 24}
"""Parts of a moment, and how many features each becomes."""
_FARTHEST = 1e9
_MOST_BUCKETS = 2**20
_SOME_MOMENT = datetime.datetime(2001, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Number:
    """A number known to lie between `low` and `high`; what lies outside is moved to the nearer bound."""

    low: float = -_FARTHEST
    high: float = _FARTHEST
    confirmed: bool = True
    guessed: bool = False
    """Whether the bounds were taken from the rows, and accepted all the same."""
    unknown: bool = False
    """Whether nobody knows its bounds: then they are to be found privately."""
    fill: float | None = None
    """What a missing one counts as; None is the middle."""
    decimal: str = "."

    def __post_init__(self) -> None:
        low, high = check.number("low", self.low), check.number("high", self.high)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InvalidArgument(f"low={self.low}, high={self.high}: want low < high, both finite")
        if not high / 2 - low / 2 > 0:
            raise InvalidArgument(f"low={self.low}, high={self.high}: want them farther apart")
        if self.fill is not None and not low <= check.number("fill", self.fill) <= high:
            raise InvalidArgument(f"fill={self.fill}: want a number between low and high, or none for the middle")
        if self.decimal not in (".", ","):
            raise InvalidArgument(f"decimal={self.decimal!r}: want '.' or ','")

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return 2

    @property
    def square(self) -> float:
        """The most that its features' squared length can be."""
        return 1.0 if self.fill is None else 2.0

    def encode(self, values: Any) -> Floats:
        """The features of each cell."""
        return _scaled(cells.numbers(values, self.decimal), self.low, self.high, self.fill)


@dataclass(frozen=True)
class Category:
    """One of `values`; anything else counts as other."""

    values: tuple[str, ...]
    confirmed: bool = True
    guessed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _listed_values(self.values))

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return len(self.values) + 1

    @property
    def square(self) -> float:
        """The most that its features' squared length can be."""
        return 1.0

    def encode(self, values: Any) -> Floats:
        """The features of each cell."""
        known = {value: place for place, value in enumerate(self.values)}
        found, places = cells.texts(values)
        chosen = np.array([known.get(one, len(self.values)) for one in found])
        return _one_hot(chosen[places], self.width)


@dataclass(frozen=True)
class Hashed:
    """A category of many or unknown values: each falls into one of `buckets` by a fixed public hash."""

    buckets: int = 64
    confirmed: bool = True
    guessed: bool = False

    def __post_init__(self) -> None:
        _check_buckets(self.buckets)

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return self.buckets + 1

    @property
    def square(self) -> float:
        """The most that its features' squared length can be."""
        return 1.0

    def encode(self, values: Any) -> Floats:
        """The features of each cell."""
        found, places = cells.texts(values)
        chosen = np.array([self.buckets if one in GAPS else bucket(one, self.buckets)[0] for one in found])
        return _one_hot(chosen[places], self.width)


@dataclass(frozen=True)
class Date:
    """A date, a moment or a time of day between `low` and `high`, with features for its `parts`."""

    low: str
    high: str
    parts: tuple[str, ...] = ()
    format: str | None = None
    """How it is written, as strptime has it, such as %d.%m.%Y; None is ISO 8601. The bounds are ISO 8601."""
    confirmed: bool = True
    guessed: bool = False

    def __post_init__(self) -> None:
        for name in ("low", "high"):  # TOML has dates of its own
            object.__setattr__(self, name, str(getattr(self, name)))
        object.__setattr__(self, "parts", tuple(str(part) for part in self.parts))
        low, high = as_moment(self.low), as_moment(self.high)
        if not low < high:
            raise InvalidArgument(
                f"low={self.low!r}, high={self.high!r}: want low < high, both as 2024-01-31, 2024-01-31T12:00 or 12:00"
            )
        if set(self.parts) - set(PARTS) or len(set(self.parts)) < len(self.parts):
            raise InvalidArgument(f"parts={list(self.parts)}: want some of {', '.join(PARTS)}, each once")
        if self.format is not None and (not isinstance(self.format, str) or "%" not in self.format):
            raise InvalidArgument(f"format={self.format!r}: want one such as %d.%m.%Y, or none for ISO 8601")
        if self.format is not None:
            try:
                datetime.datetime.strptime(_SOME_MOMENT.strftime(self.format), self.format)
            except (ValueError, re.error) as e:
                raise InvalidArgument(f"format={self.format!r}: strptime cannot read it ({e})") from None

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return 2 + sum(PARTS[part] for part in self.parts)

    @property
    def square(self) -> float:
        """The most that its features' squared length can be."""
        return 1.0 + len(self.parts)

    def encode(self, values: Any) -> Floats:
        """The features of each cell."""
        seconds = cells.moments(values, self.format)
        return np.concatenate(
            [_scaled(seconds, as_moment(self.low), as_moment(self.high)), *(_part(seconds, one) for one in self.parts)],
            axis=1,
        )


@dataclass(frozen=True)
class Text:
    """Free text: hashed n-grams of its words in `buckets`, or what a local sentence encoder makes of it."""

    buckets: int = 256
    ngrams: int = 2
    """Up to so many words that follow each other count as one."""
    encoder: str = ""
    """A sentence encoder's name; its hash and width say which."""
    sha256: str = ""
    dimensions: int = 0
    confirmed: bool = True
    guessed: bool = False

    def __post_init__(self) -> None:
        _check_buckets(self.buckets)
        if not 1 <= check.whole("ngrams", self.ngrams) <= 5:
            raise InvalidArgument(f"ngrams={self.ngrams}: want 1 to 5")
        if self.encoder and not (len(self.sha256) == 64 and check.whole("dimensions", self.dimensions)):
            raise InvalidArgument(
                "encoder: want it with sha256 and dimensions, as terrine schema --text-model writes it"
            )

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return (self.dimensions if self.encoder else self.buckets) + 1

    @property
    def square(self) -> float:
        """The most that its features' squared length can be."""
        return 1.0

    def encode(self, values: Any, encoder: Encoder | None = None) -> Floats:
        """The features of each cell.

        Raises:
            InvalidArgument: a sentence encoder is wanted, and none or another is there.
        """
        found, places = cells.texts(values)
        if self.encoder:
            made = wanted(encoder, self.encoder, self.sha256).vectors(found)
        else:
            made = np.stack([self._hashed(one) for one in found])
        gaps = np.array([one in GAPS for one in found])
        made[gaps] = 0.0
        return np.concatenate([made, gaps[:, None]], axis=1).astype(np.float32)[places]

    def _hashed(self, text: str) -> Floats:
        words, row = _WORD.findall(text.lower()), np.zeros(self.buckets, dtype=np.float32)
        for length in range(1, self.ngrams + 1):
            for at in range(len(words) - length + 1):
                place, sign = bucket(" ".join(words[at : at + length]), self.buckets)
                row[place] += sign
        norm = float(np.linalg.norm(row))
        return row / norm if norm else row


@dataclass(frozen=True)
class Ignored:
    """A column that is not used, such as a row number."""

    confirmed: bool = True
    guessed: bool = False

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return 0

    @property
    def square(self) -> float:
        """The most that its features' squared length can be."""
        return 0.0

    def encode(self, values: Any) -> Floats:
        """No features."""
        return np.zeros((len(values), 0), dtype=np.float32)


Column = Number | Category | Hashed | Date | Text | Ignored
KINDS: dict[str, type[Column]] = {
    "number": Number, "category": Category, "hashed": Hashed, "date": Date, "text": Text, "ignored": Ignored,
}  # fmt: skip


@functools.lru_cache(maxsize=2**16)
def bucket(text: str, buckets: int) -> tuple[int, float]:
    """The bucket of a text, and a sign for sums of several."""
    found = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")
    return (found >> 1) % buckets, 1.0 if found & 1 else -1.0


def wanted(encoder: Encoder | None, name: str, sha256: str) -> Encoder:
    """The encoder that the schema names.

    Raises:
        InvalidArgument: none is there, or another.
    """
    if encoder is None:
        raise InvalidArgument(f"the schema wants the sentence encoder {name!r}; want --text-model with its folder")
    if encoder.sha256 != sha256:
        raise InvalidArgument(f"--text-model: another encoder than the schema's {name!r} ({sha256[:12]}...); want that")
    return encoder


def _scaled(values: NDArray[np.float64], low: float, high: float, fill: float | None = None) -> Floats:
    """Clamped and scaled, and whether it is missing."""
    gaps, middle, half = np.isnan(values), (low / 2 + high / 2), (high / 2 - low / 2)
    known = np.clip(np.where(gaps, middle if fill is None else fill, values), low, high)
    return np.stack([np.clip((known - middle) / half, -1.0, 1.0), gaps], axis=1).astype(np.float32)


def _part(seconds: NDArray[np.float64], part: str) -> Floats:
    """The features of a part of each moment; all 0 where it is missing, or no calendar has it."""
    known = np.abs(seconds) < 1e14  # nan is not
    whole = np.where(known, seconds, 0).astype(np.int64)
    if part == "weekday":
        found = (whole // 86_400 + 3) % 7  # 1970 began on a Thursday
    elif part == "hour":
        found = whole // 3600 % 24
    else:
        found = whole.astype("datetime64[s]").astype("datetime64[M]").astype(np.int64) % 12
    return _one_hot(found, PARTS[part]) * known[:, None].astype(np.float32)


def _one_hot(places: NDArray[np.int64], width: int) -> Floats:
    made = np.zeros((len(places), width), dtype=np.float32)
    made[np.arange(len(places)), places] = 1.0
    return made


def _listed_values(values: Any) -> tuple[str, ...]:
    found = tuple(str(value).strip() for value in values)
    if not found or len(set(found)) < len(found) or "" in found:
        raise InvalidArgument(f"values={list(found)}: want at least one, each once, none of them empty")
    return found


def _check_buckets(buckets: int) -> None:
    if not 2 <= check.whole("buckets", buckets) <= _MOST_BUCKETS:
        raise InvalidArgument(f"buckets={buckets}: want 2 to {_MOST_BUCKETS:,}")

"""A question, as a value: what an analyst asks for, once its words have been understood.

SQL text and the fluent form both end here, and everything after this starts here: no text of an analyst is handed on.
Names are as the analyst wrote them; `scope` resolves them against the tables.
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

Literal = bool | int | float | str | datetime.date | datetime.datetime


@dataclass(frozen=True)
class Name:
    """A column as written: perhaps with its table, perhaps in double quotes, which make letter case count."""

    column: str
    table: str | None = None
    exact: bool = False

    def __str__(self) -> str:
        return self.column if self.table is None else f"{self.table}.{self.column}"


class Comparison(enum.Enum):
    """How a column is compared with a constant."""

    EQUAL = "="
    UNEQUAL = "<>"
    LESS = "<"
    AT_MOST = "<="
    MORE = ">"
    AT_LEAST = ">="
    LIKE = "LIKE"


@dataclass(frozen=True)
class Compare:
    """`column` against a constant, or against another column of the same row."""

    column: Name
    comparison: Comparison
    other: Literal | Name


@dataclass(frozen=True)
class Among:
    """Whether a column is one of the constants."""

    column: Name
    values: tuple[Literal, ...]


@dataclass(frozen=True)
class Missing:
    """Whether a column is NULL (or NaN, which counts as NULL)."""

    column: Name


@dataclass(frozen=True)
class Holds:
    """Whether a column of truth values is true."""

    column: Name


@dataclass(frozen=True)
class Negated:
    """NOT."""

    inner: Predicate


@dataclass(frozen=True)
class AllOf:
    """AND."""

    parts: tuple[Predicate, ...]


@dataclass(frozen=True)
class AnyOf:
    """OR."""

    parts: tuple[Predicate, ...]


Predicate = Compare | Among | Missing | Holds | Negated | AllOf | AnyOf


def names_in(predicate: Predicate) -> Iterator[Name]:
    """Every column that a predicate names."""
    match predicate:
        case AllOf(parts=parts) | AnyOf(parts=parts):
            for part in parts:
                yield from names_in(part)
        case Negated(inner=inner):
            yield from names_in(inner)
        case Compare(column=column, other=other):
            yield column
            if isinstance(other, Name):
                yield other
        case Among(column=column) | Missing(column=column) | Holds(column=column):
            yield column


class Kind(enum.Enum):
    """The aggregates that can be asked for."""

    COUNT = "COUNT"
    PEOPLE = "COUNT(DISTINCT person)"
    SUM = "SUM"
    MEAN = "AVG"
    VARIANCE = "VARIANCE"
    VARIANCE_POPULATION = "VAR_POP"
    DEVIATION = "STDDEV"
    DEVIATION_POPULATION = "STDDEV_POP"
    QUANTILE = "QUANTILE"


NEEDS_BOUNDS = frozenset(Kind) - {Kind.COUNT, Kind.PEOPLE}
LOWEST, HIGHEST = 0.01, 0.99
"""The quantiles that answer MIN and MAX: the true extreme is one person's value, and no noise could hide it."""


@dataclass(frozen=True)
class Aggregate:
    """One noisy column of the answer; `column` is None for COUNT(*)."""

    kind: Kind
    alias: str
    column: Name | None = None
    q: float = 0.5


@dataclass(frozen=True)
class AskedKey:
    """One column to group by, and what the answer calls it."""

    column: Name
    alias: str


@dataclass(frozen=True)
class Join:
    """One more table, joined where `left` equals `right`."""

    table: str
    alias: str
    left: Name
    right: Name
    outer: bool = False


@dataclass(frozen=True)
class Order:
    """Sort the answer by a group key."""

    alias: str
    descending: bool = False


@dataclass(frozen=True)
class Question:
    """Everything that was asked; `columns` is the order in which the answer shows keys and aggregates."""

    table: str
    alias: str
    aggregates: tuple[Aggregate, ...]
    keys: tuple[AskedKey, ...] = ()
    joins: tuple[Join, ...] = ()
    where: Predicate | None = None
    order: tuple[Order, ...] = ()
    columns: tuple[str, ...] = field(default=())

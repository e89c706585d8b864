"""Rows as expressions: joins, WHERE, group keys and values, of total functions only.

A function that fails on some rows would tell about them without noise, and one that differs between engines would
bound contributions on one and not on the other. So numbers become doubles first; NaN counts as NULL everywhere (engines
order and clamp it differently: DuckDB clamps NaN to the upper bound); infinities are clamped; text is compared for
equality only, because its order depends on collations.

A value x in [lower, upper] becomes a whole number of grid steps, floor(x / step + 1/2), with step a power of 2:
division by it is exact, the sum with 1/2 rounds the same way on every engine, and floor is monotone. So the steps lie
between those of the bounds, whatever x was.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ibis

from terrine import check
from terrine.errors import InvalidArgument
from terrine.queries.question import (
    AllOf,
    Among,
    AnyOf,
    Compare,
    Comparison,
    Holds,
    Literal,
    Missing,
    Name,
    Negated,
    Predicate,
)
from terrine.queries.scope import Column, Scope, Sort

DETAIL = 32
"""A bounded value is at most 2^32 grid steps from 0."""
_LARGEST_BOUND, _SMALLEST_BOUND = 1e100, 1e-100
_ORDERED = {Comparison.LESS, Comparison.AT_MOST, Comparison.MORE, Comparison.AT_LEAST}


@dataclass(frozen=True)
class ValueGrid:
    """Bounds of a value and the step it is rounded to, 2^exponent."""

    lower: float
    upper: float
    exponent: int

    @classmethod
    def of(cls, lower: float, upper: float) -> ValueGrid:
        """The finest grid on which both bounds are at most 2^32 steps from 0."""
        largest = max(abs(lower), abs(upper))
        return cls(lower, upper, math.frexp(largest)[1] - DETAIL)

    @property
    def step(self) -> float:
        return math.ldexp(1.0, self.exponent)

    @property
    def reach(self) -> int:
        """The most steps from 0, either way; one more than computed here, for an engine that reads a constant of the
        SQL text with another last bit (a relative error of 2^-40 would still move 2^32 steps by less than one)."""
        return max(abs(self.steps(self.lower)), abs(self.steps(self.upper))) + 1

    def steps(self, value: float) -> int:
        """The engine's arithmetic, in the same floats."""
        return math.floor(math.ldexp(value, -self.exponent) + 0.5)

    def steps_of(self, number: Any) -> Any:
        """`number`, clamped and rounded, as an expression; NULL stays NULL.

        Steps above 1 could make PostgreSQL refuse tiny numbers (underflow), so those become 0 first.
        """
        clamped = ibis.cases((number >= self.upper, self.upper), (number <= self.lower, self.lower), else_=number)
        if self.exponent > 0:
            clamped = ibis.ifelse(clamped.abs() < 0.25, 0.0, clamped)
        return (clamped * math.ldexp(1.0, -self.exponent) + 0.5).floor().cast("int64")


def checked_bounds(name: str, bounds: Any) -> tuple[float, float]:
    """Public bounds of a column.

    Raises:
        InvalidArgument: not two finite numbers in order, or so large or so close that doubles end.
    """
    wanted = "(lower, upper), two finite numbers, lower < upper, known without a look at the data"
    if not isinstance(bounds, Sequence) or isinstance(bounds, str | bytes) or len(bounds) != 2:
        raise check.refuse(f"bounds[{name!r}]", bounds, wanted)
    lower, upper = (check.number(f"bounds[{name!r}]", one, wanted) for one in bounds)
    if not (-_LARGEST_BOUND <= lower < upper <= _LARGEST_BOUND):
        raise check.refuse(f"bounds[{name!r}]", bounds, wanted, "within 1e100 of 0")
    if upper - lower < max(_SMALLEST_BOUND, 1e-9 * max(abs(lower), abs(upper))):
        raise check.refuse(f"bounds[{name!r}]", bounds, wanted, "subtract a constant in a view: these are too close")
    return lower, upper


def joined(scope: Scope, tables: Sequence[Any]) -> Any:
    """The tables' used columns, under our names, joined."""
    parts = []
    for number, table in enumerate(tables):
        used = {one.place: table[one.name] for one in scope.columns if one.table == number}
        parts.append(table.select(**used))
    whole = parts[0]
    for join in scope.joins:
        right = parts[join.table]
        how = "left" if join.outer else "inner"
        whole = whole.join(right, [whole[join.left] == right[join.right]], how=how).select(
            *whole.columns, *right.columns
        )
    return whole


def number(rows: Any, column: Column) -> Any:
    """The column as a double in which NaN is NULL."""
    value = rows[column.place]
    if column.kind == "string":
        if not column.castable:
            raise InvalidArgument(
                f"column {column}: holds text; want numbers: cast it in a view, with NULL for no number"
            )
        value = value.try_cast("float64")
    elif column.sort not in (Sort.WHOLE, Sort.NUMBER):
        raise InvalidArgument(f"column {column}: holds {column.sort.value} ({column.kind}); want numbers")
    value = value.cast("float64")
    return value if column.sort is Sort.WHOLE else ibis.ifelse(value.isnan(), ibis.null("float64"), value)


def condition(rows: Any, predicate: Predicate, scope: Scope) -> Any:
    """The predicate as an expression that no row can make fail."""
    match predicate:
        case AllOf(parts=parts):
            return ibis.and_(*(condition(rows, part, scope) for part in parts))
        case AnyOf(parts=parts):
            return ibis.or_(*(condition(rows, part, scope) for part in parts))
        case Negated(inner=inner):
            return ~condition(rows, inner, scope)
        case Missing(column=name):
            return _nullable(rows, scope.column(name)).isnull()
        case Holds(column=name):
            return _compared(rows, scope.column(name), Comparison.EQUAL, True)
        case Among(column=name, values=values):
            column = scope.column(name)
            return ibis.or_(*(_compared(rows, column, Comparison.EQUAL, one) for one in values))
        case Compare(column=name, comparison=comparison, other=Name() as other):
            return _paired(rows, scope.column(name), comparison, scope.column(other))
        case Compare(column=name, comparison=comparison, other=value):
            return _compared(rows, scope.column(name), comparison, value)  # type: ignore[arg-type]


def _nullable(rows: Any, column: Column) -> Any:
    return number(rows, column) if column.sort is Sort.NUMBER else rows[column.place]


def _compared(rows: Any, column: Column, comparison: Comparison, value: Literal) -> Any:
    if (comparison in _ORDERED and isinstance(value, str | bool)) and column.sort in (Sort.TEXT, Sort.TRUTH):
        raise InvalidArgument(
            f"{column} {comparison.value}: the order of {column.sort.value} differs between engines; want = <> IN LIKE"
        )
    if comparison is Comparison.LIKE and not (column.sort is Sort.TEXT and isinstance(value, str)):
        raise InvalidArgument(f"{column} LIKE: want a column of text and a constant pattern")
    return _applied(*_alike(rows, column, value), comparison)


def _alike(rows: Any, column: Column, value: Literal) -> tuple[Any, Any]:
    """Column and constant as two expressions of one type."""
    private = rows[column.place]
    if isinstance(value, bool):
        if column.sort is Sort.TRUTH:
            return private, ibis.literal(value)
    elif isinstance(value, int | float):
        if column.sort is Sort.WHOLE and isinstance(value, int):
            return private, ibis.literal(value)
        if column.sort in (Sort.WHOLE, Sort.NUMBER, Sort.TEXT):
            return number(rows, column), ibis.literal(float(value), type="float64")
    elif column.sort is Sort.TEXT and isinstance(value, str):
        return private, ibis.literal(value)
    elif column.sort is Sort.DAY and not isinstance(value, datetime.datetime):
        return private, ibis.literal(_day(column, value), type="date")
    elif column.sort is Sort.MOMENT:
        return private, ibis.literal(_moment(column, value), type="timestamp")
    raise InvalidArgument(
        f"column {column}: holds {column.sort.value}, compared with {check.shown(value)}; want constants of its type"
    )


def _day(column: Column, value: str | datetime.date) -> datetime.date:
    try:
        return datetime.date.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        raise check.refuse(str(column), value, "a date, YYYY-MM-DD") from None


def _moment(column: Column, value: str | datetime.date) -> datetime.datetime:
    try:
        found = datetime.datetime.fromisoformat(value if isinstance(value, str) else value.isoformat())
        if found.tzinfo is None:
            return found
    except ValueError:
        pass
    raise check.refuse(str(column), value, "a time, YYYY-MM-DD HH:MM:SS, without a zone")


def _paired(rows: Any, left: Column, comparison: Comparison, right: Column) -> Any:
    numbers = {Sort.WHOLE, Sort.NUMBER}
    if ({left.sort, right.sort} <= numbers and left.sort is not right.sort) or left.sort is right.sort is Sort.NUMBER:
        return _applied(number(rows, left), number(rows, right), comparison)
    if left.sort is not right.sort or left.sort in (Sort.OTHER, Sort.IDENTITY):
        raise InvalidArgument(f"{left} {comparison.value} {right}: want two columns of one type")
    if comparison in _ORDERED and left.sort in (Sort.TEXT, Sort.TRUTH):
        raise InvalidArgument(
            f"{left} {comparison.value} {right}: the order of text differs between engines; want = <>"
        )
    return _applied(rows[left.place], rows[right.place], comparison)


def _applied(left: Any, right: Any, comparison: Comparison) -> Any:
    match comparison:
        case Comparison.EQUAL:
            return left == right
        case Comparison.UNEQUAL:
            return left != right
        case Comparison.LESS:
            return left < right
        case Comparison.AT_MOST:
            return left <= right
        case Comparison.MORE:
            return left > right
        case Comparison.AT_LEAST:
            return left >= right
        case Comparison.LIKE:
            return left.like(right)

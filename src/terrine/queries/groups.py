"""Group keys: public lists, public bins, or selected privately.

A row whose key is NULL, or not on the public list, or in no bin, is in no group. Public groups are all answered, the
empty ones with noise alone.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ibis

from terrine import check
from terrine.errors import InvalidArgument
from terrine.queries import rows as row_expressions
from terrine.queries.clauses import plain_text
from terrine.queries.question import Question
from terrine.queries.scope import Column, Scope, Sort

MOST_BINS = 1_000
MOST_KEYS = 100_000
LONGEST_KEY = 1_000
PRIVATE = "private"
_GROUPABLE = {Sort.TEXT, Sort.WHOLE, Sort.TRUTH, Sort.DAY}


@dataclass(frozen=True)
class GroupKey:
    """One key column: its public values, None where they are selected privately; the edges of its bins, if any."""

    column: Column
    alias: str
    values: tuple[Any, ...] | None
    edges: tuple[float, ...] = ()

    @property
    def example(self) -> Any:
        """A value of the key's type, for a rehearsal."""
        made = {Sort.WHOLE: 0, Sort.TRUTH: True, Sort.DAY: datetime.date(2000, 1, 1)}
        return self.values[0] if self.values else made.get(self.column.sort, "")

    def expression(self, rows: Any) -> Any:
        """The key of a row; NULL for a row in no group."""
        if not self.edges:
            return rows[self.column.place]
        value = row_expressions.number(rows, self.column)
        inner = [(value < edge, place) for place, edge in enumerate(self.edges[1:-1])]
        outside = (value < self.edges[0]) | (value > self.edges[-1]) | value.isnull()
        return ibis.cases((outside, ibis.null("int64")), *inner, else_=len(self.edges) - 2).cast("int64")

    def showable(self, rows: Any, place: str) -> list[Any]:
        """Conditions on a key that is not held against a list in SQL: of a length and a year that can be brought home.

        What fails on one person's key would tell of it: those keys are in no group.
        """
        if self.column.sort is Sort.TEXT:
            return [rows[place].length() <= LONGEST_KEY]
        if self.column.sort is Sort.WHOLE:
            return [rows[place] <= ibis.literal(2**63 - 1)]
        if self.column.sort is Sort.DAY:
            first, last = datetime.date(1, 1, 1), datetime.date(9999, 12, 31)
            return [rows[place] >= ibis.literal(first), rows[place] <= ibis.literal(last)]
        return []

    def shown(self, value: Any) -> Any:
        """The key as the answer shows it: bins as intervals, of which the last holds its upper edge."""
        if not self.edges:
            return value
        closing = "]" if value == len(self.edges) - 2 else ")"
        return f"[{self.edges[value]:g}, {self.edges[value + 1]:g}{closing}"


def grouped(question: Question, scope: Scope, keys: Any, bins: Any) -> tuple[GroupKey, ...]:
    """The group keys of a question, with what was declared about each.

    Raises:
        InvalidArgument: a key without public values, bins or "private"; or values that do not fit the column.
    """
    lists, edges = _named("keys", keys, question), _named("bins", bins, question)
    found = []
    for key in question.keys:
        column = scope.column(key.column, wanted=" in GROUP BY")
        names = {key.alias.casefold(), column.name.casefold(), str(key.column).casefold()}
        given = next((value for name, value in lists.items() if name in names), None)
        cut = next((value for name, value in edges.items() if name in names), None)
        if cut is not None and not (given is None or isinstance(given, str)):
            raise InvalidArgument(f"GROUP BY {column}: has bins and keys; want one of the two")
        if cut is not None:
            found.append(_binned(column, key.alias, cut))
        elif column.sort not in _GROUPABLE:
            raise InvalidArgument(
                f"GROUP BY {column}: holds {column.sort.value}; want text, whole numbers, dates or truth values, "
                f"or bins={{{column.name!r}: [edges]}}"
            )
        elif given is None:
            raise InvalidArgument(
                f"GROUP BY {column}: its values may be private; want keys={{{column.name!r}: [values]}}, "
                'known without a look at the data, or keys="private"'
            )
        else:
            values = None if isinstance(given, str) else _values(column, given)
            found.append(GroupKey(column, key.alias, values))
    return tuple(found)


def _named(what: str, given: Any, question: Question) -> dict[str, Any]:
    """What was given for each key, by lower-case name."""
    if given is None:
        return {}
    if isinstance(given, str) and what == "keys":
        given = {str(key.column): given for key in question.keys}
    if not isinstance(given, Mapping):
        raise check.refuse(what, given, '{"column": [values]} or "private"')
    known = {text.casefold() for key in question.keys for text in (key.alias, str(key.column), key.column.column)}
    for name, value in given.items():
        if not isinstance(name, str) or name.casefold() not in known:
            raise InvalidArgument(f"{what}[{check.shown(name)}]: no GROUP BY column; want the name of one")
        if isinstance(value, str) and (what != "keys" or value != PRIVATE):
            raise check.refuse(f"{what}[{name!r}]", value, 'a list, or for keys "private"')
    return {name.casefold(): value for name, value in given.items()}


def _binned(column: Column, alias: str, given: Any) -> GroupKey:
    edges = tuple(check.number("bins", edge) for edge in given)
    rising = all(one < two for one, two in itertools.pairwise(edges))
    if not 2 <= len(edges) <= MOST_BINS or not rising or not all(map(math.isfinite, edges)):
        raise check.refuse("bins", given, f"2 to {MOST_BINS:,} finite edges, rising")
    if column.sort is Sort.TEXT and column.castable:
        column = Column(**{**column.__dict__, "sort": Sort.NUMBER})
    if column.sort not in (Sort.WHOLE, Sort.NUMBER):
        raise InvalidArgument(f"bins[{column.name!r}]: holds {column.sort.value}; want a column of numbers")
    return GroupKey(column, alias, tuple(range(len(edges) - 1)), edges)


def _values(column: Column, given: Iterable[Any]) -> tuple[Any, ...]:
    try:
        values = tuple(_value(column, one) for one in given)
    except TypeError:
        raise check.refuse(f"keys[{column.name!r}]", given, 'a list of values, or "private"') from None
    if not 0 < len(values) <= MOST_KEYS or len(set(values)) != len(values):
        raise InvalidArgument(f"keys[{column.name!r}]: want 1 to {MOST_KEYS:,} values, each once")
    return values


def _value(column: Column, value: Any) -> Any:
    """A key of the column's own type; text is read as one where that is possible."""
    item = value.item() if hasattr(value, "item") else value
    try:
        if column.sort is Sort.TEXT and isinstance(item, str | int) and not isinstance(item, bool):
            if plain_text(str(item)):
                return str(item)
        elif column.sort is Sort.WHOLE and not isinstance(item, bool) and isinstance(item, int | str):
            if -(2**63) <= int(item) < 2**63:
                return int(item)
        elif column.sort is Sort.TRUTH and (isinstance(item, bool) or str(item).lower() in ("true", "false")):
            return item if isinstance(item, bool) else str(item).lower() == "true"
        elif column.sort is Sort.DAY and not isinstance(item, datetime.datetime):
            return item if isinstance(item, datetime.date) else datetime.date.fromisoformat(item)
    except (ValueError, TypeError):
        pass
    raise check.refuse(
        f"keys[{column.name!r}]", value, f"{column.sort.value}, and in text no backslash, control character or ${{"
    )

"""Names to columns: every name of a question, resolved against the registered tables and their schemas.

A schema is public: names and types, never rows. Inside the engine a column has a name of ours (c0, c1, ...), so that no
text of an analyst gets there, and columns of joined tables cannot be mixed up.

Which joins keep the unit: two private tables on the person, so that a joined row has one owner; a private table with a
public one on anything but the person. A joined row belongs to its one person, and contributions are bounded AFTER the
join, so a join may multiply rows as it likes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from terrine import check
from terrine.errors import InvalidArgument
from terrine.queries.declared import MOST_ROWS, Private, Public
from terrine.queries.question import Join, Name, Question

Declared = Private | Public


class Sort(enum.Enum):
    """What kind of values a column holds."""

    WHOLE = "whole numbers"
    NUMBER = "numbers"
    TEXT = "text"
    TRUTH = "truth values"
    DAY = "dates"
    MOMENT = "times"
    IDENTITY = "UUIDs"
    OTHER = "something else"


@dataclass(frozen=True)
class Column:
    """A resolved column; `place` is its name inside the engine."""

    place: str
    table: int
    name: str
    sort: Sort
    kind: str
    person: bool
    castable: bool = True
    """Whether the engine turns text that is no number into NULL, instead of failing."""
    complete: bool = False
    """Whether rows without a value in it are dropped, as the owner declared."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class ScopedTable:
    """One table of the question."""

    table: str
    alias: str
    declared: Declared
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class JoinOn:
    """Which places must be equal when table number `table` joins the ones before it."""

    table: int
    left: str
    right: str
    outer: bool


class Scope:
    """The tables and columns that one question uses.

    `votes` is in how many groups a person counts when keys are selected privately: the declared `groups`, else 1,
    because the threshold grows with it as fast as the votes do.
    """

    def __init__(
        self, question: Question, declared: Mapping[str, Declared], schemas: Mapping[str, Any], *, casts: bool = True
    ) -> None:
        self._casts = casts
        self._outer = {place for place, join in enumerate(question.joins, start=1) if join.outer}
        self.sources: list[ScopedTable] = []
        self.joins: list[JoinOn] = []
        self._used: dict[tuple[int, str], Column] = {}
        self._add(question.table, question.alias, declared, schemas)
        for join in question.joins:
            self._add(join.table, join.alias, declared, schemas)
            self.joins.append(self._joined(join))
        owners = [place for place, source in enumerate(self.sources) if isinstance(source.declared, Private)]
        if not owners:
            raise InvalidArgument(
                f"table {question.table!r} is public: nothing in the question is private; ask the engine itself"
            )
        self.person = self._person(owners[0])
        self.rows, self.groups = self._bounds()
        declared_groups = [getattr(source.declared, "groups", None) for source in self.sources]
        self.votes = min(self.groups, math.prod(one for one in declared_groups if one is not None))

    @property
    def columns(self) -> list[Column]:
        """Every column that was resolved, in order of first use."""
        return list(self._used.values())

    def column(self, name: Name, *, wanted: str = "") -> Column:
        """The column that `name` names, which must not be the person.

        Raises:
            InvalidArgument: none, several, or the person.
        """
        found = self._find(name, range(len(self.sources)))
        if found.person:
            hint = f"{found.name} says who a person is; only COUNT(DISTINCT {found.name}) and joins may use it"
            raise InvalidArgument(f"{name}{wanted}: {hint}")
        return found

    def is_person(self, name: Name) -> bool:
        """Whether `name` names a person column."""
        return self._find(name, range(len(self.sources))).person

    def counts_everybody(self, name: Name) -> None:
        """Refuse the person column of an outer-joined table: NULL where nothing matched, it counts fewer people."""
        table = self._find(name, range(len(self.sources))).table
        if table != self.person.table and any(join.outer for join in self.joins):
            wanted = f"{self.sources[self.person.table].alias}.{self.person.name}"
            raise InvalidArgument(f"COUNT(DISTINCT {name}): of a table after LEFT JOIN; want COUNT(DISTINCT {wanted})")

    def _add(self, table: str, alias: str, declared: Mapping[str, Declared], schemas: Mapping[str, Any]) -> None:
        known = _match(table, declared, exact=False)
        if known is None:
            raise InvalidArgument(f"table {check.shown(table)}: not registered; want one of {', '.join(declared)}")
        if any(source.table == known for source in self.sources):
            raise InvalidArgument(f"table {known}: stands twice in the question; want every table once")
        if any(source.alias.casefold() == alias.casefold() for source in self.sources):
            raise InvalidArgument(f"alias {alias}: stands twice in the question; want another")
        self.sources.append(ScopedTable(known, alias, declared[known], schemas[known]))

    def _joined(self, join: Join) -> JoinOn:
        new = len(self.sources) - 1
        right = self._find(join.right, range(new, new + 1))
        left = self._find(join.left, range(new))
        earlier = [isinstance(source.declared, Private) for source in self.sources[:new]]
        if isinstance(self.sources[new].declared, Private) and any(earlier):
            if not (left.person and right.person):
                raise InvalidArgument(
                    f"JOIN {join.table}: two private tables join on the person alone; want ON the person columns"
                )
        elif left.person or right.person:
            raise InvalidArgument(
                f"JOIN {join.table}: a public table joins on a public key, never on the person; want another column"
            )
        if left.sort is not right.sort or left.sort in (Sort.NUMBER, Sort.OTHER):
            raise InvalidArgument(
                f"JOIN {join.table}: {left} holds {left.sort.value}, {right} holds {right.sort.value}; "
                "want two columns of one type, and not of fractions"
            )
        return JoinOn(new, left.place, right.place, join.outer)

    def _person(self, table: int) -> Column:
        source = self.sources[table]
        assert isinstance(source.declared, Private)
        found = self._find(Name(source.declared.person, source.alias, exact=True), range(table, table + 1))
        if found.sort not in (Sort.WHOLE, Sort.TEXT, Sort.IDENTITY):
            raise InvalidArgument(
                f"person={found.name}: holds {found.sort.value}; want whole numbers, text or UUIDs, "
                "of which no two are equal for different people"
            )
        return found

    def _bounds(self) -> tuple[int, int]:
        """Rows and groups of one person after the joins: of two private tables, the products."""
        rows = groups = 1
        for source in self.sources:
            if isinstance(source.declared, Private):
                rows, groups = rows * source.declared.rows, groups * source.declared.groups_touched
        if rows > MOST_ROWS:
            raise InvalidArgument(f"joined, one person may count with {rows:,} rows; want at most {MOST_ROWS:,}")
        return rows, min(groups, MOST_ROWS)

    def _find(self, name: Name, tables: range) -> Column:
        found = []
        for table in tables:
            source = self.sources[table]
            if name.table is not None and name.table.casefold() != source.alias.casefold():
                continue
            column = _match(name.column, source.columns, exact=name.exact)
            if column is not None:
                found.append((table, column))
        if len(found) != 1:
            what = "in no table of the question" if not found else "in several tables; write table.column"
            known = sorted({one for table in tables for one in self.sources[table].columns})
            raise InvalidArgument(f"column {check.shown(str(name))}: {what}; want one of {', '.join(known)[:300]}")
        return self._resolved(*found[0])

    def _resolved(self, table: int, name: str) -> Column:
        if (table, name) not in self._used:
            source = self.sources[table]
            person = isinstance(source.declared, Private) and source.declared.person == name
            sort, kind = sort_of(source.columns[name])
            whole = table not in self._outer and name in getattr(source.declared, "complete", ())
            self._used[table, name] = Column(f"c{len(self._used)}", table, name, sort, kind, person, self._casts, whole)
        return self._used[table, name]


def sort_of(kind: Any) -> tuple[Sort, str]:
    """What an Ibis type holds, and how precisely: fractions beyond a double's range are none of ours."""
    text = str(kind)
    if kind.is_integer():
        return Sort.WHOLE, "integer"
    if kind.is_floating():
        return Sort.NUMBER, "float"
    if kind.is_decimal():
        bounded = kind.precision is not None and kind.precision <= 38
        return (Sort.NUMBER, "decimal") if bounded else (Sort.OTHER, "a decimal of unlimited size")
    if kind.is_timestamp():
        plain = kind.timezone is None and kind.scale in (None, 6)  # others fail where a date is beyond their range
        return (Sort.MOMENT, "timestamp") if plain else (Sort.OTHER, text)
    simple = {"string": Sort.TEXT, "boolean": Sort.TRUTH, "date": Sort.DAY, "uuid": Sort.IDENTITY}
    found = simple.get(text.removeprefix("!").split("(")[0])
    return (found, text.removeprefix("!")) if found else (Sort.OTHER, text)


def _match(name: str, known: Mapping[str, Any], *, exact: bool) -> str | None:
    """The known name that `name` writes: as it stands, or whatever the case of its letters if just one fits."""
    if name in known:
        return name
    if exact:
        return None
    found = [one for one in known if one.casefold() == name.casefold()]
    if len(found) > 1:
        raise InvalidArgument(f"{name}: fits {' and '.join(found)}; write the name in double quotes")
    return found[0] if found else None

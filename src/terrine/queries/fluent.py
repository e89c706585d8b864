"""The fluent form of a question; every step returns a new one, and `answer` asks it.

session.table("visits").where("cost > 0").group_by("region", keys=["N", "S"]).count("n").mean("cost", bounds=(0, 100))
    .answer(epsilon=0.5)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from terrine.errors import InvalidArgument
from terrine.queries import parsing
from terrine.queries.answers import Answer, Explanation, explained
from terrine.queries.planning import Options
from terrine.queries.question import HIGHEST, LOWEST, Aggregate, AllOf, AskedKey, Join, Kind, Name, Predicate, Question

if TYPE_CHECKING:
    from terrine.queries.session import Session


@dataclass(frozen=True)
class TableQuestion:
    """A question about one table, perhaps with others joined to it."""

    session: Session
    table: str
    joins: tuple[Join, ...] = ()
    conditions: tuple[Predicate, ...] = ()
    keys: tuple[AskedKey, ...] = ()
    aggregates: tuple[Aggregate, ...] = ()
    given: dict[str, dict[str, Any]] = field(default_factory=lambda: {"bounds": {}, "keys": {}, "bins": {}})
    smallest: int | None = None

    def where(self, condition: str) -> TableQuestion:
        """Only rows that satisfy `condition`, written as after WHERE; several are joined by AND."""
        return dataclasses.replace(self, conditions=(*self.conditions, parsing.predicate_in(condition)))

    def join(self, table: str, *, on: str | tuple[str, str], left: bool = False) -> TableQuestion:
        """Join `table` where the two columns of `on` are equal; one name stands for both."""
        mine, theirs = (on, on) if isinstance(on, str) else on
        joined = Join(table, table, Name(mine), Name(theirs, table), outer=left)
        return dataclasses.replace(self, joins=(*self.joins, joined))

    def group_by(self, column: str, *, keys: Any = None, bins: Sequence[float] | None = None) -> TableQuestion:
        """Group by a column: `keys` are its public values or "private"; `bins` the public edges of a histogram."""
        given = self._with("keys", column, keys)._with("bins", column, bins)
        return dataclasses.replace(given, keys=(*self.keys, AskedKey(_name(column), column)))

    def count(self, alias: str = "count", *, column: str | None = None) -> TableQuestion:
        """How many rows; with `column`, how many have a value in it."""
        return self._add(Kind.COUNT, alias, column)

    def people(self, alias: str = "people") -> TableQuestion:
        """How many people."""
        person = getattr(self.session._declared.get(self.table), "person", None)
        if person is None:
            raise InvalidArgument(f"table {self.table!r}: not a private table; want one that has a person column")
        return self._add(Kind.PEOPLE, alias, f"{self.table}.{person}")

    def sum(self, column: str, *, bounds: tuple[float, float], alias: str | None = None) -> TableQuestion:
        """The sum of a column, clamped to `bounds`."""
        return self._add(Kind.SUM, alias or f"sum_{column}", column, bounds)

    def mean(self, column: str, *, bounds: tuple[float, float], alias: str | None = None) -> TableQuestion:
        """The mean of a column, clamped to `bounds`."""
        return self._add(Kind.MEAN, alias or f"mean_{column}", column, bounds)

    def variance(self, column: str, *, bounds: tuple[float, float], alias: str | None = None) -> TableQuestion:
        """The sample variance of a column, clamped to `bounds`."""
        return self._add(Kind.VARIANCE, alias or f"variance_{column}", column, bounds)

    def quantiles(self, column: str, qs: Sequence[float], *, bounds: tuple[float, float]) -> TableQuestion:
        """Quantiles of a column, any number at one price, called column_q25 and so on."""
        found = self
        for q in qs:
            if not 0 <= q <= 1:
                raise InvalidArgument(f"q={q!r}: want between 0 and 1")
            found = found._add(Kind.QUANTILE, f"{column}_q{100 * q:g}", column, bounds, q)
        return found

    def median(self, column: str, *, bounds: tuple[float, float], alias: str | None = None) -> TableQuestion:
        """The median of a column."""
        return self._add(Kind.QUANTILE, alias or f"median_{column}", column, bounds)

    def minimum(self, column: str, *, bounds: tuple[float, float], alias: str | None = None) -> TableQuestion:
        """The 1% quantile of a column, in place of its minimum."""
        return self._add(Kind.QUANTILE, alias or f"min_{column}", column, bounds, LOWEST)

    def maximum(self, column: str, *, bounds: tuple[float, float], alias: str | None = None) -> TableQuestion:
        """The 99% quantile of a column, in place of its maximum."""
        return self._add(Kind.QUANTILE, alias or f"max_{column}", column, bounds, HIGHEST)

    def min_group(self, people: int) -> TableQuestion:
        """Leave groups blank that have fewer than `people`, by a noisy count."""
        return dataclasses.replace(self, smallest=people)

    def answer(self, *, epsilon: float, delta: float | None = None, mock: bool = False) -> Answer:
        """Charge the question and answer it."""
        return self.session.answer(self.question(), self._options(epsilon, delta), mock=mock)

    def explain(self, *, epsilon: float = 1.0, delta: float | None = None) -> Explanation:
        """What it would cost, and how good it would be; free."""
        return explained(self.session.plan(self.question(), self._options(epsilon, delta)))

    def question(self) -> Question:
        """The question as a value."""
        if not self.aggregates:
            raise InvalidArgument("nothing is asked; want .count(), .mean(...) or another aggregate")
        where = None if not self.conditions else AllOf(self.conditions)
        columns = (*(key.alias for key in self.keys), *(one.alias for one in self.aggregates))
        return Question(
            table=self.table,
            alias=self.table,
            aggregates=self.aggregates,
            keys=self.keys,
            joins=self.joins,
            where=where,
            columns=columns,
        )

    def _options(self, epsilon: float, delta: float | None) -> Options:
        return Options(epsilon, delta, self.given["bounds"], self.given["keys"], self.given["bins"], self.smallest)

    def _add(
        self, kind: Kind, alias: str, column: str | None, bounds: tuple[float, float] | None = None, q: float = 0.5
    ) -> TableQuestion:
        given = self if column is None else self._with("bounds", column, bounds)
        aggregate = Aggregate(kind, alias, None if column is None else _name(column), q)
        return dataclasses.replace(given, aggregates=(*self.aggregates, aggregate))

    def _with(self, what: str, column: str, value: Any) -> TableQuestion:
        if value is None:
            return self
        known = self.given[what].get(column, value)
        if known is not value and tuple(known) != tuple(value):
            raise InvalidArgument(f"{what} of {column}: given twice, differently; want the same")
        return dataclasses.replace(self, given={**self.given, what: {**self.given[what], column: value}})


def _name(column: str) -> Name:
    table, _, name = column.rpartition(".")
    return Name(name, table or None)

"""A session: people's tables in one engine, one account, and questions answered with noise.

    private tables -> Question -> QueryPlan (public) -> account.charge(plan.event) -> engine -> noise -> Answer

Everything up to the charge looks at names and types alone. If the charge is refused, no row is looked at.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from terrine import check
from terrine.errors import InvalidArgument, WeakGuarantee
from terrine.events import Event, Neighbours, Reproducible, Unit
from terrine.queries import parsing, running
from terrine.queries.answers import HALF_WIDTH, Answer, Explanation, answered, explained
from terrine.queries.declared import Private, Public
from terrine.queries.engines import Engine
from terrine.queries.fluent import TableQuestion
from terrine.queries.mock import made_up
from terrine.queries.planning import Options, QueryPlan, planned
from terrine.queries.question import Question
from terrine.queries.scope import Declared, Scope
from terrine.receipts import Charged
from terrine.rng import SYSTEM, Source

USUAL_DELTA = 1e-8
"""What the selection of private keys may fail by, where neither the question nor the account says otherwise."""


class Session:
    """Questions about people's rows, each charged to `account` before any row is looked at.

    `connection`: an Ibis backend or a connection of DuckDB, PostgreSQL (psycopg) or Spark, a file (.parquet, .csv,
    .duckdb) or a URL. `tables` names every table that questions may use; no other can be reached. Private tables of one
    session are about the same people.

    Raises:
        InvalidArgument: a table that is not there or not declared, or an account that protects something else.
    """

    def __init__(
        self,
        connection: Any,
        account: Charged | None,
        tables: Mapping[str, Declared],
        *,
        purpose: str = "terrine query",
        by: str = "terrine",
        rng: Source = SYSTEM,
    ) -> None:
        self._declared = _declared(tables)
        self._account = _protecting_people(account)
        self._engine = Engine(connection)
        self._tables = {name: self._engine.table(name) for name in self._declared}
        self._schemas = {name: dict(table.schema().items()) for name, table in self._tables.items()}
        for name, one in self._declared.items():
            wanted = (one.person, *one.complete) if isinstance(one, Private) else ()
            for column in wanted:
                if column not in self._schemas[name]:
                    known = ", ".join(self._schemas[name])
                    raise InvalidArgument(
                        f"table {name}: has no column {column!r}, which was declared; it has {known[:300]}"
                    )
        self._purpose, self._by, self._rng = check.text("purpose", purpose), check.text("by", by), rng

    @property
    def schemas(self) -> dict[str, dict[str, str]]:
        """Of every table, the type of each column: public, as the declarations are."""
        return {name: {column: str(kind) for column, kind in one.items()} for name, one in self._schemas.items()}

    def sql(
        self,
        sql: str,
        *,
        epsilon: float,
        delta: float | None = None,
        bounds: Mapping[str, Any] | None = None,
        keys: Mapping[str, Any] | str | None = None,
        bins: Mapping[str, Any] | None = None,
        min_group: int | None = None,
        mock: bool = False,
    ) -> Answer:
        """The answer to one SELECT, within (epsilon, delta) for every person, adding or removing all of their rows.

        `bounds` are the public bounds of every summed column; `keys` the public values of every GROUP BY column, or
        "private"; `bins` the public edges of a histogram. Without `delta` the answer is pure, (epsilon, 0), but for
        private keys, which spend a hundredth of the account's delta. `min_group` leaves groups blank that have fewer
        people, by a noisy count. `mock` answers from made-up rows, and charges nothing.

        Raises:
            InvalidArgument: the question is refused; nothing was charged.
            BudgetExceeded: the account has not enough left; nothing was charged or looked at.
            EngineFailed: the engine failed after the charge.
        """
        options = Options(epsilon, delta, bounds, keys, bins, min_group)
        return self.answer(parsing.question_of(sql), options, mock=mock)

    def explain(
        self,
        sql: str,
        *,
        epsilon: float = 1.0,
        delta: float | None = None,
        bounds: Mapping[str, Any] | None = None,
        keys: Mapping[str, Any] | str | None = None,
        bins: Mapping[str, Any] | None = None,
        min_group: int | None = None,
    ) -> Explanation:
        """What `sql` would cost, the expected error of every cell, and what is bounded how; free, looks at no row."""
        options = Options(epsilon, delta, bounds, keys, bins, min_group)
        return explained(self.plan(parsing.question_of(sql), options))

    def table(self, name: str) -> TableQuestion:
        """The fluent form: `session.table("visits").where("cost > 0").group_by("region", keys=[...]).count()`."""
        return TableQuestion(self, check.text("table", name, at_least=1))

    def plan(self, question: Question, options: Options) -> QueryPlan:
        """The plan for a question: public arithmetic.

        Raises:
            InvalidArgument: the question is refused.
        """
        taken = [name for one in question.aggregates for name in (one.alias, one.alias + HALF_WIDTH)]
        taken += [key.alias for key in question.keys]
        if len({name.casefold() for name in taken}) != len(taken):
            raise InvalidArgument(f"columns {', '.join(taken)}: two of one name; give each its own AS name")
        scope = Scope(question, self._declared, self._schemas, casts=self._engine.traits.casts)
        return planned(question, scope, options, usual_delta=self._usual_delta())

    def answer(self, question: Question, options: Options, *, mock: bool = False) -> Answer:
        """Charge a question, then answer it; `sql` and the fluent form end here."""
        plan = self.plan(question, options)
        if weakness := check.weakness(plan.epsilon, plan.delta, units=None):
            warnings.warn(WeakGuarantee(weakness), stacklevel=3)
        event: Event = Reproducible(plan.event) if self._rng.reproducible else plan.event
        if mock:
            backend, tables = made_up(plan)
            return self._looked(plan, Engine(backend), tables, event, ("made-up rows: nothing was charged",))
        tables = [self._tables[source.table] for source in plan.scope.sources]
        running.rehearse(plan, self._engine, tables)
        if self._account is not None:
            self._account.charge(event, purpose=self._purpose, by=self._by)
        return self._looked(plan, self._engine, tables, event, ())

    def _looked(
        self, plan: QueryPlan, engine: Engine, tables: Sequence[Any], event: Event, extra: tuple[str, ...]
    ) -> Answer:
        cells = running.selected(plan, engine, tables, self._rng)
        noisy = running.measure(plan, engine, tables, cells, self._rng)
        return answered(plan, cells, noisy, event, extra)

    def _usual_delta(self) -> float:
        budget = getattr(self._account, "budget", None)
        return USUAL_DELTA if budget is None else float(budget.delta) / 100


def _declared(tables: Mapping[str, Declared]) -> dict[str, Declared]:
    if not isinstance(tables, Mapping) or not tables:
        raise check.refuse("tables", tables, '{"visits": Private(person="patient_id", rows=20)}, one or more')
    if len({str(name).casefold() for name in tables}) != len(tables):
        raise InvalidArgument(f"tables {', '.join(map(str, tables))}: two of one name; engines do not tell a from A")
    for name, one in tables.items():
        check.text("table", name, at_least=1)
        if not isinstance(one, Private | Public):
            raise check.refuse(f"tables[{name!r}]", one, "Private(person=..., rows=...) or Public()")
    return dict(tables)


def _protecting_people(account: Charged | None) -> Charged | None:
    if account is None:
        return None
    if not callable(getattr(account, "charge", None)):
        raise check.refuse("account", account, "an account of a ledger, or None")
    unit, neighbours = getattr(account, "unit", Unit.PERSON), getattr(account, "neighbours", Neighbours.ADD_REMOVE)
    if unit is not Unit.PERSON or neighbours is not Neighbours.ADD_REMOVE:
        raise InvalidArgument(
            f"account: protects one {unit.value} under {neighbours.value}; questions protect a person under "
            "add-remove; open one with unit=Unit.PERSON, or terrine ledger create --unit person"
        )
    return account

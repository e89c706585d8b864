"""Data sets: what an owner registers, the one account each has in the ledger, and the engine that holds its rows.

A source is a name of the configuration or a file of the data folder, so that no caller can name a path. No two data
sets may share a table: its people would have two budgets.
"""

from __future__ import annotations

import contextvars
import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import insert, select, update

from terrine import check, queries
from terrine.errors import InvalidArgument, TerrineError
from terrine.events import Budget, Event, Unit
from terrine.gateway.bodies import DatasetBody, TableBody
from terrine.gateway.configuration import Configuration
from terrine.gateway.database import Database, Session, changed
from terrine.gateway.refusals import Refused, log, missing
from terrine.gateway.schema import DATASETS, META
from terrine.ledger import Account, Charge

_ONE_TABLE = (".csv", ".parquet", ".pq")
Till = Callable[[Event], Any]
_TILL: contextvars.ContextVar[Till] = contextvars.ContextVar("till")


class Purse:
    """A data set's account, charged by one thread at a time: its balance is kept in memory between charges."""

    def __init__(self, database: Database, name: str) -> None:
        self._database, self._name = database, name
        self._account = database.ledger.account(name)
        self._turn = threading.Lock()
        self.budget, self.unit, self.neighbours = self._account.budget, self._account.unit, self._account.neighbours

    def charge(self, event: Event, *, purpose: str, by: str) -> Charge:
        """Charge the ledger: on disk when this returns."""
        with self._turn, self._database.turn:
            return self._account.charge(event, purpose=purpose, by=by)

    def account(self) -> Account:
        """A handle of the caller's own, to read by."""
        return self._database.ledger.account(self._name)


class _ByTill:
    """The account that a session sees: charges go to the till of the request that is being answered."""

    def __init__(self, purse: Purse) -> None:
        self.budget, self.unit, self.neighbours = purse.budget, purse.unit, purse.neighbours

    def charge(self, event: Event, *, purpose: str, by: str) -> Any:  # noqa: ARG002  the till knows them
        return _TILL.get()(event)


@dataclass(frozen=True)
class OpenDataset:
    """A data set that can be asked."""

    name: str
    digest: str
    body: DatasetBody
    session: queries.Session
    purse: Purse

    def must_hold(self, delta: float | None) -> None:
        """Refuse a delta that the whole budget does not have.

        Raises:
            InvalidArgument: it is larger.
        """
        if delta is not None and delta > self.body.budget.delta:
            raise InvalidArgument(f"delta={delta:g}: want at most {self.body.budget.delta:g}, that of the data set")

    def asked(self, till: Till, question: Any, options: Any) -> queries.Answer:
        """The answer to one question, charged at `till` before any row is looked at."""
        token = _TILL.set(till)
        try:
            return self.session.answer(question, options)
        finally:
            _TILL.reset(token)


class Datasets:
    """The data sets of one gateway."""

    def __init__(self, configuration: Configuration, database: Database) -> None:
        self._configuration, self._database = configuration, database
        self._opened: dict[str, OpenDataset] = {}
        self._turn = threading.RLock()

    def register(self, name: str, body: DatasetBody, by: str) -> dict[str, Any]:
        """Take a data set in, with its account.

        Raises:
            InvalidArgument: something in it does not fit.
            Refused: it is there with other terms, or shares a table with another.
        """
        with self._turn:
            session = queries.Session(self._connection(body.source), None, tables_of(body))
            del session
            if body.training is not None:
                self._check_training(body)
            with self._database.read() as transaction:
                if (there := self._registered(transaction, name, body)) is not None:
                    return there
            self._database.ledger.account(name, budget=Budget(body.budget.epsilon, body.budget.delta), unit=Unit.PERSON)
            row = {
                "dataset": name,
                "declaration": _canonical(body),
                "digest": hashlib.sha256(f"{name} {_canonical(body)}".encode()).hexdigest(),
                "by": by,
                "registered": self._database.now(),
                "closed": 0,
            }
            with self._database.write() as transaction:
                transaction.execute(select(META).with_for_update())  # one registration at a time, whichever server
                if (there := self._registered(transaction, name, body)) is not None:
                    return there
                transaction.execute(insert(DATASETS), row)
        return described(row)

    def _registered(self, session: Session, name: str, body: DatasetBody) -> dict[str, Any] | None:
        """What is there under `name`, if it is just this; None if there is nothing.

        Raises:
            Refused: it is, or was, something else; or another data set has one of the tables.
        """
        known = {row.dataset: row for row in session.execute(select(DATASETS))}
        if name in known:
            if known[name].declaration == _canonical(body) and not known[name].closed:
                return described(known[name]._mapping)
            raise Refused(409, f"data set {name}: is, or was, there with other terms; want another name")
        mine = self._tables(body)
        for row in known.values():
            if row.closed:
                continue
            if shared := mine & self._tables(DatasetBody.model_validate_json(row.declaration)):
                table = sorted(shared)[0][1] or body.source
                raise Refused(
                    409,
                    f"{table}: is lent already, in data set {row.dataset}; a table's people have one budget: want it "
                    "in one data set",
                )
        return None

    def close(self, name: str) -> None:
        """End a data set: it is asked no more; what was spent and answered stays on record."""
        with self._turn, self._database.write() as session:
            wanted = update(DATASETS).where(DATASETS.c.dataset == name, DATASETS.c.closed == 0)
            if changed(session, wanted.values(closed=self._database.now())) != 1:
                raise missing("data set")

    def listed(self, session: Session) -> list[dict[str, Any]]:
        """Every data set that is not closed."""
        wanted = select(DATASETS).where(DATASETS.c.closed == 0).order_by(DATASETS.c.dataset)
        return [described(row._mapping) for row in session.execute(wanted)]

    def find(self, session: Session, name: str) -> dict[str, Any] | None:
        """What was registered under a name, closed or not."""
        row = session.execute(select(DATASETS).where(DATASETS.c.dataset == name)).first()
        return None if row is None else dict(row._mapping)

    def open(self, name: str) -> OpenDataset:
        """A data set to be asked.

        Raises:
            Refused: it is closed, or its source cannot be reached now.
        """
        with self._database.read() as transaction:
            row = self.find(transaction, name)
        if row is None or row["closed"]:
            raise missing("data set")
        with self._turn:
            kept = self._opened.get(name)
            if kept is None or kept.digest != row["digest"]:
                kept = self._opened[name] = self._open(name, row)
        return kept

    def _open(self, name: str, row: dict[str, Any]) -> OpenDataset:
        body = DatasetBody.model_validate_json(row["declaration"])
        # A server may have died between the registration and the opening of the account.
        budget = Budget(body.budget.epsilon, body.budget.delta)
        self._database.ledger.account(name, budget=budget, unit=Unit.PERSON)
        purse = Purse(self._database, name)
        try:
            session = queries.Session(self._connection(body.source), _ByTill(purse), tables_of(body))
        except TerrineError as error:
            log.error("data set %s: %s", name, error)
            raise Refused(503, "the data set cannot be opened now; nothing was charged; tell its owner") from None
        return OpenDataset(name, row["digest"], body, session, purse)

    def _connection(self, source: str) -> str:
        if source in self._configuration.sources:
            return self._configuration.sources[source]
        return str(self.file(source))

    def file(self, name: str) -> Path:
        """A file of the data folder.

        Raises:
            InvalidArgument: there is none of that name, or it leads elsewhere.
        """
        folder = self._configuration.path(self._configuration.data).resolve()
        path = (folder / name).resolve()
        if path.parent != folder or not path.is_file():
            raise InvalidArgument(f"{check.shown(name)}: no file in the gateway's data folder, and no named source")
        return path

    def _check_training(self, body: DatasetBody) -> None:
        from terrine import tables

        assert body.training is not None
        path = self.file(body.training.table)
        found = tables.Schema.load(self.file(tables.schema_path(path).name))
        table = tables.open_table(path, found.file)
        wanted = [body.training.person, *body.training.labels]
        if absent := [one for one in wanted if one not in table.column_names]:
            raise InvalidArgument(f"training: {path.name} has no column {absent[0]!r}")
        if body.training.labels != (found.label,):
            raise InvalidArgument(f"training.labels: the schema of {path.name} is for {found.label!r}; want just that")
        if body.training.test is not None:
            self.file(body.training.test)

    def _tables(self, body: DatasetBody) -> set[tuple[str, str]]:
        """The private tables of a data set, each by what it is, so that two names of one are found."""
        where = self._identity(body.source)
        one_table = Path(self._configuration.sources.get(body.source, body.source)).suffix.lower() in _ONE_TABLE
        found = {(where, "" if one_table else name.casefold()) for name, one in body.tables.items() if not one.public}
        if body.training is not None:
            found.add((self._identity(body.training.table), ""))
        return found

    def _identity(self, source: str) -> str:
        where = self._configuration.sources.get(source)
        path = self._configuration.path(self._configuration.data) / source if where is None else Path(where)
        try:
            found = path.stat()
        except OSError:
            return where or source
        return f"{found.st_dev}/{found.st_ino}"


def tables_of(body: DatasetBody) -> dict[str, queries.Private | queries.Public]:
    """The tables as a session takes them."""
    return {name: _declared(name, one) for name, one in body.tables.items()}


def described(row: Any) -> dict[str, Any]:
    """What everyone in its scope may know of a data set."""
    body = DatasetBody.model_validate_json(row["declaration"])
    training = None if body.training is None else {"labels": list(body.training.labels)}
    return {
        "dataset": row["dataset"],
        "about": body.about,
        "tables": sorted(body.tables),
        "budget": body.budget.model_dump(),
        "training": training,
        "registered": row["registered"] / 1e6,
    }


def _declared(name: str, one: TableBody) -> queries.Private | queries.Public:
    if one.public:
        if one.person is not None:
            raise InvalidArgument(f"table {name}: public and with a person; want one of the two")
        return queries.Public()
    if one.person is None or one.rows is None:
        raise InvalidArgument(f"table {name}: want person = its column, and rows = how many of one count; or public")
    return queries.Private(person=one.person, rows=one.rows, groups=one.groups, complete=one.complete)


def _canonical(body: DatasetBody) -> str:
    return json.dumps(body.model_dump(mode="json"), sort_keys=True, allow_nan=False)

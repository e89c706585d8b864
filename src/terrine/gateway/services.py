"""Everything one server needs, put together once; routes and pages ask this and nothing else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from terrine.errors import TerrineError
from terrine.gateway import bodies, members, requests, schema, tokens
from terrine.gateway.access_log import AccessLog
from terrine.gateway.asking import Asking
from terrine.gateway.configuration import Configuration
from terrine.gateway.database import Database, Presence
from terrine.gateway.datasets import Datasets, described
from terrine.gateway.examples import example_rows
from terrine.gateway.limits import RateLimits
from terrine.gateway.refusals import Refused, log, missing
from terrine.gateway.tokens import ALL, Caller
from terrine.gateway.trainings import Trainings

_ROUND = 1.0
FIRST = "owner"
"""The name of the first member, who lends to everyone else."""


class Services:
    """One gateway, open."""

    def __init__(
        self, configuration: Configuration, *, create: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self.configuration, self.limits = configuration, configuration.limits
        self.key = None
        if configuration.key is not None:
            from terrine.verify import signing

            self.key = signing.load_private(configuration.path(configuration.key))
        self.database = Database(configuration.database, create=create, clock=clock)
        self.presence = Presence(self.database)
        self.rates, self.log = RateLimits(), AccessLog(self.database)
        self.datasets = Datasets(configuration, self.database)
        self.asking = Asking(self.database, self.datasets, self.presence, self.limits, self.key)
        self.trainings = Trainings(configuration, self.database, self.datasets)
        for name, body in configuration.datasets.items():
            self.datasets.register(name, body, by="gateway.toml")
        self._stopped = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="gateway keeper", daemon=True)

    def start(self) -> None:
        """Settle what was left, and look after trainings from now on."""
        requests.settle_abandoned(self.database, self.presence, self.asking.active)
        self._keeper.start()

    def stop(self) -> None:
        """Let go of the database; trainings go on in their own processes."""
        self._stopped.set()
        self.presence.stop()
        if self._keeper.is_alive():
            self._keeper.join(timeout=5.0)
        self.database.close()

    def first_token(self, days: float = 365.0) -> str:
        """A token for the owner of everything: for `terrine serve --init`, once.

        Raises:
            Refused: there is an owner already.
        """
        with self.database.write() as session:
            session.execute(schema.META.select().with_for_update())
            if members.find(session, ALL, FIRST) is not None:
                raise Refused(409, "this gateway has its first owner already; leave --init out")
            members.lend(session, self.database, dataset=ALL, member=FIRST, role="owner", by="terrine serve --init")
            made = tokens.issue(session, self.database, member=FIRST, dataset=ALL, days=days, by="terrine serve --init")
        return str(made["secret"])

    def visible(self, caller: Caller) -> list[dict[str, Any]]:
        """The data sets in a caller's scope."""
        with self.database.read() as session:
            return [one for one in self.datasets.listed(session) if caller.may_see(one["dataset"])]

    def described(self, name: str) -> dict[str, Any]:
        """A data set with its schemas and made-up rows: all public."""
        opened = self.datasets.open(name)
        with self.database.read() as session:
            row = self.datasets.find(session, name)
        assert row is not None
        tables = []
        for table, columns in opened.session.schemas.items():
            declared = opened.body.tables[table]
            tables.append(
                {
                    "table": table,
                    "public": declared.public,
                    "person": declared.person,
                    "rows": declared.rows,
                    "groups": declared.groups,
                    "columns": [{"name": column, "type": kind} for column, kind in columns.items()],
                    "example": example_rows(columns),
                }
            )
        return described(row) | {"schemas": tables}

    def balance(self, caller: Caller, name: str) -> dict[str, Any]:
        """What is spent and left of a data set, and of the caller's allowance."""
        account = self.database.ledger.account(name)
        with self.database.read() as session:
            member = members.find(session, name, caller.member)
        left = account.remaining()
        mine = member if member is not None and member["role"] == "analyst" and caller.role == "analyst" else None
        shown = {} if mine is None else members.shown(mine)
        return {
            "dataset": name,
            "budget": {"epsilon": account.budget.epsilon, "delta": account.budget.delta},
            "spent": account.spent(),
            "largest": left.epsilon,
            "used": account.used(),
            "allowance": shown.get("allowance"),
            "allowance_spent": shown.get("spent"),
            "allowance_delta": shown.get("allowance_delta"),
            "allowance_delta_spent": shown.get("spent_delta"),
        }

    def spending(self, caller: Caller, name: str) -> dict[str, Any]:
        """Who spent how much, for what."""
        with self.database.read() as session:
            sums = requests.spending(session, name)
        charges = [
            {
                "sequence": one.sequence,
                "at": one.at.timestamp(),
                "by": one.by,
                "purpose": one.purpose,
                "event": type(one.event).__name__,
                "hash": one.hash,
            }
            for one in self.database.ledger.account(name).history()
        ]
        return {"dataset": name, "balance": self.balance(caller, name), "members": sums, "charges": charges}

    def requests(self, caller: Caller, **wanted: Any) -> list[dict[str, Any]]:
        """Requests in a caller's scope, the newest first: an analyst's own."""
        if caller.role == "analyst":
            wanted["member"] = caller.member
        if caller.dataset != ALL:
            if wanted.get("dataset") not in (None, caller.dataset):
                raise missing("data set")
            wanted["dataset"] = caller.dataset
        with self.database.read() as session:
            return [self.shown(caller, row) for row in requests.listed(session, **wanted)]

    def request(self, caller: Caller, request: str) -> dict[str, Any]:
        """One request; its scope was checked by the route."""
        with self.database.read() as session:
            return self.shown(caller, requests.find(session, request))

    def shown(self, caller: Caller, row: dict[str, Any]) -> dict[str, Any]:
        """A request as the caller may see it: answers are their analyst's."""
        found = requests.shown(row)
        return found if row["member"] == caller.member and caller.role == "analyst" else found | {"answer": None}

    def approve(self, caller: Caller, request: str, reason: str) -> dict[str, Any]:
        """Approve what waits: a question is charged and answered now, a training is queued."""
        with self.database.read() as session:
            row = requests.find(session, request)
        if row["state"] != "waiting":
            raise Refused(
                409, f"the request is {row['state']}; only one that waits can be approved", state=row["state"]
            )
        if row["kind"] == requests.QUERY:
            self.asking.answer_approved(request, by=caller.member, reason=reason)
        else:
            self.trainings.approve(row, by=caller.member, reason=reason)
        return self.request(caller, request)

    def deny(self, caller: Caller, request: str, reason: str) -> dict[str, Any]:
        """Deny what waits."""
        with self.database.write() as session:
            told = {"decided_by": caller.member, "decision": reason}
            if not requests.move(session, self.database, request, ("waiting",), "denied", **told):
                raise Refused(409, "the request waits no more")
        return self.request(caller, request)

    def cancel(self, caller: Caller, request: str) -> dict[str, Any]:
        """Take back what waits, or end a training; what was charged stays charged."""
        with self.database.write() as session:
            row = requests.find(session, request, lock=True)
            if row["kind"] == requests.TRAINING and row["state"] in requests.OPEN:
                self.trainings.cancel(session, row)
            elif not requests.move(session, self.database, request, ("waiting",), "cancelled", said="taken back"):
                raise Refused(409, f"the request is {row['state']}; it cannot be taken back", state=row["state"])
        return self.request(caller, request)

    def lend(self, caller: Caller, name: str, member: str, body: bodies.MemberBody) -> dict[str, Any]:
        """Give somebody a role for a data set, or for all of them ("*")."""
        delta = 0
        if name != ALL:
            delta = schema.allowance_delta(body.allowance, self.database.ledger.account(name).budget)
        with self.database.write() as session:
            return members.lend(
                session,
                self.database,
                dataset=name,
                member=member,
                role=body.role,
                by=caller.member,
                allowance=schema.allowance(body.allowance),
                allowance_delta=delta,
            )

    def issue(self, caller: Caller, body: bodies.TokenBody) -> dict[str, Any]:
        """A token for a member of a data set in the caller's scope."""
        if not caller.may_see(body.dataset):
            raise missing("data set")
        with self.database.write() as session:
            return tokens.issue(
                session, self.database, member=body.member, dataset=body.dataset, days=body.days, by=caller.member
            )

    def _keep(self) -> None:
        while not self._stopped.wait(_ROUND):
            try:
                requests.settle_abandoned(self.database, self.presence, self.asking.active)
                self.trainings.look_after()
            except TerrineError as error:
                log.warning("keeper: %s", error)
            except Exception:
                with contextlib.suppress(Exception):
                    log.exception("keeper")

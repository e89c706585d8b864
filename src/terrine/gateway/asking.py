"""From a question to an answer, in the one order that keeps the promise.

    price (no private row) -> archive -> allowance -> ledger.charge -> engine -> the answer on disk -> out

Every arrow is on disk before the next begins. A server that dies in between leaves a request `reserved`; whoever finds
it asks the ledger whether it was charged. An answer leaves only if its request could be moved to `answered`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass
from typing import Any

from terrine import queries
from terrine.errors import TerrineError
from terrine.events import Event, to_json
from terrine.gateway import members, proofs, requests, schema
from terrine.gateway.bodies import AskBody, QuestionBody
from terrine.gateway.database import Database, Presence
from terrine.gateway.datasets import Datasets, OpenDataset
from terrine.gateway.refusals import ChargedAndLost, Refused, log, missing
from terrine.gateway.tokens import Caller
from terrine.ledger import Charge
from terrine.ledger.schema import CHARGES
from terrine.queries.answers import as_json, explained
from terrine.queries.parsing import question_of
from terrine.queries.planning import Options, certified


class _BeyondAllowance(Exception):
    """The allowance does not hold it; nothing was charged or counted."""


@dataclass(frozen=True)
class Priced:
    """A question that was understood, with what it would cost."""

    question: Any
    options: Options
    plan: Any
    epsilon: float
    digest: str
    """Of just this question, with just these settings, on just this data set: what the archive goes by."""


class Asking:
    """Questions about the data sets of one gateway."""

    def __init__(self, database: Database, datasets: Datasets, presence: Presence, limits: Any, key: Any) -> None:
        self._database, self._datasets, self._presence = database, datasets, presence
        self._limits, self._key = limits, key
        self._turn = threading.Lock()
        self.active: set[str] = set()
        """Requests that this server is answering now."""

    def price(self, caller: Caller, name: str, body: QuestionBody) -> dict[str, Any]:
        """What a question would cost and how good its answer would be; looks at no row, charges nothing."""
        opened = self._datasets.open(name)
        priced = _priced(opened, body)
        found = explained(priced.plan)
        account = opened.purse.account()
        with self._database.read() as session:
            member = members.find(session, name, caller.member)
            kept = requests.archived(session, member=caller.member, question=priced.digest)
        return found.record() | {
            "dataset": name,
            "event": json.loads(to_json(found.event)),
            "in_archive": kept is not None,
            "fits_budget": account.would_cost(found.event).fits,
            **members.quoted(member, found.epsilon, found.delta),
        }

    def mock(self, name: str, body: QuestionBody) -> dict[str, Any]:
        """The answer on made-up rows: free, and about nobody."""
        opened = self._datasets.open(name)
        priced = _priced(opened, body)
        answer = opened.session.answer(priced.question, priced.options, mock=True)
        return {"dataset": name, "mock": True, "answer": _table(answer)}

    def ask(self, caller: Caller, name: str, body: AskBody) -> dict[str, Any]:
        """The answer: from the archive, or charged and computed; or a request that waits for approval."""
        opened = self._datasets.open(name)
        priced = _priced(opened, body)
        if not body.fresh:
            with self._database.read() as session:
                kept = requests.archived(session, member=caller.member, question=priced.digest)
            if kept is not None:
                return from_archive(kept)
        row = self._new(caller, name, body, priced)
        try:
            return self._answer(opened, priced, row)
        except _BeyondAllowance:
            return self._wait(opened, priced, row)

    def answer_approved(self, request: str, *, by: str, reason: str) -> dict[str, Any]:
        """Approve a question that waits, then charge and answer it.

        Raises:
            Refused: it waits no more, or the server failed after the charge.
            BudgetExceeded: the data set's budget does not hold it; it waits on.
        """
        with self._database.read() as session:
            row = requests.find(session, request)
            member = members.find(session, row["dataset"], row["member"])
        if member is None or member["revoked"] or member["role"] != "analyst":
            raise Refused(409, "the analyst has lost the data set since; nothing was charged")
        opened = self._datasets.open(row["dataset"])
        priced = _priced(opened, AskBody.model_validate_json(row["asked"]))
        if schema.price(priced.epsilon) > row["price"]:
            raise Refused(409, "the question costs more than when it was asked; it must be asked anew")
        return self._answer(opened, priced, row | {"decided_by": by, "decision": reason})

    def _new(self, caller: Caller, name: str, body: AskBody, priced: Priced) -> dict[str, Any]:
        return requests.new(
            self._database,
            dataset=name,
            member=caller.member,
            kind=requests.QUERY,
            asked=body.model_dump(mode="json", exclude_none=True, exclude={"fresh"}),
            question=priced.digest,
            epsilon=priced.epsilon,
            delta=priced.plan.delta,
        )

    def _answer(self, opened: OpenDataset, priced: Priced, row: dict[str, Any]) -> dict[str, Any]:
        """Charge and answer; whatever fails on the way, the request is brought to an end by what the ledger says."""
        till = _Till(self._database, self._presence, opened, row)
        with self._turn:
            if row["request"] in self.active:  # approved twice: the first one is at it
                raise Refused(409, "the request is being answered already")
            self.active.add(row["request"])
        try:
            answer = opened.asked(till, priced.question, priced.options)
            return self._kept(till, row, answer, opened)
        except _BeyondAllowance:
            raise
        except Exception as error:
            state = self._ended(row["request"]) if till.reserved else ""
            if state == "failed" or till.charge is not None:
                log.error("request %s: %s: %s", row["request"], type(error).__name__, error)
                raise ChargedAndLost(row["request"]) from None
            raise
        finally:
            self.active.discard(row["request"])

    def _ended(self, request: str) -> str:
        with contextlib.suppress(TerrineError):  # the database may be away: then it is settled later
            return requests.settle(self._database, request)
        return "reserved"

    def _kept(self, till: _Till, row: dict[str, Any], answer: queries.Answer, opened: OpenDataset) -> dict[str, Any]:
        """The answer, on disk, and only then out."""
        assert till.charge is not None
        price = {"epsilon": answer.epsilon, "delta": answer.delta}
        with self._database.read() as session:
            charge = session.execute(
                CHARGES.select().where(CHARGES.c.hash == till.charge.hash, CHARGES.c.sequence == till.charge.sequence)
            ).one()
        record: dict[str, Any] = {
            "request": row["request"],
            "dataset": opened.name,
            "member": row["member"],
            "state": "answered",
            "asked": json.loads(row["asked"]),
            "answer": _table(answer),
            "proof": proofs.proof(row, dict(charge._mapping), price=price),
        }
        record["signature"] = proofs.signed(record, self._key)
        kept = json.dumps(record, allow_nan=False)
        with self._database.write() as session:
            moved = requests.move(
                session,
                self._database,
                row["request"],
                ("reserved",),
                "answered",
                held_by=self._presence.server,
                answer=kept,
                charge=till.charge.hash,
            )
            if not moved:
                raise Refused(409, "the request was ended by another server; its answer is withheld")
        return record | {"from_archive": False, "cost": price}

    def _wait(self, opened: OpenDataset, priced: Priced, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a question that is beyond the allowance until somebody decides."""
        if not row["reason"]:
            with self._database.read() as session:
                member = members.find(session, row["dataset"], row["member"])
            raise members.beyond(member, priced.epsilon, priced.plan.delta)
        if not opened.purse.account().would_cost(priced.plan.event).fits:
            raise Refused(409, "the data set's budget does not hold it, approved or not; nothing was charged")
        wait(self._database, row, self._limits.waiting_per_analyst)
        return waiting(row)


class _Till:
    """Where one request pays: counted against the allowance, then charged to the ledger."""

    def __init__(self, database: Database, presence: Presence, opened: OpenDataset, row: dict[str, Any]) -> None:
        self._database, self._presence, self._opened, self._row = database, presence, opened, row
        self.reserved = False
        self.charge: Charge | None = None

    def __call__(self, event: Event) -> Charge:
        row = self._row
        with self._database.write() as session:
            if row["decided_by"]:
                told = {name: row[name] for name in ("decided_by", "decision")} | {"server": self._presence.server}
                if not requests.move(session, self._database, row["request"], ("waiting",), "reserved", **told):
                    raise Refused(409, "the request waits no more: somebody decided before")
            elif members.reserve(session, row):
                requests.add(session, row | {"state": "reserved", "counted": 1, "server": self._presence.server})
            else:
                raise _BeyondAllowance
        self.reserved = True
        self.charge = self._opened.purse.charge(event, purpose=requests.purpose(row), by=row["member"])
        return self.charge


def wait(database: Database, row: dict[str, Any], most: int) -> None:
    """Write a request down as waiting, unless its analyst has too many.

    Raises:
        Refused: they have.
    """
    with database.write() as session:
        members.find(session, row["dataset"], row["member"], lock=True)
        known = requests.counted(session, member=row["member"], dataset=row["dataset"], states=("waiting",))
        if known >= most:
            raise Refused(
                429, f"{known} of your requests wait for approval already; cancel one, or wait for a decision"
            )
        requests.add(session, row | {"state": "waiting"})


def waiting(row: dict[str, Any]) -> dict[str, Any]:
    """What an analyst is told whose request waits."""
    return {
        "request": row["request"],
        "dataset": row["dataset"],
        "state": "waiting",
        "charged": False,
        "price": {"epsilon": row["price"] / schema.BILLION, "delta": float(row["delta"])},
        "said": f"beyond your allowance: it waits for approval; nothing was charged; see /requests/{row['request']}",
    }


def from_archive(row: dict[str, Any]) -> dict[str, Any]:
    """An answer that was paid for before; handing it out again costs nothing."""
    record: dict[str, Any] = json.loads(row["answer"])
    return record | {"from_archive": True, "cost": {"epsilon": 0.0, "delta": 0.0}}


def collected(database: Database, caller: Caller, request: str) -> dict[str, Any]:
    """The answer to one of the caller's own requests, once it is there."""
    with database.read() as session:
        row = requests.find(session, request)
    if row["member"] != caller.member or row["kind"] != requests.QUERY:
        raise missing("request")
    if row["state"] != "answered":
        raise Refused(409, f"the request is {row['state']}: {row['said'] or 'there is no answer'}", state=row["state"])
    return from_archive(row)


def _priced(opened: OpenDataset, body: QuestionBody) -> Priced:
    question = question_of(body.sql)
    opened.must_hold(body.delta)
    options = Options(body.epsilon, body.delta, body.bounds, body.keys, body.bins, body.min_group)
    plan = opened.session.plan(question, options)
    words = json.dumps([opened.name, opened.digest, repr(question), repr(options)])
    digest = hashlib.sha256(words.encode()).hexdigest()
    return Priced(question, options, plan, certified(plan.event, plan.delta), digest)


def _table(answer: queries.Answer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(as_json(answer))
    return {name: found[name] for name in ("columns", "rows", "half_widths", "notes")}

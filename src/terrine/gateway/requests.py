"""Requests: everything an analyst ever asked to be charged, and what became of it.

    question:  [waiting ->] reserved -> answered | failed           refused: the ledger did not charge it
    training:  [waiting ->] reserved -> charged -> answered | failed | cancelled

`reserved` is before the ledger's charge or just after it: a request that a server left there is settled by what the
ledger says. A charge names its request, so the two cannot be taken apart. Nothing that was charged is ever charged
less; what was charged and never shown is `failed`, stays charged, and is never computed again.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from sqlalchemy import func, insert, or_, select, update

from terrine.gateway import members, schema
from terrine.gateway.database import Database, Presence, Session, changed
from terrine.gateway.refusals import log, missing
from terrine.gateway.schema import BILLION, QUINTILLION, REQUESTS
from terrine.ledger import schema as ledger

QUERY, TRAINING = "query", "training"
OPEN = ("reserved", "charged")
COSTS = ("reserved", "charged", "answered", "failed")
"""In these states a request has, or may have, been charged; so has a cancelled one that names its charge."""
_BLANK = dict.fromkeys(("charge", "server", "decided_by", "decision", "progress", "said", "answer"), "")


def new(
    database: Database,
    *,
    dataset: str,
    member: str,
    kind: str,
    asked: dict[str, Any],
    question: str,
    epsilon: float,
    delta: float,
) -> dict[str, Any]:
    """A request that is nowhere yet."""
    now = database.now()
    return {
        **_BLANK,
        "request": secrets.token_hex(16),
        "dataset": dataset,
        "member": member,
        "kind": kind,
        "asked": json.dumps(asked, sort_keys=True, allow_nan=False),
        "question": question,
        "purpose": asked.get("purpose", ""),
        "reason": asked.get("reason", ""),
        "state": "waiting",
        "price": schema.price(epsilon),
        "price_delta": schema.price_delta(delta),
        "delta": repr(delta),
        "counted": 0,
        "made": now,
        "changed": now,
        "attempts": 0,
    }


def add(session: Session, row: dict[str, Any]) -> None:
    """Write a new request."""
    session.execute(insert(REQUESTS), row)


def find(session: Session, request: str, *, lock: bool = False) -> dict[str, Any]:
    """One request.

    Raises:
        Refused: there is none.
    """
    wanted = select(REQUESTS).where(REQUESTS.c.request == request)
    row = session.execute(wanted.with_for_update() if lock else wanted).first()
    if row is None:
        raise missing("request")
    return dict(row._mapping)


def move(
    session: Session,
    database: Database,
    request: str,
    source: tuple[str, ...],
    state: str,
    *,
    held_by: str = "",
    **told: Any,
) -> bool:
    """Take a request from one of the states `source` to another; False if it is in none of them, or not `held_by`'s."""
    wanted = update(REQUESTS).where(REQUESTS.c.request == request, REQUESTS.c.state.in_(source))
    if held_by:
        wanted = wanted.where(REQUESTS.c.server == held_by)
    return changed(session, wanted.values(state=state, changed=database.now(), **told)) == 1


def listed(
    session: Session,
    *,
    dataset: str | None = None,
    member: str | None = None,
    state: str | None = None,
    kind: str | None = None,
    most: int = 200,
) -> list[dict[str, Any]]:
    """Requests, the newest first."""
    wanted = select(REQUESTS).order_by(REQUESTS.c.made.desc(), REQUESTS.c.request).limit(most)
    for column, value in (("dataset", dataset), ("member", member), ("state", state), ("kind", kind)):
        if value is not None:
            wanted = wanted.where(REQUESTS.c[column] == value)
    return [dict(row._mapping) for row in session.execute(wanted)]


def counted(session: Session, *, member: str, dataset: str, states: tuple[str, ...], kind: str | None = None) -> int:
    """How many requests a member has in these states."""
    wanted = select(func.count()).where(
        REQUESTS.c.member == member, REQUESTS.c.dataset == dataset, REQUESTS.c.state.in_(states)
    )
    if kind is not None:
        wanted = wanted.where(REQUESTS.c.kind == kind)
    return int(session.execute(wanted).scalar() or 0)


def spending(session: Session, dataset: str) -> list[dict[str, Any]]:
    """By member: how many requests were charged, and the sums of their epsilons and deltas, which hold together."""
    charged = or_(REQUESTS.c.state.in_(COSTS), (REQUESTS.c.state == "cancelled") & (REQUESTS.c.charge != ""))
    wanted = (
        select(
            REQUESTS.c.member,
            func.count().label("charges"),
            func.sum(REQUESTS.c.price).label("price"),
            func.sum(REQUESTS.c.price_delta).label("price_delta"),
        )
        .where(REQUESTS.c.dataset == dataset, charged)
        .group_by(REQUESTS.c.member)
        .order_by(REQUESTS.c.member)
    )
    rows = session.execute(wanted)
    return [
        {
            "member": one.member,
            "charges": one.charges,
            "epsilon": float(one.price) / BILLION,
            "delta": float(one.price_delta) / QUINTILLION,
        }
        for one in rows
    ]


def archived(session: Session, *, member: str, question: str) -> dict[str, Any] | None:
    """The newest answer that `member` was given to just this question."""
    wanted = select(REQUESTS).where(
        REQUESTS.c.question == question, REQUESTS.c.member == member, REQUESTS.c.state == "answered"
    )
    row = session.execute(wanted.order_by(REQUESTS.c.made.desc()).limit(1)).first()
    return None if row is None else dict(row._mapping)


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A request as callers see it."""
    return {
        "request": row["request"],
        "dataset": row["dataset"],
        "member": row["member"],
        "kind": row["kind"],
        "state": row["state"],
        "asked": json.loads(row["asked"]),
        "purpose": row["purpose"],
        "reason": row["reason"],
        "price": {"epsilon": row["price"] / BILLION, "delta": float(row["delta"])},
        "charge": row["charge"] or None,
        "charged": row["state"] in ("charged", "answered", "failed") or bool(row["charge"]),
        "made": row["made"] / 1e6,
        "changed": row["changed"] / 1e6,
        "decided_by": row["decided_by"] or None,
        "decision": row["decision"],
        "progress": row["progress"],
        "said": row["said"],
        "answer": json.loads(row["answer"]) if row["answer"] else None,
    }


def purpose(row: dict[str, Any]) -> str:
    """What the ledger keeps as a charge's purpose: first, which request it is for."""
    return f"request {row['request']}: {row['purpose']}".strip()


def charge_of(session: Session, row: dict[str, Any]) -> Any:
    """The ledger's row of a request's charge, or None; nobody can charge the account before the transaction ends."""
    wanted = select(ledger.ACCOUNTS.c.account).where(ledger.ACCOUNTS.c.name == row["dataset"])
    account = session.execute(wanted).scalar()
    if account is None:
        return None
    session.execute(select(ledger.HEADS).where(ledger.HEADS.c.account == account).with_for_update())
    mine = ledger.CHARGES.c.purpose.like(f"request {row['request']}:%")
    found = session.execute(select(ledger.CHARGES).where(ledger.CHARGES.c.account == account, mine)).first()
    return None if found is None else dict(found._mapping)


def settle(database: Database, request: str) -> str:
    """Bring a question that nobody works on any more to its end, by what the ledger says; returns its state."""
    with database.write() as session:
        row = find(session, request, lock=True)
        if row["kind"] != QUERY or row["state"] != "reserved":
            return str(row["state"])
        charge = charge_of(session, row)
        if charge is not None:
            said = "charged, and ended before its answer was kept: it stays charged, and was never shown"
            move(session, database, request, OPEN, "failed", charge=charge["hash"], said=said)
            return "failed"
        if row["counted"]:
            members.release(session, row)
        if row["decided_by"]:
            said = "approved, and ended before it was charged: nothing was charged; it waits for approval again"
            move(session, database, request, OPEN, "waiting", decided_by="", decision="", counted=0, said=said)
            return "waiting"
        said = "ended before it was charged: nothing was charged"
        move(session, database, request, OPEN, "refused", counted=0, said=said)
        return "refused"


def settle_abandoned(database: Database, presence: Presence, active: set[str]) -> int:
    """Settle what servers that are gone, or this one, had begun; returns how many."""
    wanted = select(REQUESTS.c.request, REQUESTS.c.server).where(
        REQUESTS.c.kind == QUERY, REQUESTS.c.state == "reserved"
    )
    with database.read() as session:
        begun = session.execute(wanted).all()
        at_work = set(active)  # after the rows were read: whoever is among them and still at work is in it
        left = [
            row.request
            for row in begun
            if row.request not in at_work and (row.server == presence.server or not presence.alive(session, row.server))
        ]
    ended = {request: settle(database, request) for request in left}
    found = {request: state for request, state in ended.items() if state != "answered"}  # answered in between
    for request, state in found.items():
        log.warning("request %s was left unfinished: now %s", request, state)
    return len(found)

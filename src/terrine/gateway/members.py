"""Who may do what with which data set, and how much each analyst may spend of it without asking anyone.

One name has one role for a data set: who watches does not ask. An allowance is a sum of epsilons, counted before the
ledger is charged, in the same statement that compares it, so that two requests at once cannot pass it together.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert, select, update

from terrine.gateway.database import Database, Session, changed
from terrine.gateway.refusals import Refused, missing
from terrine.gateway.schema import BILLION, MEMBERS, META

ALL = "*"


def find(session: Session, dataset: str, member: str, *, lock: bool = False) -> dict[str, Any] | None:
    """What a member is there."""
    wanted = select(MEMBERS).where(MEMBERS.c.dataset == dataset, MEMBERS.c.member == member)
    row = session.execute(wanted.with_for_update() if lock else wanted).first()
    return None if row is None else dict(row._mapping)


def listed(session: Session, dataset: str) -> list[dict[str, Any]]:
    """Everyone who has, or had, a role there."""
    wanted = select(MEMBERS).where(MEMBERS.c.dataset == dataset).order_by(MEMBERS.c.member)
    return [shown(dict(row._mapping)) for row in session.execute(wanted)]


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A member as callers see them: epsilon instead of billionths."""
    return row | {"allowance": row["allowance"] / BILLION, "spent": row["spent"] / BILLION}


def lend(
    session: Session, database: Database, *, dataset: str, member: str, role: str, allowance: int, by: str
) -> dict[str, Any]:
    """Give `member` a role for `dataset`, or change the allowance. What was spent stays.

    Raises:
        Refused: they have another role already, there or everywhere.
    """
    session.execute(select(META).with_for_update())  # one loan at a time, so that no name gets two roles at once
    row = find(session, dataset, member, lock=True)
    everywhere = session.execute(select(MEMBERS).where(MEMBERS.c.member == member, MEMBERS.c.revoked == 0))
    for other in everywhere:
        touches = other.dataset == dataset or ALL in (other.dataset, dataset)
        if touches and other.role != role:
            raise Refused(
                409, f"member: is {other.role} already; one name has one role: revoke that first, or take another name"
            )
    if role != "analyst" and allowance:
        raise Refused(422, f"allowance: is an analyst's; a member who is {role} does not ask")
    if role == "analyst" and dataset == ALL:
        raise Refused(422, "role: an analyst is lent one data set at a time")
    values = {"role": role, "allowance": allowance, "revoked": 0, "by": by}
    if row is None:
        new = {"dataset": dataset, "member": member, "spent": 0, "since": database.now()}
        session.execute(insert(MEMBERS), new | values)
    else:
        session.execute(update(MEMBERS).where(*_one(dataset, member)).values(**values))
    made = find(session, dataset, member)
    assert made is not None
    return shown(made)


def revoke(session: Session, database: Database, dataset: str, member: str) -> None:
    """Take the loan back: tokens for it count no more.

    Raises:
        Refused: there is no such member.
    """
    row = find(session, dataset, member, lock=True)
    if row is None:
        raise missing("member")
    session.execute(update(MEMBERS).where(*_one(dataset, member)).values(revoked=database.now()))


def reserve(session: Session, dataset: str, member: str, price: int) -> bool:
    """Count `price` against the allowance, if it holds it: one statement, so that nobody gets in between."""
    fits = MEMBERS.c.spent + price <= MEMBERS.c.allowance
    wanted = update(MEMBERS).where(*_one(dataset, member), MEMBERS.c.revoked == 0, fits)
    return changed(session, wanted.values(spent=MEMBERS.c.spent + price)) == 1


def release(session: Session, dataset: str, member: str, price: int) -> None:
    """Give back what was counted for a charge that the ledger refused."""
    session.execute(update(MEMBERS).where(*_one(dataset, member)).values(spent=MEMBERS.c.spent - price))


def _one(dataset: str, member: str) -> tuple[Any, Any]:
    return MEMBERS.c.dataset == dataset, MEMBERS.c.member == member

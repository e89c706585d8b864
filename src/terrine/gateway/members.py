"""Who may do what with which data set, and how much each analyst may spend of it without asking anyone.

One name has one role for a data set: who watches does not ask. An allowance of epsilon brings the same share of the
budget's delta with it. What is counted against it is the sum of epsilons, each at its request's own delta, and the sum
of those deltas: by basic composition an analyst's answers together are (allowance, its delta)-DP. Both are counted
before the ledger is charged, in the statement that compares them, so that two requests at once cannot pass it together.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, insert, select, update

from terrine.gateway.database import Database, Session, changed
from terrine.gateway.refusals import Refused, missing
from terrine.gateway.schema import BILLION, MEMBERS, META, QUINTILLION, TOKENS, price, price_delta

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
    """A member as callers see them: epsilon and delta instead of small whole parts."""
    epsilons = {name: row[name] / BILLION for name in ("allowance", "spent")}
    return row | epsilons | {name: row[name] / QUINTILLION for name in ("allowance_delta", "spent_delta")}


def left(row: dict[str, Any] | None) -> tuple[int, int]:
    """What is left of an allowance, of epsilon and of delta: nothing for who is no member."""
    if row is None:
        return 0, 0
    return max(0, row["allowance"] - row["spent"]), max(0, row["allowance_delta"] - row["spent_delta"])


def quoted(row: dict[str, Any] | None, epsilon: float, delta: float) -> dict[str, Any]:
    """Whether an allowance holds a price, and what is left of it."""
    epsilon_left, delta_left = left(row)
    return {
        "fits_allowance": price(epsilon) <= epsilon_left and price_delta(delta) <= delta_left,
        "allowance_left": epsilon_left / BILLION,
        "allowance_delta_left": delta_left / QUINTILLION,
    }


def beyond(row: dict[str, Any] | None, epsilon: float, delta: float) -> Refused:
    """The refusal of what an allowance does not hold."""
    left = quoted(row, epsilon, delta)
    return Refused(
        403,
        f"epsilon {epsilon:.6g} at delta {delta:.3g} is beyond what is left of your allowance (epsilon "
        f"{left['allowance_left']:.6g}, delta {left['allowance_delta_left']:.3g}); nothing was charged; ask for less, "
        'or again with a "reason", and the request waits for approval',
    )


def lend(
    session: Session,
    database: Database,
    *,
    dataset: str,
    member: str,
    role: str,
    by: str,
    allowance: int = 0,
    allowance_delta: int = 0,
) -> dict[str, Any]:
    """Give `member` a role for `dataset`, or change the allowance. What was spent stays.

    Raises:
        Refused: they have another role already, there or everywhere; or their name is known in other letters.
    """
    session.execute(select(META).with_for_update())  # one loan at a time, so that no name gets two roles at once
    _must_be_one(session, member)
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
    values = {"role": role, "allowance": allowance, "allowance_delta": allowance_delta, "revoked": 0, "by": by}
    if row is None:
        new = {"dataset": dataset, "member": member, "spent": 0, "spent_delta": 0, "since": database.now()}
        session.execute(insert(MEMBERS), new | values)
    else:
        session.execute(update(MEMBERS).where(*_one(dataset, member)).values(**values))
    made = find(session, dataset, member)
    assert made is not None
    return shown(made)


def _must_be_one(session: Session, member: str) -> None:
    """Refuse a name that differs from a known one in the case of its letters alone: it would get a second role."""
    alike = select(MEMBERS.c.member).where(func.lower(MEMBERS.c.member) == member.lower(), MEMBERS.c.member != member)
    if (known := session.execute(alike.limit(1)).scalar()) is not None:
        raise Refused(409, f"member: is known as {known}; names that differ in case alone are one: want {known}")


def revoke(session: Session, database: Database, dataset: str, member: str) -> None:
    """Take the loan back: tokens for it count no more, not even if it is lent again.

    Raises:
        Refused: there is no such member.
    """
    row = find(session, dataset, member, lock=True)
    if row is None:
        raise missing("member")
    now = database.now()
    session.execute(update(MEMBERS).where(*_one(dataset, member)).values(revoked=now))
    tokens = TOKENS.c.member == member, TOKENS.c.dataset == dataset, TOKENS.c.revoked == 0
    session.execute(update(TOKENS).where(*tokens).values(revoked=now))


def reserve(session: Session, row: dict[str, Any]) -> bool:
    """Count a request's price against its member's allowance, if it holds it: one statement, nobody gets in between."""
    epsilon, delta = MEMBERS.c.spent + row["price"], MEMBERS.c.spent_delta + row["price_delta"]
    fits = (epsilon <= MEMBERS.c.allowance) & (delta <= MEMBERS.c.allowance_delta)
    wanted = update(MEMBERS).where(*_one(row["dataset"], row["member"]), MEMBERS.c.revoked == 0, fits)
    return changed(session, wanted.values(spent=epsilon, spent_delta=delta)) == 1


def release(session: Session, row: dict[str, Any]) -> None:
    """Give back what was counted for a charge that the ledger refused."""
    _count(session, row, -1)


def count_again(session: Session, row: dict[str, Any]) -> None:
    """Count what was given back for a charge that the ledger took after all, even beyond the allowance."""
    _count(session, row, 1)


def _count(session: Session, row: dict[str, Any], sign: int) -> None:
    counted = {
        "spent": MEMBERS.c.spent + sign * row["price"],
        "spent_delta": MEMBERS.c.spent_delta + sign * row["price_delta"],
    }
    session.execute(update(MEMBERS).where(*_one(row["dataset"], row["member"])).values(**counted))


def _one(dataset: str, member: str) -> tuple[Any, Any]:
    return MEMBERS.c.dataset == dataset, MEMBERS.c.member == member

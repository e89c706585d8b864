"""Tokens and logins: 256 random bits, shown once, kept as a SHA-256 hash, scoped, expiring and revocable.

A token is scoped to one member, one role and one data set ("*": all). It counts only as long as its member still has
that role there. A login exchanges a token for a cookie of another 256 bits, which ends with the token at the latest.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, select, update

from terrine.gateway import members
from terrine.gateway.database import Database, Session
from terrine.gateway.refusals import Refused, missing
from terrine.gateway.schema import SESSIONS, TOKENS

ALL = "*"
"""Every data set."""
PREFIX = "terrine_"
_MICRO, _DAY, _HOUR = 1_000_000, 86_400, 3_600


@dataclass(frozen=True)
class Caller:
    """Who is asking, as their token says."""

    member: str
    role: str
    dataset: str
    """The one data set, or "*"."""
    token: str
    """The token's public name."""
    cookie: bool = False
    csrf: str = ""
    """What forms must send back."""

    def may_see(self, dataset: str) -> bool:
        """Whether `dataset` is in the token's scope."""
        return self.dataset in (ALL, dataset)


def digest(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def csrf_of(cookie: str) -> str:
    """The CSRF token of a login: known to whoever holds the cookie, and to nobody else."""
    return hmac.new(cookie.encode(), b"terrine csrf", hashlib.sha256).hexdigest()


def issue(session: Session, database: Database, *, member: str, dataset: str, days: float, by: str) -> dict[str, Any]:
    """A new token for a member; its secret is in the answer and nowhere else.

    Raises:
        Refused: there is no such member there.
    """
    found = members.find(session, dataset, member)
    if found is None or found["revoked"]:
        raise Refused(422, "member: has no role there; lend them the data set first")
    secret, now = PREFIX + secrets.token_urlsafe(32), database.now()
    row = {
        "token": secrets.token_hex(16),
        "digest": digest(secret),
        "member": member,
        "role": found["role"],
        "dataset": dataset,
        "by": by,
        "issued": now,
        "expires": now + int(days * _DAY * _MICRO),
        "revoked": 0,
    }
    session.execute(insert(TOKENS), row)
    return {name: value for name, value in row.items() if name != "digest"} | {"secret": secret}


def caller_of(database: Database, secret: str, *, cookie: bool = False) -> Caller:
    """Whose token, or whose login's cookie, it is.

    Raises:
        Refused: nobody's, expired, revoked, or its member has lost the role.
    """
    given = digest(secret)
    with database.read() as session:
        if cookie:
            login = session.execute(select(SESSIONS).where(SESSIONS.c.digest == given)).first()
            if login is None or login.ended or login.expires <= database.now():
                raise _unknown()
            row = session.execute(select(TOKENS).where(TOKENS.c.token == login.token)).first()
        else:
            row = session.execute(select(TOKENS).where(TOKENS.c.digest == given)).first()
            if row is not None and not hmac.compare_digest(row.digest, given):
                row = None
        if row is None or row.revoked or row.expires <= database.now():
            raise _unknown()
        member = members.find(session, row.dataset, row.member)
    if member is None or member["revoked"] or member["role"] != row.role:
        raise _unknown()
    csrf = csrf_of(secret) if cookie else ""
    return Caller(row.member, row.role, row.dataset, row.token, cookie=cookie, csrf=csrf)


def log_in(database: Database, secret: str, *, hours: float) -> tuple[str, Caller]:
    """The cookie of a new login.

    Raises:
        Refused: it is nobody's token.
    """
    caller = caller_of(database, secret)
    cookie, now = secrets.token_urlsafe(32), database.now()
    with database.write() as session:
        row = {"digest": digest(cookie), "token": caller.token, "started": now, "ended": 0}
        session.execute(insert(SESSIONS), row | {"expires": now + int(hours * _HOUR * _MICRO)})
    return cookie, caller


def log_out(database: Database, cookie: str) -> None:
    """End a login."""
    with database.write() as session:
        mine = SESSIONS.c.digest == digest(cookie)
        session.execute(update(SESSIONS).where(mine, SESSIONS.c.ended == 0).values(ended=database.now()))


def revoke(session: Session, database: Database, caller: Caller, token: str) -> None:
    """End a token, and the logins that were made with it.

    Raises:
        Refused: there is none in the caller's scope.
    """
    row = session.execute(select(TOKENS).where(TOKENS.c.token == token)).first()
    if row is None or not caller.may_see(row.dataset):
        raise missing("token")
    session.execute(update(TOKENS).where(TOKENS.c.token == token, TOKENS.c.revoked == 0).values(revoked=database.now()))


def listed(session: Session, caller: Caller) -> list[dict[str, Any]]:
    """Every token in the caller's scope, without its secret."""
    wanted = select(*(one for one in TOKENS.c if one.name != "digest")).order_by(TOKENS.c.issued)
    if caller.dataset != ALL:
        wanted = wanted.where(TOKENS.c.dataset == caller.dataset)
    return [dict(row._mapping) for row in session.execute(wanted)]


def _unknown() -> Refused:
    return Refused(401, "want a token that is known, not expired and not revoked: Authorization: Bearer terrine_...")

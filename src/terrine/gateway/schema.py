"""The gateway's tables, beside the ledger's in the same database: text and whole numbers only, as there.

Epsilon is kept in whole billionths and delta in whole 10^-18, so that sums are exact: prices rounded up, allowances
down. A migration is never edited once released; a change is the next one.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Index,
    MetaData,
    Table,
    Text,
    insert,
    inspect,
    select,
    text,
    update,
)

from terrine.accounting.costs import written
from terrine.errors import LedgerUnavailable

VERSION = 1
BILLION = 10**9
QUINTILLION = 10**18
_METADATA = MetaData()


def _table(name: str, keys: str, texts: str = "", numbers: str = "") -> Table:
    columns: list[Column[Any]] = [Column(one, Text, primary_key=True) for one in keys.split()]
    columns += [Column(one, Text, nullable=False, quote=True) for one in texts.split()]
    columns += [Column(one, BigInteger, nullable=False, quote=True) for one in numbers.split()]
    return Table(name, _METADATA, *columns)


META = Table(
    "gateway_meta",
    _METADATA,
    Column("one", BigInteger, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
    Column("log_sequence", BigInteger, nullable=False),
    Column("log_hash", Text, nullable=False),
)
DATASETS = _table("gateway_datasets", "dataset", "declaration digest by", "registered closed")
MEMBERS = _table(
    "gateway_members", "dataset member", "role by", "allowance allowance_delta spent spent_delta since revoked"
)
TOKENS = _table("gateway_tokens", "token", "digest member role dataset by", "issued expires revoked")
SESSIONS = _table("gateway_sessions", "digest", "token", "started expires ended")
REQUESTS = _table(
    "gateway_requests",
    "request",
    "dataset member kind asked question purpose reason state delta charge server decided_by decision progress said"
    " answer",
    "price price_delta counted made changed attempts",
)
SERVERS = _table("gateway_servers", "server", "place", "beat")
LOG = Table(
    "gateway_log",
    _METADATA,
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("at", BigInteger, nullable=False),
    *(
        Column(one, Text, nullable=False)
        for one in ("member", "role", "token", "dataset", "action", "subject", "detail", "previous", "hash")
    ),
    Column("status", BigInteger, nullable=False),
)
Index("gateway_token_digests", TOKENS.c.digest, unique=True)
Index("gateway_archive", REQUESTS.c.question)
Index("gateway_request_states", REQUESTS.c.state)
Index("gateway_requests_made", REQUESTS.c.dataset, REQUESTS.c.made)


def migrate(connection: Connection) -> None:
    """Bring the tables up to this version, inside the caller's transaction."""
    if META.name in inspect(connection).get_table_names():
        version = connection.execute(select(META.c.version)).scalar()
        if version != VERSION:
            raise LedgerUnavailable(f"the gateway's tables are of version {version}; this Terrine reads {VERSION}")
        return
    _METADATA.create_all(connection)
    connection.execute(insert(META), {"one": 1, "version": VERSION, "log_sequence": 0, "log_hash": ""})


def price(epsilon: float) -> int:
    """Epsilon in billionths, rounded up."""
    return math.ceil(epsilon * BILLION)


def price_delta(delta: float) -> int:
    """Delta in 10^-18, rounded up."""
    return math.ceil(written(delta) * QUINTILLION)


def allowance(epsilon: float) -> int:
    """Epsilon in billionths, rounded down."""
    return math.floor(epsilon * BILLION)


def allowance_delta(epsilon: float, budget: Any) -> int:
    """What an allowance of `epsilon` may spend of delta: the same share of `budget`, rounded down."""
    share = min(Fraction(1), written(epsilon) / written(budget.epsilon))
    return math.floor(share * written(budget.delta) * QUINTILLION)


__all__ = ["BILLION", "DATASETS", "LOG", "MEMBERS", "META", "QUINTILLION", "REQUESTS", "SERVERS", "SESSIONS", "TOKENS"]
__all__ += ["VERSION", "allowance", "allowance_delta", "migrate", "price", "price_delta", "text", "update"]

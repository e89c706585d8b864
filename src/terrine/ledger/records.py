"""What the ledger writes, as frozen rows of text and whole numbers, and the hash that chains them.

    hash_n = SHA-256(JSON of all fields of row n, with hash_(n-1) among them)

The first charge of an account chains to the account's own row, so that neither can be changed alone. Numbers are
written so that reading gives the same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from fractions import Fraction
from json.encoder import encode_basestring_ascii
from typing import Any

from terrine.accounting.costs import Cost
from terrine.accounting.filters import Split, Terms
from terrine.errors import LedgerDamaged
from terrine.events import Budget


@dataclass(frozen=True)
class AccountRow:
    """One account as it was declared; nothing in it ever changes."""

    account: str
    name: str
    opened: int
    terms: str
    unit: str
    neighbours: str
    partitions: str
    hash: str = ""


@dataclass(frozen=True)
class ChargeRow:
    """One charge. `state` is the running sum of its partition's own charges, `sealed` is encrypted or empty."""

    account: str
    sequence: int
    at: int
    event: str
    purpose: str
    by: str
    partition: str
    cost: str
    state: str
    sealed: str
    previous: str
    hash: str = ""


def digest(row: AccountRow | ChargeRow) -> str:
    """The hash of every field but the hash itself."""
    return _digest(type(row), [getattr(row, name) for name in _NAMES[type(row)]])


def chained(**fields: Any) -> ChargeRow:
    """A charge with its hash, which covers every field."""
    return ChargeRow(**fields, hash=_digest(ChargeRow, [fields[name] for name in _NAMES[ChargeRow]]))


def write_cost(cost: Cost) -> str:
    """`cost` as JSON, bit for bit; a divergence without a bound is null."""
    epsilon, mu_squared = ("null" if one is None else f'"{one}"' for one in (cost.epsilon, cost.mu_squared))
    renyi = ", ".join([float.__repr__(one) if one < math.inf else "null" for one in cost.renyi])
    return (
        f'{{"epsilon": {epsilon}, "delta": "{cost.delta}", "mu_squared": {mu_squared}, "renyi": [{renyi}], '
        f'"events": {cost.events}{_PLANNED if cost.planned else ""}}}'
    )


def read_cost(text: str) -> Cost:
    """The cost that `write_cost` wrote.

    Raises:
        LedgerDamaged: it cannot have written this.
    """
    try:
        record = json.loads(text)
        return Cost(
            epsilon=None if record["epsilon"] is None else Fraction(record["epsilon"]),
            delta=Fraction(record["delta"]),
            mu_squared=None if record["mu_squared"] is None else Fraction(record["mu_squared"]),
            renyi=tuple(math.inf if one is None else float(one) for one in record["renyi"]),
            events=int(record["events"]),
            planned=bool(record.get("planned", False)),
        )
    except (ValueError, TypeError, KeyError, ZeroDivisionError, AttributeError) as error:
        raise LedgerDamaged(f"cost={text[:60]!r}: not a cost that Terrine wrote ({error})") from None


def write_terms(terms: Terms) -> str:
    """`terms` as text, bit for bit."""
    return json.dumps(dataclasses.asdict(terms), allow_nan=False)


def read_terms(text: str) -> Terms:
    """The terms that `write_terms` wrote, proven again.

    Raises:
        LedgerDamaged: it cannot have written this.
    """
    try:
        record = json.loads(text)
        terms = Terms(
            budget=Budget(**record.pop("budget")),
            split=Split(**record.pop("split")),
            orders=tuple(float(order) for order in record.pop("orders")),
            **record,
        )
        terms.check()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LedgerDamaged(f"terms={text[:60]!r}: not terms that Terrine wrote ({error})") from None
    return terms


_PLANNED = ', "planned": true'


def _digest(kind: type, fields: list[Any]) -> str:
    # The text of json.dumps([name, *fields]); joined here because this is on the path of every charge.
    encoded = [encode_basestring_ascii(one) if type(one) is str else json.dumps(one) for one in fields]
    return hashlib.sha256(f'["{kind.__name__}", {", ".join(encoded)}]'.encode()).hexdigest()


_NAMES = {
    kind: [field.name for field in dataclasses.fields(kind) if field.name != "hash"] for kind in (AccountRow, ChargeRow)
}

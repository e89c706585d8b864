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
import struct
from fractions import Fraction
from json.encoder import encode_basestring_ascii
from typing import NamedTuple

from terrine.accounting.costs import Cost
from terrine.accounting.filters import Split, Terms
from terrine.errors import LedgerDamaged
from terrine.events import Budget


class AccountRow(NamedTuple):
    """One account as it was declared; nothing in it ever changes."""

    account: str
    name: str
    opened: int
    terms: str
    unit: str
    neighbours: str
    partitions: str
    hash: str = ""


class ChargeRow(NamedTuple):
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
    # The text of json.dumps([kind, *fields]); joined here because this is on the path of every charge.
    fields = [encode_basestring_ascii(one) if type(one) is str else repr(one) for one in row[:-1]]
    return hashlib.sha256(f'["{type(row).__name__}", {", ".join(fields)}]'.encode()).hexdigest()


def hashed(row: ChargeRow) -> ChargeRow:
    """`row` with its hash filled in."""
    return ChargeRow(*row[:-1], hash=digest(row))


def write_cost(cost: Cost) -> str:
    """`cost` as JSON, bit for bit; the Renyi divergences are the hexadecimal bytes of their doubles."""
    epsilon = "null" if cost.epsilon is None else f'"{cost.epsilon}"'
    mu_squared = "null" if cost.mu_squared is None else f'"{cost.mu_squared}"'
    renyi = struct.pack(f">{len(cost.renyi)}d", *cost.renyi).hex()
    return (
        f'{{"epsilon": {epsilon}, "delta": "{cost.delta}", "mu_squared": {mu_squared}, "renyi": "{renyi}", '
        f'"events": {cost.events}{_PLANNED if cost.planned else ""}}}'
    )


def write_state(own: Cost, common: Cost | None) -> str:
    """The running sum of a stream; for a partition's, also the sum of the charges on the whole account."""
    state = write_cost(own)
    return state if common is None else f'{state[:-1]}, "common": {write_cost(common)}}}'


def read_state(text: str) -> tuple[Cost, Cost | None]:
    """The two sums that `write_state` wrote.

    Raises:
        LedgerDamaged: it cannot have written this.
    """
    own = read_cost(text)
    common = json.loads(text).get("common")
    return own, None if common is None else read_cost(json.dumps(common))


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
            renyi=_read_renyi(record["renyi"]),
            events=int(record["events"]),
            planned=bool(record.get("planned", False)),
        )
    except (ValueError, TypeError, KeyError, ZeroDivisionError, AttributeError, struct.error) as error:
        raise LedgerDamaged(f"cost={text[:60]!r}: not a cost that Terrine wrote ({error})") from None


def _read_renyi(written: str | list[float | None]) -> tuple[float, ...]:
    if isinstance(written, str):
        curve: tuple[float, ...] = struct.unpack(f">{len(written) // 16}d", bytes.fromhex(written))
    else:  # as the first ledgers wrote it
        curve = tuple(math.inf if one is None else float(one) for one in written)
    if not all(one >= 0 for one in curve):
        raise ValueError("a divergence is never negative, and always a number")
    return curve


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

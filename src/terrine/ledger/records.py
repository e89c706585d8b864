"""What the ledger writes, as frozen rows of text and whole numbers, and the hash that chains them.

    hash_n = SHA-256(JSON of all fields of row n, with hash_(n-1) among them)

The first charge of an account chains to the account's own row, so that neither can be changed alone. Numbers are
written so that reading gives the same bits. Reading is strict, because a hash shows that a row was not changed, not
that Terrine wrote it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from fractions import Fraction
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from terrine import check
from terrine.accounting.costs import Cost
from terrine.accounting.filters import DeltaShares, Terms
from terrine.errors import InvalidArgument, LedgerDamaged, TerrineError
from terrine.events import Budget, Neighbours, Unit
from terrine.events.codec import read_json

LAST_MOMENT = 253_402_300_799_999_999
"""The last microsecond that a date can name, at the end of the year 9999."""

_WHOLE_NUMBERS = {"opened", "sequence", "at"}
_COST = {"epsilon", "delta", "mu_squared", "renyi", "events"}
_FRACTION = re.compile("(?:0|[1-9][0-9]{0,1999})(?:/[1-9][0-9]{0,199})?")
_LARGEST_ORDER = 1e12
_PLANNED = ', "planned": true'


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


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What an account declares for ever when it is opened."""

    terms: Terms
    unit: Unit = Unit.EXAMPLE
    neighbours: Neighbours = Neighbours.ADD_REMOVE
    partitions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = self.partitions
        if not isinstance(names, list | tuple):
            raise check.refuse("partitions", names, "a list of names")
        for name, kind in (("unit", Unit), ("neighbours", Neighbours)):
            if not isinstance(getattr(self, name), kind):
                raise check.refuse(name, getattr(self, name), f"one of {', '.join(map(str, kind))}")
        names = tuple(check.text("partition", one, at_least=1) for one in names)
        if len(set(names)) < len(names):
            raise InvalidArgument(f"partitions={check.shown(list(names))}: want different names")
        if names and self.neighbours is Neighbours.REPLACE_ONE:
            raise InvalidArgument(
                "partitions: replacing a unit may move it to another partition; want add-remove neighbours"
            )
        object.__setattr__(self, "partitions", names)


def write_declaration(declaration: Declaration, *, account: str, name: str, opened: int) -> AccountRow:
    """`declaration` as a row with its hash."""
    row = AccountRow(
        account=account,
        name=name,
        opened=opened,
        terms=json.dumps(dataclasses.asdict(declaration.terms), allow_nan=False),
        unit=declaration.unit.value,
        neighbours=declaration.neighbours.value,
        partitions=json.dumps(declaration.partitions),
    )
    return row._replace(hash=digest(row))


def read_declaration(row: AccountRow) -> Declaration:
    """The declaration that `write_declaration` wrote, with its terms proven again.

    Raises:
        LedgerDamaged: it cannot have written this.
    """
    try:
        _must_be_written("name", row.name, at_least=1)
        if not re.fullmatch("[0-9a-f]{32}", row.account) or not 0 <= row.opened <= LAST_MOMENT:
            raise ValueError("no number and time of an account")
        names = read_json(row.partitions)
        declared = Declaration(_read_terms(row.terms), Unit(row.unit), Neighbours(row.neighbours), names)
        if list(declared.partitions) != names:
            raise ValueError("partitions are not written in NFC")
    except (TerrineError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise LedgerDamaged(f"a declaration that Terrine did not write ({check.shown(str(error), 200)})") from None
    return declared


def check_charge(row: ChargeRow) -> None:
    """Refuse a charge whose words, time or sealed field Terrine does not write.

    Raises:
        LedgerDamaged: it says which.
    """
    try:
        for name in ("purpose", "by", "partition"):
            _must_be_written(name, getattr(row, name))
        if not 0 <= row.at <= LAST_MOMENT:
            raise ValueError(f"at={check.shown(row.at)} is no time")
        if not re.fullmatch("[A-Za-z0-9+/]*={0,2}", row.sealed):
            raise ValueError("the sealed field is not one")
    except (ValueError, TypeError) as error:
        raise LedgerDamaged(str(error)) from None


def mistyped(row: AccountRow | ChargeRow) -> str:
    """The first field that is not of its type, or nothing: a database or an export can hold anything."""
    for name, value in zip(row._fields, row, strict=True):
        if type(value) is not (int if name in _WHOLE_NUMBERS else str):
            return name
    return ""


def write_cost(cost: Cost) -> str:
    """`cost` as JSON, bit for bit; the Renyi divergences are the hexadecimal bytes of their doubles."""
    epsilon = "null" if cost.epsilon is None else f'"{cost.epsilon}"'
    mu_squared = "null" if cost.mu_squared is None else f'"{cost.mu_squared}"'
    renyi = struct.pack(f">{len(cost.renyi)}d", *cost.renyi).hex()
    return (
        f'{{"epsilon": {epsilon}, "delta": "{cost.delta}", "mu_squared": {mu_squared}, "renyi": "{renyi}", '
        f'"events": {cost.events}{_PLANNED if cost.planned else ""}}}'
    )


def read_cost(text: str, orders: tuple[float, ...]) -> Cost:
    """The cost that `write_cost` wrote, at these orders.

    Raises:
        LedgerDamaged: it cannot have written this.
    """
    try:
        return _cost(read_json(text), orders)
    except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise _no_cost(text, error) from None


def write_state(own: Cost, common: Cost | None) -> str:
    """The running sum of a stream; for a partition's, also the sum of the charges on the whole account."""
    state = write_cost(own)
    return state if common is None else f'{state[:-1]}, "common": {write_cost(common)}}}'


def read_state(text: str, orders: tuple[float, ...]) -> tuple[Cost, Cost | None]:
    """The two sums that `write_state` wrote.

    Raises:
        LedgerDamaged: it cannot have written this.
    """
    try:
        record = read_json(text)
        common = record.pop("common", None)
        return _cost(record, orders), None if common is None else _cost(common, orders)
    except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise _no_cost(text, error) from None


def _must_be_written(name: str, text: str, at_least: int = 0) -> None:
    if check.text(name, text, at_least) != text:
        raise InvalidArgument(f"{name}={check.shown(text, written=ascii)}: not written in NFC")


def _read_terms(text: str) -> Terms:
    record = read_json(text)
    terms = Terms(
        budget=Budget(**record.pop("budget")),
        split=DeltaShares(**record.pop("split")),
        orders=tuple(float(order) for order in record.pop("orders")),
        **record,
    )
    if not terms.orders or not all(1 < order < _LARGEST_ORDER for order in terms.orders):
        raise ValueError("no orders of a Renyi divergence")
    terms.check()
    return terms


def _cost(record: dict[str, Any], orders: tuple[float, ...]) -> Cost:
    if set(record) - {"planned"} != _COST or record.get("planned", True) is not True:
        raise ValueError(f"want the fields {', '.join(sorted(_COST))}")
    if type(record["events"]) is not int or record["events"] < 0:
        raise ValueError("events is not a count")
    curve: tuple[float, ...] = struct.unpack(f">{len(orders)}d", bytes.fromhex(record["renyi"]))
    if not all(one >= 0 for one in curve):
        raise ValueError("a divergence is never negative, and always a number")
    return Cost(
        epsilon=None if record["epsilon"] is None else _fraction(record["epsilon"]),
        delta=_fraction(record["delta"]),
        mu_squared=None if record["mu_squared"] is None else _fraction(record["mu_squared"]),
        renyi=curve,
        events=record["events"],
        planned="planned" in record,
    )


def _fraction(written: str) -> Fraction:
    if not _FRACTION.fullmatch(written):
        raise ValueError(f"{check.shown(written)} is not a fraction")
    return Fraction(written)


def _no_cost(text: str, error: Exception) -> LedgerDamaged:
    return LedgerDamaged(f"cost={check.shown(text, 60)}: not a cost that Terrine wrote ({check.shown(str(error))})")

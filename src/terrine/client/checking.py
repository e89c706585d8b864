"""Checks of an answer by whoever receives it: offline, from the answer alone.

    event    is the one that the ledger's row names, and costs no more than the price that was told
    charge   the row's hash is that of its fields, and it names this request and this analyst
    question what was answered is what was asked
    signature, if a key is given: the server signed just this

An answer that fails one of them is refused: whoever made it does not follow the protocol, and what it says of its
price cannot be relied on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from terrine.errors import InvalidArgument, MalformedEvents, TerrineError
from terrine.events import ApproximateDP, Composed, Event, Laplace, from_json, leaves
from terrine.ledger.records import ChargeRow, digest, mistyped
from terrine.rounding import up

ANSWER_TYPE = "application/vnd.terrine.answer+json"
_ROOM = 1e-9
"""What two versions of the accountant may differ by."""


def checked(record: dict[str, Any], *, asked: dict[str, Any] | None, signed_by: Path | None) -> tuple[Event, bool]:
    """The event of an answer that keeps the protocol, and whether its signature was checked.

    Raises:
        InvalidArgument: it does not; the first thing that is wrong.
    """
    try:
        event = _charged(record)
        _fits(record, asked)
    except (KeyError, TypeError, ValueError, MalformedEvents) as error:
        raise InvalidArgument(f"the answer is not what a gateway sends ({type(error).__name__}: {error})") from None
    if signed_by is None:
        return event, False
    _signed(record, signed_by)
    return event, True


def price(event: Event, delta: float) -> float:
    """The proven epsilon of an event at `delta`: what fails with its own delta is taken off first."""
    parts = event.parts if isinstance(event, Composed) else (event,)
    noises = [part for part in parts if not isinstance(part, ApproximateDP)]
    noise = noises[0] if len(noises) == 1 else Composed(tuple(noises))
    from terrine import accounting
    from terrine.accounting import composition

    if all(isinstance(leaf, Laplace) for leaf, _ in leaves(noise)):
        return composition.pure(noise)
    return accounting.epsilon(noise, delta=delta - _failing(event))


def payload(record: dict[str, Any]) -> bytes:
    """What a gateway signs of an answer."""
    kept = {name: record[name] for name in ("dataset", "member", "asked", "answer", "proof")}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _failing(event: Event) -> float:
    """What fails with a delta of its own: the selection of private keys."""
    parts = event.parts if isinstance(event, Composed) else (event,)
    return sum(part.delta for part in parts if isinstance(part, ApproximateDP))


def _charged(record: dict[str, Any]) -> Event:
    proof = record["proof"]
    told, charge = proof["price"], ChargeRow(**proof["charge"])
    if mistyped(charge) or digest(charge) != charge.hash or proof["head"] != charge.hash:
        raise InvalidArgument("the answer's charge is not a row of a ledger: its hash is not that of its fields")
    event = from_json(json.dumps(proof["event"]))
    if from_json(charge.event) != event:
        raise InvalidArgument("the answer's event is not the one that was charged")
    if charge.by != record["member"] or not charge.purpose.startswith(f"request {record['request']}:"):
        raise InvalidArgument("the answer's charge is that of another request")
    if proof["request"] != record["request"]:
        raise InvalidArgument("the answer's proof is that of another request")
    wanted = record["asked"].get("delta") or _failing(event)
    if not 0 <= told["delta"] <= wanted * (1 + _ROOM):
        raise InvalidArgument(f"the answer says delta {told['delta']}; what was asked allows {wanted}")
    found = _priced(event, float(told["delta"]))
    if abs(found - told["epsilon"]) > _ROOM * max(1.0, found):
        raise InvalidArgument(f"the answer says epsilon {told['epsilon']}; its event costs {up(found)}")
    return event


def _priced(event: Event, delta: float) -> float:
    try:
        return price(event, delta)
    except TerrineError as error:
        raise InvalidArgument(f"the answer's event cannot be priced: {error}") from None


def _fits(record: dict[str, Any], asked: dict[str, Any] | None) -> None:
    for name, value in (asked or {}).items():
        if name in ("purpose", "reason", "fresh"):
            continue
        if _plain(record["asked"].get(name)) != _plain(value):
            same_words = name == "sql" and record["from_archive"]  # an archive goes by what was understood
            if not same_words:
                raise InvalidArgument(f"the answer is to another question: {name} is not what was asked")
    width = len(record["answer"]["columns"])
    if any(len(row) != width for row in record["answer"]["rows"]):
        raise InvalidArgument("the answer's rows do not have its columns")


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _signed(record: dict[str, Any], key: Path) -> None:
    from terrine.verify import signing

    if record.get("signature") is None:
        raise InvalidArgument("the answer is not signed, and a key was given; ask the gateway's owner for signatures")
    if signing.opened(record["signature"], ANSWER_TYPE, signing.load_public(key)) != payload(record):
        raise InvalidArgument("the answer's signature is of another answer")

"""Events as JSON and back: a versioned envelope, kinds looked up in a closed table, never imported.

    {"terrine-events": 1, "event": {"kind": "PoissonSampled", "rate": 0.01, "event": {...}}}

Floats are written so that reading gives the same bits. A field that is None is left out. A text that another reader
could take for another event is refused: a name twice in one object, a number that a double cannot hold.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, get_args

from terrine import check
from terrine.errors import InvalidArgument, MalformedEvents
from terrine.events.compose import Composed, Event
from terrine.events.relation import Neighbours, Unit
from terrine.events.stopping import Count

VERSION = 1
_ENVELOPE = "terrine-events"
_KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}
_COUNTS: dict[str, type] = {kind.__name__: kind for kind in get_args(Count)}
_DEEPEST = 100
_MOST_DIGITS = 600  # of a whole number: fewer than Python reads under any setting
_TOO_LARGE = 10**_MOST_DIGITS


def to_dict(event: Event) -> dict[str, Any]:
    """`event` as plain JSON values, without the envelope."""
    fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    return {"kind": type(event).__name__} | {name: _plain(value) for name, value in fields.items() if value is not None}


def from_dict(record: Any, _depth: int = 0) -> Event:
    """The event that `to_dict` wrote.

    Raises:
        MalformedEvents: the record is not one this version can have written.
    """
    built: Event = _built(record, _KINDS, _depth)
    return built


def to_json(event: Event) -> str:
    """`event` in its envelope, as one line of JSON.

    Raises:
        InvalidArgument: it holds a whole number of more digits than can be read back.
    """
    return json.dumps({_ENVELOPE: VERSION, "event": to_dict(event)}, allow_nan=False)


def from_json(text: str) -> Event:
    """The event in `text`: an envelope, a bare event, or a list of bare events (composed).

    Raises:
        MalformedEvents: not JSON, from a newer version, or not events.
    """
    record = read_json(text)
    if isinstance(record, list):
        return Composed(from_dict(part) for part in record)
    if isinstance(record, dict) and _ENVELOPE in record:
        version = record[_ENVELOPE]
        if type(version) is not int or version != VERSION:
            raise MalformedEvents(f"events of version {check.shown(version)}: this Terrine reads version {VERSION}")
        if strange := sorted(set(record) - {_ENVELOPE, "event"}):
            raise MalformedEvents(f"{check.shown(strange[0])} stands beside the event: want nothing but the version")
        return from_dict(record.get("event"))
    return from_dict(record)


def read_json(text: str) -> Any:
    """The value of a JSON text that every reader understands alike.

    Raises:
        MalformedEvents: not JSON, a name twice in one object, or a number that a double or 600 digits cannot hold.
    """
    if not isinstance(text, str):
        raise MalformedEvents(f"{check.shown(text)}: want text that holds JSON")
    try:
        return json.loads(
            text,
            object_pairs_hook=_without_repeats,
            parse_int=_whole,
            parse_float=_double,
            parse_constant=_no_constant,
        )
    except (json.JSONDecodeError, RecursionError) as error:
        raise MalformedEvents(f"not JSON: {error}") from None


def _built(record: Any, kinds: dict[str, type], _depth: int) -> Any:
    if not isinstance(record, dict):
        raise MalformedEvents(f"an event is {check.shown(record, 40)}: want an object with a 'kind'")
    if _depth > _DEEPEST:
        raise MalformedEvents(f"events are nested deeper than {_DEEPEST}")
    kind = kinds.get(record["kind"]) if isinstance(record.get("kind"), str) else None
    if kind is None:
        raise MalformedEvents(f"kind={check.shown(record.get('kind'))}: want one of {', '.join(sorted(kinds))}")
    known = {field.name for field in dataclasses.fields(kind)}
    if strange := sorted(set(record) - known - {"kind"}):
        raise MalformedEvents(
            f"{kind.__name__}: unknown field {check.shown(strange[0])}; it has {', '.join(sorted(known))}"
        )
    values = {name: _value(name, value, _depth) for name, value in record.items() if name != "kind"}
    try:
        return kind(**values)
    except (InvalidArgument, TypeError) as error:
        raise MalformedEvents(f"{kind.__name__}: {_reason(error)}") from None


def _plain(value: Any) -> Any:
    match value:
        case Neighbours() | Unit():
            return value.value
        case tuple():
            return [to_dict(part) for part in value]
        case int() if not -_TOO_LARGE < value < _TOO_LARGE:
            raise InvalidArgument(f"a whole number of more than {_MOST_DIGITS} digits: want one that can be read back")
        case bool() | int() | float():
            return value
        case _:
            return to_dict(value)


def _value(name: str, value: Any, depth: int) -> Any:
    match name:
        case "event":
            return from_dict(value, depth + 1)
        case "count":
            return _built(value, _COUNTS, depth + 1)
        case "parts":
            if not isinstance(value, list):
                raise MalformedEvents(f"parts is {check.shown(value, 40)}: want a list of events")
            return [from_dict(part, depth + 1) for part in value]
        case "neighbours" | "unit":
            choices = {one.value: one for one in (Neighbours if name == "neighbours" else Unit)}
            if not isinstance(value, str) or value not in choices:
                raise MalformedEvents(f"{name}={check.shown(value)}: want one of {', '.join(choices)}")
            return choices[value]
        case "monotone" | "scalar":
            if not isinstance(value, bool):
                raise MalformedEvents(f"{name}={check.shown(value)}: want true or false")
            return value
        case _:
            return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, value in pairs:
        if name in record:
            raise MalformedEvents(f"{check.shown(name)} stands twice in one object: want every name once")
        record[name] = value
    return record


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > _MOST_DIGITS:
        raise MalformedEvents(f"a whole number of {len(digits)} digits: want at most {_MOST_DIGITS}")
    return int(digits)


def _double(written: str) -> float:
    value = float(written)
    if math.isinf(value) or (value == 0 and written.lower().split("e")[0].strip("-0.")):
        raise MalformedEvents(f"{check.shown(written)}: too large or too small for a double")
    return value


def _no_constant(name: str) -> float:
    raise MalformedEvents(f"{name} is not a number an event can hold")


def _reason(error: Exception) -> str:
    return str(error).removeprefix("Composed: ").split("__init__() ")[-1]

"""Events as JSON and back: a versioned envelope, kinds looked up in a closed table, never imported.

    {"terrine-events": 1, "event": {"kind": "PoissonSampled", "rate": 0.01, "event": {...}}}

Floats are written so that reading gives the same bits. A field that is None is left out.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

from terrine.errors import InvalidArgument, MalformedEvents
from terrine.events.compose import Composed, Event
from terrine.events.relation import Neighbours, Unit
from terrine.events.stopping import Count

VERSION = 1
_ENVELOPE = "terrine-events"
_KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}
_COUNTS: dict[str, type] = {kind.__name__: kind for kind in get_args(Count)}
_DEEPEST = 100


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
    """`event` in its envelope, as one line of JSON."""
    return json.dumps({_ENVELOPE: VERSION, "event": to_dict(event)}, allow_nan=False)


def from_json(text: str) -> Event:
    """The event in `text`: an envelope, a bare event, or a list of bare events (composed).

    Raises:
        MalformedEvents: not JSON, from a newer version, or not events.
    """
    try:
        record = json.loads(text, parse_constant=_no_constant)
    except (json.JSONDecodeError, RecursionError) as error:
        raise MalformedEvents(f"not JSON: {error}") from None
    if isinstance(record, list):
        return Composed(from_dict(part) for part in record)
    if isinstance(record, dict) and _ENVELOPE in record:
        if record[_ENVELOPE] != VERSION:
            raise MalformedEvents(f"events of version {record[_ENVELOPE]!r}: this Terrine reads version {VERSION}")
        return from_dict(record.get("event"))
    return from_dict(record)


def _built(record: Any, kinds: dict[str, type], _depth: int) -> Any:
    if not isinstance(record, dict):
        raise MalformedEvents(f"an event is {_shown(record)}: want an object with a 'kind'")
    if _depth > _DEEPEST:
        raise MalformedEvents(f"events are nested deeper than {_DEEPEST}")
    kind = kinds.get(record["kind"]) if isinstance(record.get("kind"), str) else None
    if kind is None:
        raise MalformedEvents(f"kind={record.get('kind')!r}: want one of {', '.join(sorted(kinds))}")
    known = {field.name for field in dataclasses.fields(kind)}
    if strange := sorted(set(record) - known - {"kind"}):
        raise MalformedEvents(f"{kind.__name__}: unknown field {strange[0]!r}; it has {', '.join(sorted(known))}")
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
                raise MalformedEvents(f"parts is {_shown(value)}: want a list of events")
            return [from_dict(part, depth + 1) for part in value]
        case "neighbours" | "unit":
            choices = {one.value: one for one in (Neighbours if name == "neighbours" else Unit)}
            if not isinstance(value, str) or value not in choices:
                raise MalformedEvents(f"{name}={value!r}: want one of {', '.join(choices)}")
            return choices[value]
        case "monotone" | "scalar":
            if not isinstance(value, bool):
                raise MalformedEvents(f"{name}={value!r}: want true or false")
            return value
        case _:
            return value


def _no_constant(name: str) -> float:
    raise MalformedEvents(f"{name} is not a number an event can hold")


def _reason(error: Exception) -> str:
    return str(error).removeprefix("Composed: ").split("__init__() ")[-1]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."

"""Numbers in plain words, for people who decide about them. What is a bound stays one when it is rounded."""

from __future__ import annotations

import datetime
import math
import unicodedata
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

STATES = {
    "waiting": "waits for a decision",
    "denied": "denied",
    "cancelled": "taken back",
    "reserved": "being worked on",
    "charged": "charged, running",
    "answered": "answered",
    "failed": "failed after the charge",
    "refused": "refused, nothing charged",
}


def epsilon(value: float) -> str:
    """What is or would be spent: rounded up."""
    return _rounded(value, 4, ROUND_CEILING)


def left(value: float) -> str:
    """What is left: rounded down."""
    return _rounded(value, 4, ROUND_FLOOR)


def percent(share: float) -> str:
    """A share, rounded up."""
    return f"{min(100, math.ceil(100 * max(0.0, share)))}%"


def surest(epsilon: float) -> str:
    """How sure of a person's presence anyone can become, who thought it a coin flip:  e^epsilon / (1 + e^epsilon)."""
    sure = 100 / (1 + math.exp(-min(epsilon, 700.0)))
    return f"{_rounded(sure, 3 if sure <= 99 else 5, ROUND_CEILING)}%"


def moment(seconds: float) -> str:
    """A time, for people."""
    return _utc(seconds).strftime("%-d %b %Y, %H:%M UTC")


def signs(text: str) -> str:
    """Plus and minus as one sign."""
    return text.replace("+-", "\u00b1\u00a0")


def visible(text: Any) -> str:
    """Text in which no character is unseen or turns the line round: whoever decides must see what will be done."""
    return "".join(
        one if one in "\n\t " or unicodedata.category(one)[0] not in "CZ" else f"[U+{ord(one):04X}]"
        for one in str(text)
    )


def machine_moment(seconds: float) -> str:
    """A time, for `<time datetime>`."""
    return _utc(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")


def cell(value: Any) -> str:
    """A cell of a table."""
    if value is None:
        return "hidden"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if isinstance(value, int) else visible(value)


def table(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer with every half-width beside its number, as one cell."""
    names = answer["columns"]
    noisy = [name for name in names if f"{name}_half_width" in names]
    shown = [name for name in names if name.removesuffix("_half_width") not in noisy or name in noisy]
    rows = []
    for row in answer["rows"]:
        known = dict(zip(names, row, strict=True))
        rows.append(
            [
                {"value": cell(known[name]), "width": _width(known.get(f"{name}_half_width")), "noisy": name in noisy}
                for name in shown
            ]
        )
    return {"columns": [{"name": name, "noisy": name in noisy} for name in shown], "rows": rows}


def _width(value: float | None) -> str:
    return "" if value is None else _rounded(value, 3, ROUND_CEILING)


def _utc(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)


def _rounded(value: float, digits: int, rounding: str) -> str:
    """To so many digits, from the number as it is written: 0.1 is 0.1, though no binary fraction is."""
    if not math.isfinite(value):
        return "unlimited" if value > 0 else "none"
    rounded = Context(prec=digits, rounding=rounding).create_decimal(Decimal(repr(float(value)))).normalize()
    return f"{rounded:f}" if value == 0 or 1e-4 <= abs(value) < 1e9 else f"{rounded:e}"

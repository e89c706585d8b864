"""Numbers for people: a bound stays a bound when it is printed with fewer digits."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction


def up(value: float, digits: int = 5) -> str:
    """`value` with `digits` significant digits, never below it."""
    return _rounded(value, digits, ROUND_CEILING)


def down(value: float, digits: int = 5) -> str:
    """`value` with `digits` significant digits, never above it."""
    return _rounded(value, digits, ROUND_FLOOR)


def inverse(value: float) -> float:
    """1 / value for a number above 0, never below it: a cost of 1 / noise."""
    found = 1 / value
    return found if math.isinf(found) or Fraction(found) * Fraction(value) >= 1 else math.nextafter(found, math.inf)


def _rounded(value: float, digits: int, rounding: str) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = Context(prec=digits, rounding=rounding).create_decimal(Decimal(value)).normalize()
    return f"{rounded:f}" if 1e-4 <= abs(value) < 1e9 else f"{rounded:e}"

"""Argument checks: each returns the value it accepts, or raises `InvalidArgument` in one clear line."""

from __future__ import annotations

import math
import operator
from typing import Any

from terrine.errors import InvalidArgument


def refuse(name: str, value: Any, wanted: str, hint: str = "") -> InvalidArgument:
    """The error for `value`, ready to raise."""
    return InvalidArgument(f"{name}={value!r}: want {wanted}" + (f"; {hint}" if hint else ""))


def number(name: str, value: Any, wanted: str = "a number", hint: str = "") -> float:
    """A float that is not nan."""
    if isinstance(value, bool | str | bytes):
        raise refuse(name, value, wanted, hint)
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        raise refuse(name, value, wanted, hint) from None
    if math.isnan(result):
        raise refuse(name, value, wanted, hint)
    return result


def positive(name: str, value: Any, hint: str = "") -> float:
    """A finite number above 0."""
    result = number(name, value, "> 0", hint)
    if not 0 < result < math.inf:
        raise refuse(name, value, "> 0 and finite", hint)
    return result


def not_negative(name: str, value: Any, hint: str = "") -> float:
    """A finite number that is 0 or above."""
    result = number(name, value, ">= 0", hint)
    if not 0 <= result < math.inf:
        raise refuse(name, value, ">= 0 and finite", hint)
    return result


def rate(name: str, value: Any, hint: str = "") -> float:
    """A sampling rate: above 0, at most 1."""
    result = number(name, value, "0 < rate <= 1", hint)
    if not 0 < result <= 1:
        raise refuse(name, value, "0 < rate <= 1", hint)
    return result


def open_unit(name: str, value: Any, hint: str = "") -> float:
    """A probability strictly between 0 and 1."""
    result = number(name, value, f"0 < {name} < 1", hint)
    if not 0 < result < 1:
        raise refuse(name, value, f"0 < {name} < 1", hint)
    return result


def half_open_unit(name: str, value: Any, hint: str = "") -> float:
    """A probability that may be 0 but not 1."""
    result = number(name, value, f"0 <= {name} < 1", hint)
    if not 0 <= result < 1:
        raise refuse(name, value, f"0 <= {name} < 1", hint)
    return result


def whole(name: str, value: Any, at_least: int = 1, hint: str = "") -> int:
    """A whole number, given as an integer or as a float that is one."""
    wanted = f"a whole number >= {at_least}"
    if isinstance(value, bool | str | bytes):
        raise refuse(name, value, wanted, hint)
    try:
        result = operator.index(value)
    except TypeError:
        as_float = number(name, value, wanted, hint)
        if not as_float.is_integer():
            raise refuse(name, value, wanted, hint) from None
        result = int(as_float)
    if result < at_least:
        raise refuse(name, value, wanted, hint)
    return result


LARGEST_EPSILON = 20.0
"""Beyond it, whoever was all but sure that somebody is not in the data can become all but sure that they are."""


def weakness(epsilon: float, delta: float, *, units: int | None) -> str:
    """Why a guarantee for `units` units means little, in words; empty where it means something."""
    found = []
    if epsilon > LARGEST_EPSILON:
        found.append(f"epsilon={epsilon:g} is above {LARGEST_EPSILON:g}, which hardly limits what anyone can learn")
    if units is not None and delta >= 1 / units:
        found.append(f"delta={delta:g} is not below 1/{units}: publishing one of them outright would keep it")
    return "; ".join(found)

"""Argument checks: each returns the value it accepts, or raises `InvalidArgument` in one clear line."""

from __future__ import annotations

import math
import operator
from typing import Any

from terrine.errors import InvalidArgument

SMALLEST_DELTA = 1e-300
"""Below it floating point has no digits left to prove anything with."""


def refuse(name: str, value: Any, wanted: str, hint: str = "") -> InvalidArgument:
    """The error for `value`, ready to raise."""
    return InvalidArgument(f"{name}={_shown(value)}: want {wanted}" + (f"; {hint}" if hint else ""))


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 200:  # Python itself refuses to write very long ones
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)


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


def delta(name: str, value: Any, hint: str = "") -> float:
    """The delta of (epsilon, delta)-DP, where it must not be 0."""
    result = open_unit(name, value, hint)
    if result < SMALLEST_DELTA:
        raise refuse(name, value, f"{SMALLEST_DELTA:g} <= {name} < 1", hint or "floating point ends there")
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

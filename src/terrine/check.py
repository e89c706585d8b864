"""Argument checks: each returns the value it accepts, or raises `InvalidArgument` in one clear line."""

from __future__ import annotations

import math
import operator
import unicodedata
from collections.abc import Callable
from typing import Any

from terrine.errors import InvalidArgument

SMALLEST_DELTA = 1e-300
"""Below it floating point has no digits left to prove anything with."""

LARGEST_EPSILON = 20.0
"""Beyond it, whoever was all but sure that somebody is not in the data can become all but sure that they are."""
LARGEST_DELTA = 1e-4
"""Beyond it a guarantee for people whose number is not public is called weak."""
LONGEST_TEXT = 10_000
"""The most characters of a text for people."""
MODERATE = (1e-12, 1e12)
"""What clipping bounds and their like may be: beyond, single precision has no numbers for what is made of them."""

_SHOWN = 100
_UNSEEN = frozenset(  # printable to Python, but nothing is seen: fillers, selectors and joiners (Default_Ignorable)
    chr(code)
    for first, last in (
        (0x034F, 0x034F),
        (0x115F, 0x1160),
        (0x17B4, 0x17B5),
        (0x180B, 0x180F),
        (0x2800, 0x2800),
        (0x3164, 0x3164),
        (0xFE00, 0xFE0F),
        (0xFFA0, 0xFFA0),
        (0x16FE4, 0x16FE4),
        (0xE0100, 0xE01EF),
    )
    for code in range(first, last + 1)
)


def refuse(name: str, value: Any, wanted: str, hint: str = "") -> InvalidArgument:
    """The error for `value`, ready to raise."""
    return InvalidArgument(f"{name}={shown(value)}: want {wanted}" + (f"; {hint}" if hint else ""))


def shown(value: Any, at_most: int = _SHOWN, *, written: Callable[[Any], str] = repr) -> str:
    """`value` as a short piece of one line, for an error."""
    try:
        text = written(value)
    except (ValueError, RecursionError):  # a number of more digits, or lists deeper, than Python writes
        return f"a value of type {type(value).__name__} too large to be written"
    return text if len(text) <= at_most else f"{text[: at_most - 3]}..."


def text(name: str, value: Any, at_least: int = 0) -> str:
    """Text for people, in Unicode's normal form NFC: what is written is all there is to see.

    Refused: control characters, line breaks and tabs, characters of no width or that turn the direction of writing,
    spaces other than the plain one or at an end, and a first character that would change the one before it.
    """
    if not isinstance(value, str) or not at_least <= len(value) <= LONGEST_TEXT:
        raise refuse(name, value, f"text of {at_least} to {LONGEST_TEXT} printable characters")
    normal = str(value)
    if not one_line(name, normal).isascii():
        normal = unicodedata.normalize("NFC", normal)
        if unicodedata.category(normal[0]).startswith("M"):
            raise _hidden(name, normal, 1, normal[0])
    if normal != normal.strip(" "):
        raise refuse(name, normal, "text without a space at either end")
    return normal


def one_line(name: str, value: str) -> str:
    """Text of one line in which everything is to be seen; looser than `text`, for what was not written for a ledger."""
    if not value.isascii() or not value.isprintable():
        for place, character in enumerate(value, start=1):
            if not _is_seen(character):
                raise _hidden(name, value, place, character)
    return value


def printable(value: str) -> str:
    """The text with an escape for every character that would not be seen, or would move or turn what is."""
    if value.isascii() and value.isprintable():
        return value
    return "".join(one if _is_seen(one) else one.encode("unicode_escape").decode() for one in value)


def _is_seen(character: str) -> bool:
    return character.isprintable() and character not in _UNSEEN


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


def listed(name: str, value: Any, wanted: str) -> list[Any]:
    """All of an iterable that is no text."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return list(value)
    except TypeError:
        raise refuse(name, value, wanted) from None


def positive(name: str, value: Any, hint: str = "") -> float:
    """A finite number above 0."""
    result = number(name, value, "> 0", hint)
    if not 0 < result < math.inf:
        raise refuse(name, value, "> 0 and finite", hint)
    return result


def moderate(name: str, value: Any, hint: str = "") -> float:
    """A number above 0 that single precision holds with room to spare, its reciprocal and square too."""
    (least, most), found = MODERATE, positive(name, value, hint)
    if not least <= found <= most:
        raise refuse(name, value, f"between {least:g} and {most:g}", hint)
    return found


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


def weakness(epsilon: float, delta: float, *, units: int | None) -> str:
    """Why a guarantee for `units` units means little, in words; empty where it means something.

    Where nobody may know how many they are (None), delta is judged as for ten thousand.
    """
    found = []
    if epsilon > LARGEST_EPSILON:
        found.append(f"epsilon={epsilon:g} is above {LARGEST_EPSILON:g}, which hardly limits what anyone can learn")
    if units is not None and delta >= 1 / units:
        found.append(f"delta={delta:g} is not below 1/{units}: publishing one of them outright would keep it")
    if units is None and delta > LARGEST_DELTA:
        told = f"publishing one of {1 / LARGEST_DELTA:,.0f} people outright would keep it"
        found.append(f"delta={delta:g} is above {LARGEST_DELTA:g}: {told}")
    return "; ".join(found)


def _hidden(name: str, value: str, place: int, character: str) -> InvalidArgument:
    called = f"U+{ord(character):04X} {unicodedata.name(character, '')}".strip()
    wanted = "text of one line, of printable characters that stand for themselves"
    return InvalidArgument(f"{name}={shown(value, written=ascii)}: character {place} is {called}; want {wanted}")

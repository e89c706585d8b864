"""Exact random choices: coins and lotteries whose chances are real numbers, decided without rounding.

A uniform number is drawn bit by bit. Where 64 bits and machine floats cannot tell on which side of a boundary it
falls, more bits are drawn and the boundary is computed to more digits, until they differ. So the chances are the
real ones, whatever the floats say; the slow way is taken once in about 2^40 draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Context, Decimal, localcontext
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from terrine.rng import Source

_WORD = 1 << 64
_FLOAT_ERROR = 2.0**-40
"""Relative error granted to float weights and their extended sums, far above what they commit."""


def below(bound: int, rng: Source) -> int:
    """A uniform whole number from 0 to `bound` - 1."""
    words = (bound.bit_length() + 63) // 64
    if bound & (bound - 1) == 0:
        return _bits(words, rng) & (bound - 1)
    limit = (1 << 64 * words) // bound * bound
    while (drawn := _bits(words, rng)) >= limit:
        pass
    return drawn % bound


def order(count: int, rng: Source) -> list[int]:
    """A uniform permutation of 0 to `count` - 1."""
    places = list(range(count))
    for last in range(count - 1, 0, -1):
        other = below(last + 1, rng)
        places[last], places[other] = places[other], places[last]
    return places


def coins(chance: Fraction, count: int, rng: Source) -> NDArray[np.bool_]:
    """`count` coins that each show true with probability exactly `chance`."""
    if chance >= 1:
        return np.ones(count, dtype=np.bool_)
    limit, rest = divmod(chance * _WORD, 1)
    words = rng.words(count)
    found: NDArray[np.bool_] = words < np.uint64(int(limit))
    if rest:
        for place in np.flatnonzero(words == np.uint64(int(limit))):
            found[place] = bool(coins(rest, 1, rng)[0])
    return found


def coin(chance: Fraction, rng: Source) -> bool:
    """One coin that shows true with probability exactly `chance`."""
    limit, rest = divmod(chance * _WORD, 1)
    word = rng.word()
    return word < limit or (word == limit and bool(rest) and coin(rest, rng))


def falls(exponent: Callable[[], Fraction], estimate: float, rng: Source) -> bool:
    """True with probability exp(-x), for x = `exponent()` >= 0 of which `estimate` is exp(-x) within 2^-40."""
    bits, length, places = rng.word(), 64, 30
    gap = estimate - bits / _WORD
    if abs(gap) > 2 * _FLOAT_ERROR:
        return gap > 0
    x = exponent()
    while True:
        with localcontext(Context(prec=places)):
            error = Decimal(10) ** (8 - places)
            chance = (-Decimal(x.numerator) / Decimal(x.denominator)).exp()
            if Decimal(bits + 1) / (1 << length) + error <= chance - error:
                return True
            if Decimal(bits) / (1 << length) - error >= chance + error:
                return False
        if x == 0:
            return True
        bits, length, places = bits << 64 | rng.word(), length + 64, places + 20


def lottery(
    counts: Sequence[int] | NDArray[np.int64],
    exponents: NDArray[np.float64],
    exact: Callable[[int], Fraction],
    rng: Source,
) -> int:
    """Index i with probability proportional to counts[i] exp(-x_i), where x_i = `exact(i)`.

    `exponents` are the x_i in floats, within 2^-45 (1 + x_i); the smallest should be about 0.
    """
    weights = np.asarray(counts, dtype=np.float64) * np.exp(-exponents)
    running = np.cumsum(weights.astype(np.longdouble))
    total = running[-1]
    bits = rng.word()
    slack = 4 * (_FLOAT_ERROR + len(weights) * np.finfo(np.longdouble).eps)
    low = total * np.longdouble(bits) / np.longdouble(_WORD) * (1 - slack) - (bits == 0)
    high = total * (np.longdouble(bits) + 1) / np.longdouble(_WORD) * (1 + slack)
    first, last = (int(place) for place in np.searchsorted(running, [low, high], side="right"))
    if first == last and first < len(weights):
        return first
    return _slow_lottery([int(count) for count in counts], exact, bits, rng)


def _slow_lottery(counts: Sequence[int], exact: Callable[[int], Fraction], bits: int, rng: Source) -> int:
    exponents = [exact(i) for i in range(len(counts))]
    length, places = 64, 40
    while True:
        with localcontext(Context(prec=places)):
            weights = [
                count * (-Decimal(x.numerator) / Decimal(x.denominator)).exp()
                for count, x in zip(counts, exponents, strict=True)
            ]
            total, running = sum(weights, Decimal(0)), Decimal(0)
            slack = total * len(weights) * Decimal(10) ** (5 - places)
            low, high = total * bits / (1 << length) - slack, total * (bits + 1) / (1 << length) + slack
            for index, weight in enumerate(weights):
                before, running = running, running + weight
                last = index == len(weights) - 1
                if (low >= before or index == 0) and (high <= running or last):
                    return index
        bits, length, places = bits << 64 | rng.word(), length + 64, places + 20


def _bits(words: int, rng: Source) -> int:
    drawn = rng.word()
    for _ in range(words - 1):
        drawn = drawn << 64 | rng.word()
    return drawn

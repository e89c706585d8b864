"""Privacy amplification by sampling: what an (eps, delta) mechanism costs when it sees a random part of the data.

In every case delta becomes q delta.
"""

from __future__ import annotations

import math

from terrine import check

_OUTWARD = 1 + 1e-14
_LEAST = 5e-324
"""Nothing but 0 costs 0, however small."""
_OVERFLOWS = 700.0
"""From here on e^epsilon does not fit into a float."""


def poisson(epsilon: float, *, rate: float) -> float:
    """ln(1 + q (e^eps - 1)): each unit independently, add/remove neighbours; tight. [BBG18] Theorem 8"""
    epsilon, rate = check.not_negative("epsilon", epsilon), check.rate("rate", rate)
    if epsilon < _OVERFLOWS:
        return math.log1p(rate * math.expm1(epsilon)) * _OUTWARD + _LEAST
    found = epsilon + math.log(rate) + math.log1p((1 - rate) / rate * math.exp(-epsilon))
    return min(epsilon, found + 1e-15 * (epsilon - math.log(rate)))  # what the difference may have lost


def without_replacement(epsilon: float, *, size: int, population: int) -> float:
    """The same with q = size/population: a fixed number of units, replace-one neighbours; tight. [BBG18] Theorem 9"""
    population = check.whole("population", population)
    size = check.whole("size", size)
    if size > population:
        raise check.refuse("size", size, f"at most population={population}")
    return poisson(epsilon, rate=size / population)


def loose(epsilon: float, *, rate: float) -> float:
    """2 q (e^eps - e^-eps): the first of the lectures' two bounds; sound, but loose. [BBKN14]"""
    epsilon, rate = check.not_negative("epsilon", epsilon), check.rate("rate", rate)
    return 2 * rate * (math.expm1(epsilon) - math.expm1(-epsilon)) * _OUTWARD if epsilon < _OVERFLOWS else math.inf


def linear(epsilon: float, *, rate: float) -> float:
    """2 q eps, the rule of thumb of the lectures, proven for eps <= 1 only.

    Raises:
        InvalidArgument: epsilon is above 1.
    """
    epsilon, rate = check.not_negative("epsilon", epsilon), check.rate("rate", rate)
    if epsilon > 1:
        raise check.refuse("epsilon", epsilon, "at most 1 for the linear rule", "amplification.poisson holds for all")
    return 2 * rate * epsilon * _OUTWARD

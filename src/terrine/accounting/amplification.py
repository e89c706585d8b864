"""Privacy amplification by sampling: what an (eps, delta) mechanism costs when it sees a random part of the data.

In every case delta becomes q delta.
"""

from __future__ import annotations

import math

from terrine import check

_OUTWARD = 1 + 1e-14


def poisson(epsilon: float, *, rate: float) -> float:
    """ln(1 + q (e^eps - 1)): each unit independently, add/remove neighbours; tight. [BBG18] Theorem 8"""
    epsilon, rate = check.not_negative("epsilon", epsilon), check.rate("rate", rate)
    if epsilon < 30:
        return math.log1p(rate * math.expm1(epsilon)) * _OUTWARD
    return (epsilon + math.log(rate + (1 - rate) * math.exp(-epsilon))) * _OUTWARD


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
    return 2 * rate * (math.expm1(epsilon) - math.expm1(-epsilon)) * _OUTWARD if epsilon < 700 else math.inf


def linear(epsilon: float, *, rate: float) -> float:
    """2 q eps, the rule of thumb of the lectures, proven for eps <= 1 only.

    Raises:
        InvalidArgument: epsilon is above 1.
    """
    epsilon, rate = check.not_negative("epsilon", epsilon), check.rate("rate", rate)
    if epsilon > 1:
        raise check.refuse("epsilon", epsilon, "at most 1 for the linear rule", "amplification.poisson holds for all")
    return 2 * rate * epsilon * _OUTWARD

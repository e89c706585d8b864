"""Choosing a parameter: the smallest noise, the most steps or the largest rate that keeps a budget.

    family = lambda noise: Repeated(PoissonSampled(Gaussian(noise=noise), rate=0.01), times=10_000)
    calibrate(family, Budget(epsilon=2.0, delta=1e-5), over=NOISE)

The answer is checked by the certified bound: it never exceeds the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from terrine.errors import BudgetExceeded
from terrine.events import Budget, Event


@dataclass(frozen=True)
class Search:
    """Where to look for one parameter, and which way is the more private one."""

    low: float
    high: float
    private_end_is_high: bool
    whole: bool = False


NOISE = Search(low=1e-3, high=1e7, private_end_is_high=True)
STEPS = Search(low=1, high=1e12, private_end_is_high=False, whole=True)
RATE = Search(low=1e-12, high=1.0, private_end_is_high=False)

_PRECISION = 1e-6


def calibrate(family: Callable[[float], Event], budget: Budget, *, over: Search = NOISE) -> float:
    """The least private parameter of `family` that the certified accountant keeps within `budget`.

    Guarantee: `delta(family(answer), epsilon=budget.epsilon) <= budget.delta`.

    Raises:
        BudgetExceeded: even the most private end of the search costs more than the budget.
    """
    from terrine.accounting import delta

    def kept(value: float) -> bool:
        return delta(family(value), epsilon=budget.epsilon) <= budget.delta

    safe, risky = (over.high, over.low) if over.private_end_is_high else (over.low, over.high)
    if kept(risky):
        return risky
    if not kept(safe):
        raise BudgetExceeded(f"epsilon={budget.epsilon}, delta={budget.delta}: even {safe:g} costs more; raise it")
    while abs(safe - risky) > (1 if over.whole else _PRECISION * safe):
        middle = math.sqrt(safe) * math.sqrt(risky)
        if over.whole:
            middle = float(math.floor(middle))
            middle = min(max(middle, min(safe, risky) + 1), max(safe, risky) - 1)
        if kept(middle):
            safe = middle
        else:
            risky = middle
    return safe

"""Choosing a parameter: the smallest noise, the most steps or the largest rate that keeps a budget.

    family = lambda noise: Repeated(PoissonSampled(Gaussian(noise=noise), rate=0.01), times=10_000)
    calibrate(family, Budget(epsilon=2.0, delta=1e-5), over=NOISE)

A rough estimate finds the neighbourhood; what is returned was checked by the certified bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from terrine.accounting import certified, composition, renyi, tightest
from terrine.errors import BudgetExceeded, UnsupportedEvent
from terrine.events import Budget, Event


@dataclass(frozen=True)
class Search:
    """Where to look for one parameter: from `low` to `high`, first at `start`; which end is the private one."""

    low: float
    high: float
    start: float
    private_end_is_high: bool
    whole: bool = False


NOISE = Search(low=1e-3, high=1e9, start=1.0, private_end_is_high=True)
STEPS = Search(low=1, high=1e12, start=1000, private_end_is_high=False, whole=True)
RATE = Search(low=1e-12, high=1.0, start=0.01, private_end_is_high=False)

_PRECISION = 2e-6
_Score = Callable[[float], float]


def calibrate(family: Callable[[float], Event], budget: Budget, *, over: Search = NOISE) -> float:
    """The least private parameter of `family` that is shown to stay within `budget`; an int for whole parameters.

    Guarantee: `epsilon(family(answer), delta=budget.delta) <= budget.epsilon`, and likewise for delta.

    Raises:
        BudgetExceeded: even the most private end of the search costs more than the budget.
    """
    sure, rough = _scores(family, budget, over)
    near = _cross(rough, over, over.start, factor=4.0, until=1e-3)
    answer = _cross(sure, over, near, factor=1.001, until=_PRECISION)
    if sure(answer) > 0:
        raise BudgetExceeded(
            f"epsilon={budget.epsilon:g}, delta={budget.delta:g}: even {answer:g} would cost more; want a larger budget"
        )
    answer = _confirmed(family, budget, over, answer)
    return int(answer) if over.whole else answer


def _confirmed(family: Callable[[float], Event], budget: Budget, over: Search, answer: float) -> float:
    """`answer`, moved by millionths until the certified epsilon, too, is within the budget."""
    step = 1.0 if over.whole else 1e-6 * answer
    while budget.delta > 0 and over.low < answer < over.high:
        event = family(int(answer) if over.whole else answer)
        if tightest.epsilon(event, delta=budget.delta) <= budget.epsilon:
            break
        answer = min(max(answer + (step if over.private_end_is_high else -step), over.low), over.high)
        step *= 2
    return answer


def _scores(family: Callable[[float], Event], budget: Budget, over: Search) -> tuple[_Score, _Score]:
    """Two functions of the parameter, positive where the budget is exceeded: one proven, one fast."""

    def event(value: float) -> Event:
        return family(int(value) if over.whole else value)

    def pure(value: float) -> float:
        return composition.pure(event(value)) - budget.epsilon

    def sure(value: float) -> float:
        try:
            found = certified.delta(event(value), epsilon=budget.epsilon, near=budget.delta)
        except UnsupportedEvent:
            found = renyi.delta(event(value), epsilon=budget.epsilon)
        return math.log(max(found, 1e-300) / budget.delta)

    def rough(value: float) -> float:
        try:
            found = certified.estimate_log_delta(event(value), epsilon=budget.epsilon, near=budget.delta)
        except UnsupportedEvent:
            return sure(value)
        return found - math.log(budget.delta)

    return (pure, pure) if budget.delta == 0 else (sure, rough)


def _cross(score: _Score, over: Search, start: float, *, factor: float, until: float) -> float:
    """The point nearest to the risky end at which `score` is not positive, found from `start` outwards, then by
    regula falsi."""
    towards_safe = 1 if over.private_end_is_high else -1

    def clip(value: float) -> float:
        value = min(max(value, over.low), over.high)
        return math.floor(value) if over.whole else value

    safe = risky = clip(start)
    safe_score = risky_score = score(safe)
    direction = towards_safe if safe_score > 0 else -towards_safe
    while (safe_score > 0) == (risky_score > 0):
        edge = safe if direction == towards_safe else risky
        step = clip(edge * factor**direction if not over.whole else edge + direction * max(1, edge * (factor - 1)))
        if step == edge:
            return edge
        factor = factor * factor
        if direction == towards_safe:
            risky, risky_score = safe, safe_score
            safe, safe_score = step, score(step)
        else:
            safe, safe_score = risky, risky_score
            risky, risky_score = step, score(step)
    return _narrow(score, over, (safe, safe_score), (risky, risky_score), until)


def _narrow(score: _Score, over: Search, safe: tuple[float, float], risky: tuple[float, float], until: float) -> float:
    """Illinois iteration in the parameter's logarithm, keeping a safe and a risky end."""
    (safe_at, safe_score), (risky_at, risky_score) = safe, risky
    last_side = 0
    for _ in range(100):
        close = abs(safe_at - risky_at) <= (1 if over.whole else until * safe_at)
        if close or (safe_score > -20 * until and not over.whole):
            break
        share = safe_score / (safe_score - risky_score) if math.isfinite(risky_score) else 0.5
        middle = math.exp(math.log(safe_at) + min(max(share, 0.02), 0.98) * math.log(risky_at / safe_at))
        if over.whole:
            middle = min(max(math.floor(middle), min(safe_at, risky_at) + 1), max(safe_at, risky_at) - 1)
        value = score(middle)
        if value <= 0:
            safe_at, safe_score = middle, value
            risky_score = risky_score / 2 if last_side == -1 else risky_score
            last_side = -1
        else:
            risky_at, risky_score = middle, value
            safe_score = safe_score / 2 if last_side == 1 else safe_score
            last_side = 1
    return safe_at

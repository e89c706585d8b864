"""The composition theorems of the textbooks: basic, advanced in two forms, groups, and strong composition for DP-SGD.

They are kept for comparison. All are proven, but for one that says so in its name.
"""

from __future__ import annotations

import math
from collections import Counter

from scipy.optimize import minimize_scalar

from terrine import check
from terrine.accounting import gaussian
from terrine.accounting.amplification import poisson
from terrine.errors import UnsupportedEvent
from terrine.events import (
    ApproximateDP,
    Budget,
    DiscreteLaplace,
    Event,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    NegativeBinomialCount,
    Neighbours,
    OneOf,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    RandomStopping,
    Selection,
    leaves,
)


def pure(event: Event) -> float:
    """The sum of all parts' pure epsilons.

    Raises:
        UnsupportedEvent: a part has no finite epsilon at delta 0.
    """
    return stated(event, delta=0.0)


def stated(event: Event, *, delta: float) -> float:
    """The sum of all parts' epsilons, where each part states its own (epsilon, delta) and the deltas fit into `delta`.

    Raises:
        UnsupportedEvent: a part states none, or the deltas do not fit.
    """
    counted = _counted(event)
    parts = {leaf: _guarantee(leaf, None) for leaf in counted}
    if math.fsum(times * parts[leaf].delta for leaf, times in counted.items()) > delta:
        raise UnsupportedEvent(event, by="basic composition", hint="its parts' own deltas exceed the delta asked for")
    total = math.fsum(times * parts[leaf].epsilon for leaf, times in counted.items())
    return total if sum(counted.values()) == 1 else total * (1 + 2**-51)


def basic(event: Event, *, delta: float) -> float:
    """Epsilons and deltas add up; parts that need a delta share it evenly. [DR14] Theorem 3.16"""
    counted = _counted(event)
    share = _share(counted, check.open_unit("delta", delta))
    return sum(times * _guarantee(leaf, share).epsilon for leaf, times in counted.items()) * (1 + 1e-13)


def advanced(event: Event, *, delta: float, classic: bool = False) -> float:
    """k parts cost about sqrt(k): the better of this and `basic`, with half of delta for the theorem.

    eps' = eps sqrt(2k ln(1/d)) + k eps (e^eps - 1)/(e^eps + 1)     [KOV15] Theorem 3.4 (unequal parts by its Theorem
    3.5)
    eps' = eps sqrt(2k ln(1/d)) + k eps (e^eps - 1)                 with `classic`: [DRV10], [DR14] Theorem 3.20
    """
    delta = check.open_unit("delta", delta)
    counted = _counted(event)
    share = _share(counted, delta / 2)
    squares = drift = 0.0
    for leaf, times in counted.items():
        epsilon = _guarantee(leaf, share).epsilon
        squares += times * epsilon**2
        drift += times * epsilon * (math.expm1(min(epsilon, 700.0)) if classic else math.tanh(epsilon / 2))
    found = (math.sqrt(2 * squares * math.log(2 / delta)) + drift) * (1 + 1e-13)
    return min(found, basic(event, delta=delta))


def needs_delta(leaf: Event) -> bool:
    """Whether this part has an epsilon only at a delta above 0."""
    match leaf:
        case PoissonSampled(event=inner) | FixedSizeSampled(event=inner):
            return needs_delta(inner)
        case _:
            return isinstance(leaf, Gaussian)


def group(budget: Budget, size: int) -> Budget:
    """What holds for `size` units at once: (k eps, k e^((k-1) eps) delta). [DR14] Theorem 2.2, with its delta

    Raises:
        InvalidArgument: the group's delta would reach 1.
    """
    size = check.whole("size", size)
    log_delta = math.log(size) + (size - 1) * budget.epsilon + math.log(budget.delta) if budget.delta else -math.inf
    if log_delta >= 0:
        raise check.refuse("size", size, "a group whose delta stays below 1", "start from a smaller delta")
    return Budget(size * budget.epsilon * (1 + 1e-14), math.exp(log_delta) * (1 + 1e-12))


def strong_dpsgd(*, noise: float, rate: float, steps: int, delta: float) -> float:
    """DP-SGD by strong composition, every step proven: amplified as e = ln(1 + q(e^eps - 1)), composed as `classic`.

    Any split of delta between the steps and the theorem is proven; the best one is taken. A step's epsilon is the
    classic Gaussian formula's, or the exact one where that formula (proven for epsilon < 1 only) falls short of it.
    """

    def found(share: float) -> float:
        each = min((1 - share) * delta / (rate * steps), 0.5)
        single = max(_classic_epsilon(noise, each), gaussian.epsilon(1 / noise, each))
        step = poisson(single, rate=rate)
        drift = steps * step * math.expm1(min(step, 700.0))
        return (step * math.sqrt(2 * steps * math.log(1 / (share * delta))) + drift) * (1 + 1e-13)

    return float(minimize_scalar(found, bounds=(1e-6, 1 - 1e-6), method="bounded").fun)


def unproven_textbook_strong_dpsgd(*, noise: float, rate: float, steps: int, delta: float) -> float:
    """The number of [ACG16] Figure 2: amplification taken as q eps. NOT a bound: that step is only proven for eps <=
    1."""
    step = rate * _classic_epsilon(noise, delta / (2 * rate * steps))
    return step * math.sqrt(2 * steps * math.log(2 / delta)) + steps * step**2


def _classic_epsilon(noise: float, delta: float) -> float:
    return math.sqrt(2 * math.log(1.25 / delta)) / noise


def _counted(event: Event) -> Counter[Event]:
    found: Counter[Event] = Counter()
    for leaf, times in leaves(event):
        found[leaf] += times
    return found


def _share(counted: Counter[Event], delta: float) -> float | None:
    """What each part that needs a delta may take; fixed deltas of ApproximateDP come off first."""
    fixed = sum(times * leaf.delta for leaf, times in counted.items() if isinstance(leaf, ApproximateDP))
    hungry = sum(times for leaf, times in counted.items() if needs_delta(leaf))
    if fixed >= delta:
        raise check.refuse("delta", delta, f"more than the parts' own deltas, {fixed:g}")
    return (delta - fixed) / hungry if hungry else None


def _guarantee(leaf: Event, share: float | None) -> ApproximateDP:
    """One part's (epsilon, delta), spending `share` where it needs a delta."""
    match leaf:
        case Laplace(noise=noise) | DiscreteLaplace(noise=noise):
            return ApproximateDP(epsilon=1 / noise, delta=0.0)
        case RandomizedResponse(epsilon=value) | PureDP(epsilon=value) | Selection(epsilon=value):
            return ApproximateDP(epsilon=value, delta=0.0)
        case ApproximateDP():
            return leaf
        case Gaussian(noise=noise) if share is not None:
            return ApproximateDP(epsilon=gaussian.epsilon(1 / noise, share), delta=share)
        case PoissonSampled(event=inner, rate=rate, neighbours=Neighbours.ADD_REMOVE):
            inside = _guarantee(inner, None if share is None else min(share / rate, 0.5))
            return ApproximateDP(epsilon=poisson(inside.epsilon, rate=rate), delta=rate * inside.delta)
        case FixedSizeSampled(event=inner, rate=rate):
            inside = _guarantee(inner, None if share is None else min(share / rate, 0.5))
            return ApproximateDP(epsilon=poisson(inside.epsilon, rate=rate), delta=rate * inside.delta)
        case OneOf(parts=parts):
            return ApproximateDP(epsilon=max(pure(part) for part in parts), delta=0.0)
        case RandomStopping(event=inner, count=NegativeBinomialCount(shape=shape)):
            return ApproximateDP(epsilon=(2 + shape) * pure(inner) * (1 + 1e-13), delta=0.0)  # [PS22] Corollary 3
        case _:
            raise UnsupportedEvent(leaf, by="composition")

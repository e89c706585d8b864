"""The composition theorems of the textbooks: basic, advanced in two forms, groups, and strong composition for DP-SGD.

They are kept for comparison. All are proven, but for one that says so in its name.
"""

from __future__ import annotations

import math
from collections import Counter

from terrine import check
from terrine.accounting import gaussian
from terrine.accounting.amplification import poisson
from terrine.accounting.integer_noise import as_gaussian
from terrine.accounting.reach import within_floats
from terrine.errors import UnsupportedEvent
from terrine.events import (
    ApproximateDP,
    Budget,
    Composed,
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
    Repeated,
    Reproducible,
    Selection,
    ShuffledEpoch,
    Skellam,
    SummedDiscreteGaussian,
    leaves,
)
from terrine.rounding import inverse

_LEAST = 1e-306
"""Smaller products have lost digits, or all of them."""


@within_floats(by="composition")
def pure(event: Event) -> float:
    """The sum of all parts' pure epsilons.

    Raises:
        UnsupportedEvent: a part has no finite epsilon at delta 0.
    """
    return stated(event, delta=0.0)


@within_floats(by="composition")
def stated(event: Event, *, delta: float) -> float:
    """The sum of all parts' epsilons, where each part states its own (epsilon, delta) and the deltas fit into `delta`.

    Raises:
        UnsupportedEvent: a part states none, or the deltas do not fit.
    """
    if needs_delta(event):
        raise UnsupportedEvent(event, by="basic composition", hint="a part states no epsilon and delta of its own")
    if _own_delta(event) > delta:
        raise UnsupportedEvent(event, by="basic composition", hint="its parts' own deltas exceed the delta asked for")
    counted = _counted(event)
    match list(counted.items()):
        case [(Laplace(noise=noise) | DiscreteLaplace(noise=noise), 1)] if delta > 2**-50 / noise:
            return 1 / noise  # to the nearest: at e below a pure epsilon, delta is at most epsilon - e
    total = math.fsum(times * _guarantee(leaf, None).epsilon for leaf, times in counted.items())
    return total if sum(counted.values()) == 1 else total * (1 + 2**-51)


@within_floats(by="composition")
def stated_delta(event: Event, *, epsilon: float) -> float:
    """The sum of all parts' own deltas, where all parts' own epsilons fit into `epsilon`; 1 where they do not."""
    if needs_delta(event):
        raise UnsupportedEvent(event, by="basic composition", hint="a part states no epsilon and delta of its own")
    own = _own_delta(event)
    return own if stated(event, delta=own) <= epsilon else 1.0


@within_floats(by="composition")
def basic(event: Event, *, delta: float) -> float:
    """Epsilons and deltas add up; parts that need a delta share it evenly. [DR14] Theorem 3.16"""
    share = _share(event, check.delta("delta", delta))
    return sum(times * _guarantee(leaf, share).epsilon for leaf, times in _counted(event).items()) * (1 + 1e-13)


@within_floats(by="composition")
def advanced(event: Event, *, delta: float, classic: bool = False) -> float:
    """k parts cost about sqrt(k): the better of this and `basic`, with half of delta for the theorem.

    eps' = eps sqrt(2k ln(1/d)) + k eps (e^eps - 1)/(e^eps + 1)     [KOV15] Theorem 3.4 (unequal parts by its Theorem
    3.5)
    eps' = eps sqrt(2k ln(1/d)) + k eps (e^eps - 1)                 with `classic`: [DRV10], [DR14] Theorem 3.20
    """
    delta = check.delta("delta", delta)
    counted, share = _counted(event), _share(event, delta / 2)
    squares = drift = 0.0
    for leaf, times in counted.items():
        epsilon = _guarantee(leaf, share).epsilon
        grown = math.expm1(min(epsilon, 700.0)) if classic else math.tanh(epsilon / 2)
        squares += times * _not_lost(epsilon**2, epsilon)
        drift += times * _not_lost(epsilon * grown, epsilon)
    found = (math.sqrt(2 * squares * math.log(2 / delta)) + drift) * (1 + 1e-13)
    return min(found, basic(event, delta=delta))


@within_floats(by="composition")
def advanced_delta(event: Event, *, epsilon: float) -> float:
    """The smallest delta at which `advanced` stays within `epsilon`: by bisection, 1 where there is none."""
    low, high = math.log(check.SMALLEST_DELTA), 0.0
    if math.exp(low) > _own_delta(event) and advanced(event, delta=math.exp(low) * (1 + 1e-12)) <= epsilon:
        return check.SMALLEST_DELTA * (1 + 1e-12)
    while high - low > 1e-13:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        fits = math.exp(middle) > _own_delta(event) and advanced(event, delta=math.exp(middle)) <= epsilon
        low, high = (low, middle) if fits else (middle, high)
    return math.exp(high)


def needs_delta(event: Event) -> bool:
    """Whether some part has an epsilon only at a delta above 0."""
    match event:
        case PoissonSampled(event=inner) | FixedSizeSampled(event=inner):
            return needs_delta(inner)
        case Composed() | Repeated() | Reproducible() | ShuffledEpoch():
            return any(needs_delta(leaf) for leaf, _ in leaves(event))
        case _:
            return isinstance(event, Gaussian | Skellam | SummedDiscreteGaussian)


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

    from scipy.optimize import minimize_scalar  # dear to import, and only needed here

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


def _share(event: Event, delta: float) -> float | None:
    """What each part that needs a delta may take; what parts fail with in any case comes off first.

    Raises:
        InvalidArgument: nothing would be left.
    """
    fixed = _own_delta(event)
    if fixed >= delta:
        raise check.refuse("delta", delta, f"more than the parts' own deltas, {fixed:g}")
    hungry = sum(times for leaf, times in leaves(event) if needs_delta(leaf))
    if hungry and (delta - fixed) / hungry < _LEAST:
        raise check.refuse("delta", delta, f"more for {hungry} parts that need a share of it")
    return (delta - fixed) / hungry * (1 - 1e-15) if hungry else None


def _own_delta(event: Event) -> float:
    """The deltas that parts state, added up, those inside samples by the sampling rate. [BBG18] Theorem 8"""
    return math.fsum(times * _leaf_delta(leaf) for leaf, times in leaves(event))


def _leaf_delta(leaf: Event) -> float:
    match leaf:
        case ApproximateDP(delta=delta):
            return delta
        case PoissonSampled(event=inner, rate=rate) | FixedSizeSampled(event=inner, rate=rate):
            own = _own_delta(inner)
            return _not_lost(rate * own, own)
        case _:
            return 0.0


def _guarantee(event: Event, share: float | None) -> ApproximateDP:
    """One part's (epsilon, delta), spending `share` where it needs a delta, beside the delta it states."""
    match event:
        case Laplace(noise=noise) | DiscreteLaplace(noise=noise):
            return ApproximateDP(epsilon=inverse(noise), delta=0.0)
        case RandomizedResponse(epsilon=value) | PureDP(epsilon=value) | Selection(epsilon=value):
            return ApproximateDP(epsilon=value, delta=0.0)
        case ApproximateDP():
            return event
        case Skellam() | SummedDiscreteGaussian():
            return _guarantee(as_gaussian(event), share)
        case Gaussian(noise=noise) if share is not None:
            return ApproximateDP(epsilon=gaussian.epsilon(1 / noise, share), delta=share)
        case PoissonSampled(event=Gaussian(noise=noise), rate=rate, neighbours=Neighbours.REPLACE_ONE) if share:
            # Both lots share what was not drawn, and H is jointly convex: H <= q H of the two that were.
            inside = _guarantee(Gaussian(noise=noise / 2), min(share / rate, 0.5))
            return ApproximateDP(epsilon=inside.epsilon, delta=rate * inside.delta)
        case PoissonSampled(event=inner, rate=rate, neighbours=Neighbours.ADD_REMOVE):
            return _sampled(inner, rate, share)
        case FixedSizeSampled(event=inner, rate=rate):
            return _sampled(inner, rate, share)
        case OneOf(parts=parts):
            return ApproximateDP(epsilon=max(pure(part) for part in parts), delta=0.0)
        case RandomStopping(event=inner, count=NegativeBinomialCount(shape=shape)):
            return ApproximateDP(epsilon=(2 + shape) * pure(inner) * (1 + 1e-13), delta=0.0)  # [PS22] Corollary 3
        case _:
            raise UnsupportedEvent(event, by="composition")


def _sampled(inner: Event, rate: float, share: float | None) -> ApproximateDP:
    """What a sample costs whose contents compose basically: [BBG18] Theorems 8 and 9."""
    delta = _own_delta(inner)
    if not needs_delta(inner):
        inside = stated(inner, delta=delta)
    elif share is None:
        raise UnsupportedEvent(inner, by="composition", hint="it has no epsilon at delta 0")
    else:
        delta += min(share / rate, 0.5)
        inside = basic(inner, delta=delta)
    return ApproximateDP(epsilon=poisson(inside, rate=rate), delta=_not_lost(rate * delta, delta))


def _not_lost(product: float, factor: float) -> float:
    """A product that may not underflow where `factor`, of which it is one, is above 0: rounded up there."""
    return max(product, _LEAST) if factor > 0 else product

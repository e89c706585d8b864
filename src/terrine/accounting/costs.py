"""What one event costs under every rule of a filter at once: a small vector that adds up.

    pure epsilon and the chance to fail, mu^2 of Gaussian DP, and the Renyi divergence at a few fixed orders.

An (epsilon, delta)-DP part is a pure part that fails with probability delta [KOV15], so delta is counted apart. Sums of
numbers as written are exact fractions; everything else is rounded up.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from math import inf, nextafter

import numpy as np
from scipy.special import ndtri

from terrine.accounting import renyi
from terrine.accounting.integer_noise import as_gaussian
from terrine.accounting.reach import within_floats
from terrine.errors import UnsupportedEvent
from terrine.events import (
    ApproximateDP,
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
)

_ROUNDING = 1e-12
_LEAST = 1e-323
"""What underflows still costs something."""
_DENOMINATOR_BITS = 256


@dataclass(frozen=True)
class Cost:
    """What events cost under every rule at once: costs add up. None and inf: that rule cannot bound it.

    `epsilon`, `delta` and `mu_squared` are exact fractions of the numbers as written, so that ten times 0.1 is 1.
    """

    epsilon: Fraction | None
    delta: Fraction
    mu_squared: Fraction | None
    renyi: tuple[float, ...]
    events: int = 1
    planned: bool = False

    def __add__(self, other: Cost) -> Cost:
        renyi = [
            nextafter(one + two, inf) if one and two else one + two
            for one, two in zip(self.renyi, other.renyi, strict=True)
        ]
        return Cost(
            None if self.epsilon is None or other.epsilon is None else _up(self.epsilon + other.epsilon),
            _up(self.delta + other.delta) if other.delta else self.delta,
            None if self.mu_squared is None or other.mu_squared is None else _up(self.mu_squared + other.mu_squared),
            tuple(renyi),
            self.events + other.events,
            self.planned or other.planned,
        )

    def times(self, count: int) -> Cost:
        """This cost, `count` times over."""
        return Cost(
            epsilon=None if self.epsilon is None else _up(self.epsilon * count),
            delta=_up(self.delta * count),
            mu_squared=None if self.mu_squared is None else _up(self.mu_squared * count),
            renyi=tuple(math.nextafter(one * count, math.inf) for one in self.renyi),
            events=self.events,
        )

    @classmethod
    def nothing(cls, orders: tuple[float, ...]) -> Cost:
        """The cost of no event at all."""
        return cls(Fraction(0), Fraction(0), Fraction(0), (0.0,) * len(orders), events=0)

    @property
    def unknown(self) -> bool:
        """Whether no rule can bound it."""
        return self.epsilon is None and self.mu_squared is None and all(map(math.isinf, self.renyi))


@within_floats(by="the filter")
@functools.lru_cache(maxsize=4096)
def price(event: Event, orders: tuple[float, ...]) -> Cost:
    """The cost of `event` under every rule; what no rule can bound has None and inf throughout."""
    match event:
        case Composed(parts=parts):
            total = sum((price(part, orders) for part in parts), start=Cost.nothing(orders))
            return Cost(total.epsilon, total.delta, total.mu_squared, total.renyi)
        case Repeated(event=inner, times=times):
            return price(inner, orders).times(times)
        case Reproducible(event=inner) | ShuffledEpoch(event=inner):
            return price(inner, orders)
        case _:
            return _single(event, orders)


def _single(event: Event, orders: tuple[float, ...]) -> Cost:
    pure = _pure(event)
    epsilon, delta = pure if pure is not None else (None, Fraction(0))
    match event:
        case Gaussian(noise=noise):
            mu_squared: Fraction | None = _up(1 / written(noise) ** 2)
        case Skellam() | SummedDiscreteGaussian():
            mu_squared = _up(1 / written(as_gaussian(event).noise) ** 2)
        case _:
            mu_squared = None if epsilon is None else _pure_mu_squared(float_up(epsilon))
    return Cost(epsilon, delta, mu_squared, _curve(event, epsilon, orders))


def _pure(event: Event) -> tuple[Fraction, Fraction] | None:
    """(epsilon, delta) of an event for which no more than that is used, or None."""
    match event:
        case Laplace(noise=noise) | DiscreteLaplace(noise=noise):
            return _up(1 / written(noise)), Fraction(0)
        case ApproximateDP(epsilon=epsilon, delta=delta):
            return written(epsilon), written(delta)
        case RandomizedResponse(epsilon=epsilon) | PureDP(epsilon=epsilon) | Selection(epsilon=epsilon):
            return written(epsilon), Fraction(0)
        case OneOf(parts=parts):
            each = [price(part, (2.0,)) for part in parts]
            known = [one.epsilon for one in each if one.epsilon is not None and not one.delta]
            return (max(known), Fraction(0)) if len(known) == len(each) else None
        case RandomStopping(event=once_more, count=NegativeBinomialCount(shape=shape)):
            once = price(once_more, (2.0,))
            if once.epsilon is None or once.delta:
                return None
            return _up((2 + Fraction(shape)) * once.epsilon), Fraction(0)  # [PS22] Corollary 3
        case PoissonSampled(neighbours=Neighbours.ADD_REMOVE) | FixedSizeSampled():
            inner = price(event.event, (2.0,))
            if inner.epsilon is None or float_up(inner.epsilon) > 700:
                return None
            rate = Fraction(event.rate)
            amplified = math.log1p(float(rate) * math.expm1(float_up(inner.epsilon))) * (1 + _ROUNDING) + _LEAST
            return min(inner.epsilon, Fraction(amplified)), _up(rate * inner.delta)  # [BBG18] Theorems 8 and 9
        case _:
            return None


def _curve(event: Event, epsilon: Fraction | None, orders: tuple[float, ...]) -> tuple[float, ...]:
    at = np.array(orders)
    try:
        values = renyi.curve(event, at)
    except UnsupportedEvent:
        if epsilon is None:
            return (math.inf,) * len(orders)
        values = renyi.curve(PureDP(epsilon=float_up(epsilon)), at)
    return tuple(float(one) if one >= 0 else math.inf for one in values * (1 + _ROUNDING))


def _pure_mu_squared(epsilon: float) -> Fraction | None:
    # The trade-off curve of (epsilon, 0)-DP is two straight lines that meet on the diagonal at 1 / (1 + e^epsilon). A
    # Gaussian curve through that point is convex, so it lies below both lines: mu = -2 Phi^-1(1 / (1 + e^epsilon)).
    if epsilon > 600:
        return None
    tangent = math.sqrt(math.pi / 2) * epsilon  # at 0, where it lies above: the next term is -0.018 epsilon^3
    mu = tangent if epsilon < 1e-3 else -2 * float(ndtri(1 / (1 + math.exp(epsilon))))
    return Fraction((mu * (1 + 1e-9)) ** 2) if mu > 1e-140 or mu == 0 else Fraction(1e-279)  # no square underflows


@functools.lru_cache(maxsize=4096)
def written(value: float) -> Fraction:
    """The number as it is written: 0.1 is one tenth."""
    return Fraction(repr(value))


def _up(value: Fraction) -> Fraction:
    """`value`, rounded up where its denominator has grown beyond use."""
    if value.denominator.bit_length() <= _DENOMINATOR_BITS:
        return value
    scale = 1 << _DENOMINATOR_BITS // 2
    return Fraction(-(-value.numerator * scale // value.denominator), scale)


def shown(value: Fraction) -> float:
    """A float that, as it is written, is no less than `value`: three fifths is 0.6; infinite beyond floating point."""
    try:
        rounded = float(value)
    except OverflowError:
        return inf
    return rounded if written(rounded) >= value else math.nextafter(rounded, math.inf)


def float_up(value: Fraction) -> float:
    """A float that is no less than `value`; infinite beyond floating point."""
    try:
        rounded = float(value)
    except OverflowError:
        return inf
    return rounded if Fraction(rounded) >= value else math.nextafter(rounded, math.inf)

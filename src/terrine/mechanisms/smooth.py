"""Noise fitted to the data at hand: smooth sensitivity [NRS07].

The local sensitivity at D may not be used as a noise scale: it is itself private. A b-smooth bound S may:
S(D) >= local sensitivity at D, and S(D) <= e^b S(D') for all neighbours. Corollary 2.4, both branches:

    pure      f + (2(g+1) S / epsilon) Z,  Z with density ~ 1/(1 + |z|^g), g > 1
              (epsilon, 0)-DP for b <= epsilon / 2(g+1)
    Laplace   f + (2 S / epsilon) Lap(1)
              (epsilon, delta)-DP for b <= epsilon / 2 ln(2/delta)

For the Laplace branch the stretched density must stay within e^(epsilon/2) where |z| <= ln(2/delta): that needs
ln(2/delta) (e^b - 1) - b <= epsilon/2, which `beta` also keeps (it binds only for epsilon above about 3.8).

Scale and value are both private here, so the sum is formed exactly and only then rounded to a public grid: Z is drawn
to as many digits as it takes to know the grid point, so the answer is the ideal one, rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np

from terrine import check, events
from terrine.errors import InvalidArgument
from terrine.events import Neighbours
from terrine.mechanisms import grid
from terrine.mechanisms.bounded import records
from terrine.mechanisms.release import Release, stamped
from terrine.rng import SYSTEM, Source

_SMOOTHER = 1 - 1e-6
"""Users are given a beta a little below the proven one; that pays for the floats their S is computed in."""


@dataclass(frozen=True, kw_only=True)
class SmoothNoise:
    """Noise in proportion to a smooth bound; Laplace's with `delta`, heavy-tailed and pure without it.

    `grid` is the public step of the answers, a power of 2, fine against the noise that is expected.

    Guarantee: (epsilon, delta)-DP, delta 0 if left out, when `smooth` is a `beta`-smooth upper bound on the local
    sensitivity of the value.

    Raises:
        InvalidArgument: a field out of range.
    """

    epsilon: float
    grid: float
    delta: float | None = None
    tail: int = 4
    neighbours: Neighbours | None = None
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check.positive("epsilon", self.epsilon))
        if self.delta is not None:
            object.__setattr__(self, "delta", check.open_unit("delta", self.delta))
        object.__setattr__(self, "tail", check.whole("tail", self.tail, at_least=2))
        grid.power_of_two("grid", self.grid)

    @property
    def beta(self) -> float:
        """How smooth the bound must be."""
        if self.delta is None:
            return self.epsilon / (2 * (self.tail + 1)) * _SMOOTHER
        far = math.log(2 / self.delta)
        beta = self.epsilon / (2 * far)
        while far * math.expm1(beta) - beta > self.epsilon / 2:
            beta *= 0.999
        return beta * _SMOOTHER

    @property
    def factor(self) -> float:
        """Scale of the noise / the smooth bound, rounded up."""
        return (2 * (self.tail + 1) if self.delta is None else 2) / self.epsilon * (1 + 2.0**-50)

    @property
    def event(self) -> events.PureDP | events.ApproximateDP:
        where: dict[str, Any] = {"neighbours": self.neighbours, "unit": self.unit}
        if self.delta is None:
            return events.PureDP(epsilon=self.epsilon, **where)
        return events.ApproximateDP(epsilon=self.epsilon, delta=self.delta, **where)

    def release(self, value: float, *, smooth: float, rng: Source = SYSTEM) -> Release[float]:
        """`value` plus noise of scale factor * `smooth`, to the nearest grid point.

        Raises:
            InvalidArgument: a value that is no finite number, or a bound that is no positive one.
        """
        private = grid.checked("value", value)
        if not isinstance(private, int | float):
            raise check.refuse("value", value, "one number")
        check.positive("smooth", smooth, "a smooth bound is nowhere 0")
        exponent = grid.power_of_two("grid", self.grid)
        centre = Fraction(private) / Fraction(2) ** exponent
        scale = Fraction(self.factor) * Fraction(smooth) / Fraction(2) ** exponent
        draw = _laplace if self.delta is not None else _heavy_tailed(self.tail)
        index = _nearest(centre, scale, draw, rng)
        return Release(grid.to_float(index, exponent), stamped(self.event, rng))


@dataclass(frozen=True, kw_only=True)
class SmoothMedian:
    """The median of values clamped to [lower, upper], with noise fitted to how crowded its neighbourhood is.

    Guarantee: (epsilon, delta)-DP, delta 0 if left out, under replace-one, when each unit gives one value.
    """

    lower: float
    upper: float
    epsilon: float
    delta: float | None = None
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lower", check.number("lower", self.lower))
        object.__setattr__(self, "upper", check.number("upper", self.upper))
        if not self.lower < self.upper or not math.isfinite(self.upper - self.lower):
            raise InvalidArgument(f"lower={self.lower}, upper={self.upper}: want finite bounds with lower < upper")
        self.noise  # noqa: B018  # refuse bad fields now

    @property
    def noise(self) -> SmoothNoise:
        """The mechanism underneath; its grid has at least 2^30 steps between the bounds."""
        step = math.ldexp(1.0, math.frexp(self.upper - self.lower)[1] - 31)
        return SmoothNoise(
            epsilon=self.epsilon, delta=self.delta, grid=step, neighbours=Neighbours.REPLACE_ONE, unit=self.unit
        )

    @property
    def event(self) -> events.PureDP | events.ApproximateDP:
        return self.noise.event

    def release(self, values: Any, *, rng: Source = SYSTEM) -> Release[float]:
        """The noisy lower median, within the bounds.

        Raises:
            InvalidArgument: no values (their number is public), nan, or not a list of numbers.
        """
        private = np.sort(np.clip(records("values", values), self.lower, self.upper))
        if not private.size:
            raise InvalidArgument("values: empty; want at least one value where their number is public")
        smooth = smooth_sensitivity_of_median(private, self.lower, self.upper, self.noise.beta)
        found = self.noise.release(float(private[(private.size - 1) // 2]), smooth=smooth, rng=rng)
        note = f"bounds {self.lower:g} to {self.upper:g}, declared by the caller; values outside were clamped"
        return Release(min(self.upper, max(self.lower, found.value)), found.event, (note,))


def smooth_sensitivity_of_median(ordered: Any, lower: float, upper: float, beta: float) -> float:
    """[NRS07] Proposition 3.4: max over k of e^(-beta k) max_t (x[m+t] - x[m+t-k-1]), t = 0 to k + 1.

    `ordered` are the clamped values in order; beyond them lie `lower` and `upper`. Private: it comes from the data.
    """
    values = np.asarray(ordered, dtype=np.float64)
    size, middle = values.size, (values.size - 1) // 2
    padded = np.concatenate([np.full(size + 2, lower), values, np.full(size + 2, upper)])
    centre = size + 2 + middle
    best = 0.0
    for k in range(size + 1):
        reach = math.exp(-beta * k)
        if reach * (upper - lower) <= best:
            break
        highs = padded[centre : centre + k + 2]
        lows = padded[centre - k - 1 : centre + 1]
        best = max(best, reach * float((highs - lows).max()))
    return best


Draw = Callable[["_Uniform", "_Uniform", int], tuple[Decimal, Decimal] | bool | None]


class _Uniform:
    """A uniform number in (0, 1) that is drawn bit by bit."""

    def __init__(self, rng: Source) -> None:
        self._rng, self.bits, self.length = rng, 0, 0
        self.extend()

    def extend(self) -> None:
        self.bits, self.length = self.bits << 128 | self._rng.word() << 64 | self._rng.word(), self.length + 128

    def ends(self) -> tuple[Decimal, Decimal]:
        return Decimal(self.bits) / (1 << self.length), Decimal(self.bits + 1) / (1 << self.length)


def _nearest(centre: Fraction, scale: Fraction, draw: Draw, rng: Source) -> int:
    """The grid point nearest to centre + scale * Z, for Z or -Z with equal chances."""
    while True:
        sign = 1 if rng.word() & 1 else -1
        first, second = _Uniform(rng), _Uniform(rng)
        places = 60
        while True:
            with localcontext(Context(prec=places)):
                found = draw(first, second, places)
            if found is False:
                break  # rejected: draw again
            if isinstance(found, tuple):
                ends = [math.floor(centre + sign * scale * Fraction(end) + Fraction(1, 2)) for end in found]
                if ends[0] == ends[1]:
                    return ends[0]
            first.extend()
            second.extend()
            places += 60


def _laplace(first: _Uniform, _: _Uniform, places: int) -> tuple[Decimal, Decimal] | None:
    """|Lap(1)| = -ln U."""
    low, high = first.ends()
    if not low:
        return None
    slack = Decimal(10) ** (10 - places)
    return -high.ln() - slack, -low.ln() + slack


def _heavy_tailed(tail: int) -> Draw:
    """Z >= 0 with density ~ 1/(1 + z^g): from uniform on [0, 1] and z^-g beyond, each kept with the ratio."""

    def draw(first: _Uniform, second: _Uniform, places: int) -> tuple[Decimal, Decimal] | bool | None:
        slack = Decimal(10) ** (10 - places)
        bounds = [_proposal(end, tail) for end in first.ends()]
        if bounds[0] is None or bounds[1] is None or (bounds[0][0] != bounds[1][0]):
            return None
        inside = bounds[0][0]
        low, high = sorted([bounds[0][1], bounds[1][1]])
        low, high = low * (1 - slack), high * (1 + slack)
        chances = [1 / (1 + z**tail) if inside else 1 / (1 + z**-tail) for z in (low, high)]
        least, most = min(chances) - slack, max(chances) + slack
        begin, end = second.ends()
        if end <= least:
            return low, high
        return False if begin >= most else None

    return draw


def _proposal(uniform: Decimal, tail: int) -> tuple[bool, Decimal] | None:
    """Below or above 1, and where: the part below 1 has weight 1, the part above 1/(g-1)."""
    whole = Decimal(tail) / Decimal(tail - 1)
    place = uniform * whole
    if place <= 1:
        return (True, place) if place else None
    rest = (whole - place) * (tail - 1)  # uniform on (0, 1)
    return (False, (-rest.ln() / (tail - 1)).exp()) if rest > 0 else None

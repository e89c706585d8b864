"""A sampled Gaussian's privacy loss on a few dozen nodes: the trapezoidal rule, with its error bounded.

P = (1-q) N(0, 1) + q N(mu, 1) against Q = N(0, 1), so P/Q = u = 1 - q + r with r = q e^(mu x - mu^2/2). The moments of
the loss are integrals over the normal density:

    forward   E_P[u^z]  = integral of phi u^(1+z)
    backward  E_Q[u^-z] = integral of phi u^(-z)

Both integrands are analytic for |Im x| < pi/mu, where u stays off the negative axis. Summed at spacing h instead, such
an integral is off by at most 2N / (e^(2 pi a/h) - 1), where N bounds the integral of |f(x + ib)| for every |b| < a
([TW14] Theorem 5.1). With theta = mu a <= pi/2,

    |phi(x + ib)| <= phi(x) e^(a^2/2)
    1-q + r cos theta <= |u(x + ib)| <= u(x)
    |arg u(x + ib)| <= arg(1-q + r e^(i theta)),

each monotone in x, so N is bounded cell by cell. The same cells bound the loss's density under a tilt; twice the sum
of its peaks is its total variation V, which makes a transform fall off: |E e^(itL)| <= V/|t| (integration by parts).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

Floats = NDArray[np.float64]
Angles = TypeVar("Angles", float, Floats)

_EDGE = 9.8
"""Beyond it a normal variable has less than 1e-22 of its mass."""
_LOWS = (-_EDGE, -12.0, -15.0, -18.0, -22.0, -26.0, -30.0)
"""Where the first node may stand: backward, a tilt pulls the mass to the left."""
_FARTHEST = 30.0
"""Nodes farther out would hold nothing that floating point can add up."""
_LOG_GOAL = -46.0
"""log of the error to aim for in each of its pieces, relative to the moment."""
GOAL = 5 * math.exp(_LOG_GOAL)
"""What all pieces amount to: two of aliasing, one at each end, and some for rounding down."""
_LITTLE = 3.0
"""Up to this in a strip's log N, nodes are made to serve the opposite direction as well."""
_MOST = 700
"""Past this many nodes, cells are as cheap."""
_UNIT, _FAR_UNIT, _FINE_UNIT = np.arange(65) / 64, np.arange(1, 49) / 48, np.arange(513) / 512
MOST_DECAY = 0.9
"""As much as pairs of losses may take off a transform's square: then an error in the moment grows tenfold at most."""
_MOST_BINS = 20_000
"""Past this many bins a bound on a transform is not worth its time."""
_SLACK = 1e-6
"""Covers the rounding of logarithms that bound something."""
_ROOT_2 = math.sqrt(2)
_LOG_ROOT_2_PI = 0.5 * math.log(2 * math.pi)
_LOG_BEFORE = float(log_ndtr(-_EDGE))
_GENEROUS = 1.3
"""Cells reach farther than asked by this factor, so that what is asked next finds them made."""
_STRIPS: Floats = np.asarray(0.65 ** np.arange(6), dtype=float)
"""Strips to try, as shares of the widest: a fast oscillation grows too quickly away from the real axis."""


class Crowded(Exception):
    """Nodes would have to lie so close together, or terms be so many, that another method is better."""


@dataclass(frozen=True, eq=False)
class Nodes:
    """Points on a line, which stand for the loss of a sampled Gaussian, by the bound of one of the line's strips."""

    grid: QuadratureGrid
    forward: bool
    which: int
    bound: Bound | None = None
    """What is known of the strip at the tilt that they were made for."""

    @staticmethod
    def of(line: Line, *, forward: bool) -> Nodes:
        """Nodes that serve most tilts and frequencies."""
        step = _dyadic(2 * math.pi * line.widest / (line.widest**2 / 2 + 3 * line.widest - _LOG_GOAL))
        return Nodes(QuadratureGrid(line, step, -_EDGE, line.mu + _EDGE), forward, 0)

    @property
    def strip(self) -> float:
        """a in the bound above."""
        return float(self.grid.line.strips[self.which])

    def refined(self, tilt: float, frequency: float, log_moment: float, *, highest: float) -> Nodes:
        """Nodes that meet `GOAL` at this tilt and up to this frequency, and reach as far as the order `highest` asks.

        Raises:
            Crowded: they would be too many.
        """
        allowed, power, line = log_moment + _LOG_GOAL, self.power(tilt), self.grid.line
        cells = self._cells(tilt, frequency)
        sizes = cells.log_size(line.strips, power, frequency * cells.angles)
        turned = (1 + 2 * tilt) * -line.stay
        steps = _steps(line.strips, sizes - allowed + (turned if turned < _LITTLE else 0.0))
        best = int(steps.argmax())
        step, low = _dyadic(float(steps[best])), line.first_needed(power, allowed)
        high = cells.last_needed(power, allowed, step)
        if highest > tilt:
            low = min(low, line.first_needed(self.power(highest), allowed))
            high = max(high, self._cells(highest, 0.0).last_needed(self.power(highest), allowed, step))
        if high > _FARTHEST or step * _MOST < high - low:
            raise Crowded
        return Nodes(
            QuadratureGrid(line, step, low, high), self.forward, best, Bound(tilt, frequency, float(sizes[best]))
        )

    def opposite(self) -> Nodes:
        """The same points for the other direction, which they may not serve.

        Where phi |u|^(1+c) was bounded, phi |u|^(-c) is by as much over (1-q)^(1+2c): |u| is at least 1-q.
        """
        known = self.bound if self.forward else None
        if known is not None:
            more = (1 + 2 * known.tilt) * -self.grid.line.stay + _SLACK
            known = Bound(known.tilt, known.frequency, known.log_size + more)
        return Nodes(self.grid, not self.forward, self.which, known)

    def serve(self, tilt: float, frequency: float, log_moment: float) -> bool:
        """Whether they meet `GOAL` at this tilt and up to this frequency."""
        allowed, power, grid = log_moment + _LOG_GOAL, self.power(tilt), self.grid
        cells = self._cells(tilt, frequency)
        if not (
            self._known_to_serve(tilt, frequency, allowed) or self._found_to_serve(cells, power, frequency, allowed)
        ):
            return False
        reach = cells.last_needed(power, allowed, grid.step)
        return grid.line.first_needed(power, allowed) >= grid.low and reach <= grid.high

    def _known_to_serve(self, tilt: float, frequency: float, allowed: float) -> bool:
        known = self.bound
        if known is None or known.tilt != tilt or known.frequency < frequency:
            return False
        return 2 * math.pi * self.strip >= self.grid.step * max(1.0, known.log_size - allowed)

    def _found_to_serve(self, cells: _Cells, power: float, frequency: float, allowed: float) -> bool:
        among = slice(max(0, self.which - 1), self.which + 1)
        strips = self.grid.line.strips[among]
        sizes = cells.log_size(strips, power, frequency * cells.angles[among])
        return bool(_steps(strips, sizes - allowed).max() >= self.grid.step)

    def power(self, order: float) -> float:
        """p in the integrand phi u^p: above 0 forward, below backward."""
        return 1 + order if self.forward else -order

    def _cells(self, order: float, frequency: float) -> _Cells:
        """Cells over all of x that matters at this order and frequency."""
        line = self.grid.line
        far = math.sqrt(2 * (frequency * line.mu * line.widest - _LOG_GOAL))
        return line.cells(max(far, line.mu * (1 + order) + _EDGE + 1) if self.forward else far)

    @property
    def loss(self) -> Floats:
        """The loss at each node."""
        return self.grid.log_ratio if self.forward else -self.grid.log_ratio

    @property
    def mass(self) -> Floats:
        """What each node weighs: `step` times the density under P, or under Q backward."""
        return self.grid.mass * (1 + self.grid.excess) if self.forward else self.grid.mass

    @property
    def largest(self) -> float:
        """The least upper bound of the loss."""
        return math.inf if self.forward else -self.grid.line.stay

    @property
    def total_variation(self) -> float:
        """Between P and Q: q (2 Phi(mu/2) - 1)."""
        return self.grid.line.rate * math.erf(self.grid.line.mu / math.sqrt(8))

    @property
    def about_variance(self) -> float:
        """log(1 + chi^2): the loss's variance where that is small, and no more than a hint where it is not."""
        return math.log1p(self.grid.line.rate**2 * math.expm1(min(self.grid.line.mu**2, 700.0)))

    @property
    def rounding(self) -> float:
        """Relative error of a node's mass and tilt, in units of 2^-53."""
        return 4 * max(self.grid.first**2, self.grid.last**2)

    @property
    def mass_error(self) -> float:
        """A bound on |sum of all masses - 1|; here N = e^(a^2/2)."""
        step, strip = self.grid.step, self.strip
        exponent = 2 * math.pi * strip / step
        low, high = -self.grid.first, self.grid.last - (self.grid.line.mu if self.forward else 0.0)
        tails = math.erfc(low / _ROOT_2) + math.erfc(high / _ROOT_2)
        tails += step * (math.exp(-(low**2) / 2) + math.exp(-(high**2) / 2))
        return (2 * math.exp(strip**2 / 2 - exponent) / -math.expm1(-exponent) + tails) * (1 + _SLACK)

    def log_error(self, order: float) -> float:
        """log of a bound on |sum over nodes - integral| at this order, whatever these nodes were made for."""
        exponent, power = 2 * math.pi * self.strip / self.grid.step, self.power(order)
        cells = self._cells(order, 0.0)
        aliased = math.log(2) + float(cells.log_size(np.array([self.strip]), power, 0.0)[0])
        aliased -= exponent + math.log1p(-math.exp(-exponent))
        truncated = cells.log_truncated(power, self.grid)
        return float(np.logaddexp(aliased, truncated)) + _SLACK

    def missed_at(self, order: float) -> float:
        """log of about what the integral at this order has beyond the last node.

        There u is about r, and phi r^(1+z) is a normal density around mu (1+z).
        """
        line = self.grid.line
        if not self.forward or line.mu * (1 + order) <= self.grid.last:
            return -math.inf
        return (1 + order) * (math.log(line.rate) + line.mu**2 / 2 * order)

    def log_variation(self, order: float) -> float:
        """log of a bound on the total variation of the density of e^(order L) dP over the loss (not normalised).

        In x the density is phi u^(p+1) / (mu r). The slope of its log is -x - mu + (p+1) mu s with s = r/u a logistic
        curve: one root where it is monotone, three at most, and then the second peak lies where s > 1/2.
        """
        return self._cells(order, 0.0).log_variation(self.power(order))

    def tilted(self, order: float, log_moment: float) -> TiltedDensity:
        """The loss's density under a tilt, for bounds on its transform."""
        return TiltedDensity(self, order, log_moment)


class Bound(NamedTuple):
    """log N of a strip, at a tilt and up to a frequency."""

    tilt: float
    frequency: float
    log_size: float


class TiltedDensity:
    """The density of the loss times e^(order L), from below, on fine cells.

    1 - |E e^(itL)|^2 = E[1 - cos t(L-L')], and 1 - cos y >= 2 y^2/pi^2 up to pi: so it is at least 2 t^2/pi^2 times the
    sum, over bins no wider than pi/t, of the integral of (L-L')^2. Two cells of one bin are as far apart as their
    centres less half of both widths w; with S the sum of m m' (c-c')^2 over pairs of cells and W that of m m' w^2, the
    integral is at least S - 2 sqrt(S W) (Cauchy and Schwarz).
    """

    size = 150
    """What a frequency costs, in nodes: what skipping saves."""

    def __init__(self, nodes: Nodes, order: float, log_moment: float) -> None:
        self.nodes, self.order, self.log_moment = nodes, order, log_moment

    @cached_property
    def log_variation(self) -> float:
        """log V."""
        return self.nodes.log_variation(self.order) - self.log_moment

    @cached_property
    def _cells(self) -> tuple[Floats, Floats, Floats]:
        """Each cell's least mass, and the log of u at its ends."""
        line = self.nodes.grid.line
        ends = _FINE_UNIT * (line.mu + 2 * _EDGE) - _EDGE
        log_ratio: Floats = np.log1p(line.excess(ends))
        tilted = self.nodes.power(self.order) * log_ratio - self.log_moment
        far = np.maximum(-ends[:-1], ends[1:])
        log_mass = np.minimum(tilted[:-1], tilted[1:]) - 0.5 * far**2
        mass = np.exp(log_mass) * ((ends[1] - ends[0]) / math.sqrt(2 * math.pi) * (1 - _SLACK))
        return mass, log_ratio[:-1], log_ratio[1:]

    def log_decay(self, low: float, high: float) -> float:
        """log of a bound on |E e^(itL)| over [low, high]."""
        by_variation = min(0.0, self.log_variation - math.log(low))
        mass, left, right = self._cells
        start, end = (left - left[0]) * (high / math.pi), (right - left[0]) * (high / math.pi)
        if end[-1] > _MOST_BINS:
            return by_variation
        index = start.astype(np.intp)
        mass = np.where(end < index + 1, mass, 0.0)  # a cell across two bins counts for neither
        offset = 0.5 * (start + end) - (index + 0.5)
        total = np.bincount(index, mass)
        first = np.bincount(index, mass * offset)
        spread = 2 * np.maximum(total * np.bincount(index, mass * offset**2) - first**2, 0.0)
        width = np.bincount(index, mass * (end - start) ** 2)
        pairs = float(np.maximum(spread - 2 * np.sqrt(total * width * spread), 0.0).sum()) * (1 - _SLACK)
        # in units of the bin's width pi/high: 2 low^2/pi^2 (pi/high)^2
        by_pairs = 0.5 * math.log1p(-min(2 * (low / high) ** 2 * pairs, MOST_DECAY))
        return min(by_variation, by_pairs)


class QuadratureGrid:
    """Multiples of `step` from `low` to `high` on a line, with what both directions ask of them."""

    def __init__(self, line: Line, step: float, low: float, high: float) -> None:
        self.line, self.step, self.low, self.high = line, step, low, high
        first, last = math.floor(low / step), math.ceil(high / step)
        self.first, self.last = step * first, step * last
        self.x: Floats = step * np.arange(first, last + 1, dtype=np.float64)
        """The points, exact in floating point."""
        self.excess = line.excess(self.x)
        """u - 1."""
        self.log_ratio: Floats = np.log1p(self.excess)
        """log u."""
        self.mass: Floats = np.exp(-0.5 * self.x**2) * (step / math.sqrt(2 * math.pi))
        """`step` times the density under Q."""


class Line:
    """All x of one sampled Gaussian, which both directions share, and the cells made so far."""

    def __init__(self, mu: float, rate: float) -> None:
        self.mu, self.rate = mu, rate
        self.stay = math.log1p(-rate)
        self.widest = min(math.sqrt(-2 * _LOG_GOAL), math.pi / (2 * mu))
        """Half the width of the widest strip: the best for a normal density, or as wide as the bounds on u hold."""
        self.strips: Floats = _STRIPS * self.widest
        self._made: _Cells | None = None

    def excess(self, x: Floats) -> Floats:
        """u - 1."""
        excess: Floats = self.rate * np.expm1(self.mu * x - self.mu**2 / 2)
        return excess

    def cells(self, far: float) -> _Cells:
        """Cells that reach to `far`, or at least to where a normal variable ends."""
        near, made = self.mu + _EDGE, self._made
        if made is None or made.last < far or (far > near and made.last > 2 * far):
            self._made = made = _Cells(self, _GENEROUS * far if far > near else 0.0)
        return made

    def first_needed(self, power: float, allowed: float) -> float:
        """Where all nodes before are negligible, as far as the order's pull to the left can take them.

        Raises:
            Crowded: nowhere near.
        """
        if power > 0:
            return -_EDGE
        for low in _LOWS:
            log_before, pull = self.log_before(low, power, 1.0)
            if pull < -low and log_before <= allowed:  # it rises up to there, so that nodes add up to less
                return low
        raise Crowded

    def log_before(self, x: float, power: float, cosine: Angles) -> tuple[Angles, Angles]:
        """log of a bound on the integral of phi |u|^p up to x < 0 for p < 0, where r turns by angles of these cosines.

        |u| >= v = 1-q + r cos, and log v is convex: v(y)^p <= v(x)^p e^(-b (y-x)) where b = -p mu r cos / v at x.
        Returns b, too.
        """
        risen = self.rate * math.exp(self.mu * x - self.mu**2 / 2) * cosine
        least = 1 - self.rate + risen
        pull = -power * self.mu * risen / least
        bound: Angles = power * np.log(least) + pull * x + pull**2 / 2 + log_ndtr(x + pull)
        return bound, pull


class _Cells:
    """Cells over x, with what is worst in each; what is asked of u^p at p < 0 is asked of the backward direction."""

    def __init__(self, line: Line, far: float) -> None:
        self.line, self.mu, self.stay = line, line.mu, line.stay
        ends = _UNIT * (line.mu + 2 * _EDGE) - _EDGE
        if far > ends[-1]:
            ends = np.concatenate([ends, ends[-1] + _FAR_UNIT * (far - ends[-1])])
        left, self.right = ends[:-1], ends[1:]
        self.first, self.last = -_EDGE, float(ends[-1])
        self.width: Floats = self.right - left
        nearest = np.maximum(np.maximum(left, -self.right), 0.0)
        self.log_density: Floats = -0.5 * nearest**2 - _LOG_ROOT_2_PI
        self.log_held: Floats = np.log(self.width) + self.log_density
        self.log_risen: Floats = self._risen(ends)
        self.log_ratio: Floats = np.logaddexp(self.stay, self.log_risen)

    @cached_property
    def angles(self) -> Floats:
        """A bound on |arg u(x + ib)| in each strip: before the first cell, in each one, past the last.

        The angle of tangent y is twice that of y / (1 + sqrt(1 + y^2)), and no angle is above its tangent.
        """
        turn = self.mu * self.line.strips[:, None]
        tangent = np.sin(turn) / ((1 - self.line.rate) / self.risen + np.cos(turn))
        angles = np.empty((turn.size, tangent.shape[1] + 1))
        np.minimum(turn, (2 + _SLACK) * tangent / (1 + np.sqrt(1 + tangent * tangent)), out=angles[:, :-1])
        angles[:, -1:] = turn
        return angles

    @cached_property
    def risen(self) -> Floats:
        """r at the ends of the cells, as far as floating point goes."""
        risen: Floats = np.exp(np.minimum(700.0, np.maximum(-700.0, self.log_risen)))
        return risen

    def log_size(self, strips: Floats, power: float, turned: Floats | float) -> Floats:
        """log N for each strip, where |e^(it log u)| is at most e^turned."""
        growth = self._forward_growth(power) if power > 0 else self._backward_growth(power, strips)
        size: Floats = _log_sum(growth + turned) + strips**2 / 2 + _SLACK
        return size

    def _forward_growth(self, power: float) -> Floats:
        """log of a bound on the integral of phi u^p: before the first cell, in each one, past the last."""
        growth = np.empty(self.right.size + 2)
        growth[0] = _LOG_BEFORE
        growth[1:-1] = self.log_held
        growth[:-1] += power * self.log_ratio
        growth[-1] = self.log_far(power)
        return growth

    def _backward_growth(self, power: float, strips: Floats) -> Floats:
        """The same in each strip, where |u| >= 1-q + r cos."""
        cosine = np.maximum(np.cos(self.mu * strips), 0.0)
        least = 1 - self.line.rate + cosine[:, None] * self.risen
        growth = np.empty((strips.size, self.right.size + 2))
        growth[:, 1:] = power * np.log(least)
        growth[:, 1:-1] += self.log_held
        growth[:, 0] = self.line.log_before(self.first, power, cosine)[0]
        growth[:, -1] += log_ndtr(-self.last)
        return growth

    def log_far(self, power: float) -> float:
        """log of a bound on the integral of phi u^p past the last cell: there u grows at most like e^(mu x)."""
        centre = self.mu * power
        rise = power * float(self.log_ratio[-1]) - centre * self.last
        return rise + centre**2 / 2 + float(log_ndtr(centre - self.last))

    def log_truncated(self, power: float, grid: QuadratureGrid) -> float:
        """log of a bound on what nodes before the grid's first and after its last would add."""
        if power > 0:
            low = _log_tail(-grid.first, grid.step) + power * float(grid.log_ratio[0])
            high = float(_log_sum(self._log_sums(power, grid.step)[np.append(self.right > grid.last, True)]))
        else:
            low = _log_tail(-grid.first, grid.step) + power * self.stay
            high = _log_tail(grid.last, grid.step) + power * float(grid.log_ratio[-1])
        return float(np.logaddexp(low, high))

    def last_needed(self, power: float, allowed: float, step: float) -> float:
        """Where the rest of all nodes, from there on, is negligible."""
        if power < 0:  # u^p < 1 there, and a normal variable has less than e^(-x^2/2) of its mass beyond
            return max(self.mu / 2, math.sqrt(-2 * _LOG_GOAL))
        left_out = np.logaddexp.accumulate(self._log_sums(power, step)[::-1])[::-1]
        enough = np.flatnonzero(left_out[1:] <= allowed)
        return float(self.right[enough[0]]) if enough.size else math.inf

    def log_variation(self, power: float) -> float:
        """See `Nodes.log_variation`."""
        above = power + 1
        pull = above * self.mu * math.exp(float(self.log_risen[0] - self.log_ratio[0]))
        if -self.first - self.mu + min(0.0, pull) <= 0 or self.last < self.mu * power:
            return math.inf  # beyond the cells it might not fall
        log_ratio = above * (self.log_ratio[1:] if above > 0 else self.log_ratio[:-1])
        density = self.log_density + log_ratio - self.log_risen[:-1]
        peak = float(np.maximum.reduce(density)) - math.log(self.mu)
        if above * self.mu**2 <= 4:
            return peak + math.log(2) + _SLACK
        right = int(np.searchsorted(self.log_risen[1:], self.stay))  # from r = 1 - q on
        second = float(density[right:].max()) - math.log(self.mu) if right < density.size else -math.inf
        return float(np.logaddexp(peak, second)) + math.log(2) + _SLACK

    def _risen(self, x: Floats) -> Floats:
        """log r."""
        return math.log(self.line.rate) + self.mu * x - self.mu**2 / 2

    def _log_sums(self, power: float, step: float) -> Floats:
        """log of a bound on what nodes add up to in each cell, and past the last one (by a one-peaked bound)."""
        sums = np.empty(self.right.size + 1)
        sums[:-1] = np.log(self.width + step) + self.log_density + power * self.log_ratio[1:]
        past = max(0.0, self.mu * power - self.last)
        peak = power * float(self.log_ratio[-1]) - self.last**2 / 2 + past**2 / 2 - _LOG_ROOT_2_PI
        sums[-1] = np.logaddexp(self.log_far(power), math.log(step) + peak)
        return sums


def _steps(strips: Floats, log_sizes: Floats) -> Floats:
    """The spacing that strips allow, where N may be so much larger than the error."""
    steps: Floats = 2 * math.pi * strips / np.maximum(1.0, log_sizes)
    return steps


def _log_tail(end: float, step: float) -> float:
    """log of a bound on what nodes past `end` weigh under a normal density."""
    return float(np.logaddexp(log_ndtr(-end), math.log(step) - end**2 / 2 - _LOG_ROOT_2_PI))


def _log_sum(logs: Floats) -> Floats:
    top = np.maximum.reduce(logs, axis=-1, keepdims=True)
    total: Floats = top[..., 0] + np.log(np.add.reduce(np.exp(logs - top), axis=-1))
    return total


def _dyadic(step: float) -> float:
    """`step` rounded down to few bits, so that its multiples are exact."""
    return max(1.0, math.floor(min(step, 0.5) * 1024)) / 1024

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

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

Floats = NDArray[np.float64]

_EDGE = 9.8
"""Beyond it a normal variable has less than 1e-22 of its mass."""
_FARTHEST = 30.0
"""Nodes farther out would hold nothing that floating point can add up."""
_LOG_GOAL = -46.0
"""log of the error to aim for in each of its pieces, relative to the moment."""
GOAL = 5 * math.exp(_LOG_GOAL)
"""What all pieces amount to: two of aliasing, one at each end, and some for rounding down."""
_MOST = 700
"""Past this many nodes, cells are as cheap."""
_UNIT, _FAR_UNIT, _FINE_UNIT = np.arange(97) / 96, np.arange(1, 49) / 48, np.arange(513) / 512
MOST_DECAY = 0.9
"""As much as pairs of losses may take off a transform's square: then an error in the moment grows tenfold at most."""
_MOST_BINS = 20_000
"""Past this many bins a bound on a transform is not worth its time."""
_SLACK = 1e-6
"""Covers the rounding of logarithms that bound something."""
_LOG_ROOT_2_PI = 0.5 * math.log(2 * math.pi)
_STRIPS = np.array([1.0, 0.7, 0.45, 0.25, 0.12])
"""Strips to try, as shares of the widest: a fast oscillation grows too quickly away from the real axis."""


class Crowded(Exception):
    """Nodes would have to lie so close together that cells are as cheap."""


@dataclass(frozen=True, eq=False)
class Nodes:
    """Points k `step` up to `high`, which stand for the loss of a sampled Gaussian; `strip` is a in the bound above."""

    mu: float
    rate: float
    forward: bool
    step: float
    high: float
    strip: float

    @staticmethod
    def of(mu: float, rate: float, *, forward: bool) -> Nodes:
        """Nodes that serve most tilts and frequencies."""
        strip = _widest(mu)
        step = _dyadic(2 * math.pi * strip / (strip**2 / 2 + 3 * strip - _LOG_GOAL))
        return Nodes(mu, rate, forward, step, mu + _EDGE, strip)

    def refined(self, tilt: float, frequency: float, log_moment: float, *, highest: float) -> Nodes:
        """Nodes that meet `GOAL` at this tilt and up to this frequency, and reach as far as the order `highest` asks.

        Raises:
            Crowded: they would be too many.
        """
        allowed = log_moment + _LOG_GOAL
        strips = _STRIPS * _widest(self.mu)
        cells = _Cells(self, tilt, frequency)
        steps = 2 * math.pi * strips / np.maximum(1.0, cells.log_size(strips, tilt, frequency) - allowed)
        best = int(np.argmax(steps))
        step = _dyadic(float(steps[best]))
        high = cells.last_needed(tilt, allowed, step)
        if highest > tilt:
            high = max(high, _Cells(self, highest, 0.0).last_needed(highest, allowed, step))
        if high > _FARTHEST or step * _MOST < _EDGE + high:
            raise Crowded
        return Nodes(self.mu, self.rate, self.forward, step, high, float(strips[best]))

    @cached_property
    def x(self) -> Floats:
        """The points, exact in floating point."""
        first, last = -math.ceil(_EDGE / self.step), math.ceil(self.high / self.step)
        return self.step * np.arange(first, last + 1, dtype=np.float64)

    @cached_property
    def loss(self) -> Floats:
        """The loss at each node."""
        loss: Floats = np.log1p(self._excess)
        return loss if self.forward else -loss

    @cached_property
    def mass(self) -> Floats:
        """What each node weighs: `step` times the density under P, or under Q backward."""
        mass: Floats = np.exp(-0.5 * self.x**2) * (self.step / math.sqrt(2 * math.pi))
        return mass * (1 + self._excess) if self.forward else mass

    @cached_property
    def _excess(self) -> Floats:
        excess: Floats = self.rate * np.expm1(self.mu * self.x - self.mu**2 / 2)
        return excess

    @property
    def largest(self) -> float:
        """The least upper bound of the loss."""
        return math.inf if self.forward else -math.log1p(-self.rate)

    @property
    def total_variation(self) -> float:
        """Between P and Q: q (2 Phi(mu/2) - 1)."""
        return self.rate * math.erf(self.mu / math.sqrt(8))

    @property
    def rounding(self) -> float:
        """Relative error of a node's mass and tilt, in units of 2^-53."""
        return 4 * float(self.x[-1]) ** 2

    @property
    def mass_error(self) -> float:
        """A bound on |sum of all masses - 1|; here N = e^(a^2/2)."""
        exponent = 2 * math.pi * self.strip / self.step
        first, last = float(self.x[0]), float(self.x[-1]) - (self.mu if self.forward else 0.0)
        tails = sum(math.erfc(end / math.sqrt(2)) + self.step * math.exp(-(end**2) / 2) for end in (-first, last))
        return (2 * math.exp(self.strip**2 / 2 - exponent) / -math.expm1(-exponent) + tails) * (1 + _SLACK)

    def log_error(self, order: float) -> float:
        """log of a bound on |sum over nodes - integral| at this order, whatever these nodes were made for."""
        exponent = 2 * math.pi * self.strip / self.step
        cells = _Cells(self, order, 0.0)
        aliased = math.log(2) + float(cells.log_size(np.array([self.strip]), order, 0.0)[0])
        aliased -= exponent + math.log1p(-math.exp(-exponent))
        return float(np.logaddexp(aliased, cells.log_truncated(order))) + _SLACK

    def log_variation(self, order: float) -> float:
        """log of a bound on the total variation of the density of e^(order L) dP over the loss (not normalised).

        In x the density is phi u^(p+1) / (mu r). The slope of its log is -x - mu + (p+1) mu s with s = r/u a logistic
        curve: one root where it is monotone, three at most, and then the second peak lies where s > 1/2.
        """
        return _Cells(self, order, 0.0).log_variation(order)

    def tilted(self, order: float, log_moment: float) -> TiltedDensity:
        """The loss's density under a tilt, for bounds on its transform."""
        return TiltedDensity(self, order, log_moment)


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
        nodes = self.nodes
        ends = _FINE_UNIT * (nodes.mu + 2 * _EDGE) - _EDGE
        log_ratio: Floats = np.log1p(nodes.rate * np.expm1(nodes.mu * ends - nodes.mu**2 / 2))
        tilted = (1 + self.order if nodes.forward else -self.order) * log_ratio - self.log_moment
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


class _Cells:
    """Cells over all of x that matters at some order and frequency, with what is worst in each."""

    def __init__(self, nodes: Nodes, order: float, frequency: float) -> None:
        self.mu, self.rate, self.forward, self.nodes = nodes.mu, nodes.rate, nodes.forward, nodes
        self.stay = math.log1p(-self.rate)
        ends = _UNIT * (self.mu + 2 * _EDGE) - _EDGE
        far = math.sqrt(2 * (frequency * self.mu * _widest(self.mu) - _LOG_GOAL))
        if self.forward:
            far = max(far, self.mu * (1 + order) + _EDGE + 1)
        if far > ends[-1]:
            ends = np.concatenate([ends, ends[-1] + _FAR_UNIT * (far - ends[-1])])
        self.ends, self.left, self.right = ends, ends[:-1], ends[1:]
        nearest = np.maximum(np.maximum(self.left, -self.right), 0.0)
        self.log_density: Floats = -0.5 * nearest**2 - _LOG_ROOT_2_PI
        self.log_risen: Floats = math.log(self.rate) + self.mu * ends - self.mu**2 / 2
        self.log_ratio: Floats = np.logaddexp(self.stay, self.log_risen)

    def power(self, order: float) -> float:
        """p in u^p."""
        return 1 + order if self.forward else -order

    def log_size(self, strips: Floats, order: float, frequency: float) -> Floats:
        """log N for each strip, at order + i frequency."""
        power, turn = self.power(order), self.mu * strips
        open_ends: Floats = np.exp(np.minimum(700.0, self.stay - self.log_risen))
        angles = np.arctan2(np.sin(turn)[:, None], open_ends + np.cos(turn)[:, None])
        growth = np.empty((strips.size, self.ends.size + 1))
        growth[:, 0] = log_ndtr(self.ends[0])
        growth[:, 1:-1] = np.log(np.diff(self.ends)) + self.log_density
        if self.forward:
            growth[:, :-1] += power * self.log_ratio
            growth[:, -1] = self.log_far(order)
        else:
            worst = np.logaddexp(self.stay, self.log_risen + np.log(np.maximum(np.cos(turn), 1e-300))[:, None])
            growth[:, 0] += power * self.stay
            growth[:, 1:-1] += power * worst[:, :-1]
            growth[:, -1] = log_ndtr(-self.ends[-1]) + power * worst[:, -1]
        turned = np.concatenate([angles, turn[:, None]], axis=1) * frequency
        size: Floats = _log_sum(growth + turned) + strips**2 / 2 + _SLACK
        return size

    def log_far(self, order: float) -> float:
        """log of a bound on the integral of phi u^p past the last cell: there u grows at most like e^(mu x)."""
        power, last = self.power(order), float(self.ends[-1])
        centre = self.mu * power
        return power * float(self.log_ratio[-1]) - centre * last + centre**2 / 2 + float(log_ndtr(centre - last))

    def log_truncated(self, order: float) -> float:
        """log of a bound on what the nodes left out would add."""
        power, step = self.power(order), self.nodes.step
        first, last = float(self.nodes.x[0]), float(self.nodes.x[-1])
        low = float(np.logaddexp(log_ndtr(first), math.log(step) - first**2 / 2 - _LOG_ROOT_2_PI))
        low += power * (float(np.logaddexp(self.stay, self._risen(first))) if self.forward else self.stay)
        if self.forward:
            sums = self._log_sums(order, step)
            high = float(_log_sum(sums[np.append(self.right > last, True)]))
        else:
            high = float(np.logaddexp(log_ndtr(-last), math.log(step) - last**2 / 2 - _LOG_ROOT_2_PI))
            high += power * float(np.logaddexp(self.stay, self._risen(last)))
        return float(np.logaddexp(low, high))

    def last_needed(self, order: float, allowed: float, step: float) -> float:
        """Where the rest of all nodes, from there on, is negligible."""
        if not self.forward:
            return self.mu + _EDGE
        left_out = np.logaddexp.accumulate(self._log_sums(order, step)[::-1])[::-1]
        enough = np.flatnonzero(left_out[1:] <= allowed)
        return float(self.right[enough[0]]) if enough.size else math.inf

    def log_variation(self, order: float) -> float:
        """See `Nodes.log_variation`."""
        power = self.power(order) + 1
        first, last = float(self.ends[0]), float(self.ends[-1])
        pull = power * self.mu * math.exp(float(self.log_risen[0] - self.log_ratio[0]))
        if -first - self.mu + min(0.0, pull) <= 0 or (self.forward and last < self.mu * self.power(order)):
            return math.inf  # beyond the cells it might not fall
        log_ratio = power * (self.log_ratio[1:] if power > 0 else self.log_ratio[:-1])
        density = self.log_density + log_ratio - self.log_risen[:-1]
        peak = float(density.max()) - math.log(self.mu)
        if power * self.mu**2 <= 4:
            return peak + math.log(2) + _SLACK
        right = int(np.searchsorted(self.log_risen[1:], self.stay))  # from r = 1 - q on
        second = float(density[right:].max()) - math.log(self.mu) if right < density.size else -math.inf
        return float(np.logaddexp(peak, second)) + math.log(2) + _SLACK

    def _risen(self, x: float) -> float:
        return math.log(self.rate) + self.mu * x - self.mu**2 / 2

    def _log_sums(self, order: float, step: float) -> Floats:
        """log of a bound on what nodes add up to in each cell, and past the last one (by a one-peaked bound)."""
        power, last = self.power(order), float(self.ends[-1])
        inside = np.log(np.diff(self.ends) + step) + self.log_density + power * self.log_ratio[1:]
        past = max(0.0, self.mu * power - last)
        peak = power * float(self.log_ratio[-1]) - last**2 / 2 + past**2 / 2 - _LOG_ROOT_2_PI
        sums: Floats = np.append(inside, np.logaddexp(self.log_far(order), math.log(step) + peak))
        return sums


def _log_sum(logs: Floats) -> Floats:
    top = logs.max(axis=-1, keepdims=True)
    total: Floats = top[..., 0] + np.log(np.exp(logs - top).sum(axis=-1))
    return total


def _widest(mu: float) -> float:
    """Half the width of the widest strip: the best for a normal density, or as wide as the bounds on u hold."""
    return min(math.sqrt(-2 * _LOG_GOAL), math.pi / (2 * mu))


def _dyadic(step: float) -> float:
    """`step` rounded down to few bits, so that its multiples are exact."""
    return max(1.0, math.floor(min(step, 0.5) * 1024)) / 1024

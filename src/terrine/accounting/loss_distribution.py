"""Privacy loss distributions with finitely many atoms that enclose the true one, in the order that matters.

An event is dominated by a pair (P, Q) of distributions [ZDW22]; its cost is the curve of hockey-stick divergences
H_a(P||Q) = E_Q[(u - a)_+], with u = dP/dQ. Cut the outcomes into cells and let each cell's Q- and P-mass stand on

- its two ends (**upper**: every H_a can only grow, because (u - a)_+ is convex in u; "connect the dots" [DGKKM22]), or
- its mean u (**lower**: telling only the cell is post-processing, so every H_a can only shrink).

Both survive composition, and both hold the constraint E_Q[u] = 1. Poisson sampling maps u to 1 + q (u - 1) under the
same Q,
so `excess` = u - 1 is what is stored: it is scaled by q without cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from terrine.accounting.quadrature import Nodes
from terrine.errors import UnsupportedEvent
from terrine.events import (
    ApproximateDP,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    Neighbours,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    Selection,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Losses:
    """Atoms of the privacy loss under P: `mass` at `loss`, and `escaped` mass at an infinite loss.

    With `nodes` the loss is a continuous one, and the atoms are the quadrature that computes its moments.
    """

    loss: Floats
    mass: Floats
    escaped: float
    nodes: Nodes | None = None

    @staticmethod
    def at(nodes: Nodes) -> Losses:
        """A continuous loss by its nodes."""
        return Losses(nodes.loss, nodes.mass, 0.0, nodes)

    @property
    def largest(self) -> float:
        """The largest finite loss."""
        return self.nodes.largest if self.nodes else float(self.loss.max())

    @property
    def chance_of_largest(self) -> float:
        """The probability of it."""
        return 0.0 if self.nodes else float(self.mass[self.loss == self.largest].sum())

    @property
    def total_variation(self) -> float:
        """Between P and Q: what delta is at epsilon 0."""
        if self.nodes:
            return self.nodes.total_variation
        return float(self.mass @ np.maximum(-np.expm1(-self.loss), 0.0)) + self.escaped

    def trimmed(self, tail: float) -> Losses:
        """The largest losses, up to `tail` of mass, counted as infinite: never better, and rid of remote atoms."""
        order = np.argsort(-self.loss)
        gone = order[np.cumsum(self.mass[order]) <= tail]
        if gone.size == 0:
            return self
        kept = np.ones(self.loss.size, dtype=bool)
        kept[gone] = False
        return Losses(self.loss[kept], self.mass[kept], self.escaped + float(self.mass[gone].sum()))


@dataclass(frozen=True, eq=False)
class Pair:
    """Atoms of a dominating pair: Q has `mass` where P/Q = 1 + `excess`; P has `escaped` mass where Q has none."""

    excess: Floats
    mass: Floats
    escaped: float = 0.0

    def sampled(self, rate: float) -> Pair:
        """The pair ((1-q) Q + q P, Q): a Poisson sample, seen from the side that holds the unit. [ZDW22] Theorem 11"""
        return Pair(rate * self.excess, self.mass, rate * self.escaped)

    def symmetrised(self) -> Pair:
        """The pair whose curve is this one's for a >= 1 and its mirror image below. [ZDW22] Theorem 11, replacement

        Needs an atom boundary at u = 1. Above it, mass b at u also stands as mass u b at 1/u.
        """
        above = self.excess > 0
        excess, mass = self.excess[above], self.mass[above]
        mirrored = mass * (1 + excess)
        rest = max(0.0, 1.0 - float(mass.sum() + mirrored.sum()) - self.escaped)
        return Pair(
            np.concatenate([excess, -excess / (1 + excess), [0.0, -1.0]]),
            np.concatenate([mass, mirrored, [rest, self.escaped]]),
            self.escaped,
        )

    def forward(self) -> Losses:
        """Losses of P against Q."""
        mass = self.mass * (1 + self.excess)
        kept = mass > 0
        return Losses(np.log1p(self.excess[kept]), mass[kept], self.escaped)

    def backward(self) -> Losses:
        """Losses of Q against P."""
        kept = (self.mass > 0) & (self.excess > -1)
        lost = float(self.mass[self.excess <= -1].sum())
        return Losses(-np.log1p(self.excess[kept]), self.mass[kept], lost)


@dataclass(frozen=True)
class Cells:
    """How finely to cut: `width` in standard deviations where curvature is 1; `tail` is the P-mass that may escape."""

    width: float
    tail: float


Side = Callable[["_Cut"], Pair]


@dataclass(frozen=True, eq=False)
class _Cut:
    """Cells between sorted `ends` (as excess), each with its Q-mass and the part of it that the upper end gets."""

    ends: Floats
    mass: Floats
    to_right: Floats
    atoms: Pair
    """What needs no cutting: point masses and tails, as they stand on the upper side."""
    binned_atoms: Pair
    """The same on the lower side."""


def upper(cut: _Cut) -> Pair:
    """Each cell's mass on its two ends."""
    mass = np.zeros_like(cut.ends)
    mass[:-1] += cut.mass - cut.to_right
    mass[1:] += cut.to_right
    return _joined(Pair(cut.ends, mass), cut.atoms)


def lower(cut: _Cut) -> Pair:
    """Each cell's mass on its mean."""
    share = np.divide(cut.to_right, cut.mass, out=np.full_like(cut.mass, 0.5), where=cut.mass > 0)
    found = _joined(Pair(cut.ends[:-1] + share * np.diff(cut.ends), cut.mass), cut.binned_atoms)
    return Pair(np.maximum(found.excess, _LEAST_EXCESS), found.mass, found.escaped)


def pair(event: Event, cells: Cells, side: Side) -> Pair:
    """The pair that dominates `event` (side `upper`), or one that a true worst case dominates (`lower`).

    Raises:
        UnsupportedEvent: no dominating pair is known for it.
    """
    if _stated_epsilon(event) > _LARGEST_EPSILON:
        raise UnsupportedEvent(event, by="the certified accountant", hint="its epsilon is beyond floating point")
    match event:
        case PoissonSampled(event=Gaussian(noise=noise), rate=rate, neighbours=Neighbours.REPLACE_ONE):
            return side(_opposed_gaussians(1 / noise, rate, cells))
        case PoissonSampled(event=inner, rate=rate, neighbours=Neighbours.REPLACE_ONE):
            return _binary(_replaced_pure(event, inner, rate))
        case PoissonSampled(event=Gaussian(noise=noise), rate=rate):
            return side(_gaussian(1 / noise, Cells(cells.width, min(0.1, cells.tail / rate)))).sampled(rate)
        case PoissonSampled(event=inner, rate=rate):
            return pair(inner, cells, side).sampled(rate)
        case FixedSizeSampled(event=inner, rate=rate):
            inside = pair(inner, cells, side).sampled(rate)
            return inside.symmetrised() if side is upper else inside
        case Gaussian(noise=noise):
            return side(_gaussian(1 / noise, cells))
        case Laplace(noise=noise):
            return side(_laplace(1 / noise))
        case DiscreteLaplace(noise=noise, sensitivity=steps):
            return side(_discrete_laplace(1 / noise, steps))
        case DiscreteGaussian(noise=noise, sensitivity=steps, scalar=True) if noise * steps <= LARGEST_LISTED:
            return _discrete_gaussian(noise, steps, cells, side)
        case RandomizedResponse(epsilon=value) | PureDP(epsilon=value) | Selection(epsilon=value):
            return _binary(value)  # dominates every pure mechanism [KOV15]
        case ApproximateDP(epsilon=value, delta=delta):
            inside = _binary(value)
            return Pair(np.append(inside.excess, -1.0), np.append((1 - delta) * inside.mass, delta), delta)
        case _:
            raise UnsupportedEvent(event, by="the certified accountant")


LARGEST_LISTED = 30.0
"""Up to this scale the discrete Gaussian's support is listed point by point; above it, see `inversion`."""

_MOST_LISTED = 100_000
"""So many points are listed at most."""

_LARGEST_EPSILON = 500.0
"""Beyond it e^epsilon nears overflow."""

_LARGEST_MU = 25.0
"""Beyond it likelihood ratios overflow."""

_LEAST_EXCESS = -1 + 2.0**-53
"""A likelihood ratio of noise is never 0: what rounds to it is claimed to be no smaller than this."""

_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(5)
_POINTS, _WEIGHTS = (_POINTS + 1) / 2, _WEIGHTS / 2
"""Gauss-Legendre on [0, 1]. On cells of width 0.02 its relative error for a normal density is below 1e-16."""


def _check_mu(mu: float) -> None:
    if mu > _LARGEST_MU:
        raise OverflowError(f"noise={1 / mu:g}: likelihood ratios beyond floating point")


def _gaussian(mu: float, cells: Cells) -> _Cut:
    """N(mu, 1) against N(0, 1), with an end at u = 1."""
    _check_mu(mu)
    low, high = float(ndtri(cells.tail)), mu - float(ndtri(cells.tail))
    x = _grid(low, high, cells.width / math.sqrt(_curvature(mu)), through=mu / 2)
    width = x[1] - x[0]
    density = np.exp(-0.5 * (x[:-1, None] + width * _POINTS) ** 2) @ _columns(
        _WEIGHTS, np.expm1(mu * width * _POINTS) / math.expm1(mu * width)
    )
    density *= width / math.sqrt(2 * math.pi)
    ends = np.expm1(mu * x - mu * mu / 2)
    low_tail, high_tail = (ndtr(x[0]), ndtr(x[0] - mu)), (ndtr(-x[-1]), ndtr(mu - x[-1]))
    return _with_tails(ends, density, low_tail, high_tail, first_ratio=math.exp(mu * x[0] - mu * mu / 2))


def _opposed_gaussians(mu: float, rate: float, cells: Cells) -> _Cut:
    """(1-q) N(0) + q N(mu) against (1-q) N(0) + q N(-mu): Poisson sampling under replace-one neighbours.

    Worst for two contributions a, b of norm at most mu: H is an expectation of (k + q e^U - q a e^V)_+ over normal
    (U, V), which falls with their covariance and grows with either norm (docs/theory.md), so b = -a at full norm.
    """
    _check_mu(mu)
    reach = mu - float(ndtri(cells.tail))
    x = _grid(-reach, reach, cells.width / math.sqrt(_curvature(mu)), through=0.0)
    width = x[1] - x[0]
    points = x[:-1, None] + width * _POINTS
    shrink = math.exp(-mu * mu / 2)
    density = np.exp(-0.5 * points**2) * (1 - rate + rate * np.exp(-mu * points - mu * mu / 2))
    ends = _opposed_excess(x, mu, rate, shrink)
    inner = _opposed_excess(points, mu, rate, shrink)
    apart = np.diff(ends)[:, None]
    share = np.divide(inner - ends[:-1, None], apart, out=np.full_like(inner, 0.5), where=apart > 0)
    masses = np.stack([density @ _WEIGHTS, (density * share) @ _WEIGHTS], axis=1) * (width / math.sqrt(2 * math.pi))

    def tail(at: float) -> float:
        return float((1 - rate) * ndtr(at) + rate * ndtr(at - mu))

    def far_tail(at: float) -> float:
        return float((1 - rate) * ndtr(at) + rate * ndtr(at + mu))

    low_tail, high_tail = (far_tail(x[0]), tail(x[0])), (tail(-x[-1]), far_tail(-x[-1]))
    first_ratio = (1 - rate + rate * shrink * math.exp(mu * x[0])) / (1 - rate + rate * shrink * math.exp(-mu * x[0]))
    return _with_tails(ends, masses, low_tail, high_tail, first_ratio)


def _opposed_excess(x: Floats, mu: float, rate: float, shrink: float) -> Floats:
    below = 1 - rate + rate * shrink * np.exp(-mu * x)
    excess: Floats = 2 * rate * shrink * np.sinh(mu * x) / below
    return excess


def _laplace(epsilon: float) -> _Cut:
    """Lap(1, b) against Lap(0, b) with b = 1/epsilon: half of Q below both centres, cells between them."""
    x = np.linspace(0.0, 1.0, 513)
    step = epsilon * (x[1] - x[0])
    mass = 0.5 * np.exp(-epsilon * x[:-1]) * -math.expm1(-step)
    to_right = 2 * np.exp(-epsilon * x[:-1]) * math.sinh(step / 2) ** 2 / math.expm1(2 * step)
    ends = np.expm1(epsilon * (2 * x - 1))
    atoms = Pair(ends[[0, -1]], np.array([0.5, 0.5 * math.exp(-epsilon)]))
    return _Cut(ends, mass, to_right, atoms, atoms)


def _discrete_laplace(epsilon: float, steps: int) -> _Cut:
    """Mass proportional to r^|k|, r = e^(-epsilon/steps), moved by `steps`: u = r^(steps - 2k) between the centres."""
    ends_at = np.unique(np.round(np.linspace(0, steps, min(steps, 512) + 1)))
    rate = epsilon / steps
    ends = np.expm1(rate * (2 * ends_at - steps))
    inside = np.diff(ends_at) - 1  # lattice points strictly between two ends
    scale = -math.expm1(-rate) / (1 + math.exp(-rate))  # mass at 0
    start = scale * np.exp(-rate * ends_at[:-1])
    mass = start * math.exp(-rate) * np.expm1(-rate * inside) / math.expm1(-rate)
    pulled = 2 * np.sinh(rate * inside / 2) * np.sinh(rate * (inside + 1) / 2) / math.sinh(rate / 2)
    to_right = start * pulled / np.expm1(2 * rate * (inside + 1))
    points = scale * np.exp(-rate * ends_at)
    below, above = math.exp(-rate) / (1 + math.exp(-rate)), points[-1] / -math.expm1(-rate)
    points[0] += below
    points[-1] = above
    atoms = Pair(ends, points)
    return _Cut(ends, mass, to_right, atoms, atoms)


def _discrete_gaussian(noise: float, steps: int, cells: Cells, side: Side) -> Pair:
    """Every integer that matters, with the rest escaped (upper) or dropped into the last atom (lower)."""
    scale = noise * steps
    reach = math.ceil(scale * (2 - float(ndtri(min(0.1, cells.tail))))) + steps
    if 2 * reach + steps > _MOST_LISTED:
        raise OverflowError(f"sensitivity={steps}: too many grid steps for so little noise")
    k = np.arange(-reach, reach + steps + 1, dtype=float)
    mass = np.exp(-0.5 * (k / scale) ** 2)
    mass /= mass.sum()
    excess = np.expm1((2 * k - steps) * steps / (2 * scale**2))
    return Pair(excess, mass, cells.tail if side is upper else 0.0)


def _binary(epsilon: float) -> Pair:
    """Randomized response: e^epsilon and e^-epsilon."""
    low = 1 / (1 + math.exp(epsilon))
    return Pair(np.array([math.expm1(epsilon), math.expm1(-epsilon)]), np.array([low, 1 - low]))


def _stated_epsilon(event: Event) -> float:
    """The pure epsilon of an event that has one, else 0."""
    match event:
        case Laplace(noise=noise) | DiscreteLaplace(noise=noise):
            return 1 / noise
        case RandomizedResponse(epsilon=value) | PureDP(epsilon=value) | Selection(epsilon=value):
            return value
        case ApproximateDP(epsilon=value):
            return value
        case _:
            return 0.0


def _replaced_pure(event: Event, inner: Event, rate: float) -> float:
    """Pure inner event, Poisson sample, replace-one: both mixtures share their unsampled part."""
    pure = _stated_epsilon(inner)
    if isinstance(inner, ApproximateDP) or not 0 < pure <= _LARGEST_EPSILON:
        raise UnsupportedEvent(event, by="the certified accountant")
    return math.log1p(rate * math.expm1(pure)) - math.log1p(rate * math.expm1(-pure))


def _with_tails(
    ends: Floats, masses: Floats, low: tuple[float, float], high: tuple[float, float], first_ratio: float
) -> _Cut:
    """Cells, plus the two tails given by their (Q-mass, P-mass); `first_ratio` is 1 + ends[0] before it was rounded.

    Upper: the low tail stands on u = 0 and the first end, the high one on the last end and infinity.
    """
    (low_q, low_p), (high_q, high_p) = low, high
    on_first = min(low_q, low_p / first_ratio) if first_ratio > 0 else 0.0
    above = Pair(np.array([-1.0, ends[0], ends[-1]]), np.array([low_q - on_first, on_first, high_q]), high_p)
    tails = [(q, p / q - 1) for q, p in (low, high) if q > 0]
    below = Pair(np.array([mean for _, mean in tails]), np.array([q for q, _ in tails]))
    return _Cut(ends, masses[:, 0], masses[:, 1], above, below)


def _curvature(mu: float) -> float:
    """How much faster than at small mu the spread within a cell grows the loss: E[u^2] mu^2 / Var[u]."""
    return mu * mu / -math.expm1(-mu * mu)


def _grid(low: float, high: float, width: float, *, through: float) -> Floats:
    below, above = math.ceil((through - low) / width), math.ceil((high - through) / width)
    return through + width * np.arange(-below, above + 1, dtype=np.float64)


def _columns(weights: Floats, shares: Floats) -> Floats:
    return np.stack([weights, weights * shares], axis=1)


def _joined(first: Pair, second: Pair) -> Pair:
    return Pair(
        np.concatenate([first.excess, second.excess]),
        np.concatenate([first.mass, second.mass]),
        first.escaped + second.escaped,
    )

"""Independent losses that add up: their moments, and how fast the moment function of the sum must fall."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from terrine.accounting.loss_distribution import Losses

Floats = NDArray[np.float64]

_NOTICED = 1e-8
"""Share of a moment beyond the nodes that is worth looking for them there."""


@dataclass(frozen=True, eq=False)
class Part:
    """Independent copies of one loss."""

    losses: Losses
    times: float

    def refined(self, tilt: float, frequency: float, log_moment: float, *, highest: float) -> Part:
        """The same with nodes, where it has any, that serve this tilt up to this frequency."""
        if self.losses.nodes is None:
            return self
        return Part(Losses.at(self.losses.nodes.refined(tilt, frequency, log_moment, highest=highest)), self.times)


@dataclass(frozen=True)
class FallOff:
    """|M(c+it)| <= M(c) times the product of (V_i/t)^n_i over any of the parts whose V is known, smallest V first."""

    known: tuple[tuple[float, float], ...]
    """Running sums of n_i, and of n_i log V_i."""

    @staticmethod
    def of(found: Iterable[tuple[float, float]]) -> FallOff:
        """From pairs (log V, n)."""
        known, times, logs = [], 0.0, 0.0
        for log, n in sorted(pair for pair in found if pair[0] < math.inf):
            times, logs = times + n, logs + n * log
            known.append((times, logs))
        return FallOff(tuple(known))

    def log_at(self, t: float) -> float:
        """log of the bound at frequency t."""
        log = math.log(t)
        return min((logs - times * log for times, logs in self.known if logs < times * log), default=0.0)

    def frequency(self, decay: float) -> float:
        """Where it has fallen to e^-decay."""
        return math.exp(min([700.0, *((logs + decay) / times for times, logs in self.known)]))


@dataclass(frozen=True, eq=False)
class Composition:
    """Everything that happened, ready to be summed.

    `gaussian` is the total mu^2 of Gaussian mechanisms; `lattice` that of discrete Gaussians, whose moment function
    is the
    Gaussian one up to frequency `lattice_limit` but recurs beyond it.
    """

    parts: tuple[Part, ...]
    gaussian: float = 0.0
    lattice: float = 0.0
    lattice_limit: float = math.inf
    _known_moments: dict[float, list[float]] = field(default_factory=dict, init=False, repr=False)

    def opposite(self) -> Composition:
        """The other direction of parts that are all on nodes, on the same ones."""
        turned = ((part.losses.nodes, part.times) for part in self.parts)
        parts = tuple(Part(Losses.at(nodes.opposite()), times) for nodes, times in turned if nodes is not None)
        return Composition(parts, self.gaussian, self.lattice, self.lattice_limit)

    @property
    def all_nodes(self) -> bool:
        """Whether every part is a continuous loss on nodes: then there is nothing coarse or fine about it."""
        return bool(self.parts) and all(part.losses.nodes is not None for part in self.parts)

    @cached_property
    def escaped(self) -> float:
        """P-mass at an infinite loss."""
        lost = [(part.losses.escaped, part.times) for part in self.parts if part.losses.escaped > 0]
        if len(lost) == 1 and lost[0][1] == 1:
            return lost[0][0]
        kept = sum(times * math.log1p(-escaped) for escaped, times in lost)
        return min(1.0, -math.expm1(kept) * (1 + 1e-12))

    @property
    def total_variation(self) -> float:
        """An upper bound on delta(0): the parts' own, added up."""
        apart = sum(part.times * part.losses.total_variation for part in self.parts)
        mu = math.sqrt(self.gaussian + self.lattice)
        return (apart + 0.4 * mu) * (1 + 1e-9)  # a Gaussian's is 2 Phi(mu/2) - 1 < 0.4 mu

    @property
    def largest(self) -> float:
        """The largest possible finite loss."""
        if self.gaussian + self.lattice > 0:
            return math.inf
        return sum(part.times * part.losses.largest for part in self.parts) * (1 + 1e-14)

    @property
    def chance_of_largest(self) -> float:
        """The probability of it, rounded down."""
        chances = [(part.losses.chance_of_largest, part.times) for part in self.parts]
        if math.isinf(self.largest) or any(chance == 0 for chance, _ in chances):
            return 0.0
        return math.exp(sum(times * math.log(chance) for chance, times in chances) * (1 + 1e-12)) * (1 - 1e-9)

    @cached_property
    def _flat(self) -> _Flat:
        return _Flat(self.parts)

    def about_log_moment(self, orders: Floats) -> Floats:
        """log M at each of `orders`, the first of which counts most: for a choice, not for a proof.

        Where nodes miss much of that, they are completed.
        """
        total = self._smooth(orders)
        if self.parts:
            moments = self._flat.log_moments(orders)
            self.learn(float(orders[0]), moments[0].tolist())  # the one that is asked for again
            for own, part in zip(moments.T, self.parts, strict=True):
                nodes = part.losses.nodes
                if nodes and nodes.log_missed(orders[:1])[0] > math.log(_NOTICED / part.times):
                    np.logaddexp(own, nodes.log_missed(orders), out=own)
            total = total + moments @ self._flat.times
        return total

    def log_moments_above(self, orders: Floats) -> Floats:
        """Upper bounds on log M at each of `orders`."""
        total = self._smooth(orders)
        if self.parts:
            moments = self._flat.log_moments(orders)
            total = (total + moments @ self._flat.times) * (1 + 1e-12)
            for part, own in zip(self.parts, moments.T, strict=True):
                if (nodes := part.losses.nodes) is not None:
                    error = np.array([nodes.log_error(order) for order in orders])
                    total = total + part.times * np.logaddexp(0.0, error - own)
        return total

    def _smooth(self, orders: Floats) -> Floats:
        smooth: Floats = (self.gaussian + self.lattice) * orders * (orders + 1) / 2
        return smooth

    def log_moments(self, order: float) -> list[float]:
        """log E[e^(order L)] of each part."""
        if order not in self._known_moments:
            self._known_moments[order] = self._flat.log_moments(np.array([order]))[0].tolist() if self.parts else []
        return self._known_moments[order]

    def learn(self, order: float, log_moments: list[float]) -> None:
        """Remember each part's log E[e^(order L)]."""
        self._known_moments[order] = log_moments

    def fall_off(self, order: float) -> FallOff:
        """How fast the moment function must fall with the frequency, at this tilt."""
        return FallOff.of(
            (part.losses.nodes.log_variation(order) - moment, part.times)
            for part, moment in zip(self.parts, self.log_moments(order), strict=True)
            if part.losses.nodes is not None
        )

    def cumulants(self, order: float) -> tuple[float, float, float]:
        """log M and its first two derivatives at `order`."""
        variance = self.gaussian + self.lattice
        value, mean, spread = variance * order * (order + 1) / 2, variance * (order + 0.5), variance
        tilted = self._flat.tilted(order) if self.parts else []
        for part, (top, total, first, second) in zip(self.parts, tilted, strict=True):
            own = first / total
            value += part.times * (top + math.log(total))
            mean += part.times * own
            spread += part.times * max(0.0, second / total - own**2)
        return value, mean, spread

    @property
    def about_variance(self) -> float:
        """The loss's variance, or about that: a place to begin."""
        if not self.all_nodes:
            return self.cumulants(0.0)[2]
        own = sum(part.times * part.losses.nodes.about_variance for part in self.parts if part.losses.nodes is not None)
        return self.gaussian + self.lattice + own


class _Flat:
    """All parts end to end, so that sums over each of them run in one sweep."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.alone = len(parts) == 1
        self.times = np.array([part.times for part in parts], dtype=float)
        if self.alone:
            losses = parts[0].losses
            self.loss, self.mass, self.escaped = losses.loss, losses.mass, np.array(losses.escaped)
            return
        self.loss = np.concatenate([part.losses.loss for part in parts])
        self.mass = np.concatenate([part.losses.mass for part in parts])
        self.escaped = np.array([part.losses.escaped for part in parts])
        self.sizes = np.array([part.losses.loss.size for part in parts])
        self.starts = np.cumsum(self.sizes) - self.sizes

    @cached_property
    def powers(self) -> Floats:
        """Masses, times the loss, times its square."""
        powers = np.empty((3, self.mass.size))
        powers[0] = self.mass
        np.multiply(self.mass, self.loss, out=powers[1])
        np.multiply(powers[1], self.loss, out=powers[2])
        return powers

    def log_moments(self, orders: Floats) -> Floats:
        """log E[e^(order L)] for each order and part, small ones to full relative precision."""
        exponent = orders[:, None] * self.loss
        if np.maximum.reduce(exponent, axis=None) < 30:
            moved = np.expm1(exponent)
            if self.alone:
                own = (moved @ self.mass)[:, None]
            else:
                own = np.add.reduceat(moved * self.mass, self.starts, axis=1)
            return np.asarray(np.log1p(own - self.escaped), dtype=float)
        top, sums = self.sums(exponent, self.mass)
        result: Floats = top + np.log(sums)
        return result

    def tilted(self, order: float) -> list[list[float]]:
        """For each part: the largest exponent order L, and the sums of mass L^k e^(order L - largest), k = 0, 1, 2."""
        if self.alone:
            exponent = order * self.loss
            top = float(np.maximum.reduce(exponent))
            return [[top, *(self.powers @ np.exp(exponent - top)).tolist()]]
        tops, sums = self.sums(order * self.loss[None, :], self.powers)
        return [[*one] for one in zip(tops[0].tolist(), *sums.tolist(), strict=True)]

    def sums(self, exponent: Floats, mass: Floats) -> tuple[Floats, Floats]:
        """Per row and part: the largest exponent, and the sum of mass e^(exponent - largest)."""
        if self.alone:
            top = exponent.max(axis=1, keepdims=True)
            return top, (np.exp(exponent - top) * mass).sum(axis=1, keepdims=True)
        top = np.maximum.reduceat(exponent, self.starts, axis=1)
        scaled = np.exp(exponent - np.repeat(top, self.sizes, axis=1)) * mass
        return top, np.add.reduceat(scaled, self.starts, axis=1)

"""The certified accountant: an event in, a proven enclosure of epsilon or delta out.

An event is flattened into independent losses that add up; closed forms are used where they exist, and `inversion`
elsewhere.
Under add/remove neighbours the cost is the worse of two directions (the unit is there, or it is not), under
replace-one of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from terrine import check
from terrine.accounting import gaussian, integer_noise
from terrine.accounting.independent import Composition, Part
from terrine.accounting.inversion import Inversion, choose
from terrine.accounting.loss_distribution import LARGEST_LISTED, Cells, Losses, Pair, Side, lower, pair, upper
from terrine.accounting.quadrature import Crowded, Line, Nodes
from terrine.accounting.rare import apart
from terrine.accounting.reach import within_floats
from terrine.accounting.renyi import gaussian_noise
from terrine.accounting.roots import root as root_of
from terrine.accounting.saddle_point import log_saddle_delta, saddle, saddle_at
from terrine.errors import UnsupportedEvent
from terrine.events import (
    Composed,
    DiscreteGaussian,
    Event,
    FixedSizeSampled,
    Gaussian,
    Neighbours,
    NonPrivate,
    PoissonSampled,
    Repeated,
    Reproducible,
    leaves,
)


class Bounds(NamedTuple):
    """A proven enclosure: the true value is not below `lower` and not above `upper`."""

    lower: float
    upper: float


_FINE = 0.017
"""Cell width in standard deviations: widens the loss's variance by 5e-5 of itself."""
_COARSE = 0.15
"""The same for looking around, and for cheap bounds that need not be tight."""
_PRECISION, _ROUGH = 2e-5, 5e-3
"""Relative error in epsilon that smoothing may cause, in the answer and while looking around."""
_SETTLED = 0.03
"""Relative change of epsilon past which the settings that gave it were not made for it."""
_TOLERANCE = 3e-7
"""How far log delta, without what escapes, may be from the one asked for, on the safe side."""
_REACHES = (1.35, 1.1)
"""How far above the tilt the moments may lie that a lower bound rests on."""
_BLURRED = 0.01
"""Share of epsilon past which a blur may hide what happens there."""
_TAIL = 1e-5
"""Share of delta that may escape through the atoms' tails."""
_LEAST_TAIL = 1e-307
"""Less than this floating point cannot hold."""
_STEEP = 150.0
"""Past this tilt x epsilon a guess from coarse cells lands too far from the answer."""
_LEAST_NOISE = 0.2
"""Below it nodes would lie too close together."""
_MOST_TIMES = 10**300
"""Of what is not Gaussian; more repetitions are refused."""
_LEAST_SQUARE = 1e-290
"""A smaller square has lost digits, or all of them."""
_LEAST_SIZE = 1e-140
"""Of rates, epsilons, deltas and 1 / noise: with these, products keep their digits."""
_DOUBTFUL = 2e-3
"""Share of delta lost to rounding past which a shorter tail is tried."""


@within_floats(by="the certified accountant")
def epsilon(event: Event, *, delta: float) -> float:
    """The tightest proven upper bound on epsilon at `delta`.

    Raises:
        UnsupportedEvent: some part of the event has no proven bound.
    """
    delta = check.delta("delta", delta)
    return _Account(integer_noise.reduced(event)).epsilon(delta, upper)


@within_floats(by="the certified accountant")
def delta(event: Event, *, epsilon: float, near: float | None = None) -> float:
    """The tightest proven upper bound on delta at `epsilon`; it comes faster, and no less proven, if it is about
    `near`."""
    epsilon = check.not_negative("epsilon", epsilon)
    return _Account(integer_noise.reduced(event)).delta(epsilon, upper, near)


@within_floats(by="the certified accountant")
def estimate_log_delta(event: Event, *, epsilon: float, near: float) -> float:
    """log of a rough delta, in a millisecond: for searches, never to be reported."""
    account = _Account(integer_noise.reduced(event))
    if account.closed_form is not None:
        return math.log(max(account.closed_form.delta(epsilon, upper), 1e-300))
    coarse = account.composition(upper, _COARSE, near, forward=True)
    if epsilon >= coarse.largest:
        return -690.0
    return log_saddle_delta(coarse, saddle_at(coarse, epsilon), epsilon)


@within_floats(by="the certified accountant")
def least_epsilon(event: Event, *, delta: float, near: float) -> float:
    """A proven lower bound on epsilon at `delta`, for the worst mechanism that the event describes; `near` is an upper
    bound on it."""
    return _Account(event).epsilon(delta, lower, near=near if math.isfinite(near) else 0.0)


@within_floats(by="the certified accountant")
def bounds(event: Event, *, delta: float) -> Bounds:
    """A proven enclosure of the smallest epsilon at `delta`, for the worst mechanism that the event describes."""
    high = epsilon(event, delta=delta)
    return Bounds(min(least_epsilon(event, delta=delta, near=high), high), high)


@within_floats(by="the certified accountant")
def delta_bounds(event: Event, *, epsilon: float) -> Bounds:
    """A proven enclosure of the smallest delta at `epsilon`."""
    epsilon = check.not_negative("epsilon", epsilon)
    high = _Account(integer_noise.reduced(event)).delta(epsilon, upper)
    return Bounds(min(_Account(event).delta(epsilon, lower), high), high)


class _SampledGaussian(NamedTuple):
    """One Gaussian on one sample: delta(log(1 + q(e^x - 1))) = q delta_Gaussian(x). [BBG18] Theorems 8 and 9, tight"""

    mu: float
    rate: float

    def delta(self, epsilon: float, side: Side) -> float:
        if self.mu == 0:
            return 0.0
        if epsilon < 30:
            inner = math.log1p(math.expm1(epsilon) / self.rate)
        else:
            inner = epsilon - math.log(self.rate) + math.log1p((self.rate - 1) * math.exp(-epsilon))
        slack = 1e-14 * (1 + inner)
        if side is upper:
            return self.rate * gaussian.delta(self.mu, max(0.0, inner - slack))
        return self.rate * gaussian.delta_below(self.mu, inner + slack)

    def epsilon(self, delta: float, side: Side) -> float:
        if self.mu == 0 or delta >= self.rate:
            return 0.0
        solve, outward = (gaussian.epsilon, 1e-13) if side is upper else (gaussian.epsilon_below, -1e-13)
        inner = solve(self.mu, delta / self.rate)
        if inner < 30:
            outer = math.log1p(self.rate * math.expm1(inner))
        else:
            outer = math.log(self.rate) + inner + math.log1p((1 / self.rate - 1) * math.exp(-inner))
        return outer * (1 + outward)


class _Account:
    """One event, flattened, and its compositions at each fineness."""

    def __init__(self, event: Event) -> None:
        self._pairs: dict[tuple[Event, Cells, bool], Pair] = {}
        self._on_nodes: dict[bool, Composition] = {}
        self.curve: Inversion | None = None
        gaussians: list[float] = []
        self.lattice: dict[DiscreteGaussian, int] = {}
        self.others: dict[Event, int] = {}
        for leaf, times in _priced(event):
            match leaf:
                case Gaussian(noise=noise):
                    gaussians.append(gaussian.mu_of(noise, times))
                case DiscreteGaussian(noise=noise, sensitivity=steps) if noise * steps > LARGEST_LISTED:
                    self.lattice[leaf] = self.lattice.get(leaf, 0) + times
                case _:
                    self.others[leaf] = self.others.get(leaf, 0) + times
        self.mu = math.hypot(*gaussians)
        if any(times > _MOST_TIMES for times in (*self.others.values(), *self.lattice.values())):
            raise OverflowError("repeated more often than floating point counts")
        self._lines = [_line(leaf) for leaf in self.others]

    @property
    def closed_form(self) -> _SampledGaussian | None:
        """Gaussians alone, or one look at one sample through a Gaussian."""
        if not self.others and not self.lattice:
            return _SampledGaussian(self.mu, 1.0)
        if self.mu == 0 and list(self.others.values()) == [1]:
            match next(iter(self.others)):
                case PoissonSampled(event=Gaussian(noise=noise), rate=rate, neighbours=Neighbours.ADD_REMOVE):
                    return _SampledGaussian(1 / noise, rate)
                case FixedSizeSampled(event=Gaussian(noise=noise), rate=rate):
                    return _SampledGaussian(1 / noise, rate)
        return None

    @property
    def has_nodes(self) -> bool:
        """Whether nodes serve any part."""
        return any(self._lines)

    @property
    def directions(self) -> tuple[bool, ...]:
        """Which sides must be looked at: forward, and backward unless every part is symmetric."""
        for leaf in self.others:
            if isinstance(leaf, (PoissonSampled, FixedSizeSampled)):
                return True, False
        return (True,)

    def composition(
        self, side: Side, width: float, delta: float, forward: bool, tail: float = _TAIL, *, nodes: bool = True
    ) -> Composition:
        """Everything in one direction: on nodes where a part has them and they are wanted, else on cells."""
        if nodes and forward in self._on_nodes:
            return self._on_nodes[forward]
        for leaf in (*self.others, *self.lattice):
            _check_size(leaf)
        parts = []
        for (leaf, times), line in zip(self.others.items(), self._lines, strict=True):
            if nodes and line is not None:
                parts.append(Part(Losses.at(Nodes.of(line, forward=forward)), times))
            else:
                cells = Cells(width, max(tail * delta / (times * len(self.others)), _LEAST_TAIL))
                parts.append(Part(self._losses(leaf, cells, side, forward), times))
        lattice = sum(times / leaf.noise / leaf.noise for leaf, times in self.lattice.items())
        limit = min((2 * leaf.noise**2 * leaf.sensitivity for leaf in self.lattice), default=math.inf)
        found = Composition(tuple(parts), _squared(self.mu, side), lattice, limit)
        if found.all_nodes:
            self._on_nodes[forward] = found
        return found

    def _losses(self, leaf: Event, cells: Cells, side: Side, forward: bool) -> Losses:
        found = self._pair(leaf, cells, side)
        if forward:
            return found.forward()
        if side is upper:  # the far end of a low tail stands at u = 0, however little it holds
            return found.backward().trimmed(cells.tail)
        return found.backward()

    def _pair(self, leaf: Event, cells: Cells, side: Side) -> Pair:
        key = (leaf, cells, side is upper)
        if key not in self._pairs:
            self._pairs[key] = pair(leaf, cells, side)
        return self._pairs[key]

    def epsilon(self, delta: float, side: Side, near: float = 0.0) -> float:
        if self.closed_form is not None:
            return self.closed_form.epsilon(delta, side)
        if (lost := self._failing(forward=True)) > delta:
            raise check.refuse("delta", delta, f"at least {lost:g}, with which the events fail outright")
        if side is upper and self.composition(side, _COARSE, delta, forward=True).total_variation <= delta:
            return 0.0  # delta(0) is small enough
        best = 0.0
        for forward in self.directions:
            if side is upper and best > 0 and self._cheap_delta(side, best, delta, forward) <= delta:
                continue  # even a cheap bound shows that this direction is the cheaper one
            best = max(best, self._epsilon(delta, side, forward, near))
        return best

    def _epsilon(self, delta: float, side: Side, forward: bool, near: float) -> float:
        """One direction: on nodes; else on cells; where a long thin tail drowns the sum, without its end."""
        found: list[float] = []
        for tail, nodes in ((_TAIL, True), (_TAIL, False), (100 * _TAIL, False)):
            if nodes and not self.has_nodes:
                continue
            with suppress(Crowded):
                value, doubt = self._attempt(delta, side, forward, tail, near, nodes=nodes)
                found.append(value)
                if doubt <= _DOUBTFUL * delta and not (nodes and self._is_blurred(value)):
                    break
        return min(found, default=math.inf) if side is upper else max(found, default=0.0)

    def _without_large(self, fine: Composition, delta: float, is_upper: bool, beyond: float) -> tuple[float, float]:
        """Epsilon up to `beyond` where losses are tiny or large, and the doubt: the large ones taken out, see `rare`.

        Raises:
            Crowded: it is not so.
        """
        value = 0.5 * beyond
        for _ in range(6):
            curve, chance = _curve_without_large(fine, is_upper, value, beyond)
            before, value = value, _whole_crossing(curve, chance, delta, value)
            if value > beyond:
                raise Crowded
            if abs(value - before) <= _SETTLED * value:
                return value, curve.doubt_at(value)
            beyond = min(beyond, 2 * value)
        raise Crowded

    def _attempt(
        self, delta: float, side: Side, forward: bool, tail: float, near: float, *, nodes: bool
    ) -> tuple[float, float]:
        """A value it is near to or a saddle-point guess, refined on coarse cells, certified on fine ones or nodes.

        Returns epsilon, and how much of delta was doubt.
        """
        is_upper = side is upper
        scout = self.composition(side, _COARSE, delta, forward, tail, nodes=nodes)
        exact = scout.all_nodes
        fine = scout if exact else self.composition(side, _FINE, delta, forward, tail, nodes=nodes)
        if fine.escaped >= delta:  # more is lost to infinite losses than delta allows: nothing finite is proven
            return (math.inf if is_upper else fine.largest), 0.0
        near = near if near < scout.largest else 0.0  # beyond all losses there is no saddle
        tilt, guess = (saddle_at(scout, near), near) if near else saddle(scout, _left(scout, delta))
        if tilt * guess > _STEEP:  # a coarse guess would be many widths of the integrand away
            scout = fine
            tilt, guess = (saddle_at(fine, near), near) if near else saddle(fine, _left(fine, delta))
        for _ in range(4):
            if exact and not is_upper:
                curve = _from_below(scout, tilt, guess, delta)
            else:
                settings = choose(scout, tilt, guess, delta, _PRECISION if exact else _ROUGH)
                curve = Inversion(scout, settings, True, delta, guess)
            better = _crossing(curve, delta, guess)
            close = abs(better - guess) * tilt < (1.0 if exact else 0.3)
            guess = better
            if close:
                break
            tilt = saddle_at(scout, guess)
        for _ in range(0 if exact else 3):
            settings = choose(scout, tilt, guess, delta, _PRECISION)
            if settings.blur > _BLURRED * guess:
                with suppress(Crowded):
                    return self._without_large(fine, delta, is_upper, 1.01 * near or 2 * guess)
            curve = Inversion(fine, settings, is_upper, delta, guess)
            before, guess = guess, _crossing(curve, delta, guess)
            if abs(guess - before) <= _SETTLED * guess:
                break  # else what may be neglected was chosen for another epsilon
            scout, tilt = fine, saddle_at(fine, guess)
        self.curve = curve
        doubt = curve.doubt_at(guess)
        return (min(guess, fine.largest) if is_upper else max(guess, _from_largest(fine, delta))), doubt

    def delta(self, epsilon: float, side: Side, near: float | None = None) -> float:
        if self.closed_form is not None:
            return self.closed_form.delta(epsilon, side)
        best = 0.0
        for forward in self.directions:
            if side is upper and best > 0 and self._cheap_delta(side, epsilon, best, forward) <= best:
                continue
            best = max(best, self._delta(epsilon, side, forward, near))
        return best

    def _delta(self, epsilon: float, side: Side, forward: bool, near: float | None) -> float:
        """One direction: on nodes; else on cells; where a long thin tail drowns the sum, without its end."""
        found: list[float] = []
        for tail, nodes in ((_TAIL, True), (_TAIL, False), (100 * _TAIL, False)):
            if nodes and not self.has_nodes:
                continue
            with suppress(Crowded):
                value, doubt = self._delta_attempt(epsilon, side, forward, near, tail, nodes=nodes)
                found.append(value)
                if doubt <= _DOUBTFUL * value and not (nodes and self._is_blurred(epsilon)):
                    break
        return min(found, default=math.inf) if side is upper else max(found, default=0.0)

    def _is_blurred(self, epsilon: float) -> bool:
        """Whether the last curve may hide what happens around `epsilon`."""
        return self.curve is not None and self.curve.settings.blur > _BLURRED * epsilon

    def _delta_attempt(
        self, epsilon: float, side: Side, forward: bool, near: float | None, tail: float, *, nodes: bool
    ) -> tuple[float, float]:
        """What may be neglected depends on delta itself, so a coarse bound is refined until it settles."""
        scale = near or self._about_delta(epsilon, side, forward, nodes=nodes)
        for _ in range(8):
            scout = self.composition(side, _COARSE, scale, forward, tail, nodes=nodes)
            if side is upper and scout.escaped > 2 * (self._failing(forward) + tail * scale):
                raise Crowded  # likelihood ratios beyond floating point count as infinite losses
            top = max(0.0, scout.largest - epsilon)  # L <= largest: delta <= escaped + (1 - e^-top)
            if top <= 1e-12 * epsilon:  # only what escaped is left, and that may be a tail we chose to neglect
                if near or scout.escaped == 0 or scout.escaped >= scale / 10:
                    return scout.escaped + (top if side is upper else 0.0), 0.0
                scale = scout.escaped
                continue
            tilt = saddle_at(scout, epsilon)
            if tilt * epsilon > _STEEP and not scout.all_nodes:
                scout = self.composition(side, _FINE, scale, forward, tail, nodes=nodes)
                tilt = saddle_at(scout, epsilon)
            if near:
                break
            settings = choose(scout, tilt, epsilon, scale, 1e-3)
            value = min(0.5, max(Inversion(scout, settings, True, scale, epsilon)(epsilon), check.SMALLEST_DELTA))
            if scale / 2 <= value <= 2 * scale:
                return self._settled_delta(epsilon, side, forward, value, tail, nodes=nodes)
            scale = value
        if epsilon >= scout.largest:
            return scout.escaped, 0.0
        fine = scout if scout.all_nodes else self.composition(side, _FINE, scale, forward, tail, nodes=nodes)
        chance = 0.0
        if scout.all_nodes and side is not upper:
            curve = _from_below(scout, tilt, epsilon, scale)
        else:
            settings = choose(scout, tilt, epsilon, scale, _PRECISION)
            curve = Inversion(fine, settings, side is upper, scale, epsilon)
            if not scout.all_nodes and settings.blur > _BLURRED * epsilon:
                with suppress(Crowded):
                    curve, chance = _curve_without_large(fine, side is upper, epsilon, epsilon)
        self.curve = curve
        value = curve(epsilon) - (math.exp(epsilon) * chance if chance else 0.0)
        return (min(1.0, value) if side is upper else max(0.0, value)), curve.doubt_at(epsilon)

    def _settled_delta(
        self, epsilon: float, side: Side, forward: bool, near: float, tail: float, *, nodes: bool
    ) -> tuple[float, float]:
        """Made for a delta of about `near`, and made again where it turns out to be much smaller than that."""
        for _ in range(4):
            value, doubt = self._delta_attempt(epsilon, side, forward, near, tail, nodes=nodes)
            if value >= near / 2 or value < check.SMALLEST_DELTA:
                break
            near = value
        return value, doubt

    def _failing(self, forward: bool) -> float:
        """The probability with which the events fail outright, as they say themselves."""
        return self.composition(lower, 1.0, 0.5, forward).escaped

    def _about_delta(self, epsilon: float, side: Side, forward: bool, *, nodes: bool) -> float:
        """A saddle-point estimate of delta, made again for the tails that it itself asks for: no bound."""
        scale = 1e-6
        for _ in range(6):
            coarse = self.composition(side, _COARSE, scale, forward, nodes=nodes)
            if epsilon >= coarse.largest:
                return scale
            found = log_saddle_delta(coarse, saddle_at(coarse, epsilon), epsilon)
            before, scale = scale, math.exp(min(math.log(0.5), max(found, math.log(check.SMALLEST_DELTA))))
            if coarse.all_nodes or before / 10 <= scale:
                break
        return scale

    def _cheap_delta(self, side: Side, epsilon: float, scale: float, forward: bool) -> float:
        """A proven bound on delta at `epsilon`, from nodes or settings that served the other direction."""
        if (served := self.curve) is None:
            return 1.0
        if served.composition.all_nodes:
            with suppress(Crowded):
                opposite = served.opposite()
                return opposite(epsilon) if epsilon < opposite.composition.largest else 0.0
        for nodes in (True, False) if self.has_nodes else (False,):
            coarse = self.composition(side, _COARSE, scale, forward, nodes=nodes)
            if epsilon >= coarse.largest:
                return coarse.escaped
            tilt = served.settings.tilt
            if coarse.all_nodes:
                settings = replace(served.settings, last=1.1 * served.settings.last, fall_off=coarse.fall_off(tilt))
            else:
                settings = choose(coarse, tilt, epsilon, scale, 1e-3)
            with suppress(Crowded):
                return Inversion(coarse, settings, True, scale, epsilon)(epsilon)
        return 1.0


def _line(leaf: Event) -> Line | None:
    """A line for a sampled Gaussian, unless its noise is so small that nodes would lie too close together."""
    match leaf:
        case PoissonSampled(event=Gaussian(noise=noise), rate=rate, neighbours=Neighbours.ADD_REMOVE):
            return Line(1 / noise, rate) if noise > _LEAST_NOISE else None
    return None


def _priced(event: Event) -> Iterator[tuple[Event, int]]:
    """The event's leaves, each in the form that a pair is known for."""
    for leaf, times in leaves(event):
        match leaf:
            case NonPrivate():
                raise UnsupportedEvent(leaf, by="the certified accountant", hint="no finite epsilon covers it")
            case PoissonSampled(event=inner, rate=1.0, neighbours=Neighbours.ADD_REMOVE):
                yield from ((one, times * more) for one, more in _priced(inner))
            case PoissonSampled(event=Gaussian(noise=noise), rate=1.0):  # replaced: one contribution for another
                yield Gaussian(noise=noise / 2), times
            case PoissonSampled(event=Composed() | Repeated() | Reproducible() as inner):
                merged = gaussian_noise(inner)
                if merged is None:
                    hint = "inside a sample only Gaussians compose"
                    raise UnsupportedEvent(inner, by="the certified accountant", hint=hint)
                single = replace(leaf, event=Gaussian(noise=merged * (1 - 1e-15)))
                yield from ((one, times * more) for one, more in _priced(single))
            case _:
                yield leaf, times


def _check_size(event: Event) -> None:
    """
    Raises:
        OverflowError: a number is so small, or noise so large, that its products would lose their digits.
    """
    sizes = (1 / getattr(event, "noise", 1.0), *(getattr(event, name, 1.0) for name in ("epsilon", "delta", "rate")))
    if any(0 < size < _LEAST_SIZE for size in sizes):
        raise OverflowError("numbers whose products leave floating point")
    if isinstance(event, PoissonSampled | FixedSizeSampled):
        _check_size(event.event)


def _squared(mu: float, side: Side) -> float:
    """mu^2 beside other parts, rounded outward where it leaves floating point.

    Raises:
        OverflowError: it is too large for that.
    """
    if mu > 1e145:
        raise OverflowError(f"mu={mu:g}: its square is out of reach")
    squared = mu * mu
    if squared >= _LEAST_SQUARE or mu == 0:
        return squared
    return _LEAST_SQUARE if side is upper else 0.0


def _left(composition: Composition, delta: float) -> float:
    """What finite losses may take of delta."""
    return max(delta - composition.escaped, 1e-3 * delta)


def _from_below(scout: Composition, tilt: float, epsilon: float, delta: float) -> Inversion:
    """A lower bound on nodes: they reach above the tilt, if not far then less far, and moments there say how finely.

    Raises:
        Crowded: they would be too many.
    """
    for reach in _REACHES:
        with suppress(Crowded):
            curve = Inversion(scout, choose(scout, tilt, epsilon, delta, _PRECISION, reach), False, delta, epsilon)
            settings = choose(curve.composition, tilt, epsilon, delta, _PRECISION, reach)
            if settings.period <= curve.settings.period:
                return curve
            return Inversion(curve.composition, settings, False, delta, epsilon)
    raise Crowded


def _crossing(curve: Inversion, delta: float, guess: float) -> float:
    """Where `curve` crosses `delta`, near `guess`, on the side where it proves that; 0 where it does not reach it."""
    outward = -0.5 * _TOLERANCE if curve.is_upper else 0.5 * _TOLERANCE
    escaped = curve.composition.escaped
    left = delta - escaped if delta > escaped else 1e-3 * delta

    def excess(value: float) -> float:
        return math.log(max(curve(value) - escaped, 1e-320) / left) - outward

    tilt = curve.settings.tilt
    low = max(guess, 0.02 / tilt)
    here, slope = excess(low), tilt
    for _ in range(6):  # log delta falls by about the tilt for each unit of epsilon
        step = here / slope
        if not -0.5 * low < step < 0.5 * low + 1 / tilt:
            break
        there = excess(low + step)
        if abs(there) < 0.4 * _TOLERANCE:
            return _outward(curve, delta, low + step, curve.is_upper) if escaped else low + step
        if step and 0.3 * tilt < (here - there) / step < 3 * tilt:
            slope = (here - there) / step
        low, here = low + step, there
    root = _bracketed_root(excess, max(guess, 0.02 / tilt), 0.02 / tilt)
    return _outward(curve, delta, root, curve.is_upper)


def _curve_without_large(fine: Composition, is_upper: bool, epsilon: float, beyond: float) -> tuple[Inversion, float]:
    """The curve of what is left, made for this epsilon, and Q(A); it serves up to `beyond`.

    Raises:
        Crowded: large losses are no separate matter here.
    """
    if (split := apart(fine, beyond)) is None:
        raise Crowded
    rest, chance = split.rest, split.least if is_upper else split.most
    if epsilon >= rest.largest:
        raise Crowded
    tilt = saddle_at(rest, epsilon)
    left = max(math.exp(log_saddle_delta(rest, tilt, epsilon)), 1e-250)
    return Inversion(rest, choose(rest, tilt, epsilon, left, _PRECISION), is_upper, left, epsilon), chance


def _whole_crossing(curve: Inversion, chance: float, delta: float, guess: float) -> float:
    """Where `curve` less e^epsilon `chance` crosses `delta`, on the side where it proves that."""

    def whole(value: float) -> float:
        return curve(value) - math.exp(value) * chance

    def excess(value: float) -> float:
        return whole(value) / delta - 1

    root = _bracketed_root(excess, guess, max(0.02 * guess, 0.02 / curve.settings.tilt))
    return _outward(whole, delta, root, curve.is_upper)


def _bracketed_root(excess: Callable[[float], float], guess: float, step: float) -> float:
    low = high = guess
    first = step
    while excess(high) > 0:
        low, high, step = high, high + step, step * 4
        if high > 1e300:
            return math.inf
    step = first
    while low > 0 and excess(low) <= 0:
        high, low, step = low, max(0.0, low - step), step * 4
    if excess(low) <= 0:
        return 0.0
    return root_of(excess, low, high, xtol=1e-11 * high, rtol=1e-10)


def _outward(curve: Callable[[float], float], delta: float, found: float, is_upper: bool) -> float:
    """`found`, moved by ulps until the certified curve confirms it."""
    if math.isinf(found):
        return found
    step = max(found, 1e-300) * 1e-12
    for _ in range(200):
        value = curve(found)
        if (value <= delta) if is_upper else (found == 0 or value >= delta):
            return found
        found = found + step if is_upper else max(0.0, found - step)
        step *= 2
    return math.inf if is_upper else 0.0


def _from_largest(composition: Composition, delta: float) -> float:
    """The epsilon that the largest loss alone forces: delta(e) >= Pr[L = largest] (1 - e^(e - largest))."""
    chance, left = composition.chance_of_largest, delta - composition.escaped * (1 - 1e-9)
    if chance <= left:
        return 0.0
    return max(0.0, composition.largest * (1 - 1e-13) + math.log1p(-left / chance))

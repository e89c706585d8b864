"""The second witness: a slow and obvious accountant that shares no code with the others and encloses epsilon.

For neighbours with outputs P, Q let H(a) = sum (p - a q)+ over outcomes, a >= 0; delta(epsilon) = H(e^epsilon). A pair
dominates another if its H is nowhere smaller, and composition keeps that [ZDW22, Theorem 10]. Every event becomes a
measure of its losses log(p/q) under P. UPPER measures dominate every mechanism that the event describes; LOWER ones are
dominated by one of them. `witness_measure` adds losses up and rounds, `witness_noise` has the noises; here are the
rules for events, with the unit in the first data set or, reversed, in the second. Why both sides are proven:

  Poisson        Unit present P, absent Q, given the others: (rP + (1-r)Q, Q) or reversed (Q, rP + (1-r)Q). Their H are
                 r H((a-1+r)/r) of (P, Q) and (1-a(1-r)) H(ar/(1-a(1-r))) of (Q, P): monotone in H of the inner pair in
                 the same direction. The others are mixed over, and H is convex.
  fixed size     Upper: at a >= 1 no more than (rP + (1-r)Q, Q) [BBG18, Theorem 9]; replace-one is symmetric, so losses
                 below 0 mirror those above and the rest is at 0. Lower: one value counts, no other does.
  replace-one    Poisson: rP + (1-r)Q against rP' + (1-r)Q has H(a) = r E(1 - cX - dY)+, X = Q/P, Y = P'/P [BBG18]. For
                 Gaussian P at u, P' at v these are log-normal, and E grows with both variances and the covariance
                 (second derivatives >= 0): |u|^2, |u-v|^2, u.(u-v) are all largest at v = -u. For adaptive repetitions
                 go backwards, step by step. Other noise: upper as pure DP, lower with P' = Q.
  one of         Upper: all of the parts, of which one is shown. Lower: one of them.
  stopping       Upper: runs of e-DP make (2 + shape) e-DP [PS22]. Lower: all scores are the same, one run is shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np

from terrine import check, events
from terrine.accounting import witness_noise as noises
from terrine.accounting import witness_shared as shared
from terrine.accounting.witness_measure import (
    UNIT,
    Array,
    Measure,
    OutOfReach,
    Side,
    add,
    as_is,
    delta_at,
    epsilon_at,
    given,
    mixed,
    power,
)
from terrine.errors import UnsupportedEvent
from terrine.events import Event, Neighbours

_SCALES = (1e-6, 1e-12, 1e-24, 1e-48, 1e-96, 1e-150, 1e-200, 1e-250, 1e-300)
"""Deltas for which measures are made until one is small enough."""


_COARSE, _MOST_PARTS = 256, 40
"""A lower bound on so few cells looks at no more different parts than this."""


class WitnessBounds(NamedTuple):
    """What is proven: `lower` <= the smallest valid value <= `upper`."""

    lower: float
    upper: float


def bounds(event: Event, *, delta: float, cells: int = 2048) -> WitnessBounds:
    """An enclosure of the smallest epsilon at `delta`; (0, inf) where the event is out of reach."""
    delta = check.half_open_unit("delta", delta)
    lower = least_epsilon(event, delta=delta, cells=cells)
    upper = _worst(event, delta, cells, True, lambda side, measure: epsilon_at(side, measure, delta))
    return WitnessBounds(lower, min(upper, _pure(event) * (1 + 1e-9)))


def least_epsilon(event: Event, *, delta: float, cells: int = 256) -> float:
    """A lower bound of the smallest epsilon at `delta`: whoever claims less is wrong."""
    return least_epsilons(event, deltas=[check.half_open_unit("delta", delta)], cells=cells)[0]


def least_epsilons(event: Event, *, deltas: Sequence[float], cells: int = 256) -> list[float]:
    """The same for several deltas by one lower measure, made for the smallest."""
    found = [0.0] * len(deltas)

    def note(side: Side, measure: Measure) -> float:
        found[:] = [max(old, epsilon_at(side, measure, delta)) for old, delta in zip(found, deltas, strict=True)]
        return 0.0

    _worst(event, min(deltas), cells, False, note)
    return found


def least_delta(event: Event, *, epsilon: float, cells: int = 256) -> float:
    """A lower bound of the smallest delta at `epsilon`."""
    found = 0.0
    for scale in _SCALES:
        found = max(found, _worst(event, scale, cells, False, lambda s, m: delta_at(s, m, epsilon)))
        if found > scale:
            break
    return found


def delta_bounds(event: Event, *, epsilon: float, cells: int = 2048) -> WitnessBounds:
    """An enclosure of the smallest delta at `epsilon`."""
    epsilon, found = check.not_negative("epsilon", epsilon), WitnessBounds(0.0, 1.0)
    for scale in _SCALES:
        low, high = (_worst(event, scale, cells, up, lambda s, m: delta_at(s, m, epsilon)) for up in (False, True))
        found = WitnessBounds(max(found.lower, low), min(found.upper, high))
        if found.upper > scale or found.upper <= 1.01 * found.lower:
            break
    near = max(found.upper, _SCALES[-1])
    return found._replace(upper=min(found.upper, most_delta(event, epsilon=epsilon, near=near, cells=cells)))


def most_delta(event: Event, *, epsilon: float, near: float, cells: int = 2048) -> float:
    """An upper bound of the smallest delta at `epsilon`, by a measure made for deltas of about `near`."""
    return min(1.0, _worst(event, min(near, 0.5), cells, True, lambda s, m: delta_at(s, m, epsilon)))


def _worst(event: Event, delta: float, cells: int, upper: bool, value: Callable[[Side, Measure], float]) -> float:
    """The largest value over both directions, and over the parts of a `OneOf`."""
    parts = list(events.leaves(event))
    if len(parts) == 1 and isinstance(parts[0][0], events.OneOf) and parts[0][1] == 1:
        choices = parts[0][0].parts
        return max(_worst(part, delta, max(int(cells / len(choices) ** 0.5), 16), upper, value) for part in choices)
    cells = min(check.whole("cells", cells, 16), int(2048 * math.sqrt(300 / (1 + _work(event)))))
    found = 0.0
    for reverse in (False, True) if _lopsided(event, upper) else (False,):
        side = Side(upper, reverse, cells, delta)
        try:
            if cells < 16:
                raise OutOfReach
            found = max(found, value(side, _measure(side, event, (1e-6 if upper else 1e-3) * delta)))
        except OutOfReach:
            found = max(found, math.inf if upper else 0.0)
    return found


def _measure(side: Side, event: Event, cut: float) -> Measure:
    """The measure of `event`; about `cut` of its mass was moved outward at the tails."""
    s, others = _kinds(event)
    if (
        not side.upper and side.cells <= _COARSE
    ):  # without a part it never costs more: a quick look at the most frequent
        others = Counter(dict(others.most_common(_MOST_PARTS)))
    share = cut / (len(others) + 1)
    found = [noises.gaussian(side, s, share)] if s else []
    for part, times in others.items():
        try:
            found.append(power(side, _one(side, part, share / min(times, 10**30)), times, share))
        except OutOfReach:
            if side.upper:
                raise  # lower: without a part it never costs more
    return reduce(lambda a, b: add(side, a, b, share), found) if found else noises.two_points(side, 0.0)


def _kinds(event: Event) -> tuple[float, Counter[Event]]:
    """1 / noise of all Gaussian parts as one, and how often each other part happened."""
    others = Counter[Event]()
    for part, times in events.leaves(event):
        others[part] += times
    gaussian = {part: times for part, times in others.items() if isinstance(part, events.Gaussian)}
    s = math.hypot(*(_root(times, part.noise) for part, times in gaussian.items()))
    return s, Counter({part: times for part, times in others.items() if part not in gaussian})


def _root(times: int, noise: float) -> float:
    """sqrt(times) / noise, of any whole number: to a few units in the last place, infinite beyond floating point."""
    half = max(times.bit_length() - 64, 0) // 2
    try:
        return math.ldexp(math.sqrt(times >> 2 * half) / noise, half)
    except OverflowError:
        return math.inf


def _one(side: Side, event: Event, cut: float) -> Measure:
    """An event that is not a sum of others."""
    match event:
        case events.Laplace(noise=noise):
            return noises.laplace(side, noise, 0)
        case events.DiscreteLaplace(noise=noise, sensitivity=steps):
            return noises.laplace(side, noise, steps)
        case events.DiscreteGaussian(noise=noise, scalar=False) if side.upper:
            return noises.concentrated(side, noise)
        case events.DiscreteGaussian(noise=noise, sensitivity=steps):
            return noises.discrete_gaussian(side, noise, steps, cut)
        case events.Skellam():
            return shared.skellam(side, event, cut)
        case events.SummedDiscreteGaussian():
            return shared.summed_discrete_gaussian(side, event, cut)
        case events.RandomizedResponse(epsilon=epsilon) | events.PureDP(epsilon=epsilon):
            return noises.two_points(side, epsilon)
        case events.Selection(epsilon=epsilon):
            return noises.two_points(side, epsilon)
        case events.ApproximateDP(epsilon=epsilon, delta=delta):
            return noises.two_points(side, epsilon, delta)
        case events.NonPrivate():
            return noises.two_points(side, 0.0, 1.0)
        case events.PoissonSampled(event=inner, rate=rate, neighbours=neighbours):
            if neighbours is Neighbours.REPLACE_ONE and not side.inside:
                return _replaced(side, event, cut)
            return _poisson(side, _measure(side, inner, cut), rate)
        case events.FixedSizeSampled(event=inner, rate=rate):
            rate = min(rate * (1 + side.sign * 2 * UNIT), 1.0) if rate < 1 else rate
            measure = _measure(side._replace(inside=not side.upper), inner, cut)
            return _fixed_size(side, measure, rate) if side.upper else _poisson(side, measure, rate)
        case events.RandomStopping(event=inner, count=count):
            return _stopped(side, inner, count, cut)
        case events.OneOf(parts=parts) if side.upper:
            gaussian = [part for part in parts if isinstance(part, events.Gaussian)]
            dearest = sorted(gaussian, key=lambda part: part.noise)[:1]
            return _measure(side, events.Composed({*parts} - {*gaussian} | {*dearest}), cut)
        case events.OneOf(parts=parts):
            return _measure(side, _dearest(parts, side.delta), cut)
    raise UnsupportedEvent(event, by="accounting.witness")


@lru_cache(maxsize=1024)
def _dearest(parts: tuple[Event, ...], delta: float) -> Event:
    """The part whose lower bound is the largest; remembered, as parts may hold others of their kind."""
    return max(parts, key=lambda part: least_epsilon(part, delta=delta, cells=64))


def _q(p: Array, loss: Array) -> tuple[Array, float]:
    """q = p e^-loss, and to what factor it is right."""
    log_p = np.log(np.maximum(p, 5e-324))
    slop = float((np.abs(log_p) + np.minimum(np.abs(loss), 1500.0)).max() + 8) * 4 * UNIT
    return np.exp(np.minimum(log_p - loss, 0.0)), slop


def _poisson(side: Side, inner: Measure, rate: float) -> Measure:
    """(r P + (1-r) Q, Q), or reversed (P, (1-r) P + r Q).

    Upper: q that the measure lacks has the loss log(1 - r). Lower: q may add up to k > 1 after rounding; with q / k in
    place of the first q, H is also right at a < 1 - r, and what P then lacks of 1 has at least the loss log(1 - r).
    """
    if rate == 1:
        return inner
    if rate < 1e-250:
        if not side.upper:
            return noises.two_points(side, 0.0)
        rate = 1e-250
    p, loss, slop, top, excess = inner
    if side.reverse:
        if top > 0:
            p, loss = np.append(p, top), np.append(loss, math.inf)
        return given(side, p, -mixed(rate, -loss), 0.0, 0.0, excess)._replace(slop=slop)
    q, slop = _q(p, loss)
    total = math.fsum(q)
    k = 1.0 if side.upper else max(1.0, total * (1 + slop))
    found = given(side, (rate * p + (1 - rate) * q) / k, mixed(rate, loss) - math.log(k), slop + 8 * UNIT, rate * top)
    if side.upper:
        rest = (1 - rate) * max(1 - total + 2 * slop, 0.0)
    else:
        rest = max(math.fsum([1.0, -found.top, *(-found.p).tolist()]), 0.0) * (1 - 4 * UNIT)
    lowest = math.log1p(-rate) * (1 - side.sign * 4 * UNIT)
    return as_is(found._replace(p=np.append(rest, found.p), loss=np.append(lowest, found.loss)))


def _fixed_size(side: Side, inner: Measure, rate: float) -> Measure:
    """Upper: the losses above 0 of (r P + (1-r) Q, Q), their mirror image, and the rest at 0."""
    if rate == 1:
        return inner
    p, loss = inner.p[inner.loss > 0], inner.loss[inner.loss > 0]
    if not len(p):
        return inner
    (q, slop), top, loss = _q(p, loss), rate * inner.top, mixed(rate, loss)
    p = rate * p + (1 - rate) * q
    rest = max(math.fsum([1.0, -top, *(-p).tolist(), *(-q).tolist()]), 0.0) + 4 * slop
    p, loss = np.concatenate([q[::-1], [rest], p]), np.concatenate([-loss[::-1] * (1 - 4e-15), [0.0], loss])
    return as_is(given(side, p, loss, slop + 8 * UNIT, top))


def _replaced(side: Side, event: events.PoissonSampled, cut: float) -> Measure:
    """Poisson sampling under replace-one."""
    s, others = _kinds(event.event)
    if not others:
        return noises.replaced_gaussian(side, s, event.rate, cut)
    if side.upper:
        return noises.two_points(side, _pure(event))
    return _poisson(side, _measure(side, event.event, cut), event.rate)


def _stopped(side: Side, inner: Event, count: Any, cut: float) -> Measure:
    """The best of a random number of runs; a Poisson number may be 0."""
    if side.upper:
        return noises.two_points(side, _pure(events.RandomStopping(inner, count)))
    one = _measure(side, inner, cut)
    if not isinstance(count, events.PoissonCount):
        return one
    none, place = math.exp(-count.mean), int(np.searchsorted(one.loss, 0.0))
    p, loss = np.insert(one.p * (1 - none), place, none), np.insert(one.loss, place, 0.0)
    return as_is(given(side, p, loss, 8 * UNIT, one.top * (1 - none)))


def _pure(event: Event) -> float:
    """The epsilon of pure DP by basic composition, rounded up; infinite where there is none."""
    s, others = _kinds(event)
    total = sum(_product(_pure_one(part), times) for part, times in others.items())
    return math.inf if s else total * (1 + 1e-12)


def _product(epsilon: float, times: int) -> float:
    """epsilon x times, of any whole number; infinite beyond floating point."""
    try:
        return epsilon if times == 1 else float(Fraction(epsilon) * times)
    except OverflowError:
        return math.inf


def _pure_one(event: Event) -> float:
    match event:
        case events.Laplace(noise=noise) | events.DiscreteLaplace(noise=noise):
            return 1 / noise
        case events.RandomizedResponse(epsilon=e) | events.PureDP(epsilon=e) | events.Selection(epsilon=e):
            return e
        case events.OneOf(parts=parts):
            return max(map(_pure, parts))
        case events.RandomStopping(event=inner, count=events.NegativeBinomialCount(shape=shape)):
            return (2 + shape) * _pure(inner)
        case events.PoissonSampled(event=inner, rate=rate) | events.FixedSizeSampled(event=inner, rate=rate):
            up, down = mixed(rate, np.array([1, -1]) * _pure(inner))
            twice = isinstance(event, events.PoissonSampled) and event.neighbours is Neighbours.REPLACE_ONE
            return float(up - down if twice else up)
    return math.inf


def _inner(event: Event) -> tuple[Event, ...]:
    return getattr(event, "parts", ()) or ((event.event,) if hasattr(event, "event") else ())


def _lopsided(event: Event, upper: bool) -> bool:
    """Whether the two directions may differ. Upper measures under replace-one serve both."""
    own = isinstance(event, events.PoissonSampled | events.FixedSizeSampled)
    if own and not (upper and event.neighbours is Neighbours.REPLACE_ONE):
        return True
    return any(_lopsided(part, upper) for part in _inner(event))


def _work(event: Event) -> int:
    """About how many sums `event` takes."""
    kinds = _kinds(event)[1].items()
    return sum((40 + 2 * times.bit_length()) ** (times > 1) + sum(map(_work, _inner(part))) for part, times in kinds)

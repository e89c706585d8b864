"""The second witness: a slow and obvious accountant that shares no code with the others and encloses epsilon.

For neighbours D, D' with outputs P, Q let H_a = sum (p - a q)+ over outcomes, for every a >= 0; delta(epsilon) is H at
a = e^epsilon. An event becomes a measure: P mass p_i at losses l_i, q_i = p_i e^-l_i, and `top`, P mass at infinity.
(P, Q) dominates (A, B) if its H is nowhere smaller. Composition adds losses, and keeps dominance [ZDW22, Theorem 10].
UPPER measures dominate every mechanism the event describes; LOWER ones are dominated by one of them. Why:

  split, merge   merging outcomes is post-processing. Upper: a mass is split over the two grid points beside it so that
                 p and q are kept. Lower: the masses of a cell are added up, p to p and q to q.
  order          moving P mass to higher losses, or adding some, raises H; to lower losses, or dropping it, lowers H.
                 So what leaves the grid at the top is counted as infinite (upper) or as the top (lower), and what
                 leaves at the bottom as the bottom (upper) or as nothing (lower).
  Poisson        given the rest of the lot, unit present P, absent Q:  (rP + (1-r)Q, Q), or reversed (Q, rP + (1-r)Q).
                 H is r H_a' of (P, Q), a' = (a-1+r)/r, or (1-a(1-r)) H_a" of (Q, P), a" = ar/(1-a(1-r)): monotone in
                 H of the inner pair, in the same direction; the rest of the lot is mixed over, and H is convex.
  fixed size     [BBG18] Theorem 9: H_a <= that of (rP + (1-r)Q, Q) for a >= 1; replace-one is symmetric, so losses
                 below 0 mirror those above, and the rest has loss 0. Lower: a unit that counts against one that does not.
  replace-one    Poisson: r P + (1-r) Q against r P' + (1-r) Q, of which H = r H_a'(P | (1-b) Q + b P') by [BBG18].
                 Gaussian, P at u, P' at v: an expected (1 - c X - d Y)+ of log-normal X, Y of mean 1, which grows with
                 both variances and the covariance (all second derivatives are >= 0): |u|^2, |u-v|^2, u.(u-v) are all
                 largest at v = -u. Pure: (Q/P, P'/P) lies in a polygon, and its worst corners make three outcomes.
  discrete       log-concave noise: a shift by s is a chain of s unit shifts [DRS22], so larger shifts dominate, l1
                 vectors are no worse than scalars, and Laplace <= discrete Laplace <= the same on a coarser grid.

The grid is i * step with step a power of two, exact. A lower cell [c, c + step) holds p and g = p - e^c q, so that
products need no subtraction: G = p1 * g2 + g1 * (p2 - g2). With n times the variance the step grows by sqrt n only.

Rounding: sums of positive terms; an operation with k of them is right to a factor 1 +- k 2^-53, `slop`. `_settled`
moves that much mass up (upper) or down (lower). The total of a measure is known beforehand, so the moved mass is taken
from, or put into, one cell near the bottom: 10^18 repetitions then shift the losses a little, but lose no mass.
Special functions and numpy's exp, log, expm1, log1p are taken to be right to 8 units in the last place.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from terrine import check, events
from terrine.errors import UnsupportedEvent
from terrine.events import Event, Neighbours

Array = NDArray[np.float64]
_U = 2.0**-53
_FINER = 4
_FLOOR = 1e-307  # far above what thousands of underflows can hide
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


class Bounds(NamedTuple):
    """What is proven: `lower` <= the smallest valid value <= `upper`."""

    lower: float
    upper: float


def bounds(event: Event, *, delta: float, cells: int = 2048) -> Bounds:
    """An enclosure of the smallest epsilon at `delta`; (0, inf) where the event is out of reach."""
    upper = _epsilon(event, check.half_open_unit("delta", delta), check.whole("cells", cells, 16), upper=True)
    return Bounds(least_epsilon(event, delta=delta, cells=cells), min(upper, _pure(event) * (1 + 1e-9)))


def least_epsilon(event: Event, *, delta: float, cells: int = 256) -> float:
    """A lower bound of the smallest epsilon at `delta`: whoever claims less is wrong."""
    return _epsilon(event, check.half_open_unit("delta", delta), check.whole("cells", cells, 16), upper=False)


def delta_bounds(event: Event, *, epsilon: float, cells: int = 2048) -> Bounds:
    """An enclosure of the smallest delta at `epsilon`."""
    epsilon, cells = check.not_negative("epsilon", epsilon), check.whole("cells", cells, 16)
    found = Bounds(0.0, 1.0)
    for scale in (1e-6, 1e-24, 1e-96, 1e-290):
        low, high = (_worst(event, scale, cells, upper, lambda a, s: _delta(a, epsilon, s)) for upper in (False, True))
        found = Bounds(max(found.lower, low if low < math.inf else 0.0), min(found.upper, high))
        if found.upper <= 1.01 * found.lower or found.upper > scale:
            break
    return found


class _Ask(NamedTuple):
    upper: bool
    reverse: bool  # the unit is in the second data set, not in the first
    cells: int
    delta: float
    inside: bool = False  # within a sample: the pair is a unit that counts against one that does not

    @property
    def sign(self) -> int:
        return 1 if self.upper else -1


class _Atoms(NamedTuple):
    """A measure off the grid. `excess`: the total of P, exactly, less 1; never on the wrong side of it."""

    p: Array
    loss: Array
    top: float = 0.0
    excess: float = 0.0
    slop: float = 0.0


class _Grid(NamedTuple):
    step: float
    start: int
    p: Array
    g: Array
    top: float
    excess: float


class _OutOfReach(Exception):
    pass


# ---------------------------------------------------------------- from a measure to epsilon and delta


def _epsilon(event: Event, delta: float, cells: int, upper: bool) -> float:
    return _worst(event, delta, cells, upper, lambda atoms, sign: _inverse(atoms, delta, sign))


def _worst(event: Event, delta: float, cells: int, upper: bool, value: Any) -> float:
    """The largest value of both directions, and of all parts of a `OneOf`."""
    if isinstance(event, events.OneOf):
        return max(_worst(part, delta, cells, upper, value) for part in event.parts)
    cells = min(cells, int(2048 * math.sqrt(400 / _work(event))))
    found = 0.0
    for reverse in (False, True) if _sampled(event) else (False,):
        try:
            if cells < 16:
                raise _OutOfReach
            ask = _Ask(upper, reverse, cells, delta)
            found = max(found, value(_atoms(ask, event, (1e-6 if upper else 1e-3) * delta), ask.sign))
        except _OutOfReach:
            found = math.inf if upper else found
    return found


def _delta(atoms: _Atoms, epsilon: float, sign: int) -> float:
    above = atoms.loss > epsilon
    gained = -np.expm1(epsilon - atoms.loss[above]) * atoms.p[above]
    return float(min(max((gained.sum() + atoms.top) * (1 + sign * 1e-11), 0.0), 1.0))


def _inverse(atoms: _Atoms, delta: float, sign: int) -> float:
    """The smallest epsilon with `_delta` <= delta, by bisection; rounded outward."""
    if _delta(atoms, 0.0, sign) <= delta:
        return 0.0
    if atoms.top * (1 + sign * 1e-11) > delta:
        return math.inf
    low, high = 0.0, float(atoms.loss.max())
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _delta(atoms, middle, sign) <= delta else (middle, high)
    return high if sign > 0 else low


# ---------------------------------------------------------------- from an event to a measure


def _atoms(ask: _Ask, event: Event, cut: float) -> _Atoms:
    """The measure of `event`, with about `cut` of its mass moved outward at the tails."""
    match event:
        case events.Gaussian(noise=noise):
            return _gaussian(ask, noise, cut)
        case events.Laplace(noise=noise):
            return _laplace(ask, noise)
        case events.DiscreteLaplace(noise=noise, sensitivity=steps):
            return _discrete_laplace(ask, noise, steps)
        case events.DiscreteGaussian(noise=noise, sensitivity=steps, scalar=scalar):
            return _discrete_gaussian(ask, noise, steps, cut) if scalar or not ask.upper else _zcdp(ask, noise)
        case events.ApproximateDP(epsilon=epsilon, delta=delta):
            p = (1 - delta) * expit([epsilon, -epsilon])
            return _given(ask, p, [epsilon, -epsilon], 16 * _U, delta)
        case events.RandomizedResponse(epsilon=epsilon) | events.PureDP(epsilon=epsilon):
            return _two_points(ask, epsilon)
        case events.Selection(epsilon=epsilon):
            return _two_points(ask, epsilon)
        case events.NonPrivate():
            return _Atoms(np.zeros(1), np.zeros(1), 1.0)
        case events.Reproducible(event=inner) | events.ShuffledEpoch(event=inner):
            return _atoms(ask, inner, cut)
        case events.PoissonSampled(event=inner, rate=rate, neighbours=neighbours):
            if neighbours is Neighbours.REPLACE_ONE and (ask.upper or not ask.inside):
                return _replaced(ask, inner, rate, cut)
            return _poisson(ask, _atoms(ask._replace(inside=True), inner, cut), rate)
        case events.FixedSizeSampled(event=inner, size=size, population=population):
            inner_atoms = _atoms(ask._replace(inside=True), inner, cut)
            return (_fixed_size if ask.upper else _poisson)(ask, inner_atoms, size / population)
        case events.RandomStopping():
            return _stopped(ask, event, cut)
        case events.OneOf() if not ask.upper:
            dearest = max(event.parts, key=lambda part: least_epsilon(part, delta=ask.delta, cells=64))
            return _atoms(ask, dearest, cut)
        case events.Repeated(event=events.Gaussian(noise=noise), times=times):
            return _gaussian(ask, noise / math.sqrt(min(times, 10**300)) * (1 - ask.sign * 4 * _U), cut)
        case events.Repeated() | events.Composed() | events.OneOf():
            return _loose(ask, _grid(ask, event, cut))
    raise UnsupportedEvent(event, by="accounting.witness")


def _grid(ask: _Ask, event: Event, cut: float) -> _Grid:
    """The same, on a grid."""
    match event:
        case events.Repeated(event=inner, times=times) if not isinstance(inner, events.Gaussian):
            finer = _FINER if _work(inner) < 3 and times > 1 else 1
            one = _grid(ask._replace(cells=finer * ask.cells), inner, cut / min(times, 10**30))
            most = int(min(1e30, 0.1 / max(abs(one.excess), 1e-40)))
            if times > most and ask.upper:
                raise _OutOfReach
            return _power(ask, one, min(times, most), cut)
        case events.Composed(parts=parts) if parts:
            kinds = [part if n == 1 else events.Repeated(part, n) for part, n in Counter(parts).items()]
            whole = _grid(ask, kinds[0], cut / len(kinds))
            for part in kinds[1:]:
                whole = _sum(ask, whole, _grid(ask, part, cut / len(kinds)), cut / len(kinds))
            return whole
        case events.Composed():
            return _binned(ask, _two_points(ask, 0.0), cut)
        case events.OneOf(parts=parts) if ask.upper:
            return _highest(ask, [_grid(ask, part, cut) for part in _distinct(parts)])
        case events.Reproducible(event=inner) | events.ShuffledEpoch(event=inner):
            return _grid(ask, inner, cut)
        case _:
            return _binned(ask, _atoms(ask, event, cut), cut)


def _power(ask: _Ask, one: _Grid, times: int, cut: float) -> _Grid:
    """`one`, `times` over: double for every binary digit, add one where it is a 1."""
    power, done, cells = one, 1, ask.cells
    ask = ask._replace(cells=_FINER * cells)
    for digit in bin(times)[3:]:
        done = 2 * done + int(digit)
        ask = ask._replace(cells=max(ask.cells // 2, cells))
        power = _sum(ask, power, power, cut * done / times)
        if digit == "1":
            one = _as_coarse(ask, one, power.step)
            power = _sum(ask, power, one, cut * done / times)
    return power


# ---------------------------------------------------------------- the grid


def _binned(ask: _Ask, atoms: _Atoms, cut: float, least: float = 0.0) -> _Grid:
    """Onto about `cells` steps, not below `least`. Upper: g / (1 - e^-step) of a cell goes to its upper end."""
    order = np.argsort(atoms.loss, kind="stable")
    kept, p, top, excess = _cut(ask, atoms.p[order], atoms.top, atoms.excess, cut)
    loss = atoms.loss[order][kept]
    low, high = float(loss[0]), float(loss[-1])
    width = max((high - low) / ask.cells, max(abs(low), abs(high)) * 2.0**-40, least, 2.0**-1000)
    if width > 1e290:
        raise _OutOfReach
    step = 2.0 ** math.ceil(math.log2(width))
    cell = np.floor(loss / step)
    index = (cell - cell[0]).astype(int)
    p_sum = np.bincount(index, p)
    g = np.bincount(index, -np.expm1(cell * step - loss) * p)
    slop = float(np.bincount(index).max() + 8) * _U + 4 * atoms.slop
    if ask.upper:
        up = np.minimum(p_sum, g * ((1 + 4 * slop) / -math.expm1(-step)))
        p_sum, g = np.append(p_sum - up, 0.0) + np.append(0.0, up), np.zeros(len(g) + 1)
    return _settled(ask, _Grid(step, int(cell[0]), p_sum, g, top, excess), slop)


def _sum(ask: _Ask, a: _Grid, b: _Grid, cut: float) -> _Grid:
    """The losses of `a` and `b` added up."""
    a, b = _as_coarse(ask, a, b.step), _as_coarse(ask, b, a.step)
    p = np.convolve(a.p, b.p)
    g = np.zeros(len(p)) if ask.upper else np.convolve(a.p, b.g) + np.convolve(a.g, b.p - b.g)
    top = a.top * (1 + b.excess) + max(1 + a.excess - a.top, 0.0) * b.top
    excess = (a.excess + b.excess + a.excess * b.excess) * (1 + 4 * _U)
    whole = _loose(ask, _Grid(a.step, a.start + b.start, p, g, top, excess), (2 * (len(a.p) + len(b.p)) + 16) * _U)
    return _binned(ask, whole, cut, a.step)


def _as_coarse(ask: _Ask, grid: _Grid, step: float) -> _Grid:
    return grid if grid.step >= step else _binned(ask, _loose(ask, grid), 0.0, step)


def _loose(ask: _Ask, grid: _Grid, slop: float = 0.0) -> _Atoms:
    """Off the grid: a cell's loss is c - log(1 - g / p)."""
    kept = np.flatnonzero(grid.p > 0) if grid.p.any() else np.array([0])
    p, g, c = grid.p[kept], grid.g[kept], (grid.start + kept) * grid.step
    if ask.upper:
        return _Atoms(p, c, grid.top, grid.excess, slop)
    y = np.minimum(g * (1 - 4 * slop) / np.maximum(p, 5e-324), 1 - 2 * _U)
    loss = c - np.log1p(-y) * (1 - 1e-15)
    return _Atoms(p, loss - 4 * _U * np.abs(loss), grid.top, grid.excess, slop)


def _cut(ask: _Ask, p: Array, top: float, excess: float, cut: float) -> tuple[slice, Array, float, float]:
    """Takes up to `cut` of mass off either tail."""
    below, above = np.cumsum(p), np.cumsum(p[::-1])
    low, high = int(np.searchsorted(below, cut, "right")), int(np.searchsorted(above, cut, "right"))
    if cut < _FLOOR or low + high >= len(p):
        return slice(0, len(p)), p, top, excess
    kept = slice(low, len(p) - high)
    p = p[kept].copy()
    fell, rose = float(below[low - 1]) if low else 0.0, float(above[high - 1]) if high else 0.0
    if ask.upper:
        p[0] += fell
        return kept, p, top + rose, excess
    p[-1] += rose
    return kept, p, top, excess - fell * (1 + 1e-9)


def _settled(ask: _Ask, grid: _Grid, slop: float) -> _Grid:
    """The measure rounded outward: every p is right to a factor 1 +- slop, and the total is 1 + excess exactly.

    With i the lowest cell that holds 1e-7: upper adds slop above i and takes it below, lower the reverse (with i the
    cell below that one), and cell i holds the rest of the total. So the mass above any loss is bounded from the right
    side. Lower: what moves down arrives at the lower end of its cell, where g is 0.
    """
    step, start, p, g, top, excess = grid
    heavy = np.flatnonzero(p >= max(1e-7, 1e3 * slop))
    top *= 1 + ask.sign * slop
    raised, lowered = p * (1 + slop) + _FLOOR, np.maximum(p * (1 - 2 * slop) - _FLOOR, 0.0)
    if ask.upper:
        if not heavy.size:
            return _Grid(step, start, raised, g, top, excess)
        i = int(heavy[0])
        p = np.concatenate([lowered[:i], [0.0], raised[i + 1 :]])
        rest = math.fsum([1.0, excess, -top, *(-p).tolist()]) * (1 + 4 * _U)
        p[i] = rest if rest > 0 else raised[i]
        return _Grid(step, start, p, g, top, excess)
    g = np.maximum(g * (1 - 4 * slop) - _FLOOR, 0.0)
    if not heavy.size:
        return _Grid(step, start, lowered, np.minimum(g, lowered), top, min(math.fsum([*lowered, top, -1.0]), 0.0))
    i = int(heavy[0]) - 1
    if i < 0:
        i, start, lowered, raised, g = 0, start - 1, np.append(0.0, lowered), raised[:0], np.append(0.0, g)
    p = np.concatenate([raised[:i], [0.0], lowered[i + 1 :]])
    rest = math.fsum([1.0, excess, -top, *(-p).tolist()]) * (1 - 4 * _U)
    p[i] = max(rest, 0.0)
    if rest < 0:
        p[:i] = 0.0
    return _Grid(step, start, p, np.minimum(g, p), top, excess - 1e-22)


def _highest(ask: _Ask, grids: list[_Grid]) -> _Grid:
    """A measure above all of `grids`: above every loss it has the most mass that any of them has."""
    step = max(grid.step for grid in grids)
    grids = [_as_coarse(ask, grid, step) for grid in grids]
    start, end = min(grid.start for grid in grids), max(grid.start + len(grid.p) for grid in grids)
    if end - start > 2**20:
        raise _OutOfReach
    padded = [np.pad(grid.p, (grid.start - start, end - grid.start - len(grid.p))) for grid in grids]
    top = max(grid.top for grid in grids)
    tails = [np.cumsum(p[::-1]) + grid.top for p, grid in zip(padded, grids, strict=True)]
    p = np.maximum(np.diff(np.max(tails, axis=0), prepend=top), 0.0)[::-1]
    slop = 4 * (end - start) * _U
    tail = np.cumsum(p[::-1])[::-1] * slop  # differences of tails are right to slop of the tail, not of p
    return _settled(ask, _Grid(step, start, p + tail / (end - start), np.zeros(len(p)), top, 0.0), slop)


# ---------------------------------------------------------------- samples and stopping


def _mixed(rate: float, loss: Array) -> Array:
    """log(1 - rate + rate e^loss), to a few units in the last place."""
    near = np.log1p(rate * np.expm1(np.minimum(loss, 700.0))) if rate < 1 else loss
    if rate > 0.5:
        near = np.where(loss < -0.7, np.log(max(1 - rate, 5e-324) + rate * np.exp(np.minimum(loss, 0.0))), near)
    return np.where(loss > 700, loss + math.log(rate), near)


def _poisson(ask: _Ask, inner: _Atoms, rate: float) -> _Atoms:
    """(r P + (1-r) Q, Q) or, reversed, (P, (1-r) P + r Q).

    Lower: Q may have come to more than 1 by rounding, say k; then with q / k for the second q the bound holds for
    a < 1 - r as well, and what P lacks of 1 has at least the loss log(1 - r).
    """
    if rate == 1:
        return inner
    if rate < 1e-250:
        rate = 1e-250
        if not ask.upper:
            return _two_points(ask, 0.0)
    p, loss, top, excess, slop = inner
    if ask.reverse:
        p, loss = np.append(p, top), np.append(-_mixed(rate, -loss), -math.log1p(-rate))
        return _given(ask, p, loss, 0.0, 0.0, excess)._replace(slop=slop)
    q = _q(p, loss)
    k = max(1.0, math.fsum(q) - 4 * slop) if ask.upper else max(1.0, math.fsum(q) * (1 + 1e-12))
    p = (rate * p + (1 - rate) * q / (1.0 if ask.upper else k)) * (1 + ask.sign * 1e-14)
    loss, top = _mixed(rate, loss) - (0.0 if ask.upper else math.log(k)), rate * top
    rest = max(0.0, math.fsum([1.0, -top, *(-p).tolist()]) - 4 * (slop + 1e-14 * ask.upper + _U))
    p, loss = np.append(p, rest), np.append(loss, math.log1p(-rate))
    excess = rate * excess + 4 * _U * (slop == 0) + k - 1 if ask.upper else _excess(ask, p, top)
    return _given(ask, p, loss, 0.0, top, excess)._replace(slop=(slop + 2e-14) * ask.upper)


def _fixed_size(ask: _Ask, inner: _Atoms, rate: float) -> _Atoms:
    """Losses above 0 as for Poisson, their mirror images, and the rest at 0 (upper only)."""
    if rate == 1:
        return inner
    high = inner.loss > 0
    p, loss = inner.p[high], inner.loss[high]
    q, top, mixed = _q(p, loss), rate * inner.top, _mixed(rate, loss)
    p = np.concatenate([rate * p + (1 - rate) * q, q]) * (1 + 1e-14)
    rest = max(0.0, math.fsum([1.0, -top, *(-p).tolist()])) + 4 * _U
    p, loss = np.append(p, rest), np.concatenate([mixed, -mixed * (1 - 4e-15), [0.0]])
    return _given(ask, p, loss, 0.0, top, _excess(ask, p, top))


def _q(p: Array, loss: Array) -> Array:
    return np.exp(np.minimum(np.log(np.maximum(p, 5e-324)) - loss, 0.0))


def _excess(ask: _Ask, p: Array, top: float) -> float:
    total = math.fsum([*p.tolist(), top, -1.0])
    return max(total, 0.0) if ask.upper else min(total, 0.0)


def _stopped(ask: _Ask, event: events.RandomStopping, cut: float) -> _Atoms:
    """Upper: e-DP runs make (2 + shape) e-DP [PS22]. Lower: with one score for all, one run is shown, or none."""
    if ask.upper:
        if isinstance(event.count, events.PoissonCount):
            raise _OutOfReach
        return _two_points(ask, (2 + event.count.shape) * _pure(event.event) * (1 + 1e-14))
    one = _atoms(ask, event.event, cut)
    if isinstance(event.count, events.NegativeBinomialCount):
        return one
    none = math.exp(-event.count.mean)
    p = np.append(one.p * (1 - none), none) * (1 - 1e-15)
    top = one.top * (1 - none) * (1 - 1e-15)
    return _Atoms(p, np.append(one.loss, 0.0), top, _excess(ask, p, top))


def _pure(event: Event) -> float:
    """The epsilon of pure DP by basic composition; infinite where there is none."""
    match event:
        case events.Laplace(noise=noise) | events.DiscreteLaplace(noise=noise):
            return 1 / noise if noise > 1e-300 else math.inf
        case events.RandomizedResponse(epsilon=e) | events.PureDP(epsilon=e) | events.Selection(epsilon=e):
            return e
        case events.ApproximateDP(epsilon=e, delta=0.0):
            return e
        case events.Reproducible(event=inner) | events.ShuffledEpoch(event=inner):
            return _pure(inner)
        case events.Repeated(event=inner, times=times):
            return _pure(inner) * min(times, 10**300)
        case events.Composed(parts=parts):
            return float(sum(_pure(part) for part in parts))
        case events.OneOf(parts=parts):
            return max(_pure(part) for part in parts)
        case events.RandomStopping(event=inner, count=events.NegativeBinomialCount(shape=shape)):
            return (2 + shape) * _pure(inner)
        case events.PoissonSampled(event=inner) | events.FixedSizeSampled(event=inner) if _pure(inner) < math.inf:
            up, down = _mixed(event.rate, np.array([_pure(inner), -_pure(inner)]))
            pairwise = isinstance(event, events.PoissonSampled) and event.neighbours is Neighbours.REPLACE_ONE
            return float(up - down) if pairwise else float(up)
    return math.inf


def _distinct(parts: tuple[Event, ...]) -> list[Event]:
    """Without the parts that another dominates: less Gaussian or Laplace noise, or a larger epsilon."""
    worst: dict[Any, Event] = {}
    for part in parts:
        if isinstance(part, events.Gaussian | events.Laplace):
            kind, better = type(part), lambda old, new: new.noise < old.noise
        elif isinstance(part, events.PureDP | events.RandomizedResponse | events.Selection):
            kind, better = events.PureDP, lambda old, new: new.epsilon > old.epsilon
        else:
            kind, better = part, lambda old, new: False
        if kind not in worst or better(worst[kind], part):
            worst[kind] = part
    return list(worst.values())


def _inner(event: Event) -> tuple[Event, ...]:
    return getattr(event, "parts", None) or ((event.event,) if hasattr(event, "event") else ())


def _sampled(event: Event) -> bool:
    """Whether the two directions may differ."""
    return isinstance(event, events.PoissonSampled | events.FixedSizeSampled) or any(map(_sampled, _inner(event)))


def _work(event: Event) -> int:
    """About how many convolutions `event` takes."""
    own = 2 * event.times.bit_length() if isinstance(event, events.Repeated) else 1
    return own + sum(map(_work, set(_inner(event))))


# ---------------------------------------------------------------- the leaves


def _given(ask: _Ask, p: Any, loss: Any, slop: float, top: float = 0.0, excess: float = 0.0) -> _Atoms:
    """Masses right to a factor 1 +- slop and losses right to 1 +- 1e-15, rounded outward."""
    p, loss = np.asarray(p, float), np.asarray(loss, float)
    if not np.isfinite(loss).all():
        raise _OutOfReach
    return _Atoms(p * (1 + ask.sign * slop), loss + ask.sign * 1e-15 * np.abs(loss), top, excess, slop)


def _two_points(ask: _Ask, epsilon: float) -> _Atoms:
    return _given(ask, [expit(epsilon), expit(-epsilon)], [epsilon, -epsilon], 8 * _U)


def _laplace(ask: _Ask, noise: float) -> _Atoms:
    """Half of P at loss e = 1/noise, e^-e / 2 at -e, and density e^((l - e) / 2) / 4 between."""
    if not 1e-300 < noise:
        raise _OutOfReach
    e, panels = 1 / noise, 4 * ask.cells
    ends = np.linspace(-e, e, panels + 1)
    width = 2 * e / panels
    p = np.exp((ends[1:] - e) / 2) * (-math.expm1(-width / 2) / 2)
    middle = _panels(ask, p, p * -math.expm1(-width / 2), ends, 8 * _U * np.abs(ends), 64 * _U, 0.0)
    ends_p, ends_loss = np.array([0.5, math.exp(-e) / 2]), np.array([e, -e]) * (1 + np.array([1, -1]) * ask.sign * 2 * _U)
    p, loss = np.append(middle.p, ends_p * (1 + ask.sign * 4 * _U)), np.append(middle.loss, ends_loss)
    return _Atoms(p, loss, 0.0, 0.0, middle.slop)


def _discrete_laplace(ask: _Ask, noise: float, steps: int) -> _Atoms:
    """Loss (2k - s) / scale at k = 0..s, with P in proportion to r^(s-k), r = e^(-1/scale), and tails at both ends."""
    if steps > 2**16:
        if not ask.upper:
            return _laplace(ask, noise)
        block = -(-steps // 2**16)
        noise, steps = noise * (steps / block) / -(-steps // block) * (1 - 4 * _U), -(-steps // block)
    scale = noise * steps
    if not 1e-290 < noise < 1e290:
        raise _OutOfReach
    k = np.arange(steps + 1)
    p = np.exp((k - steps) / scale) * math.tanh(0.5 / scale)
    p[0], p[-1] = math.exp(-1 / noise) * expit(1 / scale), expit(1 / scale)
    return _given(ask, p, (2 * k - steps) / scale, 2000 * _U)


def _discrete_gaussian(ask: _Ask, noise: float, steps: int, cut: float) -> _Atoms:
    """Loss (2j/s + 1) / 2 noise^2 at s + j, with P in proportion to e^(-j^2 / 2 scale^2).

    Wide noise: a unit interval of the normal density is its middle's to 1 +- (z^2 + 1) / (20 scale^2), and the losses
    of an interval are its middle's to half a step.
    """
    scale, reach = noise * steps, _reach(cut)
    if not 1e-100 < noise < 1e100 or scale > 1e290:
        raise _OutOfReach
    if scale * reach > 2**16:
        wide = _gaussian(ask, noise, cut)
        slop = (reach * reach + 1) / (20 * scale * scale)
        return _given(ask, wide.p, wide.loss + ask.sign * 0.5001 / noise / scale, slop + wide.slop, wide.top, wide.excess)
    last = math.ceil(reach * scale)
    j = np.arange(-last, last + 1)
    p = np.exp(-((j / scale) ** 2) / 2)
    missing = 2 * max(cut, _FLOOR)
    loss = (2 * j / steps + 1) / noise / noise / 2
    return _given(ask, p / p.sum(), loss, 1e-12 + missing, ask.upper * missing, ask.sign * missing)


def _zcdp(ask: _Ask, noise: float) -> _Atoms:
    """Concentrated DP is (rho + 2 sqrt(rho log 1/d), d)-DP for every d [BS16]; here with d = delta / 2."""
    if noise < 1e-100 or ask.delta <= 0:
        raise _OutOfReach
    rho = 0.5 / noise**2
    epsilon = (rho + 2 * math.sqrt(rho * (math.log(2) - math.log(ask.delta)))) * (1 + 1e-12)
    return _atoms(ask, events.ApproximateDP(epsilon=epsilon, delta=ask.delta / 2), 0.0)


def _gaussian(ask: _Ask, noise: float, cut: float) -> _Atoms:
    """Under P the loss is s z + s^2 / 2, with z standard normal and s = 1 / noise."""
    if noise < 1e-100 and ask.upper:
        raise _OutOfReach
    s = 1 / min(max(noise, 1e-100), 1e100)

    def loss(z: Array) -> tuple[Array, Array]:
        value = s * z + s * s / 2
        return value, 4 * _U * (np.abs(s * z) + s * s)

    return _normal(ask, lambda z: np.exp(-z * z / 2), loss, [0.0], cut)


def _replaced(ask: _Ask, inner: Event, rate: float, cut: float) -> _Atoms:
    """Poisson sampling under replace-one: see the top of this file."""
    noise, base = 1.0, inner
    while isinstance(base, events.Repeated):
        noise, base = noise / math.sqrt(min(base.times, 10**300)), base.event
    if isinstance(base, events.Gaussian):
        noise *= base.noise * (1 - ask.sign * 1e-14)
        if noise < 1e-3 and ask.upper:
            raise _OutOfReach
        s = 1 / min(max(noise, 1e-3), 1e100)

        def loss(z: Array) -> tuple[Array, Array]:
            up, down = _mixed(rate, s * z - s * s / 2), _mixed(rate, -s * z - s * s / 2)
            return up - down, 8 * _U * (np.abs(up) + np.abs(down))

        def density(z: Array) -> Array:
            return (1 - rate) * np.exp(-z * z / 2) + rate * np.exp(-((z - s) ** 2) / 2)

        return _normal(ask, density, loss, [0.0, s], cut)
    e = _pure(inner)
    if ask.upper or isinstance(inner, events.PureDP):
        if not e < 700:
            raise _OutOfReach
        up, down = _mixed(rate, np.array([e, -e]))
        p = expit(-e) * np.exp(np.array([up, down]))
        return _given(ask, [*p, 1 - p.sum()], [up - down, down - up, 0.0], 1e-12)
    return _poisson(ask, _atoms(ask._replace(inside=True), inner, cut), rate)


def _reach(cut: float) -> float:
    return math.sqrt(-2 * math.log(min(max(cut, _FLOOR), 0.1)))


def _normal(ask: _Ask, density: Any, loss: Any, centres: list[float], cut: float) -> _Atoms:
    """A mixture of unit normals around `centres`, of increasing loss, by 8-point Gauss quadrature on narrow panels.

    The relative error is below 2e-23 (width (8 + reach))^16, 16 being twice the points, for p and for e^a q, where a is
    the loss at the panel's lower end. Panels too wide for that, or too flat, are not looked into: all of their mass
    goes to the outer end.
    """
    reach = _reach(cut)
    panels = max(4 * ask.cells, 2048)
    edges = np.unique(np.concatenate([centre + np.linspace(-reach, reach, panels + 1) for centre in centres]))
    ends, error = loss(edges)
    half = np.diff(edges)[:, None] / 2
    z = edges[:-1, None] + half * (1 + _NODES)
    mass = density(z) * (half * _WEIGHTS / math.sqrt(2 * math.pi))
    p, rise = mass.sum(axis=1), np.diff(ends)
    g = (mass * -np.expm1(np.minimum(ends[:-1, None] - loss(z)[0], 0.0))).sum(axis=1)
    g = np.where((rise > 2) | (half[:, 0] * (8 + reach) > 1), ask.upper * p, g)
    slop = (2 * reach * reach + 2 * reach * max(centres) + 100) * _U
    return _panels(ask, p, g, ends, error, slop, max(cut, _FLOOR))


def _panels(ask: _Ask, p: Array, g: Array, ends: Array, error: Array, slop: float, missing: float) -> _Atoms:
    """Ranges of outcomes with losses from ends[i] to ends[i + 1], mass p and excess g = p - e^ends[i] q."""
    wrong = 4 * np.maximum(error[1:], error[:-1])
    if not ask.upper:
        kept = p > _FLOOR
        y = np.clip(g * (1 - 1e-11) / np.maximum(p, _FLOOR) - wrong, 0.0, 1 - 2 * _U)
        return _given(ask, p[kept], (ends[:-1] - error[:-1] - np.log1p(-y))[kept], slop, 0.0, -missing)
    rise = -np.expm1(-np.diff(ends) + wrong)
    up = np.where(rise > 0, np.clip((g * (1 + 1e-11) + wrong * p) / np.maximum(rise, _FLOOR), 0.0, p), p)
    return _given(ask, np.append(p - up, 0.0) + np.append(0.0, up), ends + error, slop, missing, missing)

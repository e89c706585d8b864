"""Measures of privacy loss for `witness`: their delta, and sums of independent losses on a grid, rounded outward.

A measure is P mass p_i at losses l_i, with q_i = p_i e^-l_i, and `top`, P mass at loss infinity. UPPER ones may only
grow, LOWER ones only shrink, in H(a) = top + sum (p - a q)+ for every a >= 0:

  merge, split   Lower: the masses of a cell are added, p to p and q to q. Upper: a mass is split over the grid points
                 beside it so that p and q are kept. Merging outcomes is post-processing, splitting its reverse.
  order          Moving P mass to higher losses, or adding some, raises H; moving it lower or dropping it lowers H. So
                 the tails count as infinite and as the lowest loss (upper), or are dropped (lower).

Grid points are i * step, and step is a power of two: exact. A lower cell [c, c + step) keeps p and g = p - e^c q, so
sums of losses take no differences: G = p1 * g2 + g1 * (p2 - g2). The step grows with the spread of the losses: 10^18
repetitions take 60 doublings, and each of them adds the same relative error.

Rounding: everything is a sum of k positive terms, right to a factor 1 +- k 2^-53 (`slop`) or, after underflow, to
FLOOR. A measure's P mass is known to be at most (upper) or at least (lower) 1 + `excess`; so `_cells` moves what is
unsure along the losses, where adding or dropping it 10^18 times would add up. exp, log, expm1 and log1p are taken to be
right to 8 units in the last place.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
UNIT = 2.0**-53
FLOOR = 1e-307
_FINER = 4


class OutOfReach(Exception):
    """No finite bound: the upper one is infinite, the lower one 0."""


class Side(NamedTuple):
    """Which measure is asked for."""

    upper: bool
    reverse: bool  # the unit is in the second data set, not in the first
    cells: int
    delta: float
    inside: bool = False  # in a sample of fixed size: a value that counts against one that does not

    @property
    def sign(self) -> int:
        return 1 if self.upper else -1


class Measure(NamedTuple):
    """P mass `p` at `loss`, ascending; each p is already rounded outward by 1 +- slop."""

    p: Array
    loss: Array
    slop: float = 0.0
    top: float = 0.0
    excess: float = 0.0


def given(side: Side, p: Any, loss: Any, slop: float, top: float = 0.0, excess: float = 0.0) -> Measure:
    """Masses right to 1 +- slop at losses right to 1 +- 1e-15, rounded outward."""
    p, loss = np.asarray(p, float), np.asarray(loss, float)
    if not np.isfinite(loss).all():
        raise OutOfReach
    p, top = np.maximum(p * (1 + side.sign * slop) + side.sign * FLOOR, 0.0), top * (1 + side.sign * slop)
    kept = p > 0 if p.any() else np.arange(len(p)) == 0
    return Measure(p[kept], (loss + side.sign * 1e-15 * np.abs(loss))[kept], slop, top, excess)


def as_is(measure: Measure) -> Measure:
    """The measure as it stands, with its own sum for total."""
    return measure._replace(slop=0.0, excess=math.fsum([*measure.p.tolist(), measure.top, -1.0]))


def mixed(rate: float, loss: Array) -> Array:
    """log(1 - rate + rate e^loss), to a few units in the last place."""
    if rate == 1:
        return loss
    near = np.log1p(rate * np.expm1(np.minimum(loss, 700.0)))
    if rate > 0.5:
        near = np.where(loss < -0.7, np.log(1 - rate + rate * np.exp(np.minimum(loss, 0.0))), near)
    return np.where(loss > 700, loss + math.log(rate), near)


def delta_at(side: Side, measure: Measure, epsilon: float) -> float:
    """H(e^epsilon), rounded outward."""
    above = measure.loss > epsilon
    total = measure.top - float(np.dot(np.expm1(epsilon - measure.loss[above]), measure.p[above]))
    return min(total * (1 + side.sign * 1e-11), 1.0)


def epsilon_at(side: Side, measure: Measure, delta: float) -> float:
    """The smallest epsilon with `delta_at` <= delta, by bisection, rounded outward."""
    low, high = 0.0, max(float(measure.loss.max()), 0.0)
    if delta_at(side, measure, high) > delta:
        return math.inf
    if delta_at(side, measure, 0.0) <= delta:
        return 0.0
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_at(side, measure, middle) <= delta else (middle, high)
    return high if side.upper else low


def power(side: Side, one: Measure, times: int, cut: float) -> Measure:
    """`one`, `times` over: double for every binary digit, add one where it is a 1; the first sums on finer grids.

    About `cut` of mass in all is moved outward at the tails. Fewer times never cost more, so lower may stop early.
    """
    most = int(min(1e30 if side.upper else 1e20, 0.1 / max(abs(one.excess), 1e-40)))
    if times > max(most, 1) and side.upper:
        raise OutOfReach
    times = min(times, most)
    if times <= 1:
        return one
    one = whole = _trimmed(side, one, cut / times)
    done, cells = 1, 2 * _FINER * side.cells
    for digit in bin(times)[3:]:
        done, cells = 2 * done + int(digit), max(cells // 2, side.cells)
        whole = add(side._replace(cells=cells), whole, whole, cut * done / times)
        if digit == "1":
            whole = add(side._replace(cells=cells), whole, one, cut * done / times)
    return whole


def add(side: Side, a: Measure, b: Measure, cut: float) -> Measure:
    """Independent losses added up, on a grid of about `cells` steps."""
    widths = [max(np.ptp(x.loss) / side.cells, np.abs(x.loss).max() * 2.0**-40, 2.0**-1000) for x in (a, b)]
    if max(widths) > 1e290:
        raise OutOfReach
    step = 2.0 ** math.ceil(math.log2(max(widths)))
    start, p, g, top, excess = _cells(side, a, step)
    start_b, p_b, g_b, top_b, excess_b = (start, p, g, top, excess) if b is a else _cells(side, b, step)
    slop = (2 * (len(p) + len(p_b)) + 16) * UNIT
    whole = np.convolve(p, p_b)
    loss = (start + start_b + np.arange(len(whole))) * step
    if not side.upper:
        y = (np.convolve(p, g_b) + np.convolve(g, p_b - g_b)) / np.maximum(whole, FLOOR)
        loss = loss - np.log1p(-np.minimum(y * (1 - 4 * slop), 1 - 2 * UNIT)) * (1 - 1e-14)
    top = top * float(p_b.sum() + top_b) + float(p.sum()) * top_b
    excess = (excess + excess_b + excess * excess_b) * (1 + 4 * UNIT)
    return _trimmed(side, given(side, whole, loss, slop, top, excess), cut)


def _cells(side: Side, measure: Measure, step: float) -> tuple[int, Array, Array, float, float]:
    """The measure on a grid: start, p, g, top, excess.

    Upper: of a cell, g / (1 - e^-step) goes to its upper end. Then, with i the lowest cell that holds 1e-7, upper adds
    slop to every p above i and takes it from those below; lower does the reverse, with i one cell lower. Cell i holds
    the rest of the total, so the mass above any loss errs to the right side. In a lower cell what arrives from above
    sits at the lower end, where g is 0. Cell i is light, so that the total is kept to 1e-22; where less is left than
    its own mass, part of that is dropped, with the same part of g.
    """
    cell = np.floor(measure.loss / step)
    start = int(cell.min())
    index = (cell - start).astype(np.int64)
    p = np.bincount(index, measure.p).astype(np.float64)
    g = np.bincount(index, -np.expm1(cell * step - measure.loss) * measure.p).astype(np.float64)
    slop = (int(np.bincount(index).max()) + 8) * UNIT + 4 * measure.slop
    if side.upper:
        up = np.minimum(p, g * ((1 + 4 * slop) / -math.expm1(-step)))
        p, g = np.append(p - up, 0.0) + np.append(0.0, up), np.zeros(len(p) + 1)
    else:
        start, p, g = start - 1, np.append(0.0, p), np.append(0.0, np.maximum(g * (1 - 4 * slop) - FLOOR, 0.0))
    top = measure.top * (1 + side.sign * slop)
    more, less = p * (1 + slop) + FLOOR, np.maximum(p * (1 - 2 * slop) - FLOOR, 0.0)
    heavy = np.flatnonzero(p >= max(1e-7, 1e3 * slop))
    i = max(int(heavy[0]) - (not side.upper), 0) if heavy.size else 0
    own = p[i]
    p = np.concatenate([less[:i], [0.0], more[i + 1 :]] if side.upper else [more[:i], [0.0], less[i + 1 :]])
    rest = math.fsum([1.0, measure.excess, -top, *(-p).tolist()]) * (1 + side.sign * 4 * UNIT)
    if side.upper:
        p[i] = rest
        return start, p if rest > 0 else more, g, top, measure.excess
    if rest <= 0:
        p[:i] = 0.0
        return start, p, np.minimum(g, p), top, math.fsum([*p.tolist(), top, -1.0])
    p[i], g[i] = rest, g[i] * min(rest / max(own, FLOOR), 1.0) * (1 - 4 * slop)
    return start, p, np.minimum(g, p), top, measure.excess - 1e-22


def _trimmed(side: Side, measure: Measure, cut: float) -> Measure:
    """Without up to `cut` of mass at either tail: see "order" above."""
    p, loss, slop, top, excess = measure
    if not float(p.max()) < 1e100:  # moved outward until it left floating point, or is not a number
        raise OutOfReach
    below, above = np.cumsum(p), np.cumsum(p[::-1])
    low, high = int(np.searchsorted(below, cut, "right")), int(np.searchsorted(above, cut, "right"))
    if cut < FLOOR or low + high >= len(p):
        return measure
    fell, rose = float(below[low - 1]) if low else 0.0, float(above[high - 1]) if high else 0.0
    p, loss = p[low : len(p) - high].copy(), loss[low : len(loss) - high]
    if not side.upper:
        return Measure(p, loss, slop, top, excess - (fell + rose) * (1 + 1e-9))
    p[0] += fell
    return Measure(p, loss, slop, top + rose * (1 + 1e-9), excess)

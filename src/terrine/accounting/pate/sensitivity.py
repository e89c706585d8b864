"""How far one person can move PATE's vote-dependent bill: local sensitivity at every distance, and smooth [PSM18].

Write b(q) for the bound of `gaussian_max` at one order (the worst case above a point q0). One person moves one vote,
which moves every gap by at most 2, so q stays between

    L(q) = (m-1) F(F^-1(q/(m-1)) - 2 / (sqrt 2 sigma))   and   U(q), the same with +,     F the normal tail function.

The local sensitivity is at most max(b(U(q)) - b(q), b(q) - b(L(q))) ([PSM18] Algorithm 3), largest on the plateau
between q1 = L(q0) and q0. At distance d, the votes worth looking at are those with d votes moved between the leader and
the runner-up, towards the plateau (its Algorithms 4 and 5).

That walk is right when b rises (condition C5) and b(U(q)) - b(q) rises (condition C6) below the plateau. Both are
checked here. Where C6 fails, the largest rise over any cell of a grid stands in for the walk; where C5 fails, b's
whole range does. Distances are 0 .. teachers - 1. Every row never falls, so rows may be added up over queries.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_ndtr, ndtri_exp

from terrine import check
from terrine.accounting.pate.gaussian_max import (
    Floats,
    Integers,
    bound,
    counts,
    holds,
    log_beaten,
    log_wrong,
    threshold_rdp,
)
from terrine.accounting.roots import root as root_of
from terrine.errors import InvalidArgument

_NEGLIGIBLE = -40.0
"""A term e^-40 times the largest one does not change a sum of floats."""
_MANY = 25
"""From this many classes on, it is faster to go row by row."""


def gaussian_max_local_sensitivity(votes: ArrayLike, *, noise: float, order: float, slack: float = 0.0) -> Floats:
    """Bounds (queries, distances) on the local sensitivity of the noisy maximum's bill at `order`."""
    falling = counts(votes)
    teachers = teachers_of(falling)
    profile = profile_of(check.positive("noise", noise), _order(order), falling.shape[1])
    found = np.full((len(falling), teachers), profile.plateau)
    if not profile.rises:
        return found
    start = log_wrong(falling, profile.noise, slack)
    right = np.flatnonzero(start < profile.log_q1)
    left = np.flatnonzero(start > profile.log_q0)
    _walk_right(found, right, falling[right], profile, slack)
    _walk_left(found, left, falling[left], profile, slack)
    return np.maximum.accumulate(found, axis=1, out=found)


def gaussian_max_smooth_sensitivity(
    votes: ArrayLike, *, noise: float, order: float, beta: float, slack: float = 0.0
) -> Floats:
    """`beta`-smooth sensitivity (queries,) of each query's bill: max over d of e^(-beta d) x the bound at d."""
    local = gaussian_max_local_sensitivity(votes, noise=noise, order=order, slack=slack)
    return discounted(local, check.positive("beta", beta))


def threshold_local_sensitivity(
    votes: ArrayLike, *, threshold: float, noise: float, order: float, slack: float = 0.0
) -> Floats:
    """Bounds (queries, distances) on the local sensitivity of the threshold test's bill at `order`.

    The bill depends on the largest count alone, which one person moves by at most 1.
    """
    falling = counts(votes)
    teachers = teachers_of(falling)
    every = np.stack([np.arange(teachers + 1), np.zeros(teachers + 1, dtype=np.int64)], axis=1)
    bills = threshold_rdp(every, threshold=threshold, noise=noise, orders=_order(order), slack=slack)[:, 0]
    rise = np.abs(np.diff(bills))
    steps = np.maximum(np.append(rise, 0.0), np.append(0.0, rise))
    # Row v: the largest step among counts within d of v. Only the largest counts that occur are worked out.
    largest, place = np.unique(falling[:, 0], return_inverse=True)
    reach = np.arange(teachers)
    up, down = np.minimum(largest[:, None] + reach, teachers), np.maximum(largest[:, None] - reach, 0)
    rows: Floats = np.maximum.accumulate(np.maximum(steps[up], steps[down]), axis=1)
    return rows[place.reshape(-1)]


def threshold_smooth_sensitivity(
    votes: ArrayLike, *, threshold: float, noise: float, order: float, beta: float, slack: float = 0.0
) -> Floats:
    """`beta`-smooth sensitivity (queries,) of the threshold test's bill."""
    local = threshold_local_sensitivity(votes, threshold=threshold, noise=noise, order=order, slack=slack)
    return discounted(local, check.positive("beta", beta))


def sanitisable_rdp(votes: ArrayLike, *, noise: float, order: float, slack: float = 0.0) -> Floats:
    """The bill (queries,) that the sensitivities above belong to: never below `gaussian_max_rdp`."""
    falling = counts(votes)
    profile = profile_of(check.positive("noise", noise), _order(order), falling.shape[1])
    return profile.bill(log_wrong(falling, profile.noise, slack))


def discounted(local: Floats, beta: float) -> Floats:
    """The largest of each row after a factor e^(-beta distance)."""
    found: Floats = np.max(local * np.exp(-beta * np.arange(local.shape[-1])), axis=-1)
    return found


def teachers_of(falling: Integers) -> int:
    """The number of teachers that voted, the same in every row.

    Raises:
        InvalidArgument: rows do not sum to one number, or nobody voted.
    """
    sums = falling.sum(axis=1)
    if not len(sums) or sums.min() != sums.max() or sums[0] < 1:
        low, high = (int(sums.min()), int(sums.max())) if len(sums) else (0, 0)
        raise InvalidArgument(f"rows of votes sum to {low} .. {high}: want the number of teachers in every row")
    return int(sums[0])


@dataclass(frozen=True)
class VoteProfile:
    """The bill as a function of log q at one order, and how much it can move."""

    noise: float
    order: float
    classes: int
    log_q0: float
    log_q1: float
    plateau: float
    rises: bool
    """Whether the bill rises with q below q0: without that, only its whole range bounds its changes."""
    grid: Floats
    steepest: Floats
    """Where C6 fails: the largest rise up to each point of `grid`; empty where it holds."""

    def bill(self, log_q: Floats) -> Floats:
        """b(q)."""
        worst = self.order / self.noise**2
        inside = log_q < self.log_q0
        found = bound(np.where(inside, log_q, self.log_q0), self.noise, self.order)
        return np.where(inside, np.minimum(found, worst), worst)

    def above(self, log_q: Floats) -> Floats:
        """log U(q)."""
        return _moved(log_q, self.noise, self.classes, +1)

    def below(self, log_q: Floats) -> Floats:
        """log L(q)."""
        return _moved(log_q, self.noise, self.classes, -1)

    def local(self, log_q: Floats) -> Floats:
        """[PSM18] Algorithm 3."""
        here = self.bill(log_q)
        beyond = log_q > self.log_q0
        rise = self.bill(self.above(log_q)) - here
        if self.steepest.size:
            rise = np.maximum(rise, self.steepest[np.minimum(np.searchsorted(self.grid, log_q), self.grid.size - 1)])
        # Below q1, by C6, the rise above q is the larger one; beyond q0 nothing is above.
        rise[beyond] = here[beyond] - self.bill(self.below(log_q[beyond]))
        return np.where((log_q >= self.log_q1) & ~beyond, self.plateau, rise)


@functools.lru_cache(maxsize=4096)
def profile_of(noise: float, order: float, classes: int) -> VoteProfile:
    """The profile for one noise, order and number of classes, with conditions C5 and C6 checked."""
    log_q0 = _crossing(noise, order)
    bare = VoteProfile(noise, order, classes, log_q0, log_q0, order / noise**2, False, np.empty(0), np.empty(0))
    log_q1 = float(bare.below(np.array([log_q0]))[0])
    # Down to where the bill is a millionth of its worst case or far below anything that 10^4 teachers reach.
    grid = -(np.linspace(math.sqrt(-log_q1), math.sqrt(-log_q1) + 200.0, 4000)[::-1] ** 2)
    bills = bare.bill(grid)
    if np.any(np.diff(bills) < 0):
        return bare
    rise = bare.bill(bare.above(grid)) - bills
    rise[-1] = plateau = order / noise**2 - float(bills[-1])  # U(q1) is q0, whatever the rounding says
    steepest = np.empty(0)
    if np.any(np.diff(rise) < 0):
        cells = bare.bill(bare.above(grid[1:])) - bills[:-1]  # b and U rise: no point of a cell moves further
        steepest = np.maximum.accumulate(np.append(rise[0], cells))
        plateau = max(plateau, float(steepest[-1]))
    return VoteProfile(noise, order, classes, log_q0, log_q1, plateau, True, grid, steepest)


def _crossing(noise: float, order: float) -> float:
    """log q0: from here up the worst case is the bill. Below, the theorem holds and is cheaper."""

    def dearer(log_q: float) -> float:
        return float(bound(np.array([log_q]), noise, order)[0]) - order / noise**2

    high = -max((1 + 1 / noise) ** 2, ((order - 0.99) / noise) ** 2, 1 / noise**2)
    while not bool(holds(np.array([high]), noise)[0]):
        high *= 1.1
    if dearer(high) < 0:
        return high
    low = 2 * high
    while dearer(low) > 0:
        low *= 1.5
    return root_of(dearer, low, high, xtol=1e-13, rtol=1e-14)


def _moved(log_q: Floats, noise: float, classes: int, sign: int) -> Floats:
    share = math.log(classes - 1)
    point = ndtri_exp(np.minimum(log_q - share, -1e-300))
    moved: Floats = share + log_ndtr(point + sign * math.sqrt(2) / noise)
    return np.minimum(moved, 0.0)


def _order(order: float) -> float:
    value = check.number("order", order, "> 1")
    if not 1 < value < math.inf:
        raise check.refuse("order", order, "> 1 and finite")
    return value


def _walk_right(found: Floats, rows: Integers, falling: Integers, profile: VoteProfile, slack: float) -> None:
    """Votes move from the leader to the runner-up until q reaches q1; `found` is filled on the way."""
    if not rows.size:
        return
    gaps = falling[:, :1] - falling[:, 1:]
    table = log_beaten(int(gaps.max()), profile.noise, slack)
    reached = int(np.searchsorted(-table, -profile.log_q1, side="right"))  # first gap whose lone term is below q1
    steps = np.minimum((gaps[:, 0] - reached) // 2 + 1, found.shape[1])
    steps = np.maximum(steps, 1)
    row, step = _ragged(steps)
    first = table[gaps[row, 0] - 2 * step]
    rest = _rest_of_few(gaps, row, step, first, table) if gaps.shape[1] < _MANY else _rest(gaps, steps, first, table)
    log_q = first + np.log1p(rest)
    log_q = np.minimum(log_q, math.log1p(-1 / profile.classes))
    values, place = np.unique(log_q, return_inverse=True)
    below = values < profile.log_q1
    local = np.full(values.shape, profile.plateau)
    local[below] = profile.local(values[below])
    found[rows[row], step] = local[place.reshape(-1)]


def _rest(gaps: Integers, steps: Integers, first: Floats, table: Floats) -> Floats:
    """Sum of the terms of all classes behind the runner-up, relative to the runner-up's.

    One row at a time: there the term of a class at steps 0, 1, .. is a slice of the table read backwards.
    """
    total = np.zeros(first.size)
    backwards = table[::-1]
    largest = table.size - 1
    floor = _NEGLIGIBLE - math.log(gaps.shape[1])
    end = 0
    for row, length in zip(gaps, steps.tolist(), strict=True):
        start, end = end, end + length
        near = largest - int(row[1]) if row.size > 1 else largest + 1
        lead = first[start:end]
        reach = int(np.count_nonzero(backwards[near : near + length] - lead[: largest + 1 - near] > floor))
        if reach:
            distinct, copies = _runs(row[1:])
            slices = np.lib.stride_tricks.sliding_window_view(backwards, reach)
            terms = slices[largest - distinct] - lead[:reach]
            total[start : start + reach] = copies @ np.exp(terms, out=terms)
    return total


def _rest_of_few(gaps: Integers, row: Integers, step: Integers, first: Floats, table: Floats) -> Floats:
    """The same for few classes: one class at a time, all rows at once."""
    total = np.zeros(row.size)
    active: slice | Integers = slice(None)
    for place in range(1, gaps.shape[1]):
        behind = table[gaps[:, place][row[active]] - step[active]] - first[active]
        keep = np.flatnonzero(behind > _NEGLIGIBLE)
        if not keep.size:
            break
        active = keep if isinstance(active, slice) else active[keep]
        total[active] += np.exp(behind[keep])
    return total


def _runs(rising: Integers) -> tuple[Integers, Integers]:
    """The distinct values of a rising row, and how often each occurs."""
    starts = np.flatnonzero(np.append(True, rising[1:] != rising[:-1]))
    return rising[starts], np.diff(np.append(starts, rising.size))


def _walk_left(found: Floats, rows: Integers, falling: Integers, profile: VoteProfile, slack: float) -> None:
    """Votes move from the strongest rivals to the leader until q falls to q0; before U(q0) nothing moves the bill."""
    if not rows.size:
        return
    teachers = found.shape[1]
    movable = falling[:, 1:].sum(axis=1)
    ceiling = float(profile.above(np.array([profile.log_q0]))[0])
    stop = np.minimum(_first(falling, profile, slack, profile.log_q0, movable), movable)  # the last step walked
    begin = np.minimum(_first(falling, profile, slack, ceiling, movable), stop)
    distance = np.arange(teachers)
    quiet = distance < begin[:, None]
    found[rows[:, None], distance] = np.where(quiet, 0.0, found[rows])
    row, offset = _ragged(stop - begin + 1)
    step = begin[row] + offset
    inside = step < teachers
    row, step = row[inside], step[inside]
    log_q = log_wrong(_levelled(falling[row], step), profile.noise, slack)
    found[rows[row], step] = profile.local(log_q)


def _first(falling: Integers, profile: VoteProfile, slack: float, target: float, movable: Integers) -> Integers:
    """For each row the fewest moved votes with log q <= target; `movable` + 1 where none is enough."""
    low = np.zeros(len(falling), dtype=np.int64)
    high = movable + 1
    while np.any(low < high):
        middle = (low + high) // 2
        open_ = low < high
        enough = log_wrong(_levelled(falling, np.minimum(middle, movable)), profile.noise, slack) <= target
        high = np.where(open_ & enough & (middle <= movable), middle, high)
        low = np.where(open_ & ~(enough & (middle <= movable)), middle + 1, low)
    return low


def _levelled(falling: Integers, moved: Integers) -> Integers:
    """Each row after `moved` votes went, one at a time, from whichever rival was strongest to the leader."""
    rivals = falling[:, 1:]
    ranks = np.arange(1, rivals.shape[1] + 1)
    excess = np.cumsum(rivals, axis=1) - ranks * rivals  # votes to take before all rivals up to here are level
    level_count = (excess <= moved[:, None]).sum(axis=1)  # how many rivals are cut
    total = np.take_along_axis(np.cumsum(rivals, axis=1), level_count[:, None] - 1, axis=1)[:, 0] - moved
    base, extra = np.divmod(total, level_count)
    cut = base[:, None] + (ranks <= extra[:, None])
    after = np.where(ranks <= level_count[:, None], cut, rivals)
    return np.concatenate([falling[:, :1] + moved[:, None], after], axis=1)


def _ragged(lengths: Integers) -> tuple[Integers, Integers]:
    """Row numbers and, within each row, 0 .. length-1."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    step = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return row, step

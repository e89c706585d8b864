"""Integer noise, exact and fast: what every additive mechanism adds, in steps of its grid.

Four distributions over the integers, for any scale t > 0:

    discrete Laplace     P(k) ~ exp(-|k| / t)                    [GRS12], the geometric mechanism
    discrete Gaussian    P(k) ~ exp(-k^2 / 2 t^2)                [CKS20]
    rounded Laplace      K = nearest integer to Lap(t)
    rounded Gaussian     K = nearest integer to N(0, t^2)

A value on the grid plus rounded noise IS the ideal real-valued mechanism, rounded: a post-processing, so its
event is the continuous one, in any dimension.

How a draw is made, with no error at all. The magnitude is cut into blocks of w = 2^m integers. A block is drawn
from a table of 64-bit weights, a position in it uniformly, and the pair is kept with the ratio of the true mass
to the block's highest mass (rejection; 94 to 99% are kept). Two things are only known approximately in machine
numbers, and neither is decided by them:

- A weight is the floor of the true one; the mass lost to the floors and to blocks beyond the table is one more
  entry of the table (below 2^-50), drawn from exactly what was lost, in decimal arithmetic of any precision.
- "Keep with probability p" compares random bits with p as a float; where they are closer than the float's error,
  more bits are drawn and p is computed to more digits until they differ.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from terrine import check
from terrine.rng import Source, Words

Integers = NDArray[np.int64]

LARGEST_SCALE = 2.0**44
"""Scales above this are refused: a coarser grid says the same."""

FARTHEST = 2**62
"""Noise is clipped here, far below what 64 bits hold; no draw this far from 0 will ever be seen."""

_CHUNK = 1 << 14
_FEW = 40
_FINE = 36
_WORD = 1 << 64
_SMALLEST_ROUNDED = 2.0**-24


class Shape(enum.Enum):
    """The exponent of the noise."""

    LAPLACE = "laplace"
    GAUSSIAN = "gaussian"


@lru_cache(maxsize=256)
def noise(shape: Shape, scale: float, *, rounded: bool = False, table_bits: int = 64) -> IntegerNoise:
    """The sampler for one distribution; samplers hold public tables only and are shared."""
    return IntegerNoise(shape, scale, rounded=rounded, table_bits=table_bits)


class IntegerNoise:
    """Independent draws of one of the four distributions of this module.

    `table_bits` below 64 makes the table coarse, which changes the speed and never the distribution; tests use it
    to walk the paths that are otherwise taken once in 2^50 draws.
    """

    def __init__(self, shape: Shape, scale: float, *, rounded: bool = False, table_bits: int = 64) -> None:
        self.shape, self.rounded, self.table_bits = shape, rounded, table_bits
        self.scale = check.positive("scale", scale)
        if self.scale > LARGEST_SCALE:
            raise check.refuse("scale", scale, f"at most 2^44 = {LARGEST_SCALE:g} grid steps", "use a coarser grid")
        if rounded and self.scale < _SMALLEST_ROUNDED:
            raise check.refuse("scale", scale, "at least 2^-24 grid steps", "use a finer grid or a smaller epsilon")
        exponent = math.frexp(self.scale)[1]  # 2^(exponent-1) <= scale < 2^exponent
        self._shift = max(1, _FINE - exponent) if rounded else 0  # fine cells per step, as a power of 2
        self._fine = math.ldexp(self.scale, self._shift)
        self._bits = max(0, exponent + self._shift - (4 if shape is Shape.LAPLACE else 5))
        self._width = 1 << self._bits
        self._kept_bits = min(64 - self._bits, 52)
        doubt = 2.0**-44 + (32 / self._fine if rounded else 0.0)
        self._margin = 2.0 + math.ldexp(doubt, self._kept_bits)
        self._tabulate()

    def draw(self, rng: Source) -> int:
        """One draw."""
        while True:
            word = rng.word()
            column, low = word >> self._low_bits, word & self._low_mask
            index = column if low < self._limit_list[column] else self._alias_list[column]
            start, sign = self._start_list[index], self._sign_list[index]
            if index == self._lost:
                start, sign = self._draw_lost(rng)
            elif not self._bits:
                return start ^ sign
            second = rng.word()
            within, bits = second & (self._width - 1), second >> (64 - self._kept_bits)
            gap = self._chance(start, sign, within) - bits
            doubtful = abs(gap) <= self._margin or index == self._lost
            if self._keep(start, sign, within, bits, rng) if doubtful else gap > 0:
                return self._nearest(start + within, sign)

    def sample(self, count: int, rng: Source) -> Integers:
        """`count` draws."""
        if count <= _FEW:
            return np.array([self.draw(rng) for _ in range(count)], dtype=np.int64)
        out = np.empty(count, dtype=np.int64)
        for begin in range(0, count, _CHUNK):
            self._fill(out[begin : begin + _CHUNK], rng)
        return out

    def _chance(self, start: int, sign: int, within: int) -> float:
        if self.shape is Shape.LAPLACE:
            return math.ldexp(math.exp(-within / self._fine), self._kept_bits)
        best = start if self.rounded else start - sign
        return math.ldexp(math.exp(-0.5 * within * (2 * best + within) / self._fine**2), self._kept_bits)

    # -- drawing many ------------------------------------------------------------------------------------------

    def _fill(self, out: Integers, rng: Source) -> None:
        first = self._attempt(out, rng)
        missing = np.flatnonzero(~first)
        while missing.size:
            values = np.empty(missing.size, dtype=np.int64)
            kept = self._attempt(values, rng)
            out[missing[kept]] = values[kept]
            missing = missing[~kept]

    def _attempt(self, out: Integers, rng: Source) -> NDArray[np.bool_]:
        """Propose a value for every place of `out`; return which of them stand."""
        words = rng.words(out.size)
        column = (words >> np.uint64(self._low_bits)).astype(np.intp)
        index = np.where((words & np.uint64(self._low_mask)) < self._limit[column], column, self._alias[column])
        start, sign = self._start[index], self._sign[index]
        lost = np.flatnonzero(index == self._lost)
        if not self._bits and not lost.size:
            out[:] = start ^ sign
            return np.ones(out.size, dtype=np.bool_)
        second = rng.words(out.size)
        within = (second & np.uint64(self._width - 1)).astype(np.int64)
        kept, doubtful = self._judge(start, sign, within, second >> np.uint64(64 - self._kept_bits))
        out[:] = self._nearest_of(start | within, sign)
        for place in np.union1d(doubtful, lost):
            one, flip = self._draw_lost(rng) if index[place] == self._lost else (int(start[place]), int(sign[place]))
            bits = int(second[place]) >> (64 - self._kept_bits)
            kept[place] = self._keep(one, flip, int(within[place]), bits, rng)
            out[place] = self._nearest(one + int(within[place]), flip)
        return kept

    def _judge(
        self, start: Integers, sign: Integers, within: Integers, bits: Words
    ) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
        if self.shape is Shape.LAPLACE:
            exponent = within * (-1.0 / self._fine)
        else:
            best = start if self.rounded else start - sign
            exponent = within * (2.0 * best + within) * (-0.5 / self._fine**2)
        chance = np.ldexp(np.exp(exponent), self._kept_bits)
        gap = chance - bits.astype(np.float64)
        return gap > 0, np.flatnonzero(np.abs(gap) <= self._margin)

    def _nearest_of(self, magnitude: Integers, sign: Integers) -> Integers:
        if not self.rounded:
            return magnitude ^ sign
        steps = (magnitude + (1 << (self._shift - 1))) >> self._shift
        return (steps ^ sign) - sign

    # -- deciding one exactly ------------------------------------------------------------------------------------

    def _nearest(self, magnitude: int, sign: int) -> int:
        magnitude = min(magnitude, FARTHEST << self._shift)
        if not self.rounded:
            return magnitude ^ sign
        steps = (magnitude + (1 << (self._shift - 1))) >> self._shift
        return -steps if sign else steps

    def _keep(self, start: int, sign: int, within: int, bits: int, rng: Source) -> bool:
        """Whether a uniform number that begins with `bits` lies below the true ratio of masses."""
        best = start - (0 if self.rounded else sign)
        length, places = self._kept_bits, 30
        fraction, fraction_length = 0, 0
        while True:
            with localcontext(Context(prec=places)):
                low_end = Decimal(within) + Decimal(fraction) / (1 << fraction_length)
                high_end = low_end + (Decimal(1) / (1 << fraction_length) if self.rounded else 0)
                error = Decimal(10) ** (8 - places)
                most = self._ratio(best, low_end) + error
                least = self._ratio(best, high_end) - error
                uniform, unit = Decimal(bits), Decimal(1 << length)
                if (uniform + 1) / unit + error <= least:
                    return True
                if uniform / unit - error >= most:
                    return False
            bits, length, places = bits << 64 | rng.word(), length + 64, places + 20
            if self.rounded:
                fraction, fraction_length = fraction << 64 | rng.word(), fraction_length + 64

    def _ratio(self, best: int, within: Decimal) -> Decimal:
        """The mass (or density) at `within` past the block's best, over the best."""
        scale = Decimal(self._fine)
        if self.shape is Shape.LAPLACE:
            return (-within / scale).exp()
        return (-within * (2 * best + within) / (2 * scale * scale)).exp()

    # -- the table -----------------------------------------------------------------------------------------------

    def _tabulate(self) -> None:
        """Integer weights of the blocks, never above the true ones, and their alias table [Vose91]."""
        with localcontext(Context(prec=60)):
            masses = self._masses(Decimal(2) ** -(self.table_bits + 6))
            tail = 4 * masses[-1] * (16 if self.shape is Shape.LAPLACE else 32)  # above the blocks left out
            whole = (sum(masses) + tail) * (1 + Decimal(10) ** -45)
            weights = [int(mass * (1 << self.table_bits) / whole) for mass in masses]
        unit = 1 << (64 - self.table_bits)
        weights = [weight * unit for weight in weights]
        self._lost = len(weights)
        self._weights = weights
        self._lost_weight = _WORD - sum(weights)
        column_bits = max(1, self._lost.bit_length())
        self._low_bits = 64 - column_bits
        self._low_mask = (1 << self._low_bits) - 1
        limit, alias = _alias_table([*weights, self._lost_weight], 1 << column_bits)
        start = [(i >> 1) << self._bits for i in range(self._lost)] + [0]
        sign = [-(i & 1) for i in range(self._lost)] + [0]
        self._limit_list, self._alias_list, self._start_list, self._sign_list = limit, alias, start, sign
        self._limit = np.array(limit, dtype=np.uint64)
        self._alias = np.array(alias, dtype=np.intp)
        self._start = np.array(start, dtype=np.int64)
        self._sign = np.array(sign, dtype=np.int64)

    def _masses(self, smallest: Decimal) -> list[Decimal]:
        found: list[Decimal] = []
        for mass in self._all_masses():
            found.append(mass)
            if len(found) % 2 == 0 and mass < smallest:
                return found
        raise AssertionError("masses fall without end")

    def _all_masses(self) -> Iterator[Decimal]:
        """The highest mass of each block: block 0 upward, block 0 downward, block 1 upward, and so on.

        Consecutive blocks differ by a factor, and for a Gaussian that factor itself shrinks by a fixed one, so no
        exponential is taken after the first few.
        """
        scale, width = Decimal(self._fine), Decimal(self._width)
        masses, factors = [], []
        for best in (0, 0 if self.rounded else 1):  # downward starts at -1; a real number is as likely on each side
            if self.shape is Shape.LAPLACE:
                masses.append((-best / scale).exp())
                factors.append((-width / scale).exp())
            else:
                masses.append((-best * best / (2 * scale * scale)).exp())
                factors.append((-width * (2 * best + width) / (2 * scale * scale)).exp())
        shrink = Decimal(1) if self.shape is Shape.LAPLACE else (-width * width / (scale * scale)).exp()
        while True:
            for side in (0, 1):
                yield masses[side]
                masses[side] *= factors[side]
                factors[side] *= shrink

    def _draw_lost(self, rng: Source) -> tuple[int, int]:
        """A block, from the exact masses minus what the table gives: where the table's floors lost mass."""
        bits, length, places = rng.word() << 64 | rng.word(), 128, 60
        while True:
            with localcontext(Context(prec=places)):
                found = self._locate_lost(bits, length, Decimal(10) ** (20 - places))
            if found is not None:
                return (found >> 1) << self._bits, -(found & 1)
            bits, length, places = bits << 64 | rng.word(), length + 64, places + 40

    def _locate_lost(self, bits: int, length: int, error: Decimal) -> int | None:
        """The lost block at the uniform position `bits`, or None where `error` leaves two blocks possible."""
        masses = self._masses(error / 1000)
        unit = Decimal(_WORD) / sum(masses)  # what is beyond these masses is below the error
        low = Decimal(self._lost_weight) * bits / (1 << length)
        high = Decimal(self._lost_weight) * (bits + 1) / (1 << length)
        slack = error * _WORD
        total = Decimal(0)
        for index, mass in enumerate(masses):
            before = total
            total += mass * unit - (self._weights[index] if index < self._lost else 0)
            if high + slack <= total:
                return index if low - slack >= before or index == 0 else None
        return None


def _alias_table(weights: list[int], columns: int) -> tuple[list[int], list[int]]:
    """Whole-number alias table: column i holds `limit[i]` of weight i, and of `alias[i]` the rest."""
    capacity = _WORD // columns
    left = weights + [0] * (columns - len(weights))
    limit, alias = [capacity] * columns, list(range(columns))
    small = [i for i, weight in enumerate(left) if weight < capacity]
    large = [i for i, weight in enumerate(left) if weight >= capacity]
    while small and large:
        needy, giver = small.pop(), large[-1]
        limit[needy], alias[needy] = left[needy], giver
        left[giver] -= capacity - left[needy]
        if left[giver] < capacity:
            small.append(large.pop())
    return limit, alias


def log_mass(shape: Shape, scale: float, k: int) -> Fraction:
    """The exponent of the discrete mass at `k`, for tests and error bounds: -|k|/t or -k^2 / 2t^2."""
    t = Fraction(scale)
    return -abs(k) / t if shape is Shape.LAPLACE else -Fraction(k * k) / (2 * t * t)

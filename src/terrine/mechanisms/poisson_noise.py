"""Poisson and Skellam noise, exact for any mean: whole numbers whose chances are the real ones, whatever floats say.

A Poisson variable of mean m is drawn by rejection. Proposed is M + K, with M = floor(m) its mode and K exact discrete
Laplace noise of scale t (`lattice`); kept is k with probability

    p(k) e^(|k - M| / t) / B,      B = the largest of these products,

which exists because p is log-concave: the products rise and fall once on either side of M. With t about 1.2 sqrt(m),
two of three proposals are kept. The comparison with a random number is made in floats; where they are too close to
tell, more bits are drawn and both sides are computed to as many digits as it takes (about once in 2^30 draws).

Skellam noise of variance v is the difference of two Poisson variables of mean v / 2.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from terrine import check
from terrine.mechanisms import lattice
from terrine.rng import Source

Integers = NDArray[np.int64]

LARGEST_MEAN = 2.0**80
_CHUNK = 1 << 15
_BITS = 52
_FEW = 200
"""Up to this mean the chances are listed."""
_DOUBT = 2.0**-33
"""What a float log-probability may be off by; it commits less than 1e-12 (see `_log_ratio`)."""
_BERNOULLI = tuple(Fraction(*one) for one in ((1, 6), (-1, 30), (1, 42), (-1, 30), (5, 66), (-691, 2730), (7, 6),
                                              (-3617, 510), (43867, 798), (-174611, 330)))  # fmt: skip


def skellam(count: int, variance: float, rng: Source) -> Integers:
    """`count` draws of Skellam noise."""
    one = poisson(check.positive("variance", variance) / 2)
    return one.sample(count, rng) - one.sample(count, rng)


@lru_cache(maxsize=64)
def poisson(mean: float) -> PoissonNoise:
    """The sampler for one mean; samplers hold public numbers only and are shared."""
    return PoissonNoise(mean)


class PoissonNoise:
    """Independent draws of a Poisson variable, relative to its mode; `doubt` is for tests of the slow way."""

    def __init__(self, mean: float, *, doubt: float = _DOUBT) -> None:
        self.mean = check.positive("mean", mean)
        if mean > LARGEST_MEAN:
            raise check.refuse("mean", mean, "at most 2^80", "use a coarser grid")
        self.mode = math.floor(mean)
        self._doubt = doubt
        self._scale = max(1.0, 1.2 * math.sqrt(mean))
        self._proposed = lattice.noise(lattice.Shape.LAPLACE, self._scale)
        self._best = max((self._highest(step) for step in (-1, 1)), key=lambda k: self._exponent(k, 50))
        self._listed = self._list() if self.mode < _FEW else None
        self._top = 0.0 if self._listed is not None else float(self._exponent(self._best, 50))

    def sample(self, count: int, rng: Source) -> Integers:
        """`count` draws, less the mode: what differences of draws need."""
        out = np.empty(count, dtype=np.int64)
        for begin in range(0, count, _CHUNK):
            self._fill(out[begin : begin + _CHUNK], rng)
        return out

    def _fill(self, out: Integers, rng: Source) -> None:
        filled = 0
        while filled < out.size:
            kept = self._attempt(int((out.size - filled) * 1.6) + 8, rng)[: out.size - filled]
            out[filled : filled + kept.size] = kept
            filled += kept.size

    def _attempt(self, count: int, rng: Source) -> Integers:
        """Those of `count` proposals that are kept, in order."""
        k = self._proposed.sample(count, rng)
        bits = rng.words(count) >> np.uint64(64 - _BITS)
        chance = np.exp(self._log_ratio(k))
        gap = chance - np.ldexp(bits.astype(np.float64), -_BITS)
        kept = gap > 0
        for place in np.flatnonzero(np.abs(gap) <= self._doubt * chance + 2.0 ** (1 - _BITS)):
            kept[place] = self._keep(int(k[place]), int(bits[place]), rng)
        return k[kept]

    def _log_ratio(self, k: Integers) -> NDArray[np.float64]:
        """log of the chance to keep k, in floats: m D(k) with D in a form that takes no difference of large numbers.

        log p(n) - log p(M) for n = M + k, by Stirling's formula with its first terms; small n exactly.
        """
        if self._listed is not None:
            return self._listed[np.clip(k + self.mode + 1, 0, len(self._listed) - 1)]
        far = np.maximum(k, -self.mode // 2)  # further down the chance is 0 in floats; see `_keep`
        value = _log_mass(self.mean, self.mode, far) + np.abs(k) / self._scale - self._top
        return np.where(k < far, -800.0, np.minimum(value, 0.0))

    def _keep(self, k: int, bits: int, rng: Source) -> bool:
        """Whether a uniform number that begins with `bits` lies below the chance to keep k."""
        if k < -self.mode:
            return False
        length, places = _BITS, 40
        while True:
            with localcontext(Context(prec=places)):
                error = Decimal(10) ** (12 - places)
                chance = (self._exponent(k, places) - self._exponent(self._best, places)).exp()
                if Decimal(bits + 1) / (1 << length) <= chance - error:
                    return True
                if Decimal(bits) / (1 << length) >= chance + error:
                    return False
            if k == self._best:
                return True
            bits, length, places = bits << 64 | rng.word(), length + 64, places + 20

    def _exponent(self, k: int, places: int) -> Decimal:
        """log of m^n / n! e^(|k| / t) for n = M + k, less that at k = 0, to 12 digits fewer than `places`."""
        n, mode = self.mode + k, self.mode
        extra = 2 * len(str(n + mode))
        with localcontext(Context(prec=places + extra)):
            mass = k * Decimal(self.mean).ln() - (_log_factorial(n, places) - _log_factorial(mode, places))
            return +(mass + abs(Decimal(k)) / Decimal(self._scale))

    def _list(self) -> NDArray[np.float64]:
        """The logs of the chances from n = -1 to where they are next to 0."""
        most, top = self.mode + math.ceil(40 * self._scale) + 60, self._exponent(self._best, 40)
        logs = [float(self._exponent(n - self.mode, 40) - top) for n in range(most + 1)]
        return np.array([-800.0, *logs, -800.0])

    def _highest(self, step: int) -> int:
        """Where the products are largest on one side of the mode: the first k at which they no longer rise."""
        low, high = -1, 0
        while self._rises(step * high, step):
            low, high = high, 2 * high + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._rises(step * middle, step) else (low, middle)
        return step * high

    def _rises(self, k: int, step: int) -> bool:
        """Whether the product at k + step is larger than at k."""
        n = self.mode + k
        if step < 0 and n <= 0:
            return False
        with localcontext(Context(prec=60)):
            ratio = Decimal(self.mean) / (n + 1) if step > 0 else Decimal(n) / Decimal(self.mean)
            return ratio.ln() + 1 / Decimal(self._scale) > 0


def _log_mass(mean: float, mode: int, k: Integers) -> NDArray[np.float64]:
    """log p(M + k) - log p(M): (k) log m - log (M+k)!/M!, as a sum of small terms.

    log (M+k)!/M! = n log n - M log M - k + (log n - log M)/2 + c(n) - c(M), with n = M + k, and c(n) = 1/12n - 1/360n^3
    + ...; n log n - M log M - k log m - k = M h(k/M) + k log(M/m) with h(x) = (1+x) log(1+x) - x.
    """
    x = k / mode
    main = mode * _bend(x) - k * math.log1p((mean - mode) / mode)
    return -(main + 0.5 * np.log1p(x) + _correction(mode + k.astype(np.float64)) - _correction(np.float64(mode)))


def _bend(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """(1+x) log(1+x) - x, by its series where the difference would lose digits."""
    near = np.clip(x, -0.02, 0.02)
    series = np.zeros_like(near)
    for j in range(12, 1, -1):
        series = series * near + (1.0 if j % 2 == 0 else -1.0) / (j * (j - 1))
    return np.where(np.abs(x) <= 0.02, series * near * near, (1 + x) * np.log1p(x) - x)


def _correction(n: NDArray[np.float64] | np.float64) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.asarray((1 / 12 - (1 / 360 - 1 / 1260 / n**2) / n**2) / n)
    return found


def _log_factorial(n: int, places: int) -> Decimal:
    """log n!, within 10^-places: exactly for small n, by Stirling's series above."""
    if n <= 2000:
        return Decimal(math.factorial(n)).ln()
    shift = max(0, 10 ** (places // 18 + 1) - n)  # the series is good to `places` from here on
    at = n + shift
    z = Decimal(at)
    total = (z + Decimal("0.5")) * z.ln() - z + (2 * _pi()).ln() / 2
    power = z
    for j, value in enumerate(_BERNOULLI, start=1):
        total += Decimal(value.numerator) / Decimal(value.denominator) / (2 * j * (2 * j - 1)) / power
        power *= z * z
    for i in range(n + 1, at + 1):
        total -= Decimal(i).ln()
    return total


@lru_cache(maxsize=1)
def _pi() -> Decimal:
    """pi to 300 digits, by Machin's formula."""
    with localcontext(Context(prec=320)):

        def arctan(inverse: int) -> Decimal:
            term, total, k = Decimal(1) / inverse, Decimal(0), 0
            while abs(term) > Decimal(10) ** -315:
                total += term / (2 * k + 1) * (-1) ** k
                term, k = term / (inverse * inverse), k + 1
            return total

        return 4 * (4 * arctan(5) - arctan(239))

"""Audit one run against a whole trade-off curve rather than one epsilon [MMC24].

Write f for the trade-off curve that a mechanism claims for flipping one canary's coin: a test whose false-positive rate
is x has a true-positive rate of at most F(x) = 1 - f(x). F is concave and rises; g is its inverse, the least
false-positive rate that buys a true-positive rate. There are m canaries with fair, independent coins; the attacker
sees the output, makes exactly r guesses, and N of them are correct.

Theorem. Let p_n = P(N = n). For every j from 1 to r,

    1/m sum over n >= j of n p_n  <=  F( 1/m sum over n >= j-1 of (r - n) p_n ).

Proof. Take canary i, coins s, and the outputs for which guess i is right and N >= j. Under coins that differ at i only,
guess i is wrong for the same outputs and N >= j - 1, so f bounds the first probability by F of the second. Since F is
concave, averaging over coins and over canaries keeps the inequality. On the left, n of m canaries are guessed right; on
the right, r - n are guessed wrong.

How likely can N >= v be, then? Put a_n = 1/m sum over k >= n of (r - k) p_k and b_n = 1/m sum over k >= n of k p_k. The
theorem asks for a_n >= g(b_{n+1}) everywhere, and all probability together is a_0 + b_0 = r/m. For a tail of t, the
least is spent with all of it at v exactly, and below v with as little at each n as the theorem allows:

    a_v = t (r - v)/m,      b_v = t v/m,
    a_n = max(a_{n+1}, g(b_{n+1})),      b_n = b_{n+1} + n/(r - n) (a_n - a_{n+1})      for n = v-1, ..., 0.

(Moving probability from n > v down to v raises a and lowers b below; moving what is not needed at n + 1 down to n, as
much as keeps a_n, lowers b: neither breaks a constraint, and neither adds to the total.) If that exceeds r/m, the tail
is smaller than t, for every larger t too: with p, every c p with c < 1 keeps the constraints, since g is convex and
g(0) = 0. Summed by parts, b_n has positive terms only,

    b_n = t r / (m (r - v + 1)) + n/(r - n) a_n + sum over n < k < v of a_k r / ((r - k)(r - k + 1)),

so that a g that is rounded down rounds everything down: the probability can only come out too large.

What is assumed: fair coins of their own; a number of guesses that does not depend on them; and f for neighbours that
differ in one coin. Nothing is assumed about how canaries hang together. A refuted curve is refuted for every mechanism:
that of one (epsilon, delta) by `epsilon`, a claimed event's own by `refutes`, every Gaussian's up to `mu`. Only what
mu then says about epsilon (`gaussian_epsilon`) asks for more: a mechanism whose curve is that of some Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import ndtr, ndtri

from terrine import check
from terrine.accounting import Profile, gaussian
from terrine.audit.guesses import Guesses

_ROUNDING = 1e-10
"""Relative error granted to sums and to normal probabilities, far above what numpy and scipy commit."""
_MOST = 60.0
"""No bound on mu is looked for beyond."""


class Curve(Protocol):
    """A trade-off curve, read from the side of the attacker's success."""

    def least(self, true_positive_rate: float) -> float:
        """The least false-positive rate with which a test can have this true-positive rate, rounded down."""


@dataclass(frozen=True)
class GaussianCurve:
    """The curve of a Gaussian whose mean moves by `mu` deviations: g(y) = Phi(Phi^-1(y) - mu) [DRS22]."""

    mu: float

    def least(self, true_positive_rate: float) -> float:
        return float(ndtr(ndtri(true_positive_rate) - self.mu)) * (1 - _ROUNDING)


@dataclass(frozen=True)
class Point:
    """The curve of (epsilon, delta)-DP alone: two lines [DRS22]."""

    epsilon: float
    delta: float

    def least(self, true_positive_rate: float) -> float:
        grow = math.exp(min(self.epsilon, 700.0))
        rising = (true_positive_rate * (1 - _ROUNDING) - self.delta) / grow * (1 - _ROUNDING)
        return max(0.0, rising, 1 - self.delta - grow * (1 - true_positive_rate) - _ROUNDING)


@dataclass(frozen=True, eq=False)
class Certified:
    """The curve behind a certified profile: all lines of all of its points, the greatest at each place."""

    profile: Profile

    def least(self, true_positive_rate: float) -> float:
        grow, delta = np.exp(np.minimum(self.profile.epsilon, 700.0)), self.profile.delta
        rising = (true_positive_rate * (1 - _ROUNDING) - delta) / grow * (1 - _ROUNDING)
        steep = 1 - delta - grow * (1 - true_positive_rate) - _ROUNDING
        return max(0.0, float(rising.max()), float(steep.max()))


def refutes(guesses: Guesses, curve: Curve, *, chance: float) -> bool:
    """Whether so many correct guesses have a probability below `chance` under every mechanism that keeps the curve."""
    v, r, m = guesses.correct, guesses.made, guesses.canaries
    if v == 0:
        return False
    start = chance * r / (m * (r - v + 1))
    a, b, between = chance * (r - v) / m, chance * v / m, 0.0
    for n in range(v - 1, -1, -1):
        a = max(a, curve.least(b))
        b = (start + n / (r - n) * a + between) * (1 - _ROUNDING)
        if a + b > r / m * (1 + _ROUNDING):  # what is spent so far only grows
            return True
        between += a * r / ((r - n) * (r - n + 1))
    return False


def p_value(guesses: Guesses, curve: Curve) -> float:
    """The greatest probability of so many correct guesses under the curve, rounded up."""
    low, high = 0.0, 1.0
    if not refutes(guesses, curve, chance=high):
        return 1.0
    while high - low > 1e-6 * high and high > 1e-300:
        middle = (low + high) / 2 if low > 0 else high / 16
        low, high = (low, middle) if refutes(guesses, curve, chance=middle) else (middle, high)
    return high


def epsilon(guesses: Guesses, *, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that so many correct guesses refute at `delta`, whatever the mechanism; 0 for none."""
    chance, delta = 1 - check.open_unit("confidence", confidence), check.half_open_unit("delta", delta)
    return largest(lambda value: refutes(guesses, Point(value, delta), chance=chance))


def mu(guesses: Guesses, *, confidence: float = 0.95) -> float:
    """The largest mu whose Gaussian curve so many correct guesses refute; 0 where they refute none."""
    chance = 1 - check.open_unit("confidence", confidence)
    return largest(lambda value: refutes(guesses, GaussianCurve(value), chance=chance), most=_MOST)


def gaussian_epsilon(guesses: Guesses, *, delta: float, confidence: float = 0.95) -> float:
    """The epsilon at `delta` of the bound on mu: a bound for mechanisms whose curve is that of some Gaussian.

    For others mu is proven and epsilon is a reading of it. At delta 0 no Gaussian has an epsilon.
    """
    found = mu(guesses, confidence=confidence)
    return gaussian.epsilon_below(found, check.open_unit("delta", delta)) if found > 0 else 0.0


def largest(refuted: Callable[[float], bool], *, least: float = 0.0, most: float = 700.0) -> float:
    """The largest value that is refuted, from below, where refuting one refutes all smaller; `least` if none above."""
    if not refuted(least):
        return least
    low, high = least, 2 * least + 1
    while refuted(high):
        low, high = high, 2 * high
        if high > most:
            return low
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low

"""Randomized response [War65]: everyone adds noise to their own answer, and nobody has to be trusted.

Two coins, k answers: with probability `truth` report the true answer, else one of all k at random. Then

    P(report = truth) = truth + (1 - truth)/k,   epsilon = ln(1 + k truth / (1 - truth))

so two fair coins cost ln 3 and a first coin of 75% costs ln 7. From n reports with share r of an answer,
(r - (1 - truth)/k) / truth is an unbiased estimate of its true share.

Unary encoding [WBLJ17], for large domains: the answer as a row of k bits with one 1; every bit is reported through a
coin of its own, P(1 | 1) = p and P(1 | 0) = q. Changing the answer changes two bits: epsilon = ln(p (1-q) / ((1-p) q)).
OPTIMAL (p = 1/2, q = 1/(e^epsilon + 1)) has the least variance; SYMMETRIC has 1 - p = q = 1/(e^(epsilon/2) + 1).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri

from terrine import check, events
from terrine.errors import InvalidArgument
from terrine.events import Neighbours
from terrine.mechanisms import exact, grid
from terrine.mechanisms.release import Release, stamped
from terrine.rng import SYSTEM, Source

_SMALLEST = Fraction(1, 2**60)


@dataclass(frozen=True)
class Estimate:
    """Shares of each answer, estimated without bias, with a confidence interval for each."""

    shares: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    confidence: float


@dataclass(frozen=True, kw_only=True)
class RandomizedResponse:
    """Report the truth with probability `truth`, else one of `answers` at random; give `truth` or `epsilon`.

    Guarantee: each report is (epsilon, 0)-DP for the person who gives it (replace-one; that they answered is public).

    Raises:
        InvalidArgument: not exactly one of truth and epsilon, or one out of range.
    """

    truth: float | None = None
    epsilon: float | None = None
    answers: int = 2
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "answers", check.whole("answers", self.answers, at_least=2))
        if (self.truth is None) == (self.epsilon is None):
            raise InvalidArgument(f"truth={self.truth}, epsilon={self.epsilon}: want exactly one of the two")
        if self.truth is not None:
            check.open_unit("truth", self.truth, "at 1 there is no privacy, at 0 no answer")
            odds = Fraction(self.truth) / (1 - Fraction(self.truth)) * self.answers
            object.__setattr__(self, "epsilon", math.log1p(float(odds)) * (1 + 1e-15))
        elif self.epsilon is not None:
            check.positive("epsilon", self.epsilon)
            grown = math.expm1(min(self.epsilon, 40.0))  # no float can tell a coin of 1 - e^-40 from a certain one
            object.__setattr__(self, "truth", grown / (grown + self.answers) * (1 - 1e-15))

    @property
    def event(self) -> events.RandomizedResponse:
        assert self.epsilon is not None
        return events.RandomizedResponse(epsilon=self.epsilon, neighbours=Neighbours.REPLACE_ONE, unit=self.unit)

    def release(self, value: Any, *, rng: Source = SYSTEM) -> Release[Any]:
        """One report per answer in `value` (a whole number from 0 to answers - 1, True or False, or an array).

        Raises:
            InvalidArgument: an answer that is not on the list.
        """
        private = _answers(value, self.answers)
        assert self.truth is not None
        flat = private.reshape(-1)
        honest = exact.coins(Fraction(self.truth), flat.size, rng)
        reports = np.where(honest, flat, _uniform(self.answers, flat.size, rng)).reshape(private.shape)
        return Release(reports if private.ndim else int(reports), stamped(self.event, rng))

    def estimate(self, reports: Any, *, confidence: float = 0.95) -> Estimate:
        """Shares of the true answers, from reports: public arithmetic, no further cost.

        The intervals are exact (Clopper-Pearson) for the share of reports, carried over, and cut to [0, 1].
        """
        public = _answers(reports, self.answers).reshape(-1)
        assert self.truth is not None
        seen = np.bincount(public, minlength=self.answers).astype(np.float64)
        noise = (1 - self.truth) / self.answers
        low, high = _clopper_pearson(seen, public.size, confidence)
        return Estimate(
            (seen / public.size - noise) / self.truth,
            np.clip((low - noise) / self.truth, 0, 1),
            np.clip((high - noise) / self.truth, 0, 1),
            confidence,
        )

    def error(self, *, confidence: float = 0.95, size: int) -> float:
        """By how much an estimated share is off at most, for `size` reports (normal approximation, worst case)."""
        assert self.truth is not None
        chance = 1 - check.open_unit("confidence", confidence)
        return float(-ndtri(chance / 2)) * 0.5 / math.sqrt(check.whole("size", size)) / self.truth


class Encoding(enum.Enum):
    """How the two coins of unary encoding are chosen."""

    OPTIMAL = "optimal"
    SYMMETRIC = "symmetric"


@dataclass(frozen=True, kw_only=True)
class UnaryEncoding:
    """One noisy bit for each of `answers` possible answers, for domains too large for randomized response.

    Guarantee: each report is (epsilon, 0)-DP for the person who gives it (replace-one).
    """

    epsilon: float
    answers: int
    encoding: Encoding = Encoding.OPTIMAL
    unit: events.Unit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check.positive("epsilon", self.epsilon))
        object.__setattr__(self, "answers", check.whole("answers", self.answers, at_least=2))

    @property
    def chances(self) -> tuple[Fraction, Fraction]:
        """P(1 | 1) and P(1 | 0), rounded to the private side."""
        if self.encoding is Encoding.OPTIMAL:
            return Fraction(1, 2), max(Fraction(_logistic(-self.epsilon) * (1 + 1e-14)), _SMALLEST)
        wrong = max(Fraction(_logistic(-self.epsilon / 2) * (1 + 1e-14)), _SMALLEST)
        return 1 - wrong, wrong

    @property
    def event(self) -> events.RandomizedResponse:
        return events.RandomizedResponse(epsilon=self.epsilon, neighbours=Neighbours.REPLACE_ONE, unit=self.unit)

    def release(self, value: Any, *, rng: Source = SYSTEM) -> Release[NDArray[np.bool_]]:
        """For one answer, a row of `answers` bits; for n answers, n rows.

        Raises:
            InvalidArgument: an answer that is not on the list.
        """
        private = _answers(value, self.answers)
        kept, wrong = self.chances
        bits = exact.coins(wrong, private.size * self.answers, rng).reshape(private.size, self.answers)
        bits[np.arange(private.size), private.reshape(-1)] = exact.coins(kept, private.size, rng)
        return Release(bits if private.ndim else bits[0], stamped(self.event, rng))

    def estimate(self, reports: Any, *, confidence: float = 0.95) -> Estimate:
        """Shares of the true answers, from rows of bits: public arithmetic, no further cost."""
        rows = np.atleast_2d(grid.array_of("reports", reports))
        if rows.ndim != 2 or rows.shape[1] != self.answers or not rows.size:
            raise InvalidArgument(f"reports: shape {rows.shape} arrived; want rows of {self.answers} bits")
        kept, wrong = (float(chance) for chance in self.chances)
        ones = rows.astype(np.float64).sum(axis=0)
        low, high = _clopper_pearson(ones, len(rows), confidence)
        gain = kept - wrong
        return Estimate(
            (ones / len(rows) - wrong) / gain,
            np.clip((low - wrong) / gain, 0, 1),
            np.clip((high - wrong) / gain, 0, 1),
            confidence,
        )


def _answers(value: Any, answers: int) -> NDArray[np.int64]:
    array = grid.array_of("value", value)
    if not array.size:
        raise InvalidArgument("value: empty; want at least one answer")
    if array.dtype.kind not in "iub":
        raise InvalidArgument(f"value: {array.dtype} arrived; want answers as whole numbers from 0 to {answers - 1}")
    if (array < 0).any() or (array >= answers).any():
        raise InvalidArgument(f"value: an answer is off the list; want whole numbers from 0 to {answers - 1}")
    return array.astype(np.int64)


def _uniform(bound: int, count: int, rng: Source) -> NDArray[np.int64]:
    limit = np.uint64((1 << 64) // bound * bound - 1)
    words = rng.words(count).copy()
    while (over := np.flatnonzero(words > limit)).size:
        words[over] = rng.words(over.size)
    return (words % np.uint64(bound)).astype(np.int64)


def _logistic(x: float) -> float:
    return math.exp(x) / (1 + math.exp(x))


def _clopper_pearson(seen: NDArray[np.float64], total: int, confidence: float) -> tuple[Any, Any]:
    tail = (1 - check.open_unit("confidence", confidence)) / 2
    low = np.where(seen > 0, betaincinv(np.maximum(seen, 1), total - seen + 1, tail), 0.0)
    high = np.where(seen < total, betaincinv(seen + 1, np.maximum(total - seen, 1), 1 - tail), 1.0)
    return low, high

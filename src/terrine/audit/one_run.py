"""Audit a single training run: many canaries, each in or out by a coin of its own [SNJ23].

After the run, guess for each canary whether it was in, or abstain. If training is (epsilon, delta)-DP under adding or
removing an example, then for m canaries, r guesses and W ~ Binomial(r, e^epsilon / (1 + e^epsilon)),

    P(at least v correct) <= P(W >= v) + 2 m delta max over i in 1..m of P(v > W >= v - i) / i.      [SNJ23] Theorem 5.2

Nothing is assumed about how canaries' scores hang together. The number of guesses must not depend on which canaries
were in: `guess` fixes a few numbers beforehand, and shares the error between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import bdtr, bdtrc, expit

from terrine import check
from terrine.audit.scores import Flags, paired
from terrine.errors import InvalidArgument

_ROUNDING = 1e-9
"""Relative error granted to the binomial tails, far above what scipy commits."""


@dataclass(frozen=True)
class Guesses:
    """`correct` of `made` guesses about `canaries` coins."""

    correct: int
    made: int
    canaries: int

    def __post_init__(self) -> None:
        check.whole("canaries", self.canaries)
        if not 0 <= self.correct <= self.made <= self.canaries:
            raise InvalidArgument(
                f"correct={self.correct}, made={self.made}, canaries={self.canaries}: want correct <= made <= canaries"
            )


@dataclass(frozen=True)
class OneRun:
    """What was guessed in one run, for each number of guesses fixed beforehand, proven with `confidence` together."""

    guesses: tuple[Guesses, ...]
    confidence: float

    def bound(self, delta: float) -> float:
        """A lower bound on epsilon at `delta`; valid at all deltas at once."""
        share = 1 - (1 - self.confidence) / len(self.guesses)
        return max(epsilon(one, delta=delta, confidence=share) for one in self.guesses)


def p_value(guesses: Guesses, *, epsilon: float, delta: float) -> float:
    """The greatest probability of so many correct guesses under (epsilon, delta)-DP, rounded up."""
    rate = float(expit(check.not_negative("epsilon", epsilon)))
    delta = check.half_open_unit("delta", delta)
    v, r = guesses.correct, guesses.made
    if v == 0:
        return 1.0
    beyond = float(bdtrc(v - 1, r, rate))
    if delta == 0:
        return min(1.0, beyond * (1 + _ROUNDING))
    below = np.concatenate([bdtr(np.arange(v - 1, -1, -1), r, rate), [0.0]])  # P(W <= v - 1), ..., P(W <= 0), 0
    steps = np.arange(1, v + 1)
    # For i > v the probability no longer grows, so the largest quotient is at i <= v.
    steepest = float(np.max((below[0] - below[1:] + _ROUNDING * below[0]) / steps))
    return min(1.0, (beyond + 2 * guesses.canaries * delta * steepest) * (1 + _ROUNDING))


def epsilon(guesses: Guesses, *, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that so many correct guesses refute at `delta`; 0 where they refute none.

    Refuting epsilon refutes every smaller one too, so any value that is refuted is a valid bound.
    """
    confidence = check.open_unit("confidence", confidence)

    def refuted(value: float) -> bool:
        return p_value(guesses, epsilon=value, delta=delta) < 1 - confidence

    low, high = 0.0, 1.0
    if not refuted(low):
        return 0.0
    while refuted(high):
        low, high = high, 2 * high
        if high > 700:
            return low
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def guess(
    scores: ArrayLike,
    included: ArrayLike,
    *,
    confidence: float = 0.95,
    guesses: int | Sequence[int] | None = None,
    seed: int = 0,
) -> OneRun:
    """Guess "in" for the highest scores and "out" for as many of the lowest, and abstain between.

    `guesses` is how many in all, or several numbers to try; without, a few shares of the canaries. Ties are broken at
    random. `included` must have been drawn with a fair coin for each canary.
    """
    every, flags = paired(scores, included)
    confidence = check.open_unit("confidence", confidence)
    asked = _shares(flags.size) if guesses is None else [guesses] if isinstance(guesses, int) else list(guesses)
    made = sorted({check.whole("guesses", one) for one in asked})
    if made[-1] > flags.size:
        raise check.refuse("guesses", made[-1], f"at most the {flags.size} canaries")
    shuffled = np.random.default_rng(seed).permutation(flags.size)  # whatever the order of canaries tells is lost
    order = shuffled[np.argsort(every[shuffled], kind="stable")]
    return OneRun(tuple(_guessed(flags[order], one) for one in made), confidence)


def coins(count: int) -> Flags:
    """A fair coin for each of `count` canaries, from the operating system."""
    import secrets

    count = check.whole("count", count)
    bits = np.frombuffer(secrets.token_bytes(math.ceil(count / 8)), dtype=np.uint8)
    return np.unpackbits(bits)[:count].astype(np.bool_)


def _shares(canaries: int) -> list[int]:
    return [max(1, round(canaries * share)) for share in (0.02, 0.1, 0.4, 0.85)]


def _guessed(ordered: Flags, made: int) -> Guesses:
    """`ordered`: whether each canary was in, from the lowest score to the highest."""
    high = (made + 1) // 2
    low = made - high
    correct = int(ordered[ordered.size - high :].sum()) + int((~ordered[:low]).sum())
    return Guesses(correct, made, ordered.size)

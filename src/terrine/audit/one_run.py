"""Audit a single training run: many canaries, each in or out by a coin of its own [SNJ23].

After the run, guess for each canary whether it was in, or abstain. If training is (epsilon, delta)-DP under adding or
removing an example, then for m canaries, r guesses and W ~ Binomial(r, e^epsilon / (1 + e^epsilon)),

    P(at least v correct) <= P(W >= v) + 2 m delta max over i in 1..m of P(v > W >= v - i) / i.      [SNJ23] Theorem 5.2

Nothing is assumed about how canaries' scores hang together. The number of guesses must not depend on which canaries
were in: `guess` fixes a few numbers beforehand, and shares the error between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import bdtr, bdtrc, expit

from terrine import check
from terrine.accounting import Profile, bounds, profile
from terrine.audit import f_dp
from terrine.audit.guesses import Guesses
from terrine.audit.scores import Flags, paired
from terrine.events import Event

_FEWEST = 20
_ROUNDING = 1e-9
"""Relative error granted to the binomial tails, far above what scipy commits."""


@dataclass(frozen=True)
class OneRun:
    """What was guessed in one run, for each number of guesses fixed beforehand, proven with `confidence` together.

    Two theorems bound the same probability, that of so many correct guesses: Steinke's and that of `f_dp`. The smaller
    of two bounds is a bound, so both may be used, and no error is shared between them.
    """

    guesses: tuple[Guesses, ...]
    confidence: float

    @property
    def share(self) -> float:
        """The confidence left to each number of guesses."""
        return 1 - (1 - self.confidence) / len(self.guesses)

    def epsilon_at(self, delta: float) -> float:
        """A lower bound on epsilon at `delta`, whatever the mechanism; valid at all deltas at once."""
        delta, chance, best = check.half_open_unit("delta", delta), 1 - self.share, 0.0
        for one in self.guesses:  # each takes up where the others ended
            best = f_dp.largest(partial(_refuted, one, delta, chance), least=best)
        return best

    def refutes(self, claimed: Profile) -> bool:
        """Whether the guesses are too good for a mechanism that keeps the claimed curve; nothing else is assumed."""
        curve = f_dp.Certified(claimed)
        return any(f_dp.refutes(one, curve, chance=1 - self.share) for one in self.guesses)

    def mu(self) -> float:
        """A lower bound on the mu of Gaussian DP [DRS22]."""
        return max(f_dp.mu(one, confidence=self.share) for one in self.guesses)

    def gaussian(self, delta: float) -> float:
        """A lower bound on epsilon at `delta` for a mechanism whose curve is that of some Gaussian.

        Outside that family it is an estimate: the bound on mu is proven, its reading as epsilon is not.
        """
        return max(f_dp.gaussian_epsilon(one, delta=delta, confidence=self.share) for one in self.guesses)

    def within(self, family: Callable[[float], Event], delta: float) -> float:
        """A lower bound on epsilon at `delta` for a mechanism that is `family(noise)` for some noise, unknown here.

        The family must cost less the more noise there is, as a plan with its noise left open does. Outside the family
        it is an estimate.

        Raises:
            UnsupportedEvent: no accountant can bound the events.
        """
        quietest = _least_refuted(lambda noise: self.refutes(profile(family(noise))))
        return 0.0 if quietest is None else bounds(family(quietest), delta=delta).lower


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
    chance = 1 - check.open_unit("confidence", confidence)
    return f_dp.largest(lambda value: p_value(guesses, epsilon=value, delta=delta) < chance)


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
    asked = _shares(flags.size) if guesses is None else np.atleast_1d(guesses).tolist()
    made = sorted({check.whole("guesses", one) for one in asked})
    if not made:
        raise check.refuse("guesses", guesses, "one number or more of guesses, fixed beforehand")
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
    """A few shares of the canaries, without those too small to prove anything."""
    made = [round(canaries * share) for share in (0.05, 0.15, 0.4, 0.85)]
    return [one for one in made if one >= _FEWEST] or [max(1, made[-1])]


def _refuted(guesses: Guesses, delta: float, chance: float, value: float) -> bool:
    """Whether one of the theorems refutes an epsilon of `value`."""
    if p_value(guesses, epsilon=value, delta=delta) < chance:
        return True
    return f_dp.refutes(guesses, f_dp.Point(value, delta), chance=chance)


def _least_refuted(refuted: Callable[[float], bool]) -> float | None:
    """The least noise that is refuted, to a hundredth and from above, in 1/1000 to 1000; None where none is."""
    low, high = math.log(1e-3), math.log(1e3)
    if not refuted(math.exp(high)):
        return None
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if refuted(math.exp(middle)) else (middle, high)
    return math.exp(high)


def _guessed(ordered: Flags, made: int) -> Guesses:
    """`ordered`: whether each canary was in, from the lowest score to the highest."""
    high = (made + 1) // 2
    low = made - high
    correct = int(ordered[ordered.size - high :].sum()) + int((~ordered[:low]).sum())
    return Guesses(correct, made, ordered.size)

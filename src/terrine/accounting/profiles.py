"""The whole privacy curve of an event, and what it means for an attacker.

(epsilon, delta)-DP for every point of a curve bounds every test of "was this person there?": at false-positive rate a,

    true-positive rate <= min over epsilon of  min(e^epsilon a + delta,  1 - e^-epsilon (1 - delta - a)).     [DRS22]
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from terrine import check
from terrine.accounting import tightest
from terrine.events import Event
from terrine.rounding import up

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Profile:
    """Proven points (epsilon, delta), from delta(0) down to a negligible delta."""

    epsilon: Floats
    delta: Floats

    def true_positive_rate(self, false_positive_rate: ArrayLike) -> Floats:
        """An upper bound on the best attack's true-positive rate: the trade-off curve, seen from above."""
        rate = np.asarray(false_positive_rate, dtype=float)[..., None]
        if np.any((rate < 0) | (rate > 1)) or np.any(np.isnan(rate)):
            raise check.refuse("false_positive_rate", false_positive_rate, "0 <= rate <= 1")
        grow = np.exp(np.minimum(self.epsilon, 700.0))
        grown = np.where((self.epsilon > 700.0) & (rate > 0), 1.0, grow * rate)
        best = np.minimum(grown + self.delta, 1 - (1 - self.delta - rate) / grow)
        bound: Floats = np.clip(best.min(axis=-1), 0.0, 1.0)
        return bound

    def posterior(self, prior: float) -> float:
        """How sure anyone can become that a person is in the data, starting from `prior`, but for the least delta's
        chance."""
        prior = check.open_unit("prior", prior)
        odds = np.exp(min(float(self.epsilon[-1]), 700.0)) * prior / (1 - prior)
        return float(odds / (1 + odds))

    def in_words(self, *, unit: str, epsilon: float, delta: float) -> str:
        """What a claim of (epsilon, delta) with this curve means for one `unit`, for people to read."""
        sure = 100 / (1 + math.exp(-min(epsilon, 700.0)))
        caught = 100 * float(self.true_positive_rate(0.01))
        return (
            f"For one {unit}: whoever thought it a coin flip that the {unit} was in the data can become at most "
            f"{up(sure, 3)}% sure of it, whatever else they know (but for a chance of {delta:g}). The best possible "
            f"attack with 1% false alarms finds at most {up(caught, 3)}% of those who were in."
        )


def claimed_profile(event: Event, *, delta: float) -> Profile:
    """The curve behind a claim at `delta`: what every page and command reads the best attack off."""
    return _claimed(event, min(delta, 1e-9))


@functools.lru_cache(maxsize=64)
def _claimed(event: Event, smallest: float) -> Profile:
    """A run's card, its report and their check ask for one and the same curve."""
    found = profile(event, smallest_delta=smallest)
    for points in (found.epsilon, found.delta):
        points.flags.writeable = False
    return found


def profile(event: Event, *, points: int = 33, smallest_delta: float = 1e-12) -> Profile:
    """The certified curve of `event` at `points` epsilons, evenly spread in log delta.

    Raises:
        UnsupportedEvent: no accountant can bound some part of the event.
    """
    points = check.whole("points", points, at_least=2)
    at_zero = tightest.delta(event, epsilon=0.0)
    smallest_delta = check.open_unit("smallest_delta", smallest_delta)
    if at_zero <= smallest_delta:  # nothing is left to be seen
        return Profile(np.zeros(2), np.full(2, at_zero))
    deltas = np.geomspace(min(at_zero, 0.9), min(smallest_delta, at_zero / 2), points)
    epsilons = [0.0, *tightest.epsilons(event, deltas=deltas[1:].tolist())]
    return Profile(np.array(epsilons), np.concatenate([[at_zero], deltas[1:]]))

"""From how often an attack is right to a lower bound on epsilon, with a stated confidence.

For every set S of outcomes, (epsilon, delta)-DP says P(S | in) <= e^epsilon P(S | out) + delta and the same with "in"
and "out" exchanged [KOV15]. So with a lower bound on one probability and an upper bound on the other,

    epsilon >= ln((P(S | in) - delta) / P(S | out)).

Both come from Clopper and Pearson's exact tail probabilities [CP34], taken together by Fisher's method [Fis32]: for the
true rates, the chance U of as many hits and the chance V of as few alarms are independent and at least uniform, so
U V <= e^-t happens with probability at most (1 + t) e^-t. Choosing S after seeing the scores is paid for in one of two
ways: `Split` chooses on one part of the scores and counts on the other; `Corrected` looks at thresholds at fixed ranks
of the scores and shares the error between them (the share above the k-th largest of n draws is Beta(k, n+1-k) or less,
which is Clopper and Pearson's bound for k - 1 alarms).

The intervals take scores for independent draws: each from a run of its own, or at least from examples that were drawn
at random. Many scores from one trained model lean on each other; `one_run` needs no independence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainccinv, betaincinv, gammainccinv, ndtri

from terrine import check
from terrine.accounting import gaussian
from terrine.audit.scores import Floats, Scores
from terrine.errors import InvalidArgument

_BOXES = 128


@dataclass(frozen=True)
class Cut:
    """One test: how many of those it should find (`hits` of `found`) and should not (`alarms` of `spared`) it named.

    With `above`, it names whoever scores above `threshold` a member; else, whoever scores below a non-member.
    """

    threshold: float
    above: bool
    hits: int
    found: int
    alarms: int
    spared: int


@dataclass(frozen=True)
class Split:
    """Choose one threshold on a random `share` of the scores, count on the rest."""

    share: float = 0.5
    seed: int = 0

    def cuts(self, scores: Scores, delta: float, chance: float) -> Iterator[Cut]:
        share = check.open_unit("share", self.share)
        generator = np.random.default_rng(self.seed)
        first, second = [], []
        for side in (scores.members, scores.non_members):
            order = generator.permutation(side)
            size = round(share * side.size)
            if not 0 < size < side.size:
                raise InvalidArgument(f"{side.size} scores: too few to split; want at least {math.ceil(1 / share)}")
            first.append(np.sort(order[:size]))
            second.append(np.sort(order[size:]))
        tried = [cut for above in (True, False) for cut in _ranked(first[0], first[1], above, 64)]
        strict = chance / 20  # the luckiest threshold is not the best one
        best = max(tried, key=lambda cut: _roughly(cut, delta, strict))
        yield _counted(best.threshold, best.above, second[0], second[1])


@dataclass(frozen=True)
class Corrected:
    """Look at `ranks` thresholds on each side, evenly spread in log rank, and share the error between all of them."""

    ranks: int = 16

    def cuts(self, scores: Scores, delta: float, chance: float) -> Iterator[Cut]:  # noqa: ARG002 - none is chosen
        ranks = check.whole("ranks", self.ranks)
        members, others = np.sort(scores.members), np.sort(scores.non_members)
        for above in (True, False):
            yield from _ranked(members, others, above, ranks)


@dataclass(frozen=True)
class Rates:
    """The tests that were made, and what they prove together with `confidence`."""

    cuts: tuple[Cut, ...]
    confidence: float
    delta: float
    """Where `epsilon` is read."""

    @cached_property
    def regions(self) -> list[tuple[Floats, Floats]]:
        """For each test, boxes of which one holds the true rates: at least so many hits, at most so many alarms."""
        return [boxes(cut, (1 - self.confidence) / len(self.cuts)) for cut in self.cuts]

    @property
    def epsilon(self) -> float:
        """A lower bound on epsilon at `delta`, the one that was asked for."""
        return self.epsilon_at(self.delta)

    def epsilon_at(self, delta: float) -> float:
        """A lower bound on epsilon at `delta`; valid at all deltas at once."""
        delta = check.half_open_unit("delta", delta)
        return max(0.0, *(_epsilon(least, most, delta) for least, most in self.regions))

    def mu(self) -> float:
        """A lower bound on the mu of Gaussian DP [DRS22]: Phi^-1(true positives) - Phi^-1(false positives)."""
        return max(0.0, *(_mu(least, most) for least, most in self.regions))

    def gaussian(self, delta: float) -> float:
        """A lower bound on epsilon at `delta` for a mechanism whose curve is that of some Gaussian.

        Outside that family it is an estimate: the bound on mu is proven, its reading as epsilon is not.
        """
        mu = self.mu()
        return gaussian.epsilon_below(mu, delta) if mu > 0 else 0.0


def bound(
    members: Floats | Scores,
    non_members: Floats | None = None,
    *,
    delta: float,
    confidence: float = 0.95,
    choose: Split | Corrected | None = None,
) -> Rates:
    """The evidence in an attack's scores; its `.epsilon` is a lower bound on epsilon at `delta`.

    Raises:
        InvalidArgument: empty or nan scores, one side only, or a confidence outside (0, 1).
    """
    if isinstance(members, Scores):
        scores = members
    elif non_members is None:
        raise InvalidArgument("non_members: missing; want the scores of those who were not in the data")
    else:
        scores = Scores(members, non_members)
    confidence = check.open_unit("confidence", confidence)
    delta = check.half_open_unit("delta", delta)
    chosen = Corrected() if choose is None else choose
    return Rates(tuple(chosen.cuts(scores, delta, 1 - confidence)), confidence, delta)


def at_least(hits: int, total: int, chance: ArrayLike) -> Floats:
    """A probability is at least this, but for `chance`, when `hits` of `total` draws had it [CP34]."""
    chances = np.asarray(chance, dtype=np.float64)
    return np.asarray(betaincinv(hits, total - hits + 1, chances)) if hits else np.zeros(chances.shape)


def at_most(hits: int, total: int, chance: ArrayLike) -> Floats:
    """A probability is at most this, but for `chance`, when `hits` of `total` draws had it [CP34]."""
    chances = np.asarray(chance, dtype=np.float64)
    return np.asarray(betainccinv(hits + 1, total - hits, chances)) if hits < total else np.ones(chances.shape)


def boxes(cut: Cut, chance: float) -> tuple[Floats, Floats]:
    """Least rates of hits and greatest rates of alarms: but for `chance`, the truth is in one of the boxes.

    They cover where U V > e^-t, in steps of ln U: within a step, U is taken at its start and V at its end.
    """
    level = float(gammainccinv(2, chance))  # (1 + t) e^-t = chance
    steps = np.linspace(0.0, level, _BOXES + 1)
    least = at_least(cut.hits, cut.found, np.exp(steps[:-1] - level))
    most = at_most(cut.alarms, cut.spared, np.exp(-steps[1:]))
    return least, most


def _roughly(cut: Cut, delta: float, chance: float) -> float:
    """About what a test will prove: one box in place of many."""
    return _epsilon(at_least(cut.hits, cut.found, chance), at_most(cut.alarms, cut.spared, chance), delta)


def _epsilon(least: Floats, most: Floats, delta: float) -> float:
    if least.min() <= delta:
        return -math.inf
    return float(np.log((least - delta) / most).min())


def _mu(least: Floats, most: Floats) -> float:
    if least.min() <= 0 or most.max() >= 1:
        return 0.0
    return float((ndtri(least) - ndtri(most)).min())


def _ranked(members: Floats, others: Floats, above: bool, ranks: int) -> Iterator[Cut]:
    """Tests at ranks of the side that should be spared, both sides sorted."""
    spared = others if above else members
    places = np.unique(np.rint(np.geomspace(1, max(1, spared.size // 2), ranks)).astype(int))
    for place in places:
        threshold = spared[-place] if above else spared[place - 1]
        # As many alarms as the rank allows, never fewer for ties: the proof is for the rank.
        counted = _counted(float(threshold), above, members, others)
        yield Cut(counted.threshold, above, counted.hits, counted.found, int(place) - 1, counted.spared)


def _counted(threshold: float, above: bool, members: Floats, others: Floats) -> Cut:
    if above:
        hits = members.size - int(np.searchsorted(members, threshold, side="right"))
        alarms = others.size - int(np.searchsorted(others, threshold, side="right"))
        return Cut(threshold, above, hits, members.size, alarms, others.size)
    hits, alarms = (int(np.searchsorted(side, threshold, side="left")) for side in (others, members))
    return Cut(threshold, above, hits, others.size, alarms, members.size)

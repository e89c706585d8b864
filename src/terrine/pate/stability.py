"""Answers that are exact where they are stable: M_stab, M_samp and M_svec on the teachers' plurality [BTT18].

The plurality cannot change before d + 1 people have moved the gap between the first two counts, each by at most 2c
(c: the teachers that one person reaches, 1 for disjoint ones):

    d = max(0, floor((gap - 1) / 2c)).

One person moves d by at most 1, and where neighbours have different pluralities d is 0 on both. So the plurality
itself may be given whenever d plus noise passes a threshold that d = 0 passes with probability at most delta:

    M_stab   d + DLap(1/eps) >= t, with Pr[DLap(1/eps) >= t] <= delta                          (eps, delta)-DP each
    M_samp   the same on subsampled teachers, c = 2 x rate x teachers (checked by `Subsampled`)
    M_svec   d + DLap(2 lambda) >= w + DLap(lambda); the threshold noise is drawn again after each failure, so only
             failures are paid for: `unstable` of them are `unstable` runs of AboveThreshold, each (2/lambda, 0)-DP

Noise and thresholds are whole numbers (discrete Laplace), like d.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from terrine import accounting, check
from terrine.accounting.calibration import Search
from terrine.errors import InvalidArgument
from terrine.events import ApproximateDP, Budget, Event, Neighbours, PureDP, Repeated, Unit
from terrine.mechanisms.lattice import Shape
from terrine.mechanisms.lattice import noise as lattice_noise
from terrine.pate.answering import ABSTAINED, Aggregator, DrawnLabels, Integers, Questions


def distances(counts: Integers, *, reach: int = 1) -> Integers:
    """How many people the plurality of each row surely survives, each moving up to `reach` votes."""
    falling = np.sort(counts, axis=1)[:, ::-1]
    gap = falling[:, 0] - falling[:, 1]
    surely: Integers = np.maximum(0, (gap - 1) // (2 * reach))
    return surely


@dataclass(frozen=True)
class StableMax(Aggregator):
    """M_stab: the exact plurality where it is stable, else nothing.

    Guarantee: (epsilon, delta)-DP for each query.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check.positive("epsilon", self.epsilon)
        check.open_unit("delta", self.delta)

    @property
    def threshold(self) -> int:
        """The least t with Pr[DLap(1/epsilon) >= t] = e^(-epsilon t) / (1 + e^-epsilon) <= delta."""
        exact = -(math.log(self.delta) + math.log1p(math.exp(-self.epsilon))) / self.epsilon
        return max(1, math.ceil(exact * (1 + 1e-12)))

    def event(self, queries: int, answers: int | None = None, *, unit: Unit = Unit.EXAMPLE) -> Event:
        """Every query costs, answered or not."""
        del answers
        return Repeated(_stated(self.epsilon, self.delta, unit), times=queries)

    def _draw(self, asked: Questions) -> DrawnLabels:
        return _where_stable(self, asked)


@dataclass(frozen=True)
class SubsampleAggregate(Aggregator):
    """M_samp: M_stab on teachers that each drew a random part of the data.

    Guarantee: (epsilon, delta)-DP for each query, given `Subsampled`'s check that nobody is in too many parts.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        StableMax(self.epsilon, self.delta)

    def event(self, queries: int, answers: int | None = None, *, unit: Unit = Unit.EXAMPLE) -> Event:
        """Every query costs, answered or not."""
        return StableMax(self.epsilon, self.delta).event(queries, answers, unit=unit)

    def require(self, deal: Mapping[str, Any]) -> None:
        """Refuse a deal of which nobody counted how many teachers one person reaches."""
        if deal["kind"] not in ("subsampled", "disjoint"):
            raise InvalidArgument(f"votes of {deal['kind']} teachers: want Subsampled ones; draw them with it")

    def _draw(self, asked: Questions) -> DrawnLabels:
        return _where_stable(StableMax(self.epsilon, self.delta), asked)


@dataclass(frozen=True)
class SparseVectorMax(Aggregator):
    """M_svec: the exact plurality of stable queries for free; stops at the `unstable`-th query that is not.

    Guarantee: (epsilon, delta)-DP for up to `queries` queries together.
    """

    epsilon: float
    delta: float
    queries: int
    unstable: int

    def __post_init__(self) -> None:
        check.positive("epsilon", self.epsilon)
        check.open_unit("delta", self.delta)
        check.whole("queries", self.queries)
        check.whole("unstable", self.unstable)

    @property
    def scale(self) -> float:
        """lambda: the least that composes `unstable` AboveThresholds within (epsilon, delta / 2)."""
        return _least_scale(self.epsilon, self.delta / 2, self.unstable)

    @property
    def threshold(self) -> int:
        """w: the least that queries with d = 0 pass, all `queries` together, with probability at most delta / 2."""
        return _least_threshold(self.scale, self.delta / 2 / self.queries)

    @property
    def published(self) -> tuple[float, float]:
        """lambda and w as [BTT18] states them: sqrt(32 T log(2/delta)) / eps and 2 lambda log(2m/delta)."""
        scale = math.sqrt(32 * self.unstable * math.log(2 / self.delta)) / self.epsilon
        return scale, 2 * scale * math.log(2 * self.queries / self.delta)

    def event(self, queries: int, answers: int | None = None, *, unit: Unit = Unit.EXAMPLE) -> Event:
        """One cost for the whole run, however many of its queries are asked."""
        del answers
        if queries > self.queries:
            raise InvalidArgument(f"{queries} queries: this run was set up for {self.queries}; set it up for more")
        return _stated(self.epsilon, self.delta, unit)

    def _draw(self, asked: Questions) -> DrawnLabels:
        counts, rng = asked.counts, asked.rng
        coarse, fine = (lattice_noise(Shape.LAPLACE, self.scale * factor) for factor in (1, 2))
        noisy = distances(counts) + fine.sample(len(counts), rng)
        labels = np.full(len(counts), ABSTAINED, dtype=np.int64)
        bar, failures = self.threshold + coarse.draw(rng), 0
        for query, plurality in enumerate(counts.argmax(axis=1).tolist()):
            if noisy[query] >= bar:
                labels[query] = plurality
                continue
            failures += 1
            if failures == self.unstable:
                return DrawnLabels(labels, query + 1, f"{failures} queries were unstable, as many as the run allows")
            bar = self.threshold + coarse.draw(rng)
        return DrawnLabels(labels, len(counts), asked.plan.reason)


def _stated(epsilon: float, delta: float, unit: Unit) -> Event:
    return ApproximateDP(epsilon=epsilon, delta=delta, neighbours=Neighbours.REPLACE_ONE, unit=unit)


def _where_stable(rule: StableMax, asked: Questions) -> DrawnLabels:
    reach, noise = max(1, int(asked.votes.deal["most_parts"])), lattice_noise(Shape.LAPLACE, 1 / rule.epsilon)
    noisy = distances(asked.counts, reach=reach) + noise.sample(len(asked.counts), asked.rng)
    labels = np.where(noisy >= rule.threshold, asked.counts.argmax(axis=1), ABSTAINED)
    return DrawnLabels(labels, asked.plan.queries, asked.plan.reason)


@functools.lru_cache(maxsize=256)
def _least_scale(epsilon: float, delta: float, times: int) -> float:
    def family(scale: float) -> Event:
        return Repeated(PureDP(epsilon=2 / scale), times=times)

    widest = 8 * (math.sqrt(times * math.log(1 / delta)) + times * epsilon) / epsilon + 2 * times
    return accounting.calibrate(
        family,
        Budget(epsilon, delta),
        over=Search(1 / epsilon, widest, 2 * math.sqrt(times) / epsilon, private_end_is_high=True),
    )


@functools.lru_cache(maxsize=256)
def _least_threshold(scale: float, chance: float) -> int:
    """The least w with Pr[DLap(2 scale) - DLap(scale) >= w] <= chance."""
    reach = math.ceil(scale * (math.log(1 / chance) + 40))
    grid = np.arange(-reach, reach + 1)
    ratio = math.exp(-1 / scale)
    weights = np.exp(-np.abs(grid) / scale) * (1 - ratio) / (1 + ratio)
    half = math.exp(-0.5 / scale)

    def passed(bar: int) -> float:
        over = (bar + grid).astype(float)
        upper = np.where(
            over > 0, half ** np.maximum(over, 0) / (1 + half), 1 - half ** (1 - np.minimum(over, 1)) / (1 + half)
        )
        return float(np.sum(weights * upper)) * (1 + 1e-9) + 2 * ratio**reach

    low, high = 0, 4 * reach
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passed(middle) <= chance else (middle, high)
    return high

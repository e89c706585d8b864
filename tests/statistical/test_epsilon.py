"""Every mechanism as a black box on its worst neighbours: the measured epsilon never exceeds the claim.

`lower_bound` is right with probability 1 - 1e-4, so each case has a false-alarm rate of 1e-4 over the choice of its
seed, which is fixed. Where the mechanism is tight, the bound must come within a factor of 2 of the claim,
and the same runs of a mechanism whose noise was cut by 30% must refute the claim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq

from terrine import events
from terrine.audit import lower_bound
from terrine.mechanisms import (
    AboveThreshold,
    BoundedMean,
    BoundedSum,
    Counts,
    Encoding,
    Exponential,
    Gaussian,
    Histogram,
    Laplace,
    MostCommonValue,
    Noise,
    NoisyMax,
    PermuteAndFlip,
    Quantile,
    RandomizedResponse,
    SmoothMedian,
    SmoothNoise,
    SparseVector,
    StableRelease,
    UnaryEncoding,
)
from terrine.mechanisms.gaussian import noise_for
from terrine.rng import Seeded

CONFIDENCE = 1 - 1e-4
CUT, QUICK_CUT = 0.7, 0.4
REPLACE = events.Neighbours.REPLACE_ONE


@dataclass(frozen=True)
class Case:
    """`make(epsilon)` builds the mechanism; `run(mechanism, value, count, rng)` gives `count` outcomes."""

    make: Callable[[float], Any]
    run: Callable[[Any, Any, int, Any], Any]
    first: Any
    second: Any
    claim: float = 1.0
    delta: float = 0.0
    trials: int = 40_000
    tight: bool = True
    cut: float | None = None
    quick: float = 0.25

    @property
    def cut_epsilon(self) -> float:
        """The epsilon whose noise is 30% below that of the claim: for all but Gaussian noise, claim / 0.7."""
        return self.cut or self.claim / CUT

    def measured(self, epsilon: float, share: float = 1.0) -> float:
        mechanism, rng = self.make(epsilon), Seeded(11)
        found = lower_bound(
            lambda value, count: self.run(mechanism, value, count, rng),
            self.first,
            self.second,
            trials=int(share * self.trials),
            delta=self.delta,
            confidence=CONFIDENCE,
        )
        return found.epsilon


def cut_gaussian(epsilon, delta):
    wanted = CUT * noise_for(epsilon, delta)
    return brentq(lambda e: noise_for(e, delta) - wanted, epsilon, 10 * epsilon)


def together(mechanism, value, count, rng):
    """One release of `count` equal entries: as many independent runs."""
    return mechanism.release(np.full(count, value), rng=rng).value


def one_by_one(mechanism, value, count, rng):
    return [mechanism.release(value, rng=rng).value for _ in range(count)]


def below_the_gap(mechanism, value, count, rng):
    """On which side of 120 the quantile fell: all that the likelihood ratio depends on."""
    return [int(one <= 120) for one in one_by_one(mechanism, value, count, rng)]


def summed(direction):
    """Noisy counts, clipped to where the two inputs differ: what the likelihood ratio depends on."""

    def run(mechanism, value, count, rng):
        rows = np.array([mechanism.release(value, rng=rng).value for _ in range(count)])
        return np.clip(rows, 0, 1) @ np.array(direction)

    return run


def stable(shift):
    def run(mechanism, extra, count, rng):
        distance = mechanism.threshold + shift + extra
        return [mechanism.release("same", distance=distance, rng=rng).value is None for _ in range(count)]

    return run


def second_round(mechanism, values, count, rng):
    """The first success is certain for both inputs; what follows costs one round."""

    def once():
        scan = mechanism.start(rng=rng)
        assert scan.ask(1e6)
        return tuple(scan.run(values))

    return [once() for _ in range(count)]


def smooth(mechanism, value, count, rng):
    return [mechanism.release(value[0], smooth=value[1], rng=rng).value for _ in range(count)]


STREAM = [-0.5] * 8 + [0.5], [0.5] * 8 + [-0.5]
SCORES = [1.0] + [0.0] * 20, [0.0] + [1.0] * 20
LIST = [0.0] * 2 + [120.0] + [1000.0] * 3, [0.0] * 3 + [120.0] + [1000.0] * 2

CASES = {
    "Laplace": Case(lambda e: Laplace(sensitivity=1, epsilon=e), together, 0.0, 1.0, trials=100_000),
    "Laplace number": Case(lambda e: Laplace(sensitivity=2.5, epsilon=e), one_by_one, 10.1, 12.6),
    "Gaussian": Case(
        lambda e: Gaussian(sensitivity=1, epsilon=e, delta=0.05), together, 0.0, 1.0, delta=0.05, trials=100_000,
        cut=cut_gaussian(1.0, 0.05),
    ),
    "Counts": Case(lambda e: Counts(epsilon=e), one_by_one, 7, 8),
    "Counts list": Case(
        lambda e: Counts(epsilon=e, queries=3), summed([1, 1, 1]), [0] * 3, [1] * 3, claim=2.0, trials=20_000
    ),
    "Histogram": Case(lambda e: Histogram(epsilon=e, bins=2), summed([1, 0]), [0, 3], [1, 3], trials=20_000),
    "Histogram replace": Case(
        lambda e: Histogram(epsilon=e, bins=2, neighbours=REPLACE), summed([1, -1]), [1, 0], [0, 1], trials=20_000
    ),
    "BoundedSum": Case(lambda e: BoundedSum(lower=0, upper=5, epsilon=e), one_by_one, [], [9.0], trials=25_000),
    "BoundedMean": Case(
        lambda e: BoundedMean(lower=0, upper=5, epsilon=e, neighbours=REPLACE), one_by_one, [0.0], [5.0], trials=25_000
    ),
    "BoundedMean add": Case(
        lambda e: BoundedMean(lower=0, upper=5, epsilon=e), one_by_one, [], [5.0], trials=10_000, tight=False
    ),
    "Quantile": Case(
        lambda e: Quantile(q=0.5, lower=0, upper=1000, epsilon=e, points=1000, neighbours=REPLACE),
        below_the_gap,
        *LIST,
        claim=3.0,
        trials=15_000,
    ),
    "MostCommonValue": Case(
        lambda e: MostCommonValue(categories=("a", "b"), epsilon=e), one_by_one, [], ["a"], trials=15_000
    ),
    "Exponential": Case(
        lambda e: Exponential(sensitivity=1, epsilon=e), one_by_one, *SCORES, claim=3.0, trials=15_000
    ),
    "Exponential monotone": Case(
        lambda e: Exponential(sensitivity=1, epsilon=e, monotone=True), one_by_one, [0] * 9, [1] * 8 + [0],
        claim=2.0, trials=15_000,
    ),
    "PermuteAndFlip": Case(
        lambda e: PermuteAndFlip(sensitivity=1, epsilon=e), one_by_one, *SCORES, claim=3.0, trials=15_000
    ),
    "NoisyMax": Case(lambda e: NoisyMax(sensitivity=1, epsilon=e), one_by_one, *SCORES, claim=3.0, trials=15_000),
    "NoisyMax Laplace": Case(
        lambda e: NoisyMax(sensitivity=1, epsilon=e, noise=Noise.LAPLACE), one_by_one, *SCORES, claim=3.0, trials=15_000
    ),
    "NoisyMax Laplace monotone": Case(
        lambda e: NoisyMax(sensitivity=1, epsilon=e, noise=Noise.LAPLACE, monotone=True), one_by_one,
        [0] * 9, [1] * 8 + [0], claim=2.0, trials=15_000,
    ),
    "NoisyMax Gaussian": Case(
        lambda e: NoisyMax(sensitivity=1, epsilon=e, noise=Noise.GAUSSIAN, delta=0.05, l2=2**0.5), one_by_one,
        [-1.9, 0.0], [-2.9, 1.0], delta=0.05, trials=40_000, cut=cut_gaussian(1.0, 0.05),
    ),
    "NoisyMax Gaussian by place": Case(
        lambda e: NoisyMax(sensitivity=1, epsilon=e, noise=Noise.GAUSSIAN, delta=0.05), one_by_one,
        [-1.9, 0.0], [-2.9, 1.0], delta=0.05, trials=10_000, tight=False,
    ),
    "RandomizedResponse": Case(lambda e: RandomizedResponse(epsilon=e), together, 0, 1, trials=100_000),
    "RandomizedResponse many": Case(
        lambda e: RandomizedResponse(epsilon=e, answers=6), together, 2, 5, claim=2.0, trials=100_000
    ),
    "UnaryEncoding": Case(lambda e: UnaryEncoding(epsilon=e, answers=2), together, 0, 1, trials=100_000),
    "UnaryEncoding symmetric": Case(
        lambda e: UnaryEncoding(epsilon=e, answers=2, encoding=Encoding.SYMMETRIC), together, 0, 1, trials=100_000
    ),
    "AboveThreshold": Case(
        lambda e: AboveThreshold(threshold=0, epsilon=e), one_by_one, *STREAM, claim=3.0, trials=50_000
    ),
    "SparseVector": Case(
        lambda e: SparseVector(threshold=0, epsilon=2 * e, answers=2), second_round, *STREAM, claim=3.0, trials=50_000
    ),
    "StableRelease": Case(lambda e: StableRelease(epsilon=e, delta=1e-3), stable(2), 0, 1, delta=1e-3, quick=1.0),
    "StableRelease unstable": Case(
        lambda e: StableRelease(epsilon=e, delta=0.01),
        lambda mechanism, value, count, rng: [
            str(mechanism.release(value, distance=0, rng=rng).value) for _ in range(count)
        ],
        "mine", "yours", delta=0.01, trials=20_000, tight=False,
    ),
    # Half of their epsilon is kept for the change of scale between neighbours, so these two cannot be tight on a fixed
    # scale; their law is tested in tests/mechanisms/test_smooth.py, where a cut of 30% fails.
    "SmoothNoise": Case(
        lambda e: SmoothNoise(epsilon=e, grid=2**-10), smooth, (0.0, 1.0), (1.0, 1.1), trials=3_000, tight=False
    ),
    "SmoothMedian": Case(
        lambda e: SmoothMedian(lower=0, upper=1, epsilon=e, delta=0.01), one_by_one,
        [0.0] * 3 + [1.0] * 2, [0.0] * 2 + [1.0] * 3, delta=0.01, trials=3_000, tight=False,
    ),
}  # fmt: skip
TIGHT = {name: case for name, case in CASES.items() if case.tight}


def test_every_mechanism_is_here():
    from terrine import mechanisms

    public = {name for name in mechanisms.__all__ if hasattr(getattr(mechanisms, name), "release")}
    assert public == {type(case.make(1.0)).__name__ for case in CASES.values()}


QUICK, WHOLE = Case.quick, pytest.param(1.0, marks=pytest.mark.slow)
"""The share of the trials that is run. A quarter finds a noise cut by 60%; it takes all of them to find one by 30%."""


@pytest.mark.parametrize("share", [QUICK, WHOLE])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_measured_epsilon_is_below_the_claim_and_near_it_where_tight(case, share):
    found = case.measured(case.claim, share)
    assert found <= case.claim
    if case.tight:
        assert found >= case.claim * min(0.5, share)


@pytest.mark.parametrize("share", [QUICK, WHOLE])
@pytest.mark.parametrize("case", TIGHT.values(), ids=TIGHT.keys())
def test_a_cut_scale_is_found_out(case, share):
    share = max(share, case.quick)
    cut = case.cut_epsilon if share == 1.0 else case.cut or case.claim / QUICK_CUT
    assert case.measured(cut, share) > case.claim

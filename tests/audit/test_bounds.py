"""Bounds from rates: exact intervals, known answers, and never above the truth more often than allowed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom

from terrine import audit
from terrine.accounting import gaussian
from terrine.audit.bounds import Cut, at_least, at_most, boxes
from terrine.errors import InvalidArgument


@pytest.mark.parametrize(("hits", "total"), [(0, 10), (1, 10), (7, 10), (10, 10), (3, 1000), (999, 1000)])
@pytest.mark.parametrize("chance", [0.05, 1e-6])
def test_clopper_pearson_solves_the_binomial_tails(hits: int, total: int, chance: float) -> None:
    low, high = at_least(hits, total, chance), at_most(hits, total, chance)
    if hits:
        assert binom.sf(hits - 1, total, low) == pytest.approx(chance, rel=1e-6)
    else:
        assert low == 0
    if hits < total:
        assert binom.cdf(hits, total, high) == pytest.approx(chance, rel=1e-6)
    else:
        assert high == 1


@pytest.mark.parametrize(("hits", "alarms"), [(40, 3), (500, 120), (1000, 0), (999, 1), (0, 0), (7, 1000)])
def test_boxes_cover_what_the_counts_do_not_refute(hits: int, alarms: int) -> None:
    """By brute force: rates whose tails multiply to more than e^-t lie in a box, and little else does."""
    chance = 0.01
    least, most = boxes(Cut(0.0, True, hits, 1000, alarms, 1000), chance)
    level = brentq(lambda t: (1 + t) * math.exp(-t) - chance, 1, 50)
    p, q = np.meshgrid(np.geomspace(1e-4, 1, 150), np.geomspace(1e-4, 1, 150))
    unrefuted = binom.sf(hits - 1, 1000, p) * binom.cdf(alarms, 1000, q) > math.exp(-level)
    slack = 1 + 1e-9
    inside = ((p[..., None] * slack >= least) & (q[..., None] <= most * slack)).any(axis=-1)
    assert inside[unrefuted].all()
    assert (inside & ~unrefuted).mean() < 0.02


@pytest.mark.parametrize("choose", [audit.Corrected(), audit.Split()])
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_gaussian_known_answer(choose: audit.Corrected | audit.Split, epsilon: float) -> None:
    delta = 1e-3
    mu = _mu(epsilon, delta)
    generator = np.random.default_rng(3)
    evidence = audit.bound(
        generator.normal(mu, 1, 300_000), generator.normal(0, 1, 300_000), delta=delta, choose=choose
    )
    assert 0.75 * epsilon < evidence.epsilon_at(delta) < epsilon
    assert 0.75 * epsilon < evidence.gaussian(delta) < epsilon
    assert 0.75 * mu < evidence.mu() < mu


@pytest.mark.parametrize("choose", [audit.Corrected(), audit.Split()])
def test_randomised_response_is_rarely_bounded_above_the_truth(choose: audit.Corrected | audit.Split) -> None:
    """At confidence 80%, 300 audits may exceed the truth 60 times; 86 or more has a chance below 1e-4.

    Randomised response is the hardest case: a single threshold attains its epsilon, on both sides.
    """
    generator = np.random.default_rng(1)
    truth = math.log(3)
    exceeded = 0
    for _ in range(300):
        members, others = generator.random(400) < 0.75, generator.random(400) < 0.25
        found = audit.bound(members.astype(float), others.astype(float), delta=0.0, confidence=0.8, choose=choose)
        exceeded += found.epsilon_at(0.0) > truth
    assert exceeded < 86


def test_without_paying_for_the_choice_the_bound_would_be_wrong() -> None:
    """The best of 60 thresholds, each taken at face value, is wrong more often than stated; corrected, it is not.

    Nothing tells the two sides apart, so a bound above 0 is wrong. 60 audits at 60%.
    """
    generator = np.random.default_rng(2)
    naive = corrected = 0
    for _ in range(60):
        found = audit.bound(*generator.normal(size=(2, 2000)), delta=0.0, confidence=0.6, choose=audit.Corrected(30))
        naive += max(audit.Rates((cut,), 0.6, 0.0).epsilon for cut in found.cuts) > 0
        corrected += found.epsilon_at(0.0) > 0
    assert naive > 30 > 24 > corrected


def test_ranks_count_ties_against_the_attack() -> None:
    same = audit.bound(np.ones(1000), np.ones(1000), delta=0.0)
    assert same.epsilon_at(0.0) == 0
    assert same.mu() == 0


def test_either_tail_can_carry_the_evidence() -> None:
    """Members never below 0, half of the others are: all evidence lies in the low scores."""
    members = np.linspace(0.0, 1.0, 2000)
    others = np.linspace(-1.0, 1.0, 2000)
    assert audit.bound(members, others, delta=0.0).epsilon_at(0.0) > 4
    assert audit.bound(-others, -members, delta=0.0).epsilon_at(0.0) > 4


def test_bound_falls_with_delta_and_rises_with_doubt() -> None:
    generator = np.random.default_rng(4)
    members, others = generator.normal(1, 1, 5000), generator.normal(0, 1, 5000)
    evidence = audit.bound(members, others, delta=1e-5)
    bounds = [evidence.epsilon_at(delta) for delta in (0.0, 1e-5, 1e-3, 0.1, 0.9)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > 1
    assert bounds[-1] == 0
    surer = audit.bound(members, others, delta=1e-5, confidence=0.9999)
    assert surer.epsilon_at(1e-5) < evidence.epsilon_at(1e-5)


def test_infinite_scores_are_scores() -> None:
    found = audit.bound(np.full(1000, math.inf), np.full(1000, -math.inf), delta=0.0)
    assert found.epsilon_at(0.0) > 4


NAN = np.array([1.0, math.nan])


@pytest.mark.parametrize(
    ("members", "others", "options", "said"),
    [
        ([], [1.0], {}, "members: empty"),
        ([1.0], [], {}, "non_members: empty"),
        (NAN, [1.0], {}, "members: 1 of 2 scores are nan"),
        ([1.0], NAN, {}, "non_members: 1 of 2 scores are nan"),
        ([[1.0]], [1.0], {}, "shape"),
        (["a"], [1.0], {}, "not numbers"),
        ([1.0], None, {}, "non_members: missing"),
        ([1.0], [1.0], {"confidence": 0.0}, "confidence=0.0"),
        ([1.0], [1.0], {"confidence": 1.0}, "confidence=1.0"),
        ([1.0], [1.0], {"confidence": math.nan}, "confidence=nan"),
        ([1.0], [1.0], {"delta": 1.0}, "delta=1.0"),
        ([1.0], [1.0], {"delta": -1e-5}, "delta=-1e-05"),
        ([1.0], [1.0], {"choose": audit.Split()}, "too few to split"),
    ],
)
def test_bad_input_is_refused(members: object, others: object, options: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        audit.bound(members, others, **{"delta": 1e-5, **options})  # type: ignore[arg-type]


def test_one_class_only_is_refused() -> None:
    for flags, kind in (([True, True], "members"), ([False, False], "non-members")):
        with pytest.raises(InvalidArgument, match=f"all 2 are {kind}"):
            audit.Scores.split([1.0, 2.0], flags)
    with pytest.raises(InvalidArgument, match="shape"):
        audit.Scores.split([1.0, 2.0], [True])
    with pytest.raises(InvalidArgument, match="other than 0 and 1"):
        audit.Scores.split([1.0, 2.0], [0, 2])


def _mu(epsilon: float, delta: float) -> float:
    return float(brentq(lambda mu: gaussian.epsilon(mu, delta) - epsilon, 1e-3, 20))

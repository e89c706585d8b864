"""Verdicts: claims as budgets, curves and events; evidence of every kind."""

from __future__ import annotations

import numpy as np
import pytest

from terrine import accounting, audit
from terrine.audit import estimators, one_run
from terrine.errors import InvalidArgument
from terrine.events import Budget, Gaussian

GENERATOR = np.random.default_rng(0)
PERFECT = audit.bound(np.ones(1000), np.zeros(1000), delta=1e-5)
GUESSED = one_run.guess(np.arange(1000.0), np.arange(1000) >= 500)
FOUND = audit.LowerBound(epsilon=3.0, delta=1e-5, confidence=0.99, trials=1000)


@pytest.mark.parametrize("evidence", [PERFECT, GUESSED, FOUND], ids=["rates", "one run", "tester"])
def test_a_claim_stands_or_falls_by_its_epsilon(evidence: audit.Evidence | audit.LowerBound) -> None:
    violated, consistent = audit.verdict(Budget(1.0, 1e-5), evidence), audit.verdict(Budget(9.0, 1e-5), evidence)
    assert violated.violated
    assert violated.bound > 1 == violated.claimed
    assert str(violated).startswith("VIOLATED")
    assert f"{100 * evidence.confidence:.6g}%" in str(violated)
    assert not consistent.violated
    assert str(consistent).startswith("consistent")


def test_a_bound_equal_to_the_claim_is_consistent() -> None:
    assert not audit.verdict(Budget(3.0, 1e-5), FOUND).violated


def test_evidence_at_a_larger_delta_holds_at_a_smaller_one_only() -> None:
    assert audit.verdict(Budget(1.0, 1e-6), FOUND).violated
    with pytest.raises(InvalidArgument, match=r"want it tested at 0\.001"):
        audit.verdict(Budget(1.0, 1e-3), FOUND)


def test_a_whole_curve_is_claimed_by_an_event() -> None:
    """Half the claimed noise passes at the one delta where it hurts least, and is caught on the curve."""
    samples = GENERATOR.normal(0, 1, (2, 200_000))
    evidence = audit.bound(samples[0] + 0.5, samples[1], delta=1e-6)  # the Gaussian mechanism with noise 2
    claimed = accounting.epsilon(Gaussian(noise=2.5), delta=1e-6)
    assert not audit.verdict(Budget(claimed, 1e-6), evidence).violated
    caught = audit.verdict(Gaussian(noise=2.5), evidence)
    assert caught.violated
    assert caught.delta > 1e-6
    assert not audit.verdict(Gaussian(noise=2.0), evidence).violated
    assert audit.verdict(accounting.profile(Gaussian(noise=2.5)), evidence) == caught


def test_estimators_of_the_gaussian_curve() -> None:
    samples = GENERATOR.normal(0, 1, (2, 400_000))
    first, second = samples[0] + 1, samples[1]
    truth = accounting.gaussian.delta(1.0, 0.5)
    assert estimators.hockey_stick(first, second, epsilon=0.5) == pytest.approx(truth, rel=0.05)
    assert 0.9 * truth < estimators.hockey_stick_bound(first, second, epsilon=0.5) < truth
    assert estimators.hockey_stick_bound(second, second, epsilon=0.5) == 0
    answers = GENERATOR.random((2, 100_000)) < np.array([[0.75], [0.25]])
    assert estimators.histogram(answers[0], answers[1]) == pytest.approx(np.log(3), rel=0.02)
    assert estimators.histogram([1.0], [2.0]) == 0

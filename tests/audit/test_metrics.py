"""Metrics against slow, obvious counts."""

from __future__ import annotations

import numpy as np
import pytest

from terrine import audit
from terrine.errors import InvalidArgument


@pytest.fixture(params=["distinct", "tied"])
def scores(request: pytest.FixtureRequest) -> audit.Scores:
    generator = np.random.default_rng(0)
    members, others = generator.normal(0.7, 1, 300), generator.normal(0, 1, 400)
    return (
        audit.Scores(members, others) if request.param == "distinct" else audit.Scores(members.round(), others.round())
    )


def test_area_is_the_chance_that_a_member_scores_higher(scores: audit.Scores) -> None:
    pairs = scores.members[:, None] - scores.non_members[None, :]
    assert audit.roc(scores).auc() == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean(), abs=1e-12)


@pytest.mark.parametrize("level", [0.001, 0.0025, 0.01, 0.3, 1.0])
def test_true_positives_at_few_false_ones(scores: audit.Scores, level: float) -> None:
    best = 0.0
    for threshold in np.concatenate([scores.members, scores.non_members]):
        if (scores.non_members >= threshold).mean() <= level:
            best = max(best, float((scores.members >= threshold).mean()))
    assert audit.roc(scores).at(level) == pytest.approx(best, abs=1e-12)


def test_balanced_accuracy_of_the_best_threshold(scores: audit.Scores) -> None:
    tried = [
        ((scores.members >= one).mean() + (scores.non_members < one).mean()) / 2
        for one in np.concatenate([scores.members, scores.non_members])
    ]
    assert audit.roc(scores).balanced_accuracy() == pytest.approx(max(0.5, *tried), abs=1e-12)


def test_bootstrap_agrees_with_resampling_by_hand() -> None:
    generator = np.random.default_rng(5)
    members, others = generator.normal(0.5, 1, 200), generator.normal(0, 1, 200)
    found = audit.summary(audit.Scores(members, others), resamples=2000).auc
    slow = [
        audit.roc(audit.Scores(generator.choice(members, 200), generator.choice(others, 200))).auc() for _ in range(500)
    ]
    low, high = np.quantile(slow, [0.025, 0.975])
    assert found.low == pytest.approx(low, abs=0.012)
    assert found.high == pytest.approx(high, abs=0.012)
    assert found.low < found.value < found.high


def test_gathering_scores_in_cells_changes_little() -> None:
    generator = np.random.default_rng(6)
    scores = audit.Scores(generator.normal(1, 1, 20_000), generator.normal(0, 1, 20_000))
    found = audit.summary(scores, resamples=200)
    for metric in (found.auc, found.at_one_percent, found.balanced_accuracy):
        assert metric.low <= metric.value <= metric.high
        assert metric.high - metric.low < 0.04
    assert found.auc.high - found.auc.low == pytest.approx(4 * 0.0022, rel=0.3)  # Hanley and McNeil's deviation


def test_bad_settings_are_refused() -> None:
    scores = audit.Scores([1.0], [0.0])
    with pytest.raises(InvalidArgument, match="confidence"):
        audit.summary(scores, confidence=2.0)
    with pytest.raises(InvalidArgument, match="resamples"):
        audit.summary(scores, resamples=0)

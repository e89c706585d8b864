"""The black-box tester: right about what is known, silent about what is not."""

import math

import numpy as np
import pytest

from terrine.audit import lower_bound
from terrine.errors import InvalidArgument


def response(truth):
    rng = np.random.default_rng(0)
    return lambda answer, count: np.where(rng.random(count) < truth, answer, rng.random(count) < 0.5).astype(int)


def test_it_finds_most_of_a_known_epsilon_and_never_more():
    found = lower_bound(response(0.5), 0, 1, trials=200_000)
    assert 0.95 * math.log(3) < found.epsilon < math.log(3)
    assert found.refutes(1.0)
    assert not found.refutes(1.1)


def test_it_is_below_the_truth_as_often_as_it_says():
    """At confidence 80%, over 200 mechanisms of epsilon ln 3: at most 65 bounds above (40 expected at worst, 1e-5)."""
    rng = np.random.default_rng(1)
    run = lambda a, n: np.where(rng.random(n) < 0.5, a, rng.random(n) < 0.5).astype(int)  # noqa: E731
    above = sum(lower_bound(run, 0, 1, trials=2_000, confidence=0.8).epsilon > math.log(3) for _ in range(200))
    assert above <= 65


def test_a_mechanism_that_ignores_its_input_costs_nothing():
    rng = np.random.default_rng(2)
    assert lower_bound(lambda _, count: rng.normal(size=count), 0, 1, trials=20_000).epsilon < 0.05


def test_delta_is_given_away_first():
    rng = np.random.default_rng(3)
    leaky = lambda answer, count: np.where(rng.random(count) < 0.05, answer, 7)  # noqa: E731
    assert lower_bound(leaky, 0, 1, trials=50_000).epsilon > 3
    assert lower_bound(leaky, 0, 1, trials=50_000, delta=0.06).epsilon == 0


def test_outcomes_may_be_anything_hashable_or_rows():
    rng = np.random.default_rng(4)
    words = lambda answer, count: ["yes" if coin else ("a", answer) for coin in rng.random(count) < 0.5]  # noqa: E731
    assert lower_bound(words, 0, 1, trials=5_000).epsilon > 3
    rows = lambda answer, count: np.column_stack([rng.integers(2, size=count), np.full(count, answer)])  # noqa: E731
    assert lower_bound(rows, 0, 1, trials=5_000).epsilon > 3


def test_a_mechanism_that_miscounts_is_refused():
    with pytest.raises(InvalidArgument, match="outcomes"):
        lower_bound(lambda _, count: [1] * (count - 1), 0, 1, trials=1_000)

"""Published and popular privacy bugs, each built on purpose: the black-box tester must catch every one.

Bounds hold with probability 1 - 1e-6 each (seeds are fixed). Beside each mutant stands the right mechanism on the same
two inputs, which must pass: a tester that cries wolf proves nothing.
"""

import numpy as np
import pytest

from terrine.audit import lower_bound
from terrine.mechanisms import AboveThreshold, Laplace, Noise, NoisyMax, RandomizedResponse
from terrine.rng import Seeded

CONFIDENCE = 1 - 1e-6
TRIALS = 200_000


def caught(mechanism, first, second, claim, trials=TRIALS):
    return lower_bound(mechanism, first, second, trials=trials, confidence=CONFIDENCE).refutes(claim)


# -- sparse vectors that are not private; threshold 0, sensitivity 1 ---------------------------------------------------
# Each takes (answers, count, epsilon, successes) and returns, per run, the string of what it said as a row.


def noisy_answers_released(values, count, epsilon, c, rng):
    """[LSL17] Algorithm 3: gives out the very noisy answer that passed the threshold."""
    threshold = rng.laplace(scale=2 / epsilon, size=(count, 1))
    noisy = values + rng.laplace(scale=2 * c / epsilon, size=(count, len(values)))
    above = noisy >= threshold
    return np.round(np.where(stopped(above, c), np.nan, np.where(above, noisy, -np.inf)), 0)


def answers_noise_ignores_the_number_of_successes(values, count, epsilon, c, rng):
    """[LSL17] Algorithm 4: noise 1/(3 epsilon/4) for each answer, although c of them may succeed."""
    threshold = rng.laplace(scale=4 / epsilon, size=(count, 1))
    noisy = values + rng.laplace(scale=4 / (3 * epsilon), size=(count, len(values)))
    above = noisy >= threshold
    return np.where(stopped(above, c), 2, above).astype(float)


def no_noise_on_the_answers(values, count, epsilon, c, rng):
    """[LSL17] Algorithm 5: only the threshold is noisy, and nothing ever stops."""
    return (values >= rng.laplace(scale=2 / epsilon, size=(count, 1))).astype(float)


def no_limit_on_successes(values, count, epsilon, c, rng):
    """[LSL17] Algorithm 6: noise for one success, but it goes on for ever."""
    threshold = rng.laplace(scale=2 / epsilon, size=(count, 1))
    return (values + rng.laplace(scale=2 / epsilon, size=(count, len(values))) >= threshold).astype(float)


def generalised_threshold_testing(values, count, epsilon, c, rng):
    """[LSL17] Section 3.3: as Algorithm 6 with an uneven split; its published proof is wrong too."""
    threshold = rng.laplace(scale=4 / epsilon, size=(count, 1))
    return (values + rng.laplace(scale=4 / (3 * epsilon), size=(count, len(values))) >= threshold).astype(float)


def restarts_without_paying(values, count, epsilon, c, rng):
    """AboveThreshold restarted after each success with new noise of the full epsilon, billed once."""
    out = np.full((count, len(values)), 2.0)
    left = np.full(count, c)
    threshold = rng.laplace(scale=2 / epsilon, size=count)
    for place, value in enumerate(values):
        above = value + rng.laplace(scale=4 / epsilon, size=count) >= threshold
        out[:, place] = np.where(left > 0, above, 2)
        left = left - (above & (left > 0))
        threshold = np.where(above, rng.laplace(scale=2 / epsilon, size=count), threshold)
    return out


def stopped(above, c):
    """Places after the c-th success."""
    before = np.cumsum(above, axis=1) - above
    return before >= c


MIXED = [0.0] * 6 + [1.0] * 6, [1.0] * 6 + [0.0] * 6
PAIR = [0.0, 1.0], [1.0, 0.0]
TWELVE = [1.0] * 12, [0.0] * 12
SPARSE = [
    (noisy_answers_released, ([0.0] * 8 + [3.0], [1.0] * 8 + [3.0]), 2.0),
    (answers_noise_ignores_the_number_of_successes, MIXED, 2.0),
    (no_noise_on_the_answers, PAIR, 2.0),
    (no_limit_on_successes, MIXED, 2.0),
    (generalised_threshold_testing, MIXED, 2.0),
    (restarts_without_paying, TWELVE, 2.0),
]


@pytest.mark.parametrize(("mutant", "inputs", "claim"), SPARSE, ids=[mutant.__name__ for mutant, *_ in SPARSE])
def test_a_broken_sparse_vector_is_caught(mutant, inputs, claim):
    rng = np.random.default_rng(3)
    c = {noisy_answers_released: 1, restarts_without_paying: 12}.get(mutant, 6)
    assert caught(lambda values, count: mutant(np.array(values), count, claim, c, rng), *inputs, claim)


@pytest.mark.parametrize(("_", "inputs", "claim"), SPARSE, ids=[mutant.__name__ for mutant, *_ in SPARSE])
def test_the_right_one_passes_on_the_same_inputs(_, inputs, claim):
    rng, right = Seeded(4), AboveThreshold(threshold=0, epsilon=claim)
    assert not caught(
        lambda values, count: [right.release(values, rng=rng).value for _ in range(count)], *inputs, claim, 6_000
    )


def test_laplace_with_the_wrong_sensitivity_is_caught():
    """Two counts of the same person, noised as if they were one."""
    rng = Seeded(5)

    def both(sensitivity):
        wrong = Laplace(sensitivity=sensitivity, epsilon=1)
        return lambda value, count: np.clip(wrong.release(np.full((count, 2), value), rng=rng).value, 0, 1).sum(axis=1)

    # one release of count x 2 entries stands for `count` releases of a pair
    assert caught(both(1), 0.0, 1.0, 1.0)
    assert not caught(both(2), 0.0, 1.0, 1.0)


def test_noisy_max_that_returns_the_noisy_value_is_caught():
    rng = np.random.default_rng(6)

    def leaky(scores, count):
        return (np.array(scores) + rng.laplace(scale=1.0, size=(count, len(scores)))).max(axis=1)

    assert caught(leaky, [0.0] * 10, [1.0] * 10, 1.0)
    right, seeded = NoisyMax(sensitivity=1, epsilon=1, noise=Noise.LAPLACE, monotone=True), Seeded(6)
    assert not caught(
        lambda scores, count: [right.release(scores, rng=seeded).value for _ in range(count)],
        [0.0] * 10, [1.0] * 10, 1.0, 5_000,
    )  # fmt: skip


def test_randomized_response_with_a_biased_second_coin_is_caught():
    rng = np.random.default_rng(7)

    def biased(answer, count):
        return np.where(rng.random(count) < 0.5, answer, rng.random(count) < 0.9).astype(int)

    claim = RandomizedResponse(truth=0.5).epsilon
    assert caught(biased, 0, 1, claim)
    right, seeded = RandomizedResponse(truth=0.5), Seeded(7)
    assert not caught(lambda answer, count: right.release(np.full(count, answer), rng=seeded).value, 0, 1, claim)

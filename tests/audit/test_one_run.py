"""The one-run bound against exact enumeration, its worst case, and synthetic guesses."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom

from terrine.audit import one_run
from terrine.audit.one_run import Guesses, epsilon, guess, p_value
from terrine.errors import InvalidArgument


def slow_p_value(correct: int, made: int, canaries: int, odds: Fraction, delta: Fraction) -> Fraction:
    """Theorem 5.2 of Steinke, Nasr and Jagielski in exact fractions; odds stands for e^epsilon."""
    rate = odds / (1 + odds)
    mass = [math.comb(made, k) * rate**k * (1 - rate) ** (made - k) for k in range(made + 1)]
    beyond = sum(mass[correct:], Fraction(0))
    steepest = max(
        sum((mass[k] for k in range(max(0, correct - i), correct)), Fraction(0)) / i for i in range(1, canaries + 1)
    )
    return min(Fraction(1), beyond + 2 * canaries * delta * steepest)


@pytest.mark.parametrize(("correct", "made", "canaries"), [(0, 5, 9), (1, 1, 1), (5, 5, 9), (7, 9, 30), (28, 40, 60)])
@pytest.mark.parametrize("odds", [1, 3, 50])
@pytest.mark.parametrize("delta", [Fraction(0), Fraction(1, 10**5), Fraction(1, 100)])
def test_theorem_in_exact_fractions(correct: int, made: int, canaries: int, odds: int, delta: Fraction) -> None:
    exact = slow_p_value(correct, made, canaries, Fraction(odds), delta)
    found = p_value(Guesses(correct, made, canaries), epsilon=math.log(odds), delta=float(delta))
    assert float(exact) * (1 - 1e-12) <= found <= float(exact) * (1 + 1e-6)


def test_perfect_guesses() -> None:
    """All of r right refutes epsilon where q^r = 1 - confidence: epsilon = -ln((1-confidence)^(-1/r) - 1)."""
    for made in (10, 100, 1000):
        wanted = -math.log(0.05 ** (-1 / made) - 1)
        assert epsilon(Guesses(made, made, 1000), delta=0.0) == pytest.approx(wanted, rel=1e-6)


def test_random_and_abstaining_guesses_prove_nothing() -> None:
    assert epsilon(Guesses(500, 1000, 1000), delta=1e-5) == 0
    assert epsilon(Guesses(0, 0, 1000), delta=1e-5) == 0
    assert epsilon(Guesses(0, 1000, 1000), delta=1e-5) == 0  # always wrong is not a guess in this theorem


def test_abstaining_is_better_than_guessing_where_unsure() -> None:
    sure = epsilon(Guesses(30, 30, 1000), delta=0.0)
    unsure = epsilon(Guesses(30 + 485, 1000, 1000), delta=0.0)
    assert sure > 2 > 0.1 > unsure


def test_delta_costs_and_more_canaries_cost_more() -> None:
    bounds = [epsilon(Guesses(95, 100, 1000), delta=delta) for delta in (0.0, 1e-6, 1e-4, 1e-2)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[2] > bounds[3]
    assert epsilon(Guesses(95, 100, 100), delta=1e-4) > epsilon(Guesses(95, 100, 10_000), delta=1e-4)


def test_what_is_found_is_refuted_and_little_more_is_not() -> None:
    guesses = Guesses(90, 100, 200)
    found = epsilon(guesses, delta=1e-4, confidence=0.99)
    assert p_value(guesses, epsilon=found, delta=1e-4) < 0.01 <= p_value(guesses, epsilon=found * 1.001, delta=1e-4)


def test_randomised_response_is_bounded_at_the_stated_confidence() -> None:
    """The worst case for delta 0: each coin told truthfully with e^eps/(1+e^eps). The bound is tight there.

    Of 400 audits at 90%, at most 40 may exceed the truth; 65 or more has a chance below 1e-4, 5 or fewer too.
    """
    generator, truth = np.random.default_rng(0), 1.5
    exceeded = 0
    for _ in range(400):
        correct = int((generator.random(300) < expit(truth)).sum())
        exceeded += epsilon(Guesses(correct, 300, 300), delta=0.0, confidence=0.9) > truth
    assert 5 < exceeded < 65


@pytest.mark.parametrize(("correct", "told"), [(80, 65), (80, 70), (100, 100), (70, 50)])
def test_leaky_mechanism_needs_the_delta_term(correct: int, told: int) -> None:
    """With chance m delta / k, tell k random coins: each is told with chance delta, so this is (0, delta)-DP.

    The plain binomial would call it a violation; the theorem does not.
    """
    canaries, delta = 100, 1e-3
    leak = canaries * delta / told
    guessed = leak * binom.sf(correct - told - 1, canaries - told, 0.5)
    truth = guessed + (1 - leak) * binom.sf(correct - 1, canaries, 0.5)
    guesses = Guesses(correct, canaries, canaries)
    assert p_value(guesses, epsilon=0.0, delta=0.0) < truth <= p_value(guesses, epsilon=0.0, delta=delta)


def test_guessing_takes_the_extremes() -> None:
    included = np.array([True, False] * 50)
    scores = np.where(included, 1.0, -1.0) * np.linspace(1, 2, 100)
    found = guess(scores, included, guesses=[10, 100], confidence=0.9)
    assert [(one.correct, one.made, one.canaries) for one in found.guesses] == [(10, 10, 100), (100, 100, 100)]
    assert found.epsilon_at(0.0) == pytest.approx(epsilon(found.guesses[1], delta=0.0, confidence=0.95))
    backwards = guess(-scores, included, guesses=100)
    assert backwards.guesses[0].correct == 0


def test_order_of_canaries_tells_nothing() -> None:
    """Members listed first and every score tied: a careless sort would guess all of them right."""
    included = np.repeat([True, False], 500)
    for flags in (included, ~included):
        assert guess(np.zeros(1000), flags, confidence=0.999).epsilon_at(0.0) == 0


def test_coins_are_fair() -> None:
    tossed = one_run.coins(100_003)
    assert tossed.shape == (100_003,)
    assert abs(tossed.mean() - 0.5) < 5 * 0.5 / math.sqrt(100_003)


def test_bad_input_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="correct=5, made=4"):
        Guesses(5, 4, 10)
    with pytest.raises(InvalidArgument, match="correct <= made <= canaries"):
        Guesses(1, 11, 10)
    with pytest.raises(InvalidArgument, match="confidence"):
        epsilon(Guesses(1, 1, 1), delta=0.0, confidence=1.0)
    with pytest.raises(InvalidArgument, match="at most the 4 canaries"):
        guess([1.0, 2, 3, 4], [True, False, True, False], guesses=5)
    with pytest.raises(InvalidArgument, match="nan"):
        guess([math.nan, 1.0], [True, False])

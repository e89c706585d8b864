"""The f-DP one-run bound: against a linear program, 40 digits, every small mechanism, and simulated Gaussians."""

from __future__ import annotations

import itertools
import math
from functools import cache

import mpmath
import numpy as np
import pytest
from scipy.optimize import brentq, linprog
from scipy.stats import binom, norm

from terrine import accounting, audit
from terrine.accounting import Profile, gaussian
from terrine.audit import f_dp, one_run
from terrine.audit.f_dp import Certified, GaussianCurve, Point, p_value, refutes
from terrine.audit.guesses import Guesses
from terrine.events import Budget, Gaussian, PoissonSampled, Repeated

DELTA = 1e-5


def mean_of(epsilon: float, delta: float = DELTA) -> float:
    """The mu of the Gaussian with this epsilon."""
    return float(brentq(lambda value: gaussian.epsilon(value, delta) - epsilon, 1e-3, 20))


def by_linear_program(guesses: Guesses, epsilons: np.ndarray, deltas: np.ndarray) -> float:
    """The largest P(N >= v) among all p that keep the theorem's inequality, F being the least of its lines."""
    v, r, m = guesses.correct, guesses.made, guesses.canaries
    count = np.arange(r + 1)
    rows, limits = [], []
    for j in range(1, r + 1):
        left, right = np.where(count >= j, count / m, 0.0), np.where(count >= j - 1, (r - count) / m, 0.0)
        for epsilon, delta in zip(epsilons, deltas, strict=True):
            rows += [left - math.exp(epsilon) * right, left - math.exp(-epsilon) * right]
            limits += [delta, 1 - math.exp(-epsilon) * (1 - delta)]
    found = linprog(-(count >= v).astype(float), A_ub=np.array(rows), b_ub=limits, A_eq=np.ones((1, r + 1)), b_eq=[1.0])
    assert found.success
    return float(-found.fun)


@pytest.mark.parametrize("guesses", [Guesses(5, 5, 9), Guesses(7, 9, 30), Guesses(9, 12, 12), Guesses(17, 20, 40)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (0.0, 0.01), (1.0, 0.0), (1.0, 1e-3), (2.0, 0.05)])
def test_the_recursion_is_the_linear_program(guesses: Guesses, epsilon: float, delta: float) -> None:
    wanted = by_linear_program(guesses, np.array([epsilon]), np.array([delta]))
    assert p_value(guesses, Point(epsilon, delta)) == pytest.approx(wanted, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("guesses", [Guesses(7, 9, 30), Guesses(12, 12, 20), Guesses(17, 20, 20)])
def test_a_certified_curve_is_all_of_its_points(guesses: Guesses) -> None:
    curve = accounting.profile(Gaussian(noise=1.0), points=9)
    wanted = by_linear_program(guesses, curve.epsilon, curve.delta)
    assert p_value(guesses, Certified(curve)) == pytest.approx(wanted, rel=1e-5)
    for epsilon, delta in zip(curve.epsilon, curve.delta, strict=True):
        assert p_value(guesses, Certified(curve)) <= p_value(guesses, Point(float(epsilon), float(delta))) * (1 + 1e-6)


def spent(guesses: Guesses, mu: float, chance: float) -> mpmath.mpf:
    """The recursion as the docstring states it, in 40 digits: what a tail of `chance` spends, in units of r/m."""
    v, r, m = guesses.correct, guesses.made, guesses.canaries
    a, b = mpmath.mpf(chance) * (r - v) / m, mpmath.mpf(chance) * v / m
    for n in range(v - 1, -1, -1):
        z = mpmath.sqrt(2) * mpmath.erfinv(2 * b - 1)
        least = max(a, mpmath.ncdf(z - mu))
        b += mpmath.mpf(n) / (r - n) * (least - a)
        a = least
    return (a + b) * m / r


@pytest.mark.parametrize(("guesses", "mu"), [(Guesses(20, 20, 100), 1.0), (Guesses(57, 60, 200), 0.8)])
def test_forty_digits_agree_and_rounding_is_outward(guesses: Guesses, mu: float) -> None:
    found = p_value(guesses, GaussianCurve(mu))
    with mpmath.workdps(40):
        assert spent(guesses, mu, found) >= 1  # truly refuted: no larger tail is possible
        assert spent(guesses, mu, found * (1 - 1e-4)) < 1  # and hardly less would be


def test_no_small_mechanism_breaks_the_theorem() -> None:
    """Mechanisms on three coins: their exact curve, the best guesses, the exact chance of N >= v.

    Half are drawn at random; half tell each coin truthfully with some chance, for which the bound is tight.
    """
    generator, coins = np.random.default_rng(1), list(itertools.product((0, 1), repeat=3))
    close = 0
    for place in range(60):
        rate, spread = generator.uniform(0.5, 0.95), generator.choice([0.2, 1.0, 5.0])
        told = np.array([[sum(x == y for x, y in zip(s, t, strict=True)) for t in coins] for s in coins])
        honest = rate**told * (1 - rate) ** (3 - told)
        table = honest if place % 2 else generator.dirichlet(np.full(8, spread), size=8)
        epsilons = np.linspace(0, 12, 241)
        deltas = np.zeros(241)
        for (i, s), (j, t) in itertools.permutations(enumerate(coins), 2):
            if sum(x != y for x, y in zip(s, t, strict=True)) == 1:
                lost = np.maximum(table[i] - np.exp(epsilons)[:, None] * table[j], 0).sum(axis=1)
                deltas = np.maximum(deltas, lost)
        curve = Certified(Profile(epsilons, deltas))
        chances = table / 8
        for made, right in ((1, 1), (2, 2), (3, 2), (3, 3)):
            truth = sum(_best(chances[:, output], coins, made, right) for output in range(8))
            bound = p_value(Guesses(right, made, 3), curve)
            assert truth <= bound * (1 + 1e-6)
            close += truth > 0.95 * bound
    assert close > 60  # the bound is not idle


def _best(chances: np.ndarray, coins: list[tuple[int, ...]], made: int, right: int) -> float:
    """The best chance of `right` correct among `made` guesses, for one output."""
    best = 0.0
    for places in itertools.combinations(range(3), made):
        for told in itertools.product((0, 1), repeat=made):
            hits = [sum(s[place] == one for place, one in zip(places, told, strict=True)) >= right for s in coins]
            best = max(best, float(chances[hits].sum()))
    return best


@cache
def refuted(guesses: Guesses, mu: float, chance: float) -> bool:
    """Whether the bound on mu is above `mu`."""
    return refutes(guesses, GaussianCurve(mu), chance=chance)


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 10.0])
def test_simulated_gaussians_raise_no_more_false_alarms_than_stated(epsilon: float) -> None:
    """1,000 runs with 1,000 independent canaries each, at 90%: 100 alarms are allowed, 135 have a chance below 2e-4.

    A third of the noise must be caught: a test that never speaks would pass otherwise.
    """
    generator, truth = np.random.default_rng(7), mean_of(epsilon)
    alarms, caught = 0, 0
    for _ in range(1000):
        included = generator.random(1000) < 0.5
        noise = generator.normal(size=1000)
        for factor in (1, 3):
            found = one_run.guess(included * truth * factor + noise, included, confidence=0.9)
            above = any(refuted(one, truth, 1 - found.share) for one in found.guesses)
            alarms, caught = (alarms + above, caught) if factor == 1 else (alarms, caught + above)
    assert alarms < 135
    assert caught > 500


def test_a_mechanism_that_fails_now_and_then_is_not_falsely_accused() -> None:
    """With chance 6% it hardly adds noise, otherwise much: guesses are far from independent.

    A mutant that takes them for independent would call 6% of the runs a violation at 99%; the theorem does not.
    """
    made, weights, means = 100, np.array([0.06, 0.94]), np.array([6.0, 0.3])
    epsilons = np.linspace(0, 30, 301)
    deltas = sum(w * np.array([gaussian.delta(mu, e) for e in epsilons]) for w, mu in zip(weights, means, strict=True))
    curve = Certified(Profile(epsilons, deltas))
    correct = 90
    truth = float((weights * binom.sf(correct - 1, made, norm.cdf(means / 2))).sum())
    best_guess = float((weights * norm.cdf(means / 2)).sum())
    assert binom.sf(correct - 1, made, best_guess) < 0.01 < truth <= p_value(Guesses(correct, made, made), curve)


@pytest.mark.parametrize("epsilon", [2.0, 4.0, 6.0, 8.0, 10.0])
def test_tighter_than_the_bound_for_one_epsilon(epsilon: float) -> None:
    generator = np.random.default_rng(3)
    included = generator.random(1000) < 0.5
    found = one_run.guess(included * mean_of(epsilon) + generator.normal(size=1000), included)
    steinke = max(one_run.epsilon(one, delta=DELTA, confidence=found.share) for one in found.guesses)
    assert steinke < found.gaussian(DELTA) < epsilon
    assert steinke <= found.epsilon_at(DELTA) < epsilon


def test_at_a_large_delta_the_bound_for_any_mechanism_is_tighter_too() -> None:
    guesses = Guesses(400, 400, 4000)
    assert f_dp.epsilon(guesses, delta=1e-4) > one_run.epsilon(guesses, delta=1e-4) + 1
    assert f_dp.epsilon(guesses, delta=0.0) == pytest.approx(one_run.epsilon(guesses, delta=0.0), abs=1e-6)


def test_nothing_is_proven_by_chance_or_silence() -> None:
    for guesses in (Guesses(50, 100, 100), Guesses(0, 0, 10), Guesses(0, 10, 10)):
        assert f_dp.mu(guesses) == f_dp.epsilon(guesses, delta=DELTA) == 0
        assert p_value(guesses, GaussianCurve(0.5)) == 1


def test_what_is_found_is_refuted_and_little_more_is_not() -> None:
    guesses = Guesses(97, 100, 1000)
    found = f_dp.mu(guesses, confidence=0.99)
    assert refutes(guesses, GaussianCurve(found), chance=0.01)
    assert not refutes(guesses, GaussianCurve(found * 1.001), chance=0.01)
    assert f_dp.gaussian_epsilon(guesses, delta=DELTA, confidence=0.99) == pytest.approx(
        gaussian.epsilon(found, DELTA), rel=1e-5
    )


def _scored(mu: float, canaries: int) -> one_run.OneRun:
    generator = np.random.default_rng(5)
    included = generator.random(canaries) < 0.5
    return one_run.guess(included * mu + generator.normal(size=canaries), included)


def test_an_event_is_judged_by_its_whole_curve() -> None:
    """A Gaussian with half of the noise it claims: no point of the curve is refuted, the curve is."""
    evidence = _scored(2.0, 3000)
    claimed = Gaussian(noise=1.0)
    assert not audit.verdict(Budget(accounting.epsilon(claimed, delta=DELTA), DELTA), evidence).violated
    caught = audit.verdict(claimed, evidence)
    assert caught.violated
    assert caught.whole_curve
    assert str(caught).startswith("VIOLATED")
    assert evidence.refutes(accounting.profile(claimed))
    honest = audit.verdict(Gaussian(noise=0.5), evidence)
    assert not honest.violated
    assert str(honest).startswith("consistent")


def test_within_a_family_the_noise_is_what_is_unknown() -> None:
    """Canaries of a plan whose noise is unknown prove more within the plan's family than for any mechanism."""

    def family(noise: float) -> Repeated:
        return Repeated(PoissonSampled(Gaussian(noise=noise), rate=0.2), times=20)

    generator, truth = np.random.default_rng(8), family(1.0)
    included = generator.random(1000) < 0.5
    drawn = included[:, None] & (generator.random((1000, 20)) < 0.2)
    seen = drawn + generator.normal(size=drawn.shape)
    evidence = one_run.guess(np.log1p(0.2 * np.expm1(seen - 0.5)).sum(axis=1), included)
    assert evidence.epsilon_at(DELTA) < evidence.within(family, DELTA) < accounting.epsilon(truth, delta=DELTA)
    nothing = one_run.guess(generator.normal(size=1000), included)
    assert nothing.within(family, DELTA) == 0

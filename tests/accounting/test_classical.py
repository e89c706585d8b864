"""The classical methods: their published numbers, and a slow formula beside each fast one."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import comb, logsumexp

from terrine import accounting
from terrine.accounting import amplification, composition, gaussian, moments, renyi
from terrine.errors import InvalidArgument, UnsupportedEvent
from terrine.events import (
    ApproximateDP,
    Budget,
    Gaussian,
    Laplace,
    NonPrivate,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    Repeated,
)

ABADI = Repeated(PoissonSampled(Gaussian(noise=4.0), rate=0.01), times=10_000)


def test_the_classic_example_of_abadi_et_al():
    assert moments.epsilon(ABADI, delta=1e-5) == pytest.approx(1.26, abs=0.005)
    textbook = composition.unproven_textbook_strong_dpsgd(noise=4.0, rate=0.01, steps=10_000, delta=1e-5)
    assert textbook == pytest.approx(9.34, abs=0.005)
    rigorous = composition.strong_dpsgd(noise=4.0, rate=0.01, steps=10_000, delta=1e-5)
    assert rigorous == pytest.approx(26.39, abs=0.005)


def test_each_method_is_tighter_than_the_one_before():
    tight = accounting.epsilon(ABADI, delta=1e-5)
    chain = [tight, renyi.epsilon(ABADI, delta=1e-5), moments.epsilon(ABADI, delta=1e-5)]
    chain += [composition.advanced(ABADI, delta=1e-5), composition.advanced(ABADI, delta=1e-5, classic=True)]
    chain += [composition.basic(ABADI, delta=1e-5)]
    assert chain == sorted(chain)


@pytest.mark.parametrize("order", [2, 3, 8, 32])
@pytest.mark.parametrize(("rate", "noise"), [(0.01, 4.0), (0.2, 0.8), (1e-4, 1.0)])
def test_sampled_gaussian_renyi_matches_the_binomial_sum(rate, noise, order):
    """[MTZ19] for integer orders: sum of C(a,k) (1-q)^(a-k) q^k e^(k(k-1)/(2 s^2))."""
    k = np.arange(order + 1)
    logs = np.log(comb(order, k)) + (order - k) * math.log1p(-rate) + k * math.log(rate) + k * (k - 1) / (2 * noise**2)
    exact = logsumexp(logs) / (order - 1)
    found = renyi.curve(PoissonSampled(Gaussian(noise=noise), rate=rate), np.array([float(order)]))[0]
    assert found == pytest.approx(exact, rel=1e-8, abs=1e-12)
    assert found >= exact * (1 - 1e-12)


@pytest.mark.parametrize("order", [1.5, 4.0, 20.0])
def test_laplace_renyi_matches_the_integral(order):
    def integrand(x):  # p^order q^(1-order), scaled by its peak e^((order-1)/0.8)
        return math.exp((order - 1) * (abs(x) - 1) / 0.8 - order * abs(x - 1) / 0.8) / 1.6

    value, _ = quad(integrand, -60, 60, limit=500, points=[0, 1])
    exact = math.log(value) / (order - 1) + 1 / 0.8
    assert renyi.curve(Laplace(noise=0.8), np.array([order]))[0] == pytest.approx(exact, rel=1e-7)


def test_randomized_response_renyi_matches_two_terms():
    p = math.e / (1 + math.e)
    exact = math.log(p**3 * (1 - p) ** -2 + (1 - p) ** 3 * p**-2) / 2
    assert renyi.curve(RandomizedResponse(epsilon=1.0), np.array([3.0]))[0] == pytest.approx(exact, rel=1e-9)


def test_the_newer_conversion_is_the_tighter_one():
    new, old = (renyi.epsilon(ABADI, delta=1e-5, convert=rule) for rule in (None, renyi.mironov))
    assert new < old


def test_moments_match_direct_integration_both_ways():
    rate, noise, order = 0.05, 1.0, 4

    def density(x, centre):
        return math.exp(-((x - centre) ** 2) / 2) / math.sqrt(2 * math.pi)

    def mixture(x):
        return (1 - rate) * density(x, 0) + rate * density(x, 1)

    one, _ = quad(lambda x: density(x, 0) * (density(x, 0) / mixture(x)) ** order, -20, 20)
    two, _ = quad(lambda x: mixture(x) * (mixture(x) / density(x, 0)) ** order, -20, 30)
    found = moments.log_moment(PoissonSampled(Gaussian(noise=noise), rate=rate), order)
    assert found == pytest.approx(math.log(max(one, two)), rel=1e-8)


def test_advanced_composition_in_both_forms():
    event = Repeated(PureDP(epsilon=0.1), times=100)
    delta = 1e-6
    root = 0.1 * math.sqrt(2 * 100 * math.log(2 / delta))
    assert composition.advanced(event, delta=delta, classic=True) == pytest.approx(
        root + 10 * math.expm1(0.1), rel=1e-9
    )
    assert composition.advanced(event, delta=delta) == pytest.approx(root + 10 * math.tanh(0.05), rel=1e-9)
    few = Repeated(PureDP(epsilon=0.1), times=2)
    assert composition.advanced(few, delta=delta) == pytest.approx(0.2)


def test_a_group_pays_in_both_numbers():
    assert composition.group(Budget(1.0, 1e-9), 3).epsilon == pytest.approx(3.0)
    assert composition.group(Budget(1.0, 1e-9), 3).delta == pytest.approx(3 * math.e**2 * 1e-9)
    with pytest.raises(InvalidArgument, match="below 1"):
        composition.group(Budget(5.0, 1e-3), 10)


def test_a_groups_bound_covers_the_gaussian_exactly():
    """Two units move a Gaussian twice as far; its exact delta there must be within the group bound."""
    single = gaussian.delta(0.5, 1.0)
    pair = composition.group(Budget(1.0, single), 2)
    assert gaussian.delta(1.0, pair.epsilon) <= pair.delta


def test_amplification_by_sampling():
    assert amplification.poisson(1.0, rate=0.01) == pytest.approx(math.log(1 + 0.01 * (math.e - 1)))
    assert amplification.without_replacement(1.0, size=10, population=1000) == amplification.poisson(1.0, rate=0.01)
    assert amplification.poisson(100.0, rate=0.5) == pytest.approx(100 + math.log(0.5))
    for epsilon in (0.01, 0.5, 1.0):
        tight = amplification.poisson(epsilon, rate=0.1)
        assert tight <= amplification.linear(epsilon, rate=0.1) <= amplification.loose(epsilon, rate=0.1) * 1.0001
    with pytest.raises(InvalidArgument, match="at most 1"):
        amplification.linear(1.4592, rate=0.01)


def test_the_analytic_gaussian_matches_its_definition():
    """delta = integral of (P - e^eps Q)_+."""
    mu, epsilon = 0.7, 0.9
    exact, _ = quad(
        lambda x: max(0.0, math.exp(-((x - mu) ** 2) / 2) - math.exp(epsilon - x * x / 2)) / math.sqrt(2 * math.pi),
        -15,
        15,
        points=[epsilon / mu + mu / 2],
    )
    assert gaussian.delta(mu, epsilon) == pytest.approx(exact, rel=1e-8)
    assert gaussian.delta_below(mu, epsilon) <= gaussian.delta(mu, epsilon)
    assert (
        gaussian.delta(mu, gaussian.epsilon(mu, 1e-6))
        <= 1e-6
        <= gaussian.delta_below(mu, gaussian.epsilon_below(mu, 1e-6))
    )


@pytest.mark.parametrize("run", [moments.epsilon, renyi.epsilon, composition.basic, composition.advanced])
def test_an_unknown_event_is_refused(run):
    with pytest.raises(UnsupportedEvent, match="NonPrivate"):
        run(NonPrivate(), delta=1e-5)


def test_deltas_of_parts_come_off_the_whole():
    event = Repeated(ApproximateDP(epsilon=0.1, delta=1e-7), times=10)
    assert composition.basic(event, delta=1e-5) == pytest.approx(1.0)
    with pytest.raises(InvalidArgument, match="own deltas"):
        composition.basic(event, delta=1e-7)

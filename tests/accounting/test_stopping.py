"""The best of a random number of runs, against its exact law on small mechanisms.

One run gives one of finitely many scores, with chances p under one data set and q under its neighbour. With f the
generating function of K and F the chance of a score or a lower one, the best score y of K runs has the chance
f(F(y)) - f(F(y-)): so every divergence between both laws can be computed, and no bound may lie below it.
"""

import math

import numpy as np
import pytest
from scipy.stats import norm

from terrine import accounting
from terrine.accounting import certified, composition, moments, renyi
from terrine.accounting.costs import price
from terrine.accounting.filters import Filter
from terrine.errors import InvalidArgument, UnsupportedEvent
from terrine.events import (
    Budget,
    Composed,
    FixedSizeSampled,
    Gaussian,
    NegativeBinomialCount,
    OneOf,
    PoissonCount,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    RandomStopping,
    Repeated,
    from_json,
    to_json,
)

COUNTS = {
    "geometric": NegativeBinomialCount(shape=1.0, gamma=0.1),
    "rare geometric": NegativeBinomialCount(shape=1.0, gamma=0.9),
    "logarithmic": NegativeBinomialCount(shape=0.0, gamma=0.02),
    "heavy tail": NegativeBinomialCount(shape=-0.5, gamma=0.01),
    "shape 5": NegativeBinomialCount(shape=5.0, gamma=0.3),
    "poisson 1": PoissonCount(mean=1.0),
    "poisson 10": PoissonCount(mean=10.0),
    "poisson 200": PoissonCount(mean=200.0),
}
ORDERS = np.array([1.01, 1.1, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0])
each_count = pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)


def generating(count, x):
    """E[x^K]."""
    if isinstance(count, PoissonCount):
        return np.exp(count.mean * (x - 1))
    rest = 1 - (1 - count.gamma) * x
    if count.shape == 0:
        return np.log(rest) / math.log(count.gamma)
    return np.expm1(-count.shape * np.log(rest)) / math.expm1(-count.shape * math.log(count.gamma))


def best_of(count, chances):
    """The law of the best score; with no run at all, an outcome of its own."""
    below = np.concatenate([[0.0], np.cumsum(chances)])
    below[-1] = 1.0
    law = np.diff(generating(count, below))
    return np.append(law, generating(count, 0.0))


def divergence(p, q, order):
    kept = (p > 0) & (q > 0)
    logs = order * np.log(p[kept]) + (1 - order) * np.log(q[kept])
    top = logs.max()
    return (top + math.log(np.exp(logs - top).sum())) / (order - 1)


def response(epsilon):
    """Randomized response: the true answer has the higher score under p, the lower one under q."""
    share = 1 / (1 + math.exp(-epsilon))
    return np.array([1 - share, share])


def gaussian_scores(noise, cells=60):
    """A Gaussian seen through a grid: what is lost by the grid only lowers the divergences."""
    edges = np.concatenate([[-np.inf], np.linspace(-5, 5 + 1 / noise, cells), [np.inf]])
    return np.diff(norm.cdf(edges - 1 / noise)), np.diff(norm.cdf(edges))


MECHANISMS = {
    "response 0.1": (RandomizedResponse(epsilon=0.1), response(0.1), response(0.1)[::-1]),
    "response 1": (RandomizedResponse(epsilon=1.0), response(1.0), response(1.0)[::-1]),
    "pure 3": (PureDP(epsilon=3.0), response(3.0), response(3.0)[::-1]),
    "gaussian 1": (Gaussian(noise=1.0), *gaussian_scores(1.0)),
    "gaussian 5": (Gaussian(noise=5.0), *gaussian_scores(5.0)),
}
each_mechanism = pytest.mark.parametrize(("inner", "p", "q"), MECHANISMS.values(), ids=MECHANISMS)


def excess(claimed, count, p, q):
    """How far the exact divergences, both ways, lie above the claim: positive means refuted."""
    one, two = best_of(count, p), best_of(count, q)
    exact = [max(divergence(one, two, order), divergence(two, one, order)) for order in ORDERS]
    return float(np.max(np.array(exact) - claimed(ORDERS)))


@each_count
@each_mechanism
def test_no_exact_divergence_is_above_the_bound(count, inner, p, q):
    event = RandomStopping(inner, count)
    assert excess(lambda orders: renyi.curve(event, orders), count, p, q) <= 1e-9


@each_count
@each_mechanism
def test_the_exact_epsilon_is_below_the_proven_one(count, inner, p, q):
    one, two = best_of(count, p), best_of(count, q)
    for delta in (1e-3, 1e-6):
        epsilon = accounting.epsilon(RandomStopping(inner, count), delta=delta)
        assert np.maximum(one - math.exp(epsilon) * two, 0).sum() <= delta * (1 + 1e-9)
        assert np.maximum(two - math.exp(epsilon) * one, 0).sum() <= delta * (1 + 1e-9)


def test_the_mutant_that_charges_one_run_only_is_caught():
    caught = [
        excess(lambda orders, inner=inner: renyi.curve(inner, orders), count, p, q) > 0.01
        for count in (COUNTS["geometric"], COUNTS["logarithmic"], COUNTS["poisson 10"])
        for inner, p, q in (MECHANISMS["response 1"], MECHANISMS["gaussian 1"])
    ]
    assert all(caught)


def test_the_mutant_that_forgets_the_number_of_runs_is_caught():
    """Without ln(mean) / (a - 1) the bound for Poisson would be refuted."""
    inner, p, q = MECHANISMS["response 0.1"]
    count = COUNTS["poisson 200"]
    event = RandomStopping(inner, count)
    assert excess(lambda orders: renyi.curve(event, orders) - math.log(200) / (orders - 1), count, p, q) > 0.01


def test_the_bound_is_within_reason():
    """Pure runs of two scores already reach 2 epsilon; the bound, for any number of scores, is 3."""
    inner, count = RandomizedResponse(epsilon=1.0), NegativeBinomialCount(shape=1.0, gamma=1e-4)
    one, two = best_of(count, response(1.0)), best_of(count, response(1.0)[::-1])
    exact = np.abs(np.log(one[:2] / two[:2])).max()
    assert 1.99 < exact <= 3.0 + 1e-9
    assert accounting.epsilon(RandomStopping(inner, count), delta=1e-9) <= 3.0 * (1 + 1e-9)


@each_count
def test_the_mean_is_that_of_the_generating_function(count):
    step = 1e-6
    slope = (generating(count, 1.0) - generating(count, 1 - step)) / step
    assert count.mean == pytest.approx(float(slope), rel=1e-2)


@pytest.mark.parametrize("shape", [-0.5, 0.0, 1e-9, 1.0, 3.0])
@pytest.mark.parametrize("mean", [1.001, 4.0, 1000.0])
def test_a_count_of_a_mean_has_at_least_that_mean(shape, mean):
    found = NegativeBinomialCount.of_mean(mean, shape=shape).mean
    assert mean <= found * (1 + 1e-12) <= mean * (1 + 1e-6)


def test_a_run_of_training_is_billed_about_twice_not_ten_times():
    run = Repeated(PoissonSampled(Gaussian(noise=2.0), rate=0.05), times=200)
    once = accounting.epsilon(run, delta=1e-5)
    for count in (PoissonCount(mean=10.0), NegativeBinomialCount.of_mean(10.0, shape=0.0)):
        best = accounting.epsilon(RandomStopping(run, count), delta=1e-5)
        assert once < best < 3.2 * once
    assert accounting.epsilon(Repeated(run, times=10), delta=1e-5) > 3.2 * once


def test_it_agrees_with_an_independent_implementation():
    peer = pytest.importorskip("dp_accounting.rdp.rdp_privacy_accountant")
    orders = np.array([1.5, 2.0, 4.0, 8.0, 32.0, 128.0, 1024.0])
    known = renyi.curve(Gaussian(noise=3.0), renyi.ORDERS)
    for count, shape in ((PoissonCount(mean=7.0), math.inf), (NegativeBinomialCount.of_mean(7.0, shape=1.0), 1.0)):
        theirs = peer._compute_rdp_repeat_and_select(renyi.ORDERS, known, 7.0, shape)
        theirs = np.minimum.accumulate(theirs[::-1])[::-1]  # a divergence grows with its order
        ours = renyi.curve(RandomStopping(Gaussian(noise=3.0), count), renyi.ORDERS)
        assert np.interp(orders, renyi.ORDERS, ours) == pytest.approx(np.interp(orders, renyi.ORDERS, theirs), rel=1e-6)


def test_pure_runs_have_a_pure_bound_and_others_are_refused_by_those_who_do_not_know():
    geometric = COUNTS["geometric"]
    assert composition.pure(RandomStopping(PureDP(epsilon=0.5), geometric)) == pytest.approx(1.5)
    assert price(RandomStopping(PureDP(epsilon=0.5), geometric), (2.0,)).epsilon == 1.5
    for event in (
        RandomStopping(Gaussian(noise=3.0), geometric),
        RandomStopping(PureDP(epsilon=0.5), PoissonCount(mean=3.0)),
    ):
        for refuse in (certified.epsilon, moments.epsilon, composition.basic, composition.advanced):
            with pytest.raises(UnsupportedEvent):
                refuse(event, delta=1e-5)
        with pytest.raises(UnsupportedEvent):
            accounting.epsilon(PoissonSampled(event, rate=0.1), delta=1e-5)
        assert price(event, (2.0,)).epsilon is None


def test_one_of_several_costs_no_more_than_the_dearest_and_no_less_than_a_mixture():
    event = OneOf([RandomizedResponse(epsilon=0.3), RandomizedResponse(epsilon=1.0)])
    for weight in (0.01, 0.5, 0.99):
        p = np.concatenate([weight * response(0.3), (1 - weight) * response(1.0)])
        q = np.concatenate([weight * response(0.3)[::-1], (1 - weight) * response(1.0)[::-1]])
        exact = [divergence(p, q, order) for order in ORDERS]
        assert np.all(exact <= renyi.curve(event, ORDERS) + 1e-9)
        assert np.any(exact > renyi.curve(RandomizedResponse(epsilon=0.3), ORDERS))  # the cheapest would not do
    assert composition.pure(event) == price(event, (2.0,)).epsilon == 1.0
    assert price(OneOf([PureDP(epsilon=1.0), Gaussian(noise=2.0)]), (2.0,)).epsilon is None
    with pytest.raises(InvalidArgument, match="no parts"):
        OneOf([])
    draw = FixedSizeSampled(Gaussian(noise=1.0), size=1, population=10)
    with pytest.raises(InvalidArgument, match="different neighbours"):
        OneOf([Gaussian(noise=1.0), draw])


def test_a_filter_takes_it():
    event = RandomStopping(Gaussian(noise=20.0), COUNTS["logarithmic"])
    filter_ = Filter(Budget(epsilon=8.0, delta=1e-5))
    filter_.charge(event)
    filter_.charge(Composed([event, Gaussian(noise=20.0)]))
    assert 0 < filter_.spent() <= 8.0


@each_count
def test_the_codec_keeps_it(count):
    event = RandomStopping(Repeated(PoissonSampled(Gaussian(noise=1.0), rate=0.1), times=3), count)
    assert from_json(to_json(event)) == event


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: NegativeBinomialCount(shape=-1.0, gamma=0.5),
        lambda: NegativeBinomialCount(shape=1.0, gamma=1.0),
        lambda: PoissonCount(mean=0.5),
        lambda: NegativeBinomialCount.of_mean(1.0, shape=1.0),
        lambda: RandomStopping(Gaussian(noise=1.0), 10),
    ],
)
def test_counts_out_of_range_are_refused(wrong):
    with pytest.raises(InvalidArgument, match="want"):
        wrong()

"""Filters against brute force over every transcript, and the odometer against simulated losses."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri

from terrine import accounting
from terrine.accounting import gaussian
from terrine.accounting.calibration import NOISE, RATE, STEPS
from terrine.accounting.costs import Cost, price, written
from terrine.accounting.filters import DeltaShares, Filter, Odometer, Terms, accept, least_private, remaining_noise
from terrine.errors import BudgetExceeded, InvalidArgument, UnsupportedEvent
from terrine.events import (
    ApproximateDP,
    Budget,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    NegativeBinomialCount,
    Neighbours,
    NonPrivate,
    OneOf,
    PoissonCount,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    RandomStopping,
    Repeated,
    Reproducible,
    Selection,
    ShuffledEpoch,
)
from tests.thorough import examples

BUDGET = Budget(epsilon=1.0, delta=1e-5)


def fill(filter_, event, most=100_000):
    for count in range(most):
        try:
            filter_.charge(event)
        except BudgetExceeded:
            return count
    return most


def test_ten_tenths_are_one_and_an_eleventh_is_refused_without_a_trace():
    filter_ = Filter(Budget(epsilon=1.0, delta=0.0))
    assert fill(filter_, PureDP(epsilon=0.1)) == 10
    before = filter_.state
    with pytest.raises(BudgetExceeded, match=r"0% is left; nothing was charged"):
        filter_.charge(PureDP(epsilon=1e-12))
    assert filter_.state == before
    assert filter_.spent(0.0) == 1.0
    assert filter_.remaining().share == 0.0


amounts = st.none() | st.sampled_from([0.0, 0.5, 0.999, 1.0, 1.001, 3.0])


@given(amounts, amounts, amounts, st.sampled_from([0.0, 0.25, 0.26]), st.booleans(), st.sampled_from([0.0, 1e-5]))
def test_the_quick_look_at_the_rules_agrees_with_the_shares(epsilon, mu, renyi, failures, planned, delta):
    terms = Terms.of(Budget(epsilon=1.0, delta=delta))

    def times(share, limit):
        return None if share is None else written(share) * Fraction(limit)

    first = math.inf if renyi is None else renyi * terms.renyi
    cost = Cost(
        epsilon=times(epsilon, 1),
        delta=written(failures) * written(delta),
        mu_squared=times(mu, terms.mu_squared),
        renyi=(first, *terms.nothing.renyi[1:]),
        planned=planned,
    )
    assert terms.hold(cost) == (terms.used(cost) <= 1)


def test_thirds_add_up_to_one():
    assert fill(Filter(Budget(epsilon=1.0, delta=0.0)), Laplace(noise=3.0)) == 3
    assert fill(Filter(Budget(epsilon=1.0, delta=0.0)), Laplace(noise=2.999999)) == 2


def test_gaussians_fill_exactly_the_share_of_the_gaussian_rule():
    count = fill(Filter(BUDGET), Gaussian(noise=60.0))
    share = BUDGET.delta * DeltaShares().gaussian
    assert gaussian.delta(math.sqrt(count) / 60, 1.0) <= share
    assert gaussian.delta_below(math.sqrt(count + 1) / 60, 1.0) > share


def test_all_of_delta_for_gaussians_is_the_exact_gaussian_composition():
    filter_ = Filter(BUDGET, DeltaShares(failures=0, gaussian=1, renyi=0))
    noise = filter_.calibrate(lambda noise: Repeated(Gaussian(noise=noise), times=50))
    exact = accounting.calibrate(lambda noise: Repeated(Gaussian(noise=noise), times=50), BUDGET)
    assert noise == pytest.approx(exact, rel=1e-5)
    assert gaussian.delta(math.sqrt(50) / noise, 1.0) <= BUDGET.delta


EVENTS = st.one_of(
    st.floats(1.5, 60).map(lambda noise: Gaussian(noise=noise)),
    st.floats(1.5, 60).map(lambda noise: Laplace(noise=noise)),
    st.floats(0.01, 0.7).map(lambda epsilon: PureDP(epsilon=epsilon)),
    st.floats(0.01, 0.7).map(lambda epsilon: ApproximateDP(epsilon=epsilon, delta=1e-7)),
    st.tuples(st.floats(0.8, 4), st.integers(1, 300)).map(
        lambda pair: Repeated(PoissonSampled(Gaussian(noise=pair[0]), rate=0.01), times=pair[1])
    ),
)


@settings(deadline=None, max_examples=examples(25))
@given(st.lists(EVENTS, min_size=1, max_size=25), st.floats(0.3, 5))
def test_whatever_was_accepted_keeps_the_budget_as_one_plan_too(events, epsilon):
    budget = Budget(epsilon=epsilon, delta=1e-5)
    filter_, accepted = Filter(budget), []
    for event in events:
        quote = filter_.would_cost(event)
        try:
            filter_.charge(event)
        except BudgetExceeded:
            assert not quote.fits
        else:
            assert quote.fits
            accepted.append(event)
    assert filter_.spent(1e-5) <= epsilon
    failures = sum(event.delta for event in accepted if isinstance(event, ApproximateDP))
    pure = [PureDP(epsilon=event.epsilon) if isinstance(event, ApproximateDP) else event for event in accepted]
    assert failures <= DeltaShares().failures * 1e-5 * (1 + 1e-9)
    if pure:
        assert accounting.bounds(Composed(pure), delta=1e-5).lower <= epsilon


def hockey_stick(strategy, budget, limit, steps):
    """delta at the budget's epsilon of `steps` rounds of randomized response: every transcript, one by one."""
    total = 0.0
    for transcript in itertools.product((0, 1), repeat=steps):
        p = q = 1.0
        spent = limit.nothing
        for step, bit in enumerate(transcript):
            epsilon = strategy(transcript[:step])
            after = accept(limit, spent, RandomizedResponse(epsilon=epsilon))
            if after is None or after.planned:
                p, q = p / 2, q / 2  # refused: a fair coin in place of an answer
                continue
            spent = after
            truth = 1 / (1 + math.exp(-epsilon))
            p, q = p * (truth if bit else 1 - truth), q * (1 - truth if bit else truth)
        total += max(0.0, p - math.exp(budget.epsilon) * q)
    return total


def strategies():
    menu = [0.2, 0.5, 0.9, 1.4]
    rng = np.random.default_rng(5)
    for _ in range(25):
        table = {}

        def chosen(past, table=table):
            return table.setdefault(past, menu[int(rng.integers(len(menu)))])

        yield chosen
    yield lambda past: 0.9 if sum(past) == len(past) else 0.2  # bold while the answers go one way
    yield lambda past: 0.2 if sum(past) == len(past) else 1.4
    yield lambda past: 0.5


@pytest.mark.parametrize("delta", [0.02, 0.2])
def test_no_adaptive_strategy_of_coins_passes_the_budget(delta):
    budget = Budget(epsilon=1.5, delta=delta)
    terms = Terms.of(budget)
    assert max(hockey_stick(one, budget, terms, 8) for one in strategies()) <= delta


def test_a_filter_with_inflated_limits_is_caught_both_ways():
    budget = Budget(epsilon=1.5, delta=0.02)
    honest = Terms.of(budget)
    honest.check()
    inflated = replace(honest, renyi=honest.renyi * 4, mu_squared=honest.mu_squared * 4)
    assert max(hockey_stick(one, budget, inflated, 8) for one in strategies()) > budget.delta
    for wrong in (replace(honest, renyi=honest.renyi * 1.01), replace(honest, mu_squared=honest.mu_squared * 1.01)):
        with pytest.raises(InvalidArgument, match="above its share"):
            wrong.check()


@pytest.mark.parametrize("epsilon", [1e-6, 9.99e-4, 1e-3, 0.05, 0.5, 1, 3, 8, 40, 300])
def test_a_pure_event_lies_above_its_gaussian_trade_off_curve_and_not_by_more(epsilon):
    mu = math.sqrt(price(PureDP(epsilon=epsilon), (2.0,)).mu_squared)
    false_positive = np.concatenate([np.geomspace(1e-200, 0.4, 500), np.linspace(0.4, 0.999, 500)])
    lines = np.maximum(1 - math.exp(epsilon) * false_positive, math.exp(-epsilon) * (1 - false_positive))
    assert np.all(ndtr(-ndtri(false_positive) - mu) <= np.maximum(lines, 0) + 1e-15)
    kink = 1 / (1 + math.exp(epsilon))
    assert ndtr(-ndtri(kink) - 0.99 * mu) > kink or epsilon < 1e-3


def test_the_odometer_holds_at_every_moment_against_an_analyst_who_hunts_for_large_losses():
    # False alarm rate: the true crossing chance is at most 0.1; 0.1 + 4 standard deviations is exceeded in 1 of 30,000.
    runs, delta, rng = 400, 0.1, np.random.default_rng(11)
    crossed = bare = 0
    for _ in range(runs):
        odometer, loss, worst, worst_bare, spent = Odometer(delta), 0.0, -math.inf, -math.inf, 0.0
        for _ in range(25):
            noise = 2.0 if loss > spent / 2 else 6.0
            odometer.charge(Gaussian(noise=noise))
            loss += rng.normal(0.5 / noise**2, 1 / noise)  # loss of a Gaussian mechanism under P
            spent = odometer.spent()
            worst, worst_bare = max(worst, loss - spent), max(worst_bare, loss - 0.4 * spent)
        crossed, bare = crossed + (worst > 0), bare + (worst_bare > 0)
    limit = runs * delta + 4 * math.sqrt(runs * delta * (1 - delta))
    assert crossed <= limit
    assert bare > limit  # the same test finds an odometer that shows 40% of its bound


def test_the_odometer_is_basic_composition_at_first_and_better_later():
    odometer = Odometer(1e-5)
    assert odometer.spent() == 0.0
    odometer.charge(PureDP(epsilon=0.01))
    assert odometer.spent() == 0.01
    for _ in range(9_999):
        odometer.charge(PureDP(epsilon=0.01))
    best = accounting.epsilon(Repeated(PureDP(epsilon=0.01), times=10_000), delta=1e-5)
    assert best < odometer.spent() < 1.5 * best
    odometer.charge(NonPrivate())
    assert odometer.spent() == math.inf


def test_failures_are_counted_apart_and_stop_every_rule():
    filter_ = Filter(BUDGET)
    assert fill(filter_, ApproximateDP(epsilon=1e-6, delta=1e-6)) == 2  # a quarter of 1e-5
    assert filter_.spent(1e-5) == pytest.approx(2e-6)
    assert filter_.spent(1e-6) == math.inf  # two failures of 1e-6 do not fit into a quarter of 1e-6
    odometer = Odometer(1e-6)
    odometer.charge(ApproximateDP(epsilon=0.1, delta=1e-6))
    assert odometer.spent() == math.inf


def test_one_planned_event_may_take_the_whole_budget_and_closes_it():
    def plan(noise):
        return Repeated(PoissonSampled(Gaussian(noise=noise), rate=0.02), times=500)

    exact = plan(accounting.calibrate(plan, BUDGET))
    filter_ = Filter(BUDGET)
    assert filter_.would_cost(exact).fits
    filter_.charge(exact)
    assert filter_.state.planned
    assert filter_.spent(1e-5) <= 1.0
    assert filter_.spent(1e-3) == pytest.approx(accounting.epsilon(exact, delta=1e-3))
    assert filter_.remaining().share == 0
    with pytest.raises(BudgetExceeded, match="a plan holds the whole budget"):
        filter_.charge(PureDP(epsilon=1e-9))
    later = Filter(BUDGET)
    later.charge(PureDP(epsilon=1e-9))  # an answer exists: no plan any more
    with pytest.raises(BudgetExceeded):
        later.charge(exact)


def test_refusals_name_the_reason():
    filter_ = Filter(BUDGET)
    with pytest.raises(BudgetExceeded, match="NonPrivate: wants more than all"):
        filter_.charge(NonPrivate())
    strange = PoissonSampled(Gaussian(noise=1.0), rate=0.5, neighbours=Neighbours.REPLACE_ONE)
    filter_.charge(PureDP(epsilon=0.1))
    if price(strange, (2.0,)).unknown:
        fresh = Filter(Budget(epsilon=1e-3, delta=1e-9))
        with pytest.raises((UnsupportedEvent, BudgetExceeded)):
            fresh.charge(strange)
        assert fresh.state.events == 0
    assert filter_.state.events == 1
    with pytest.raises(
        InvalidArgument, match="protects one example, replace-one; the events before it protect one example"
    ):
        filter_.charge(Gaussian(noise=90.0, neighbours=Neighbours.REPLACE_ONE))
    with pytest.raises(InvalidArgument, match=r"add up to 1\.5"):
        DeltaShares(failures=0.5, gaussian=0.5, renyi=0.5)


def test_the_closed_loop_spends_what_is_left_and_not_more():
    filter_ = Filter(Budget(epsilon=3.0, delta=1e-5))

    def steps(noise):
        return Repeated(PoissonSampled(Gaussian(noise=noise), rate=0.05), times=200)

    filter_.charge(steps(2.0))
    noise = filter_.calibrate(steps)
    with pytest.raises(BudgetExceeded):
        filter_.charge(steps(noise * 0.999))
    filter_.charge(steps(noise))
    assert 0 <= filter_.remaining().share < 1e-3


@pytest.mark.parametrize("limit", [1e-30, 0.002, 0.7, 1.0, 3.5, 1234.5, 1e8, 1e40])
def test_the_search_finds_the_edge_wherever_it_is(limit):
    for over in (NOISE, RATE, STEPS):
        fits = (lambda value: value >= limit) if over.private_end_is_high else (lambda value: value <= limit)
        safe_end, risky_end = (over.high, over.low) if over.private_end_is_high else (over.low, over.high)
        if not fits(safe_end):
            with pytest.raises(BudgetExceeded, match="does not fit"):
                least_private(fits, over)
            continue
        found = least_private(fits, over)
        assert fits(found)
        assert found == risky_end or not fits(found * (0.999 if over.private_end_is_high else 1.001) + over.whole)


def test_remaining_noise_is_one_plan_with_what_was_spent():
    done = Repeated(PoissonSampled(Gaussian(noise=2.0), rate=0.05), times=100)
    budget = Budget(epsilon=3.0, delta=1e-5)
    noise = remaining_noise(done, budget, steps=300, rate=0.05)
    rest = Repeated(PoissonSampled(Gaussian(noise=noise), rate=0.05), times=300)
    assert accounting.delta(Composed([done, rest]), epsilon=3.0) <= 1e-5
    looser = Repeated(PoissonSampled(Gaussian(noise=noise * 0.999), rate=0.05), times=300)
    assert accounting.delta(Composed([done, looser]), epsilon=3.0) > 1e-5
    with pytest.raises(BudgetExceeded):
        remaining_noise(Repeated(done, times=1000), budget, steps=1)


ALL_KINDS = [
    Laplace(noise=2.0),
    Gaussian(noise=2.0),
    DiscreteLaplace(noise=2.0),
    DiscreteGaussian(noise=2.0),
    RandomizedResponse(epsilon=0.5),
    PureDP(epsilon=0.5),
    Selection(epsilon=0.5),
    ApproximateDP(epsilon=0.5, delta=1e-9),
    PoissonSampled(Gaussian(noise=1.0), rate=0.1),
    PoissonSampled(ApproximateDP(epsilon=0.5, delta=1e-9), rate=0.1),
    FixedSizeSampled(PureDP(epsilon=0.5), size=10, population=100),
    ShuffledEpoch(Gaussian(noise=2.0), steps=5),
    Reproducible(Laplace(noise=2.0)),
    OneOf([PureDP(epsilon=0.5), Laplace(noise=3.0)]),
    RandomStopping(PureDP(epsilon=0.5), NegativeBinomialCount(shape=0.0, gamma=0.1)),
    RandomStopping(Gaussian(noise=2.0), PoissonCount(mean=4.0)),
]


@pytest.mark.parametrize("event", ALL_KINDS, ids=lambda event: type(event).__name__)
def test_every_kind_has_a_price_that_adds_up(event):
    orders = (2.0, 17.0)
    cost = price(event, orders)
    assert not cost.unknown
    assert all(value > 0 for value in cost.renyi)
    twice, again = price(Composed([event, event]), orders), price(Repeated(event, times=2), orders)
    assert twice.epsilon == again.epsilon
    assert twice.mu_squared == again.mu_squared
    assert twice.renyi == pytest.approx(again.renyi)
    assert all(whole > part for whole, part in zip(twice.renyi, cost.renyi, strict=True))


def test_fractions_stay_small_and_never_round_down():
    rng = np.random.default_rng(3)
    total, exact = price(Composed([]), (2.0,)), Fraction(0)
    for noise in rng.uniform(1, 100, size=400):
        total = total + price(Laplace(noise=float(noise)), (2.0,))
        exact += 1 / written(float(noise))
    assert total.epsilon.denominator.bit_length() <= 256
    assert 0 <= total.epsilon - exact < 1e-30

"""Certified numbers that a hostile reader found below the truth, or that crashed, hung or warned."""

import math
import time
import warnings

import numpy as np
import pytest

from terrine import accounting
from terrine.accounting import composition, moments, renyi
from terrine.accounting.filters import Filter
from terrine.errors import BudgetExceeded, InvalidArgument, TerrineError
from terrine.events import (
    ApproximateDP,
    Budget,
    DiscreteGaussian,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    Neighbours,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    Repeated,
)

TINY_NOISE = Repeated(PoissonSampled(Gaussian(noise=0.03), rate=0.1), times=2)


def replaced(noise: float, rate: float) -> PoissonSampled:
    return PoissonSampled(Gaussian(noise=noise), rate=rate, neighbours=Neighbours.REPLACE_ONE)


def test_two_steps_of_tiny_noise_cost_at_least_one_of_them():
    assert accounting.epsilon(TINY_NOISE, delta=1e-5) >= 676.27


def test_a_thousand_ordinary_looks_at_one_sample_are_not_lost():
    inside = PoissonSampled(Repeated(Gaussian(noise=1.0), times=1000), rate=0.01)
    found = accounting.bounds(Repeated(inside, times=10), delta=1e-5)
    assert found.lower >= 592
    assert found.upper <= 1.1 * found.lower


def test_samples_of_fixed_size_with_tiny_noise_are_not_free():
    event = Repeated(FixedSizeSampled(Gaussian(noise=0.03), size=10, population=100), times=2)
    assert accounting.epsilon(event, delta=1e-5) >= 676.27


def test_very_many_tiny_pure_events_cost_what_the_certified_accountant_says():
    event = Repeated(PureDP(epsilon=1e-9), times=10**20)
    assert renyi.epsilon(event, delta=1e-6) >= 96.6
    assert 96.6 <= accounting.bounds(event, delta=1e-6).lower <= accounting.epsilon(event, delta=1e-6) <= 96.8


def test_the_renyi_curve_of_wide_laplace_noise_keeps_its_digits():
    """For small e = 1/noise the divergence at order a is a e^2 / 2."""
    found = renyi.curve(Laplace(noise=1e9), np.array([1.5, 2.0]))
    assert found / np.array([0.75e-18, 1e-18]) == pytest.approx(1, rel=1e-6)


def test_a_rare_sample_of_a_large_epsilon_keeps_its_digits():
    found = accounting.epsilon(PoissonSampled(PureDP(epsilon=40.0), rate=1e-25), delta=1e-60)
    exact = math.log1p(1e-25 * math.expm1(40.0))
    assert exact <= found <= exact * (1 + 1e-12)


def test_a_filter_does_not_take_very_many_tiny_events():
    with pytest.raises(BudgetExceeded):
        Filter(Budget(1, 1e-6)).charge(Repeated(PureDP(epsilon=1e-10), times=10**22))


def test_a_pure_budget_takes_ten_tenths_and_no_more():
    budget = Filter(Budget(1e-8, delta=0.0))
    for _ in range(10):
        budget.charge(PureDP(epsilon=1e-9))
    with pytest.raises(BudgetExceeded):
        budget.charge(PureDP(epsilon=1e-9))


def test_basic_composition_counts_the_delta_inside_a_sample():
    with pytest.raises(InvalidArgument, match="delta"):
        composition.basic(PoissonSampled(ApproximateDP(epsilon=1.0, delta=0.1), rate=0.5), delta=1e-6)


def answer(method, event, delta) -> float:
    """What the method finds, or the length of the one line in which it refuses."""
    try:
        return method(event, delta=delta)
    except TerrineError as refusal:
        return math.inf if "\n" in str(refusal) else len(str(refusal))


@pytest.mark.parametrize(
    "event",
    [
        replaced(0.5, 1.0),
        Repeated(replaced(0.1, 1.0), times=10),
        replaced(0.2, 0.1),
        Repeated(replaced(0.2, 0.1), times=100),
        replaced(0.045, 0.1),
        Repeated(replaced(0.04, 0.1), times=10),
        DiscreteGaussian(noise=0.01),
        Gaussian(noise=1e160),
        Gaussian(noise=1e-160),
        Repeated(PoissonSampled(Gaussian(noise=1e-200), rate=0.1), times=3),
        Repeated(PureDP(epsilon=400.0), times=3),
        Repeated(PureDP(epsilon=17.8), times=327),
        Repeated(RandomizedResponse(epsilon=19.6), times=438464),
        Repeated(PoissonSampled(Gaussian(noise=1.0), rate=1e-3), times=10**18),
        Repeated(Gaussian(noise=1.0), times=10**400),
        Repeated(PoissonSampled(Gaussian(noise=1.0), rate=1e-3), times=10**5000),
        PoissonSampled(ApproximateDP(epsilon=1.0, delta=1e-6), rate=0.1),
    ],
    ids=lambda event: repr(type(event).__name__),
)
@pytest.mark.parametrize("delta", [1e-5, 1e-300])
def test_extreme_events_answer_soon_or_are_refused_in_one_line(event, delta):
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in (accounting.epsilon, renyi.epsilon, moments.epsilon, composition.basic, composition.advanced):
            assert 0 <= answer(method, event, delta) < math.inf
    assert time.process_time() - start < 10


def test_replacing_one_in_every_lot_is_a_gaussian_of_half_the_noise():
    assert accounting.epsilon(replaced(0.5, 1.0), delta=1e-5) == accounting.epsilon(Gaussian(noise=0.25), delta=1e-5)


def test_calibration_of_few_rare_steps_ends():
    start = time.process_time()
    noise = accounting.calibrate(
        lambda value: Repeated(PoissonSampled(Gaussian(noise=value), rate=1.28e-5), times=22), Budget(29.9, 1.2e-9)
    )
    assert 0 < noise < 1
    assert time.process_time() - start < 15


def test_what_parts_state_does_not_hide_a_tighter_bound():
    """The sample is not drawn with probability 0.97, so that delta of 0.12 covers all that can happen."""
    inside = PoissonSampled(Repeated(Laplace(noise=0.1), times=10), rate=0.03)
    assert accounting.epsilon(inside, delta=0.12) == 0


def test_a_small_account_refuses_an_event_that_fails_too_often_as_too_dear():
    with pytest.raises(BudgetExceeded):
        Filter(Budget(1.0, 1e-9)).charge(ApproximateDP(epsilon=0.1, delta=1e-6))


@pytest.mark.parametrize("epsilon", [1e308, 1e10])
def test_a_budget_beyond_all_meaning_is_refused(epsilon):
    with pytest.raises(InvalidArgument, match="epsilon"):
        Budget(epsilon, 1e-9)


def test_a_delta_below_floating_point_is_refused():
    with pytest.raises(InvalidArgument, match="1e-300"):
        accounting.epsilon(Gaussian(noise=1.0), delta=1e-320)

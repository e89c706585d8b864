"""What calibration returns is within the budget, and nothing much less private is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrine import accounting
from terrine.accounting import NOISE, RATE, STEPS, calibrate, gaussian
from terrine.errors import BudgetExceeded
from terrine.events import Budget, Composed, DiscreteGaussian, Gaussian, Laplace, PoissonSampled, Repeated


def dpsgd(noise, rate=0.01, steps=10_000):
    return Repeated(PoissonSampled(Gaussian(noise=noise), rate=rate), times=steps)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.05, 20), st.floats(-10, -3).map(lambda power: 10**power), st.integers(1, 10**5))
def test_the_smallest_noise_keeps_the_budget_and_spends_it(epsilon, delta, steps):
    budget = Budget(epsilon, delta)
    noise = calibrate(lambda value: dpsgd(value, steps=steps), budget, over=NOISE)
    found = accounting.bounds(dpsgd(noise, steps=steps), delta=delta)
    assert found.upper <= epsilon
    by_other_atoms = 2e-3
    assert accounting.delta(dpsgd(noise, steps=steps), epsilon=epsilon) <= delta * (1 + by_other_atoms)
    assert accounting.bounds(dpsgd(noise * 0.999, steps=steps), delta=delta).upper > epsilon * 0.999


def test_the_most_steps_and_the_largest_rate():
    budget = Budget(2.0, 1e-5)
    steps = calibrate(lambda value: dpsgd(4.0, steps=value), budget, over=STEPS)
    assert isinstance(steps, int)
    assert accounting.epsilon(dpsgd(4.0, steps=steps), delta=1e-5) <= 2.0
    assert accounting.epsilon(dpsgd(4.0, steps=int(steps * 1.001) + 1), delta=1e-5) > 2.0
    rate = calibrate(lambda value: dpsgd(4.0, rate=value, steps=1000), budget, over=RATE)
    assert accounting.epsilon(dpsgd(4.0, rate=rate, steps=1000), delta=1e-5) <= 2.0
    assert accounting.epsilon(dpsgd(4.0, rate=rate * 1.001, steps=1000), delta=1e-5) > 2.0


def test_one_gaussian_is_the_analytic_calibration():
    noise = calibrate(lambda value: Gaussian(noise=value), Budget(1.0, 1e-5))
    assert noise == pytest.approx(3.7306, abs=1e-4)
    assert gaussian.delta(1 / noise, 1.0) <= 1e-5


def test_a_pure_budget_uses_basic_composition():
    noise = calibrate(lambda value: Repeated(Laplace(noise=value), times=10), Budget(1.0, 0.0))
    assert noise == pytest.approx(10, rel=1e-5)
    assert noise >= 10 * (1 - 1e-12)


def test_any_one_parameter_family():
    def family(scale):
        return Composed([Laplace(noise=scale), dpsgd(scale, steps=100), DiscreteGaussian(noise=scale, sensitivity=10)])

    scale = calibrate(family, Budget(1.0, 1e-6))
    assert accounting.epsilon(family(scale), delta=1e-6) <= 1.0
    assert accounting.epsilon(family(scale * 0.999), delta=1e-6) > 1.0


def test_an_impossible_budget_is_refused():
    with pytest.raises(BudgetExceeded, match="larger budget"):
        calibrate(lambda steps: dpsgd(0.3, rate=1.0, steps=steps), Budget(0.1, 1e-9), over=STEPS)


def test_a_budget_that_nothing_can_exceed_returns_the_end():
    assert calibrate(lambda rate: dpsgd(1e6, rate=rate, steps=1), Budget(5.0, 1e-5), over=RATE) == 1.0

"""One suite for every accountant: what any cost must satisfy."""

import math

import numpy as np
import pytest

from terrine import accounting
from terrine.accounting import composition, moments, renyi
from terrine.errors import InvalidArgument, TerrineError, UnsupportedEvent
from terrine.events import (
    Composed,
    Gaussian,
    Laplace,
    NegativeBinomialCount,
    Neighbours,
    NonPrivate,
    PoissonCount,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    RandomStopping,
    Repeated,
    Reproducible,
    Skellam,
    SummedDiscreteGaussian,
)

ACCOUNTANTS = {
    "tight": accounting.epsilon,
    "renyi": renyi.epsilon,
    "moments": moments.epsilon,
    "advanced": composition.advanced,
    "basic": composition.basic,
}
EVENTS = {
    "gaussian": lambda noise: Gaussian(noise=noise),
    "laplace": lambda noise: Laplace(noise=noise),
    "randomized response": lambda noise: RandomizedResponse(epsilon=1 / noise),
    "pure": lambda noise: PureDP(epsilon=1 / noise),
    "skellam": lambda noise: Skellam(noise=noise, sensitivity=300.0),
    "summed discrete gaussians": lambda noise: SummedDiscreteGaussian(noise=noise, sensitivity=90.5, shares=12),
    "federated": lambda noise: Repeated(PoissonSampled(Skellam(noise=noise, sensitivity=40.0), rate=0.02), times=50),
    "dp-sgd": lambda noise: Repeated(PoissonSampled(Gaussian(noise=noise), rate=0.02), times=50),
}
STOPPED = {
    "best of pure": lambda noise: RandomStopping(
        PureDP(epsilon=1 / noise), NegativeBinomialCount(shape=0.0, gamma=0.1)
    ),
    "best of gaussian": lambda noise: RandomStopping(Gaussian(noise=noise), PoissonCount(mean=5.0)),
}
each_accountant = pytest.mark.parametrize("epsilon", ACCOUNTANTS.values(), ids=ACCOUNTANTS)
each_event = pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)


@each_accountant
def test_nothing_costs_zero(epsilon):
    assert epsilon(Composed([]), delta=1e-5) == 0


@each_accountant
@each_event
def test_something_costs_something_finite(epsilon, event):
    assert 0 < epsilon(event(2.0), delta=1e-6) < math.inf


@each_accountant
@each_event
def test_more_noise_never_costs_more(epsilon, event):
    costs = [epsilon(event(noise), delta=1e-6) for noise in (0.7, 1.0, 3.0, 20.0)]
    assert all(np.diff(costs) <= 1e-12)


@each_accountant
@each_event
def test_a_larger_delta_never_costs_more(epsilon, event):
    costs = [epsilon(event(2.0), delta=delta) for delta in (1e-12, 1e-8, 1e-4)]
    assert all(np.diff(costs) <= 1e-12)


@each_accountant
@each_event
def test_a_whole_never_costs_less_than_its_part(epsilon, event):
    part, rest = event(2.0), Laplace(noise=5.0)
    whole = epsilon(Composed([part, rest]), delta=1e-6)
    slack = 1e-4 if epsilon is accounting.epsilon else 1e-12  # two certified numbers, each rounded outward
    assert whole >= epsilon(part, delta=1e-6) * (1 - slack)


@each_accountant
@each_event
def test_order_grouping_and_a_seed_do_not_change_the_cost(epsilon, event):
    one, other = event(2.0), Laplace(noise=5.0)
    cost = epsilon(Composed([one, other]), delta=1e-6)
    assert epsilon(Composed([other, one]), delta=1e-6) == pytest.approx(cost, rel=1e-9)
    assert epsilon(Composed([Composed([other]), one]), delta=1e-6) == pytest.approx(cost, rel=1e-9)
    assert epsilon(Reproducible(Composed([one, other])), delta=1e-6) == pytest.approx(cost, rel=1e-9)
    assert epsilon(Repeated(one, times=3), delta=1e-6) == pytest.approx(
        epsilon(Composed([one, one, one]), delta=1e-6), rel=1e-9
    )


@each_accountant
@each_event
def test_no_accountant_claims_less_than_is_possible(epsilon, event):
    """Every claim is compared with a proven lower bound on the truth."""
    run = Repeated(event(3.0), times=20)
    assert epsilon(run, delta=1e-6) >= accounting.bounds(run, delta=1e-6).lower * (1 - 1e-9)


@each_accountant
@pytest.mark.parametrize("event", STOPPED.values(), ids=STOPPED)
def test_the_best_of_many_is_priced_above_one_or_refused(epsilon, event):
    try:
        costs = [epsilon(event(noise), delta=1e-6) for noise in (1.0, 3.0, 20.0)]
    except UnsupportedEvent:
        assert epsilon not in (accounting.epsilon, renyi.epsilon)
        return
    assert all(np.diff(costs) <= 1e-12)
    assert costs[0] > epsilon(event(1.0).event, delta=1e-6)
    assert epsilon(Composed([event(1.0), Laplace(noise=5.0)]), delta=1e-6) >= costs[0]


@each_accountant
def test_what_it_does_not_know_it_refuses(epsilon):
    with pytest.raises(UnsupportedEvent, match="NonPrivate"):
        epsilon(Composed([Gaussian(noise=1.0), NonPrivate()]), delta=1e-5)


@each_accountant
def test_replace_one_samples_are_priced_or_refused_but_never_as_add_remove(epsilon):
    sample = PoissonSampled(Gaussian(noise=1.0), rate=0.01, neighbours=Neighbours.REPLACE_ONE)
    try:
        cost = epsilon(Repeated(sample, times=100), delta=1e-6)
    except UnsupportedEvent:
        return
    assert cost > accounting.epsilon(Repeated(PoissonSampled(Gaussian(noise=1.0), rate=0.01), times=100), delta=1e-6)


@each_accountant
@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, math.nan, math.inf])
def test_a_bad_delta_is_refused(epsilon, delta):
    with pytest.raises(InvalidArgument, match="delta"):
        epsilon(Gaussian(noise=1.0), delta=delta)


def test_every_refusal_is_one_line():
    for wrong in (
        lambda: Gaussian(noise=-1),
        lambda: PoissonSampled(Gaussian(noise=1.0), rate=2),
        lambda: Repeated(Gaussian(noise=1.0), times=0),
    ):
        with pytest.raises(TerrineError) as refusal:
            wrong()
        assert "\n" not in str(refusal.value)
        assert "want" in str(refusal.value)

"""Counts and sizes beyond floating point: priced right, or refused in one line, and never for less."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from terrine import accounting
from terrine.accounting import composition, witness
from terrine.accounting.filters import Filter
from terrine.errors import InvalidArgument, TerrineError
from terrine.events import (
    ApproximateDP,
    Budget,
    Composed,
    Event,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    OneOf,
    PoissonSampled,
    PureDP,
    Repeated,
)

OFTEN = Repeated(Gaussian(noise=1e160), 10**400)
"""As one Gaussian of noise 1e-40: epsilon is about 1e80 / 2."""


def nested(event: Event, *counts: int) -> Event:
    for times in counts:
        event = Repeated(event, times)
    return event


def answered(ask: Callable[[], float]) -> float | str:
    try:
        return ask()
    except TerrineError as refusal:
        return str(refusal)


@pytest.mark.parametrize(
    "event",
    [
        OFTEN,
        nested(Gaussian(noise=1e160), 10**200, 10**200),
        PoissonSampled(OFTEN, rate=0.5),
        Composed([OFTEN, Laplace(noise=2)]),
        OneOf([OFTEN, Laplace(noise=2)]),
    ],
    ids=["repeated", "nested", "sampled", "composed", "one of"],
)
def test_a_gaussian_repeated_more_often_than_a_double_counts_is_not_free(event):
    assert accounting.epsilon(event, delta=1e-6) >= 4.9999e79
    assert accounting.bounds(event, delta=1e-6, witness=True).lower >= 4.9e79
    assert accounting.delta(event, epsilon=1.0) >= 0.49
    assert accounting.profile(event, points=3).epsilon[-1] >= 4.9e79
    with np.errstate(all="ignore"):
        assert witness.bounds(event, delta=1e-6).upper >= 4.9999e79


@pytest.mark.parametrize(("noise", "times", "alike"), [(1e200, 10**400, 1.0), (2e150, 4 * 10**300, 1.0)])
def test_many_gaussians_cost_what_the_one_costs_that_they_amount_to(noise, times, alike):
    many, one = Repeated(Gaussian(noise=noise), times), Gaussian(noise=alike)
    assert accounting.epsilon(many, delta=1e-6) == pytest.approx(accounting.epsilon(one, delta=1e-6), rel=1e-9)


@pytest.mark.parametrize(
    "event",
    [
        Repeated(Laplace(noise=1e307), 10**400),
        Repeated(PureDP(epsilon=1e-300), 10**400),
        Repeated(ApproximateDP(epsilon=0.0, delta=1e-300), 10**400),
        Repeated(PoissonSampled(Gaussian(noise=1.0), rate=1e-200), 10**400),
    ],
    ids=["laplace", "pure", "approximate", "sampled"],
)
def test_anything_else_as_often_is_priced_above_the_truth_or_refused_in_one_line(event):
    for ask in (lambda: accounting.epsilon(event, delta=1e-6), lambda: accounting.bounds(event, delta=1e-6).upper):
        answer = answered(ask)
        assert "\n" not in answer if isinstance(answer, str) else answer >= 1e90
    assert accounting.delta(event, epsilon=1.0) == 1.0


@pytest.mark.parametrize(
    "event",
    [
        OFTEN,
        nested(Gaussian(noise=1e160), 10**200, 10**200),
        nested(PureDP(epsilon=1e-165), 10**300, 10**30),
        nested(PureDP(epsilon=5e-324), 10**300, 10**300),
        nested(PoissonSampled(ApproximateDP(epsilon=0.0, delta=5e-324), rate=0.5), 10**300, 10**24),
        nested(PoissonSampled(PureDP(epsilon=5e-324), rate=0.4), 10**300, 10**300),
        Gaussian(noise=1e-200),
    ],
)
def test_no_filter_takes_them_for_nothing(event):
    with pytest.raises(TerrineError) as refusal:
        Filter(Budget(epsilon=0.01, delta=1e-6)).charge(event)
    assert "\n" not in str(refusal.value)


def test_squares_of_tiny_numbers_are_not_lost():
    """10^20 times 10^-170: delta at epsilon 0 is about 10^-160, so epsilon at 10^-300 is not 0."""
    event = Repeated(PureDP(epsilon=1e-170), 10**20)
    assert composition.advanced(event, delta=1e-300) > 0
    assert accounting.epsilon(event, delta=1e-300) > 1e-160
    assert accounting.epsilon(Gaussian(noise=1e163), delta=1e-300) > 1e-163


def test_a_pure_event_of_hardly_any_noise_costs_infinitely_much():
    found = witness.bounds(Laplace(noise=1e-320), delta=1e-6).upper
    assert math.isinf(found)


def test_a_share_of_a_population_that_no_double_holds_is_refused():
    with pytest.raises(InvalidArgument, match="population"):
        FixedSizeSampled(PureDP(epsilon=1.0), size=1, population=10**400)


def test_an_attack_is_not_bounded_by_an_exponential_that_was_cut_off():
    """At epsilon 5e79 a false-positive rate of 1e-306 allows anything."""
    found = accounting.profile(OFTEN, points=3).true_positive_rate(1e-306)
    assert found > 0.99

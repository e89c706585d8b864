"""Arguments that made mechanisms raise what is not theirs to raise."""

import numpy as np
import pytest

from terrine import accounting, mechanisms
from terrine.errors import InvalidArgument
from terrine.events import DiscreteLaplace, Laplace
from terrine.rounding import inverse

RAGGED = [[1, 2], [3]]
MECHANISMS = {
    "Counts": lambda: mechanisms.Counts(epsilon=1.0, queries=2),
    "Histogram": lambda: mechanisms.Histogram(epsilon=1.0, bins=2),
    "BoundedSum": lambda: mechanisms.BoundedSum(lower=0, upper=1, epsilon=1.0),
    "BoundedMean": lambda: mechanisms.BoundedMean(lower=0, upper=1, epsilon=1.0),
    "Quantile": lambda: mechanisms.Quantile(q=0.5, lower=0, upper=1, epsilon=1.0),
    "RandomizedResponse": lambda: mechanisms.RandomizedResponse(epsilon=1.0, answers=4),
    "UnaryEncoding": lambda: mechanisms.UnaryEncoding(epsilon=1.0, answers=4),
    "SmoothMedian": lambda: mechanisms.SmoothMedian(lower=0, upper=1, epsilon=1.0),
    "MostCommonValue": lambda: mechanisms.MostCommonValue(categories=(1, 2), epsilon=1.0),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_lists_of_different_lengths_are_refused_in_one_line(name):
    with pytest.raises(InvalidArgument) as refusal:
        MECHANISMS[name]().release(RAGGED)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["RandomizedResponse", "UnaryEncoding"])
def test_so_are_reports_of_them(name):
    with pytest.raises(InvalidArgument):
        MECHANISMS[name]().estimate(RAGGED)


@pytest.mark.parametrize("values", [5, None, "ab", [[]], [{}], [([1],)], np.array(3), np.zeros((2, 2))])
def test_the_most_common_value_of_what_is_no_list_of_values(values):
    with pytest.raises(InvalidArgument) as refusal:
        MECHANISMS["MostCommonValue"]().release(values)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("categories", [5, [[1]], "ab"])
def test_categories_that_are_none(categories):
    with pytest.raises(InvalidArgument):
        mechanisms.MostCommonValue(categories=categories, epsilon=1.0)


@pytest.mark.parametrize("kind", [mechanisms.BoundedSum, mechanisms.BoundedMean])
@pytest.mark.parametrize(("lower", "upper"), [(0, 1e299), (-1e300, 1e300), (0, 5e-324), (1e299, 1.1e299)])
def test_bounds_that_no_grid_holds_are_refused_when_the_mechanism_is_made(kind, lower, upper):
    with pytest.raises(InvalidArgument, match="want bounds"):
        kind(lower=lower, upper=upper, epsilon=1.0)


@pytest.mark.parametrize("kind", [mechanisms.BoundedSum, mechanisms.BoundedMean])
@pytest.mark.parametrize(("lower", "upper"), [(-1e250, 1e250), (0, 1e-250), (0, 1e200)])
def test_bounds_at_the_edge_work(kind, lower, upper):
    assert np.isfinite(kind(lower=lower, upper=upper, epsilon=1.0).release([lower, upper]).value)


@pytest.mark.parametrize("noise", [0.7, 0.1, 3.0, 1 / 3, 49.0, 0.3])
def test_one_over_the_noise_is_rounded_up(noise):
    from fractions import Fraction

    for event in (Laplace(noise=noise), DiscreteLaplace(noise=noise)):
        assert Fraction(accounting.epsilon(event, delta=1e-300)) >= 1 / Fraction(noise)
    assert Fraction(inverse(noise)) - 1 / Fraction(noise) < Fraction(2) ** -51 / Fraction(noise)


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0, 64.0])
def test_where_it_is_exact_it_stays(noise):
    assert accounting.epsilon(Laplace(noise=noise), delta=1e-300) == 1 / noise


@pytest.mark.parametrize("noise", [0.7, 0.9102392266268373])
def test_just_below_one_over_the_noise_delta_is_not_0(noise):
    """1 - e^((e - 1/noise) / 2) at the double e nearest to 1 / noise, which lies below it."""
    assert accounting.delta(Laplace(noise=noise), epsilon=1 / noise) > 1e-17

"""The curve and the attack it allows."""

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from terrine import accounting
from terrine.errors import InvalidArgument
from terrine.events import Composed, Gaussian, PoissonSampled, PureDP, Repeated


def test_the_gaussian_trade_off_is_gaussian_dp():
    """The best test of N(0,1) against N(mu,1) has power Phi(mu + Phi^-1(a))."""
    rates = np.array([0.001, 0.01, 0.1, 0.5])
    bound = accounting.profile(Gaussian(noise=1.0), points=129).true_positive_rate(rates)
    exact = ndtr(1 + ndtri(rates))
    assert np.all(bound >= exact - 1e-12)
    assert np.all(bound <= exact * 1.01)


def test_the_curve_is_certified_point_by_point():
    event = Repeated(PoissonSampled(Gaussian(noise=1.0), rate=0.01), times=100)
    curve = accounting.profile(event, points=9)
    assert np.all(np.diff(curve.epsilon) >= 0)
    assert np.all(np.diff(curve.delta) < 0)
    for epsilon, delta in zip(curve.epsilon[1:], curve.delta[1:], strict=True):
        assert accounting.bounds(event, delta=float(delta)).lower <= epsilon


def test_nothing_allows_no_attack():
    assert accounting.profile(Composed([])).true_positive_rate(0.01) == pytest.approx(0.01)


def test_pure_dp_bounds_the_posterior():
    assert accounting.profile(PureDP(epsilon=np.log(3))).posterior(0.5) == pytest.approx(0.75)


def test_a_bad_rate_is_refused():
    with pytest.raises(InvalidArgument, match="false_positive_rate"):
        accounting.profile(Gaussian(noise=1.0), points=3).true_positive_rate(1.5)

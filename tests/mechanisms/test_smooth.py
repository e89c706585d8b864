"""Smooth sensitivity: the noise has its law, and the bound for the median is smooth and above the local one.

Kolmogorov-Smirnov tests have fixed seeds and a false-alarm rate of 1e-6; a scale cut by 30% must fail them.
"""

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, stats

from terrine.errors import InvalidArgument
from terrine.mechanisms import SmoothMedian, SmoothNoise
from terrine.mechanisms.smooth import smooth_sensitivity_of_median
from terrine.rng import Seeded


def heavy_tailed_cdf(tail):
    whole = 2 * integrate.quad(lambda z: 1 / (1 + z**tail), 0, np.inf)[0]

    def cdf(x):
        return np.array(
            [0.5 + math.copysign(integrate.quad(lambda z: 1 / (1 + z**tail), 0, abs(one))[0], one) / whole for one in x]
        )

    return cdf


@pytest.mark.parametrize(
    ("delta", "tail", "cdf", "factor"),
    [
        (1e-6, 4, stats.laplace.cdf, 2.0),
        (None, 2, stats.cauchy.cdf, 6.0),
        (None, 4, heavy_tailed_cdf(4), 10.0),
    ],
    ids=["Laplace", "Cauchy", "tail 4"],
)
def test_the_noise_has_its_law(delta, tail, cdf, factor):
    mechanism, rng = SmoothNoise(epsilon=1, delta=delta, tail=tail, grid=2.0**-20), Seeded(1)
    assert mechanism.factor == pytest.approx(factor)
    draws = np.array([mechanism.release(3.0, smooth=0.25, rng=rng).value for _ in range(3000)])
    scaled = (draws - 3.0) / (factor * 0.25)
    assert stats.kstest(scaled, cdf).pvalue > 1e-6
    assert stats.kstest(scaled * 0.7, cdf).pvalue < 1e-6


def slow_smooth_sensitivity(values, lower, upper, beta):
    """The oracle: Proposition 3.4 by its definition, counted from 1, with bounds beyond the ends."""
    n = len(values)
    x = lambda i: lower if i < 1 else upper if i > n else values[i - 1]  # noqa: E731
    m = (n + 1) // 2
    return max(math.exp(-beta * k) * max(x(m + t) - x(m + t - k - 1) for t in range(k + 2)) for k in range(n + 1))


@pytest.mark.parametrize("seed", range(8))
def test_the_fast_bound_for_the_median_equals_the_slow_one(seed):
    rng = np.random.default_rng(seed)
    values = np.sort(np.round(rng.random(rng.integers(1, 30)) * 10, 1))
    for beta in (0.01, 0.3, 2.0):
        fast = smooth_sensitivity_of_median(values, 0.0, 10.0, beta)
        assert fast == pytest.approx(slow_smooth_sensitivity(values, 0.0, 10.0, beta), rel=1e-12)


def test_the_bound_is_above_the_local_sensitivity_and_smooth_over_all_small_data_sets():
    domain, n, beta = [0.0, 1.0, 4.0, 10.0], 4, 0.2
    median = lambda data: sorted(data)[(n - 1) // 2]  # noqa: E731
    bound = {
        data: smooth_sensitivity_of_median(np.array(data), 0.0, 10.0, beta)
        for data in itertools.combinations_with_replacement(domain, n)
    }
    for data, mine in bound.items():
        for place, other in itertools.product(range(n), domain):
            neighbour = tuple(sorted([*data[:place], other, *data[place + 1 :]]))
            assert abs(median(data) - median(neighbour)) <= mine * (1 + 1e-12)
            assert mine <= math.exp(beta) * bound[neighbour] * (1 + 1e-12)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 10.0, 50.0])
def test_beta_keeps_both_conditions_of_the_laplace_branch(epsilon):
    delta = 1e-6
    beta, far = SmoothNoise(epsilon=epsilon, delta=delta, grid=1.0).beta, math.log(2 / delta)
    assert 0 < beta <= epsilon / (2 * far)
    assert far * math.expm1(beta) - beta <= epsilon / 2
    assert SmoothNoise(epsilon=epsilon, grid=1.0, tail=4).beta <= epsilon / 10


def test_a_bound_of_zero_and_a_missing_grid_are_refused():
    with pytest.raises(InvalidArgument, match="smooth"):
        SmoothNoise(epsilon=1, grid=1.0).release(1.0, smooth=0)
    with pytest.raises(InvalidArgument, match="power of 2"):
        SmoothNoise(epsilon=1, grid=0.3)


def test_the_median_is_near_where_the_data_are_dense():
    values = np.linspace(0, 100, 20_001)
    answers = [SmoothMedian(lower=0, upper=100, epsilon=1, delta=1e-6).release(values).value for _ in range(20)]
    assert np.abs(np.array(answers) - 50).max() < 3

"""Exact Poisson and Skellam draws: against their masses, and the fast way against the slow one."""

import numpy as np
import pytest
from scipy import stats

from terrine.errors import InvalidArgument
from terrine.mechanisms.poisson_noise import PoissonNoise, poisson, skellam
from terrine.rng import SYSTEM, Seeded

MEANS = [0.3, 3.0, 50.25, 350.7, 4.5e5]


@pytest.mark.parametrize("mean", MEANS)
def test_draws_have_the_masses_of_the_distribution(mean):
    """Chi-squared at a false-alarm rate of 1e-6; a mean 1% off must fail."""
    drawn = poisson(mean).sample(200_000, Seeded(3)) + poisson(mean).mode
    assert _chance(drawn, mean) > 1e-6
    assert _chance(drawn, mean * 1.01 + 0.02) < 1e-6


def _chance(drawn, mean):
    edges = np.unique(np.round(stats.poisson.ppf(np.linspace(1e-3, 1 - 1e-3, 25), mean)))
    expected = np.diff([0, *stats.poisson.cdf(edges, mean), 1]) * len(drawn)
    found = np.bincount(np.searchsorted(edges, drawn), minlength=len(edges) + 1)
    kept = expected > 5
    return stats.chi2.sf(((found - expected)[kept] ** 2 / expected[kept]).sum(), kept.sum() - 1)


@pytest.mark.parametrize("mean", [*MEANS, 1e12])
def test_every_decision_is_what_exact_arithmetic_says(mean):
    """With all decisions in doubt, each is made in decimals: the same draws come out."""
    fast, slow = PoissonNoise(mean), PoissonNoise(mean, doubt=1e9)
    assert (fast.sample(300, Seeded(5)) == slow.sample(300, Seeded(5))).all()


def test_skellam_noise_is_symmetric_and_has_its_variance():
    drawn = skellam(400_000, 900.0, SYSTEM)
    assert abs(drawn.mean()) < 6 * np.sqrt(900 / 400_000)
    assert abs(drawn.var() / 900 - 1) < 6 * np.sqrt(2 / 400_000)


@pytest.mark.parametrize("mean", [0.0, -1.0, float("nan"), 2.0**81])
def test_a_mean_that_cannot_be_is_refused(mean):
    with pytest.raises(InvalidArgument, match="mean"):
        PoissonNoise(mean)

"""Atoms above and below enclose every hockey-stick divergence of the pair they stand for."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

from terrine.accounting.loss_distribution import Cells, lower, pair, upper
from terrine.events import (
    DiscreteGaussian,
    DiscreteLaplace,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
)

CELLS = Cells(width=0.05, tail=1e-12)
ALPHAS = np.exp(np.linspace(-3, 3, 61))


def divergence(found, alpha):
    """H_alpha from atoms: sum of (P - alpha Q)_+, with escaped mass in P alone."""
    return np.maximum(found.mass * (1 + found.excess - alpha), 0).sum() + found.escaped


def gaussian(alpha, mu):
    epsilon = math.log(alpha)
    return ndtr(mu / 2 - epsilon / mu) - alpha * ndtr(-mu / 2 - epsilon / mu)


def laplace(alpha, epsilon):
    log = math.log(alpha)
    if log >= epsilon:
        return 0.0
    if log <= -epsilon:
        return 1 - alpha
    return 1 - math.exp((log - epsilon) / 2) if log >= 0 else 1 - alpha + alpha * (1 - math.exp((-log - epsilon) / 2))


@pytest.mark.parametrize("noise", [0.3, 1.0, 10.0])
def test_gaussian_atoms_enclose_the_closed_form(noise):
    above, below = (pair(Gaussian(noise=noise), CELLS, side) for side in (upper, lower))
    for alpha in ALPHAS:
        exact = gaussian(alpha, 1 / noise)
        assert divergence(below, alpha) - 1e-13 <= exact <= divergence(above, alpha) + 1e-13
    assert any(divergence(above, alpha) > gaussian(alpha, 1 / noise) + 1e-9 for alpha in ALPHAS)


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 4.0])
def test_laplace_atoms_enclose_the_closed_form(epsilon):
    above, below = (pair(Laplace(noise=1 / epsilon), CELLS, side) for side in (upper, lower))
    for alpha in ALPHAS:
        assert divergence(below, alpha) - 1e-13 <= laplace(alpha, epsilon) <= divergence(above, alpha) + 1e-13


@pytest.mark.parametrize("steps", [1, 2, 7, 1000, 5000])
def test_discrete_laplace_atoms_enclose_the_sum(steps):
    epsilon = 1.3
    k = np.arange(-60 * steps, 61 * steps) if steps < 100 else np.arange(-25 * steps, 26 * steps)
    q = np.exp(-epsilon / steps * np.abs(k))
    q /= q.sum()
    ratio = np.exp(epsilon / steps * (np.abs(k) - np.abs(k - steps)))
    above, below = (pair(DiscreteLaplace(noise=1 / epsilon, sensitivity=steps), CELLS, side) for side in (upper, lower))
    for alpha in ALPHAS:
        exact = np.maximum(q * (ratio - alpha), 0).sum()
        assert divergence(below, alpha) - 1e-12 <= exact <= divergence(above, alpha) + 1e-12


@pytest.mark.parametrize("side", [upper, lower])
@pytest.mark.parametrize(
    "event",
    [
        Gaussian(noise=0.5),
        Laplace(noise=2.0),
        DiscreteLaplace(noise=2.0, sensitivity=100),
        DiscreteGaussian(noise=3.0),
        PureDP(epsilon=1.0),
        PoissonSampled(Gaussian(noise=0.7), rate=0.01),
        PoissonSampled(Laplace(noise=0.7), rate=0.2),
        FixedSizeSampled(Gaussian(noise=0.7), size=3, population=10),
    ],
    ids=lambda event: type(event).__name__,
)
def test_both_distributions_have_mass_one(event, side):
    found = pair(event, CELLS, side)
    assert np.all(found.mass >= 0)
    assert found.mass.sum() == pytest.approx(1, abs=1e-9)
    assert (found.mass * (1 + found.excess)).sum() + found.escaped == pytest.approx(1, abs=1e-9)


def test_sampling_follows_the_amplification_theorem():
    """H_(1 + q(a-1)) of the sample is q H_a. [BBG18]"""
    plain, sampled = (
        pair(event, CELLS, upper) for event in (Laplace(noise=1.0), PoissonSampled(Laplace(noise=1.0), 0.1))
    )
    for alpha in ALPHAS[ALPHAS > 1]:
        assert divergence(sampled, 1 + 0.1 * (alpha - 1)) == pytest.approx(0.1 * divergence(plain, alpha), abs=1e-14)


def test_the_symmetric_envelope_is_the_larger_of_both_directions():
    one_way = pair(PoissonSampled(Gaussian(noise=0.7), rate=0.3), CELLS, upper)
    envelope = pair(FixedSizeSampled(Gaussian(noise=0.7), size=3, population=10), CELLS, upper)
    for alpha in ALPHAS:
        other_way = 1 - alpha + alpha * divergence(one_way, 1 / alpha)
        assert divergence(envelope, alpha) == pytest.approx(max(divergence(one_way, alpha), other_way), abs=1e-9)

"""Noise in shares against exact masses: the theorem of `accounting.integer_noise`, its lemmas, and both witnesses."""

import itertools
import math

import mpmath as mp
import numpy as np
import pytest
from scipy.special import ive, ndtr

from terrine import accounting
from terrine.accounting import witness
from terrine.accounting.integer_noise import as_gaussian, reduced, unevenness
from terrine.errors import UnsupportedEvent
from terrine.events import Composed, Gaussian, PoissonSampled, Repeated, Skellam, SummedDiscreteGaussian

VARIANCES = [4.0, 5.5, 9.0, 30.0, 144.0]


def skellam_masses(variance, reach):
    return ive(np.abs(np.arange(-reach, reach + 1)), variance)


def summed_masses(scale, shares, reach):
    one = np.exp(-0.5 * (np.arange(-reach, reach + 1) / scale) ** 2)
    whole = one / one.sum()
    for _ in range(shares - 1):
        whole = np.convolve(whole, one / one.sum(), mode="same")
    return whole


def gaussian_delta(mu, ratio):
    """H(a) of a Gaussian that is moved by mu deviations."""
    x = math.log(ratio) / mu
    return ndtr(mu / 2 - x) - ratio * ndtr(-mu / 2 - x)


@pytest.mark.parametrize("variance", [*VARIANCES, 1e3, 8e3])
def test_skellam_falls_no_faster_than_proven(variance):
    """The lemma on Bessel functions, to 40 digits, also far out."""
    with mp.workdps(40):
        bound = 1 / mp.mpf(variance) + 1 / (2 * mp.mpf(variance) ** 2)
        for k in {0, 1, 2, 5, 17, int(variance**0.5), int(3 * variance**0.5), int(variance), int(3 * variance)}:
            below, here, above = (mp.besseli(abs(k + step), variance) for step in (-1, 0, 1))
            assert 1 - below * above / here**2 <= bound


def test_where_the_barrier_of_the_proof_starts():
    """S - m^2/2S^2 - m^2/4S^3 is below m I_k'/I_k at m = 3, for the k at which S is not yet 2.2 at m = 0."""
    for k in range(3):
        slope = 3 * mp.besseli(k, 3, derivative=1) / mp.besseli(k, 3)
        s = mp.sqrt(9 + k * k)
        assert s - mp.mpf(9) / (2 * s**2) - mp.mpf(9) / (4 * s**3) < slope


@pytest.mark.parametrize("variance", VARIANCES)
def test_steps_of_the_normal_quantiles_are_at_most_those_of_the_gaussian(variance):
    steps = _steps(variance)
    assert max(steps) <= 1 / (as_gaussian(Skellam(noise=math.sqrt(variance), sensitivity=1.0)).noise) + 1e-12
    assert max(steps) > 1 / math.sqrt(variance)  # so a claim without the correction would be found out here


def _steps(variance):
    with mp.workdps(60):
        reach = int(8 * variance**0.5)
        masses = [mp.exp(-variance) * mp.besseli(k, variance) for k in range(reach + 200)]
        tails = [mp.fsum(masses[k + 1 :]) for k in range(reach)]  # P(K > k)
        z = [mp.sqrt(2) * mp.erfinv(1 - 2 * tail) for tail in tails]
        return [2 * z[0], *(later - sooner for sooner, later in itertools.pairwise(z))]


@pytest.mark.parametrize("moves", [(1,), (3,), (7,), (1, 1), (2, 1), (4, 3)])
@pytest.mark.parametrize("kind", ["skellam", "summed"])
def test_exact_trade_offs_are_no_worse_than_the_gaussian(moves, kind):
    length = math.hypot(*moves)
    if kind == "skellam":
        masses, event = skellam_masses(9.0, 60), Skellam(noise=3 / length, sensitivity=length)
    else:
        masses = summed_masses(1.2, 5, 60)
        event = SummedDiscreteGaussian(noise=1.2 * math.sqrt(5) / length, sensitivity=length, shares=5)
    p = q = np.ones(1)
    for move in moves:
        p = np.multiply.outer(p, np.roll(masses, move))
        q = np.multiply.outer(q, masses)
    mu = 1 / as_gaussian(event).noise
    for ratio in (0.05, 0.3, 0.8, 1.0, 1.7, 4.0, 30.0, 1e3):
        assert np.maximum(p - ratio * q, 0).sum() <= gaussian_delta(mu, ratio) + 1e-14


def test_a_sum_of_discrete_gaussians_varies_no_more_than_proven():
    masses = summed_masses(1.0, 4, 40)[20:61]
    single = np.exp(-0.5 * np.arange(-20, 21) ** 2 / 4.0)
    logs = np.log(masses / single)[8:-8]
    assert 0 < np.ptp(logs) <= unevenness(SummedDiscreteGaussian(noise=2.0, sensitivity=1.0, shares=4))


@pytest.mark.parametrize("order", [2, 3, 8, 40])
@pytest.mark.parametrize("variance", [0.5, 4.0, 60.0])
@pytest.mark.parametrize("move", [1, 4, 11])
def test_the_published_curve_that_the_witness_uses_holds(order, variance, move):
    """[AKL21], by the exact Renyi divergence in one entry."""
    with mp.workdps(30):
        reach = int(12 * variance**0.5 + order * move + 60)
        masses = {k: mp.besseli(abs(k), variance) for k in range(-reach - move, reach + move + 1)}
        total = mp.fsum(masses[k - move] ** order * masses[k] ** (1 - order) for k in range(-reach, reach + 1))
        exact = mp.log(total * mp.exp(-variance)) / (order - 1)
        excess = min(((2 * order - 1) * move**2 + 6 * move) / (4 * variance**2), 1.5 * move / variance)
        assert exact <= order * move**2 / (2 * variance) + excess


@pytest.mark.parametrize("sensitivity", [6.0, 250.5])
@pytest.mark.parametrize("noise", [0.8, 2.0])
@pytest.mark.parametrize("sampled", [False, True])
def test_both_witnesses_enclose_the_price(sensitivity, noise, sampled):
    for event in (
        Skellam(noise=noise, sensitivity=sensitivity),
        SummedDiscreteGaussian(noise=noise, sensitivity=sensitivity, shares=8),
    ):
        whole = Repeated(PoissonSampled(event, rate=0.1), times=30) if sampled else event
        found = accounting.bounds(whole, delta=1e-6)
        seen = witness.bounds(event, delta=1e-6)
        assert 0.8 * found.upper < found.lower <= found.upper
        if not sampled:
            assert seen.lower <= found.upper <= seen.upper < math.inf


def test_more_noise_and_a_finer_grid_come_close_to_gaussian_noise():
    event = Skellam(noise=1.0, sensitivity=6000.0)
    plain = accounting.epsilon(Repeated(PoissonSampled(Gaussian(noise=1.0), rate=0.05), times=200), delta=1e-5)
    whole = accounting.epsilon(Repeated(PoissonSampled(event, rate=0.05), times=200), delta=1e-5)
    assert plain <= whole <= plain * (1 + 1e-6)


def test_noise_too_narrow_for_the_proof_is_refused():
    with pytest.raises(UnsupportedEvent, match="narrow"):
        as_gaussian(Skellam(noise=1.0, sensitivity=1.5))
    with pytest.raises(UnsupportedEvent, match="narrow"):
        as_gaussian(SummedDiscreteGaussian(noise=1.0, sensitivity=2.0, shares=100))


def test_only_noise_in_shares_is_replaced():
    event = Composed([Gaussian(noise=2.0), PoissonSampled(Skellam(noise=2.0, sensitivity=9.0), rate=0.5)])
    found = reduced(event)
    assert found.parts[0] is event.parts[0]
    assert isinstance(found.parts[1].event, Gaussian)
    assert found.parts[1].event.noise < 2.0

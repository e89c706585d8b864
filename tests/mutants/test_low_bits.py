"""Attacks on the low bits of floats: they break textbook noise and find nothing in ours.

Mironov's attack [Mir12]: value + float noise cannot reach every float, and which ones it reaches depends on the value.
Two forms. (1) Granularity: 1 + n has no bits below 2^-53, while 0 + n for small n does, so an answer near 0 tells the
two apart; it works against Laplace and against every common Gaussian sampler (ziggurat, polar, Box-Muller: [Jin22]).
(2) Support: invert the sampler, and ask whether any of its 2^53 uniforms could have given the answer.
"""

import math

import numpy as np
import pytest

from terrine.audit import lower_bound
from terrine.mechanisms import Gaussian, Laplace
from terrine.rng import Seeded

EPSILON = 1.0


def box_muller(rng, scale, count):
    first, second = 1 - rng.random(count), rng.random(count)
    return scale * np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)


def polar(rng, scale, count):
    legacy = np.random.RandomState(int(rng.integers(2**31)))  # its normal() is Marsaglia's polar method
    return legacy.normal(scale=scale, size=count)


NAIVE = {
    "Laplace, inverse of a uniform": (lambda rng, count: rng.laplace(scale=1 / EPSILON, size=count), 0.0),
    "Gaussian, ziggurat": (lambda rng, count: rng.normal(scale=3.73, size=count), 1e-5),
    "Gaussian, polar": (lambda rng, count: polar(rng, 3.73, count), 1e-5),
    "Gaussian, Box-Muller": (lambda rng, count: box_muller(rng, 3.73, count), 1e-5),
}
OURS = {
    "Laplace": (Laplace(sensitivity=1, epsilon=EPSILON), 0.0),
    "Gaussian": (Gaussian(sensitivity=1, epsilon=EPSILON, delta=1e-5), 1e-5),
}


def granularity(answers):
    """What the attacker looks at: is the answer near 0, and does it have bits below 2^-53?"""
    coarse = np.ldexp(answers, 53) == np.rint(np.ldexp(answers, 53))
    return np.where(np.abs(answers) < 0.25, np.where(coarse, 1, 2), 0)


@pytest.mark.parametrize(("noise", "delta"), NAIVE.values(), ids=NAIVE.keys())
def test_granularity_breaks_float_noise(noise, delta):
    rng = np.random.default_rng(1)
    found = lower_bound(
        lambda value, count: granularity(value + noise(rng, count)), 0.0, 1.0, trials=200_000, delta=delta
    )
    assert found.epsilon > 3 * EPSILON


@pytest.mark.parametrize(("mechanism", "delta"), OURS.values(), ids=OURS.keys())
@pytest.mark.parametrize("single", [False, True], ids=["array", "number"])
def test_granularity_says_nothing_about_ours(mechanism, delta, single):
    rng = Seeded(2)

    def answers(value, count):
        if single:
            return granularity(np.array([mechanism.release(value, rng=rng).value for _ in range(count)]))
        return granularity(mechanism.release(np.full(count, value), rng=rng).value)

    found = lower_bound(answers, 0.0, 1.0, trials=20_000 if single else 200_000, delta=delta)
    assert found.epsilon <= EPSILON


@pytest.mark.parametrize(("mechanism", "_"), OURS.values(), ids=OURS.keys())
@pytest.mark.parametrize("value", [0.0, 1.0, 1 / 3, 1e-9, 123456.789, -7e7 / 3])
def test_every_answer_of_ours_is_a_point_of_one_public_grid(mechanism, _, value):
    one = mechanism._plan(1, False).step
    many = mechanism._plan(1000, False).step
    assert all(mechanism.release(value).value / one % 1 == 0 for _ in range(200))
    assert (mechanism.release(np.full(1000, value)).value / many % 1 == 0).all()


def reachable(answer, value):
    """Whether value + ln(2u) or value - ln(2 - 2u), u one of 2^53 uniforms, can be `answer`: numpy's legacy Laplace."""
    noise = answer - value
    centre = round(math.exp(-abs(noise)) / 2 * 2**53)
    u = np.arange(max(1, centre - 64), centre + 65) / 2**53
    if noise < 0:
        return bool((value + np.log(u + u) == answer).any())
    upper = 1 - u
    return bool((value - np.log(2 - upper - upper) == answer).any())


def test_the_support_attack_names_the_value_behind_naive_laplace():
    """Answers from value 0 that value 1 could not have given, and no false accusation."""
    rng = np.random.RandomState(4)
    answers = {value: value + rng.laplace(size=20_000) for value in (0.0, 1.0)}
    exposed = 0
    for value, other in ((0.0, 1.0), (1.0, 0.0)):
        near = answers[value][np.abs(answers[value] - 0.5) > 4][:400]  # far out, uniforms are sparse
        assert all(reachable(answer, value) for answer in near)
        exposed += sum(not reachable(answer, other) for answer in near)
    assert exposed > 100


def test_the_support_attack_finds_nothing_in_ours():
    """The support of ours is the whole grid whatever the value, so each answer is possible under both."""
    mechanism = Laplace(sensitivity=1, epsilon=EPSILON, grid=2.0**-6)
    seen = {value: set(mechanism.release(np.full(300_000, value), rng=Seeded(5)).value.tolist()) for value in (0, 1)}
    span = {point / 64 for point in range(-2 * 64, 3 * 64)}
    assert span <= seen[0]
    assert span <= seen[1]

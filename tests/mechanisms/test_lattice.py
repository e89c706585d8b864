"""Integer noise: the fast sampler against slow obvious masses, on every path it can take.

Each chi-square test has a fixed seed and a false-alarm rate of 1e-6; a scale that is off by 5% must fail the same test.
"""

import math

import numpy as np
import pytest
from scipy import stats

from terrine.errors import InvalidArgument
from terrine.mechanisms.lattice import IntegerNoise, Shape
from terrine.rng import SYSTEM, Seeded

FALSE_ALARM = 1e-6
ALL = [(shape, rounded) for shape in Shape for rounded in (False, True)]


def masses(shape, scale, rounded, ks):
    """The oracle: probabilities by definition."""
    if rounded:
        law = stats.laplace(scale=scale) if shape is Shape.LAPLACE else stats.norm(scale=scale)
        # by symmetry from the upper tail, where no digits cancel
        return law.sf(np.abs(ks) - 0.5) - law.sf(np.abs(ks) + 0.5)
    exponent = (lambda k: abs(k) / scale) if shape is Shape.LAPLACE else (lambda k: k * k / (2 * scale * scale))
    far = math.ceil(60 * scale + 60)
    whole = sum(math.exp(-exponent(k)) for k in range(-far, far + 1))
    return np.array([math.exp(-exponent(k)) for k in ks]) / whole


def p_value(draws, shape, scale, rounded):
    """Chi-square of the draws, in cells that all expect at least 50."""
    far = math.ceil((8 if shape is Shape.LAPLACE else 4) * scale) + 1
    ks = np.arange(-far, far + 1)
    expected = masses(shape, scale, rounded, ks) * draws.size
    width = max(1, math.ceil(2 * far / 60))
    cells = np.arange(ks.size) // width
    expected_cells = np.bincount(cells, expected)
    inside = np.abs(draws) <= far
    seen = np.bincount(cells[draws[inside] + far], minlength=expected_cells.size).astype(float)
    keep = expected_cells >= 50
    rest = draws.size - seen[keep].sum(), draws.size - expected_cells[keep].sum()
    statistic = ((seen[keep] - expected_cells[keep]) ** 2 / expected_cells[keep]).sum()
    if rest[1] > 5:
        statistic += (rest[0] - rest[1]) ** 2 / rest[1]
    return stats.chi2.sf(statistic, keep.sum())


@pytest.mark.parametrize("scale", [0.4, 1.0, 3.7, 20.0, 1000.3])
@pytest.mark.parametrize(("shape", "rounded"), ALL)
def test_many_draws_follow_the_law(shape, rounded, scale):
    draws = IntegerNoise(shape, scale, rounded=rounded).sample(200_000, Seeded(1))
    assert p_value(draws, shape, scale, rounded) > FALSE_ALARM
    assert p_value(draws, shape, scale * 1.05, rounded) < FALSE_ALARM


@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize(("shape", "rounded"), ALL)
def test_single_draws_follow_the_law(shape, rounded, scale):
    noise, rng = IntegerNoise(shape, scale, rounded=rounded), Seeded(2)
    draws = np.array([noise.draw(rng) for _ in range(60_000)])
    assert p_value(draws, shape, scale, rounded) > FALSE_ALARM
    assert p_value(draws, shape, scale * 1.07, rounded) < FALSE_ALARM


@pytest.mark.parametrize("scale", [0.7, 30.0])
@pytest.mark.parametrize(("shape", "rounded"), ALL)
def test_a_coarse_table_changes_nothing_because_what_it_loses_is_drawn_exactly(shape, rounded, scale):
    noise = IntegerNoise(shape, scale, rounded=rounded, table_bits=8)
    assert noise._lost_weight > 2**54  # the exact path is taken often here, once in 2^50 draws normally
    draws = noise.sample(2_500, Seeded(3))
    assert p_value(draws, shape, scale, rounded) > FALSE_ALARM
    assert p_value(draws, shape, scale * 1.5, rounded) < FALSE_ALARM


@pytest.mark.parametrize(("shape", "rounded"), ALL)
def test_when_every_comparison_is_decided_in_decimals_the_law_is_the_same(shape, rounded):
    noise = IntegerNoise(shape, 100.0, rounded=rounded)
    noise._margin = math.inf
    draws = noise.sample(12_000, Seeded(4))
    assert p_value(draws, shape, 100.0, rounded) > FALSE_ALARM
    assert p_value(draws, shape, 130.0, rounded) < FALSE_ALARM


@pytest.mark.parametrize(("shape", "rounded"), ALL)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 12345.678, 2.0**44])
def test_the_table_accounts_for_every_one_of_the_2_to_the_64_words(shape, rounded, scale):
    noise = IntegerNoise(shape, scale, rounded=rounded)
    assert sum(noise._weights) + noise._lost_weight == 2**64
    assert 0 <= noise._lost_weight < 2**14
    held = [0] * (noise._lost + 1)
    capacity = 2**noise._low_bits
    for column, (limit, alias) in enumerate(zip(noise._limit_list, noise._alias_list, strict=True)):
        if limit:
            held[column] += limit
        if limit < capacity:
            held[alias] += capacity - limit
    assert held == [*noise._weights, noise._lost_weight]


@pytest.mark.parametrize(("shape", "rounded"), ALL)
def test_no_weight_is_above_the_true_mass(shape, rounded):
    import mpmath

    noise = IntegerNoise(shape, 50.5, rounded=rounded)
    with mpmath.workdps(60):
        t, w = mpmath.mpf(noise._fine), noise._width
        exponent = (lambda x: x / t) if shape is Shape.LAPLACE else (lambda x: x * x / (2 * t * t))
        first = 0 if rounded else 1
        ups = [mpmath.exp(-exponent(h * w)) for h in range(3000)]
        downs = [mpmath.exp(-exponent(first + h * w)) for h in range(3000)]
        unit = mpmath.mpf(2) ** 64 / (mpmath.fsum(ups) + mpmath.fsum(downs))
        for index, weight in enumerate(noise._weights):
            true = (downs if index & 1 else ups)[index >> 1] * unit
            assert true - 2 <= weight <= true


class Scripted:
    """Bits from a list, then from a seed: to force the paths that chance would take once in a lifetime."""

    reproducible = True

    def __init__(self, words):
        self._words, self._rest = list(words), Seeded(9)

    def word(self):
        return self._words.pop(0) if self._words else self._rest.word()

    def words(self, count):
        return np.array([self.word() for _ in range(count)], dtype=np.uint64)


def test_a_comparison_at_the_boundary_draws_more_bits():
    noise = IntegerNoise(Shape.LAPLACE, 1000.0)
    chance = math.exp(-5 / 1000.0)
    boundary = math.floor(chance * 2**noise._kept_bits)
    for extra, kept in ((0, True), (2**64 - 1, False)):
        assert noise._keep(0, 0, 5, boundary, Scripted([extra])) is kept
    assert noise._keep(0, 0, 5, boundary - 1, Scripted([])) is True
    assert noise._keep(0, 0, 5, boundary + 1, Scripted([])) is False


def test_a_word_in_the_lost_entry_gives_a_legal_draw():
    noise = IntegerNoise(Shape.GAUSSIAN, 3.0)
    column = next(c for c, alias in enumerate(noise._alias_list) if c == noise._lost and noise._limit_list[c])
    word = column << noise._low_bits
    assert abs(noise.draw(Scripted([word]))) < 100
    assert np.abs(noise.sample(50, Scripted([word]))).max() < 100


def test_system_and_scales_at_the_ends():
    for shape, rounded in ALL:
        assert IntegerNoise(shape, 2.0**-24, rounded=rounded).sample(1000, SYSTEM).any() == 0
        assert np.abs(IntegerNoise(shape, 2.0**44, rounded=rounded).sample(1000, SYSTEM)).max() > 2**43


@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf, 2.0**45])
def test_a_scale_that_cannot_be_is_refused(scale):
    with pytest.raises(InvalidArgument, match="scale"):
        IntegerNoise(Shape.LAPLACE, scale)


def test_rounded_noise_that_would_never_be_seen_is_refused():
    with pytest.raises(InvalidArgument, match="finer grid"):
        IntegerNoise(Shape.GAUSSIAN, 1e-9, rounded=True)

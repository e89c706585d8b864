"""Numbers with a source, and laws against slow obvious ones."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from terrine import accounting, events
from terrine.errors import Halted, InvalidArgument
from terrine.events import Neighbours
from terrine.mechanisms import (
    AboveThreshold,
    BoundedMean,
    BoundedSum,
    Calibration,
    Counts,
    Encoding,
    Exponential,
    Gaussian,
    Histogram,
    Laplace,
    Noise,
    NoisyMax,
    Origin,
    PermuteAndFlip,
    Quantile,
    RandomizedResponse,
    SparseVector,
    StableRelease,
    UnaryEncoding,
    exact,
    gap_distance,
)
from terrine.rng import Seeded


def test_randomized_response_costs_ln_3_and_ln_7():
    assert RandomizedResponse(truth=0.5).epsilon == pytest.approx(math.log(3), rel=1e-12)
    assert RandomizedResponse(truth=0.75).epsilon == pytest.approx(math.log(7), rel=1e-12)
    assert RandomizedResponse(epsilon=math.log(3)).truth == pytest.approx(0.5, rel=1e-12)


def test_the_survey_estimates_ten_percent():
    reports = np.array([1] * 3_000 + [0] * 7_000)
    estimate = RandomizedResponse(truth=0.5).estimate(reports)
    assert estimate.shares == pytest.approx([0.9, 0.1])
    assert estimate.low[1] < 0.1 < estimate.high[1]
    assert estimate.high[1] - estimate.low[1] == pytest.approx(2 * 1.96 * math.sqrt(0.3 * 0.7 / 10_000) / 0.5, rel=0.02)


@pytest.mark.parametrize("encoding", list(Encoding))
def test_unary_encoding_costs_epsilon_and_estimates_without_bias(encoding):
    mechanism = UnaryEncoding(epsilon=1.5, answers=4, encoding=encoding)
    p, q = mechanism.chances
    cost = math.log(float(p) * (1 - float(q)) / ((1 - float(p)) * float(q)))
    assert 1.5 * (1 - 1e-9) < cost <= 1.5
    truth = np.repeat([0, 1, 2, 3], [4_000, 3_000, 2_000, 1_000])
    estimate = mechanism.estimate(mechanism.release(truth, rng=Seeded(1)).value, confidence=1 - 1e-6)
    assert (estimate.low <= [0.4, 0.3, 0.2, 0.1]).all()
    assert (estimate.high >= [0.4, 0.3, 0.2, 0.1]).all()


def test_ten_thousand_names_are_off_by_at_most_12_2():
    assert Laplace(sensitivity=1, epsilon=1).error(confidence=0.95, size=10_000) == pytest.approx(12.206, abs=1e-3)
    assert Histogram(epsilon=1, bins=10_000).error(confidence=0.95) == pytest.approx(12.206, abs=1e-3)


def test_the_classic_formula_is_larger_and_refused_from_1_on():
    classic = Gaussian(sensitivity=2, epsilon=0.5, delta=1e-5, calibration=Calibration.CLASSIC)
    assert classic.noise == pytest.approx(math.sqrt(2 * math.log(1.25e5)) / 0.5)
    analytic = Gaussian(sensitivity=2, epsilon=0.5, delta=1e-5)
    assert analytic.noise < classic.noise
    assert analytic.scale == pytest.approx(2 * analytic.noise, rel=1e-5)
    with pytest.raises(InvalidArgument, match="ANALYTIC"):
        Gaussian(sensitivity=1, epsilon=1.0, delta=1e-5, calibration=Calibration.CLASSIC)


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 5.0, 30.0])
def test_the_analytic_noise_spends_the_budget_and_no_more(epsilon):
    noise = Gaussian(sensitivity=1, epsilon=epsilon, delta=1e-6).noise
    oracle = lambda s: (  # noqa: E731
        stats.norm.cdf(0.5 / s - epsilon * s) - math.exp(epsilon + stats.norm.logcdf(-0.5 / s - epsilon * s))
    )
    assert oracle(noise) <= 1e-6 * (1 + 1e-6)
    assert oracle(noise * 0.9999) > 1e-6


def test_sensitivities_of_counts_and_histograms():
    assert Counts(epsilon=1, queries=7).sensitivity == 7
    assert Counts(epsilon=1, queries=9, delta=1e-5).sensitivity == 3
    replace = Neighbours.REPLACE_ONE
    assert Histogram(epsilon=1, bins=4).sensitivity == 1
    assert Histogram(epsilon=1, bins=4, neighbours=replace).sensitivity == 2
    assert Histogram(epsilon=1, bins=4, neighbours=replace, delta=1e-5).sensitivity == pytest.approx(math.sqrt(2))


def test_rounding_to_the_grid_is_paid_for():
    """However fine or coarse the grid, scale / (sensitivity after rounding) is at least 1 / epsilon."""
    for sensitivity, step, size in [(1.0, 1.0, 1), (0.3, 1.0, 1), (1.0, 2.0**-4, 100), (5.0, None, 10_000)]:
        plan = Laplace(sensitivity=sensitivity, epsilon=0.5, grid=step)._plan(size, False)
        least = math.ceil(sensitivity / plan.step) if size == 1 else sensitivity / plan.step + size
        assert plan.noise.scale >= least / 0.5
        gaussian = Gaussian(sensitivity=sensitivity, epsilon=0.5, delta=1e-5, grid=step)
        plan = gaussian._plan(size, False)
        least = math.ceil(sensitivity / plan.step) if size == 1 else sensitivity / plan.step + math.sqrt(size)
        assert plan.noise.scale >= least * gaussian.noise


def test_neighbours_on_the_grid_are_no_farther_apart_than_was_paid_for():
    """Halves are rounded upward, not to even: 0.5 and 1.5 must not end two steps apart."""
    from terrine.mechanisms.grid import index_of

    draw = np.random.default_rng(0)
    for value in [0.5, 1.5, -0.5, 2.5, 0.49999999999999994, *draw.normal(size=300) * 10]:
        for distance in (1.0, 0.3, 1.7):
            here, there = float(value), float(value) + distance
            apart = math.ceil(Fraction(there) - Fraction(here))
            assert abs(index_of(there, 0) - index_of(here, 0)) <= apart


def test_bounded_sums_state_their_bounds_and_nothing_else():
    notes = BoundedSum(lower=0, upper=5, epsilon=1).release([1.0, 99.0, -3.0]).notes
    assert "declared by the caller" in notes[0]
    assert "2" not in notes[0]  # two values were clamped
    released = BoundedMean(lower=0, upper=5, epsilon=1, origin=Origin.RELEASED).release([1.0]).notes
    assert "earlier private release" in released[0]


def test_sums_do_not_depend_on_the_order_of_floats():
    values = [1e16, 1.0, -1e16, 1.0] * 50
    mechanism = BoundedSum(lower=-1e16, upper=1e16, epsilon=1)
    assert mechanism.release(values, rng=Seeded(1)).value == mechanism.release(values[::-1], rng=Seeded(1)).value


@pytest.mark.parametrize("scores", [[0.0, 1.0, 3.0], [5, 5, 4, 1]])
@pytest.mark.parametrize("monotone", [False, True])
def test_the_exponential_mechanism_has_its_chances(scores, monotone):
    mechanism, rng = Exponential(sensitivity=1, epsilon=1.2, monotone=monotone), Seeded(2)
    weights = np.exp(np.array(scores) * (1.2 if monotone else 0.6))
    seen = Counter(mechanism.release(scores, rng=rng).value for _ in range(6000))
    observed = [seen[i] for i in range(len(scores))]
    assert stats.chisquare(observed, weights / weights.sum() * 6000).pvalue > 1e-6


def slow_permute_and_flip(scores, rate):
    """By definition: all orders, all coins."""
    import itertools

    best, chances = max(scores), [0.0] * len(scores)
    orders = list(itertools.permutations(range(len(scores))))
    for order in orders:
        reached = 1.0
        for i in order:
            take = math.exp(rate * (scores[i] - best))
            chances[i] += reached * take / len(orders)
            reached *= 1 - take
    return np.array(chances)


def test_permute_and_flip_and_exponential_noise_have_the_same_law():
    scores, draws = [0.0, 1.0, 2.0, 1.5], 6000
    expected = slow_permute_and_flip(scores, 0.75) * draws
    for mechanism in (PermuteAndFlip(sensitivity=1, epsilon=1.5), NoisyMax(sensitivity=1, epsilon=1.5)):
        rng = Seeded(3)
        seen = Counter(mechanism.release(scores, rng=rng).value for _ in range(draws))
        assert stats.chisquare([seen[i] for i in range(4)], expected).pvalue > 1e-6


class Bits:
    """Given words first, then seeded ones."""

    reproducible = True

    def __init__(self, *words):
        self._left, self._rest = list(words), Seeded(8)

    def word(self):
        return self._left.pop(0) if self._left else self._rest.word()


def test_a_lottery_near_a_boundary_is_decided_exactly():
    counts, exponents = np.array([1, 1]), np.zeros(2)
    choose = lambda *words: exact.lottery(counts, exponents, lambda i: Fraction(0), Bits(*words))  # noqa: E731
    assert choose(2**63 - 1, 2**64 - 1, 2**64 - 1) == 0
    assert choose(2**63, 0, 0, 1) == 1
    assert choose(0, 5) == 0
    assert choose(2**64 - 1, 2**64 - 2) == 1


@pytest.mark.parametrize("chance", [Fraction(1, 3), Fraction(1, 2**70), Fraction(2**70 - 1, 2**70), Fraction(0.1)])
def test_coins_compare_beyond_64_bits(chance):
    limit = int(chance * 2**64)
    below, above = int((chance * 2**64 - limit) * 2**64) - 1, int((chance * 2**64 - limit) * 2**64) + 1
    if below >= 0:
        assert exact.coin(chance, Bits(limit, below))
    if above < 2**64:
        assert not exact.coin(chance, Bits(limit, above))


@pytest.mark.parametrize("bound", [1, 2, 3, 10, 2**64, 2**64 + 1, 10**30])
def test_uniform_numbers_stay_below_their_bound(bound):
    drawn = [exact.below(bound, Seeded(seed)) for seed in range(200)]
    assert all(0 <= one < bound for one in drawn)
    assert bound == 1 or len(set(drawn)) > 1


def test_a_quantile_is_near_the_rank_asked_for():
    values = np.linspace(0, 100, 10_001)
    for q in (0.0, 0.1, 0.5, 0.9, 1.0):
        mechanism = Quantile(q=q, lower=0, upper=100, epsilon=1)
        allowed = mechanism.error(confidence=1 - 1e-9) / 10_001 * 100 + 0.1
        assert abs(mechanism.release(values).value - 100 * q) <= allowed


def test_the_sparse_vector_constants():
    """lambda = sqrt(32 Q ln(2/delta)) / epsilon on the threshold, 2 lambda on the answers; or basic composition."""
    mechanism = SparseVector(threshold=0, epsilon=1, answers=1000, delta=1e-6)
    scan = mechanism.start(rng=Seeded(1))
    step = 2.0**scan._exponent
    expected = math.sqrt(32 * 1000 * math.log(2e6))
    assert scan._threshold_noise.scale * step == pytest.approx(expected, rel=1e-5)
    assert scan._answer_noise.scale * step == pytest.approx(2 * expected, rel=1e-5)
    assert accounting.delta(mechanism.event, epsilon=1.0) <= 1e-6
    assert SparseVector(threshold=0, epsilon=1, answers=3, delta=1e-6).round_epsilon == pytest.approx(1 / 3)
    single = AboveThreshold(threshold=0, epsilon=1).start(rng=Seeded(1))
    step = 2.0**single._exponent
    assert single._threshold_noise.scale * step == pytest.approx(2, rel=1e-5)
    assert single._answer_noise.scale * step == pytest.approx(4, rel=1e-5)


def test_a_scan_halts_and_refuses_to_go_on():
    scan = SparseVector(threshold=0, epsilon=1, answers=2).start(rng=Seeded(1))
    assert scan.run([1e9, -1e9, 1e9, 1e9]) == [True, False, True]
    assert scan.halted
    with pytest.raises(Halted, match="halted"):
        scan.ask(0)
    assert events.is_reproducible(scan.event)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-3, 0.2])
def test_the_threshold_of_a_stable_release_is_the_smallest_that_keeps_delta(epsilon, delta):
    threshold = StableRelease(epsilon=epsilon, delta=delta).threshold
    ratio = math.exp(-epsilon)
    beyond = lambda t: ratio ** (t + 1) / (1 + ratio)  # noqa: E731  # P(noise > t), t >= 0
    assert beyond(threshold) <= delta
    assert threshold == 0 or beyond(threshold - 1) > delta


def test_a_stable_answer_is_exact_and_an_unstable_one_is_withheld():
    mechanism = StableRelease(epsilon=1, delta=1e-6)
    far = math.ceil(mechanism.error(confidence=1 - 1e-9))
    assert mechanism.release("exact", distance=far).value == "exact"
    assert [mechanism.release("exact", distance=0).value for _ in range(50)] == [None] * 50
    with pytest.raises(InvalidArgument, match="distance"):
        mechanism.release("exact", distance=-1)


def test_gap_distance_is_0_exactly_where_a_neighbour_disagrees():
    assert gap_distance([5, 5, 1]) == 0
    assert gap_distance([6, 5, 1]) == 0
    assert gap_distance([7, 5, 1]) == 1
    assert gap_distance([10, 4], moved=2) == 2
    assert gap_distance([10, 5], moved=2) == 2


def test_gaussian_noise_on_a_maximum_needs_its_delta():
    with pytest.raises(InvalidArgument, match="delta"):
        NoisyMax(sensitivity=1, epsilon=1, noise=Noise.GAUSSIAN)
    with pytest.raises(InvalidArgument, match="delta"):
        NoisyMax(sensitivity=1, epsilon=1, delta=1e-5)

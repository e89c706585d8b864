"""The certified accountant encloses 40-digit arithmetic, repeats no peer's mistake, and behaves as a cost must."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from terrine import accounting
from terrine.accounting import certified, renyi
from terrine.errors import InvalidArgument, UnsupportedEvent
from terrine.events import (
    ApproximateDP,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    Neighbours,
    NonPrivate,
    PoissonCount,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    RandomStopping,
    Repeated,
    ShuffledEpoch,
)
from tests.thorough import examples

from .oracle import many_steps, one_step, two_steps


def dpsgd(rate, noise, steps, neighbours=Neighbours.ADD_REMOVE):
    return Repeated(PoissonSampled(Gaussian(noise=noise), rate=rate, neighbours=neighbours), times=steps)


# ------------------------------------------------------------------------------------------------ against the oracle

MANY = [  # rate, noise, steps, delta, contour
    (0.01, 4.0, 10_000, 1e-5, 15),
    (0.01, 4.0, 10_000, 1e-15, 30),
    (256 / 60000, 1.1, 14_062, 1e-5, 6),
    (0.01, 0.5, 10_000, 1e-5, 0.5),
    (0.001, 10.0, 1_000, 1e-5, 900),
    (1e-4, 0.8, 10**7, 1e-8, 8.5),
    (0.9, 30.0, 5_000, 1e-6, 2),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "contour"), MANY)
def test_many_steps_are_enclosed(rate, noise, steps, delta, contour):
    found = accounting.bounds(dpsgd(rate, noise, steps), delta=delta)
    assert many_steps(found.upper, rate, noise, steps, contour) <= delta
    assert many_steps(found.lower, rate, noise, steps, contour) >= delta
    assert found.upper - found.lower <= 1e-3 * found.upper


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "contour"), MANY[:3])
def test_the_other_direction_is_no_worse(rate, noise, steps, delta, contour):
    upper = accounting.epsilon(dpsgd(rate, noise, steps), delta=delta)
    assert many_steps(upper, rate, noise, steps, contour, backward=True) <= delta


@pytest.mark.parametrize(("rate", "noise", "delta"), [(0.01, 1.0, 1e-5), (1e-6, 0.3, 1e-9), (0.5, 5.0, 1e-3)])
def test_one_step_is_exact(rate, noise, delta):
    found = accounting.bounds(dpsgd(rate, noise, 1), delta=delta)
    assert one_step(found.upper, rate, noise) <= delta <= one_step(found.lower, rate, noise)
    assert found.upper - found.lower <= 1e-9 * found.upper


@pytest.mark.parametrize(("rate", "noise", "delta"), [(0.001, 1.0, 1e-10), (2.7e-5, 0.68, 1.5e-7)])
def test_two_steps_are_enclosed(rate, noise, delta):
    found = accounting.bounds(dpsgd(rate, noise, 2), delta=delta)
    assert two_steps(found.upper, rate, noise) <= delta <= two_steps(found.lower, rate, noise)
    assert found.upper - found.lower <= 1e-3 * found.upper


# ------------------------------------------------------------------------------------------------- known answers

MEASURED = [  # rate, noise, steps, delta, exact epsilon by 40-digit arithmetic
    (0.01, 4.0, 10_000, 1e-5, 0.946867),
    (0.01, 8.0, 10_000, 1e-5, 0.437249),
    (256 / 60000, 1.1, 14_062, 1e-5, 2.381597),
    (0.001, 0.6, 100_000, 1e-5, 6.112825),
    (1.0, 50.0, 1_000, 1e-5, 2.594383),
    (1e-5, 0.4, 1_000_000, 1e-5, 3.074806),
    (0.001, 10.0, 1_000, 1e-5, 0.00748754),
    (0.01, 0.5, 10_000, 1e-5, 43.36649),
    (0.01, 4.0, 10_000, 1e-15, 1.956053),
    (0.01, 1.0, 1, 1e-5, 0.1994504),
    (1e-4, 0.8, 10_000_000, 1e-8, 3.392924),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "exact"), MEASURED)
def test_known_epsilons_are_enclosed_within_a_thousandth(rate, noise, steps, delta, exact):
    found = accounting.bounds(dpsgd(rate, noise, steps), delta=delta)
    rounding = 1e-6  # of the printed digits
    assert found.lower <= exact * (1 + rounding)
    assert found.upper >= exact * (1 - rounding)
    assert found.upper - found.lower <= 1e-3 * found.upper


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "delta", "truth", "wrong_claim"),
    [
        (1e-4, 0.8, 10_000_000, 1e-10, 3.8757, 3.7984),
        (256 / 60000, 1.1, 14_062, 1e-10, 3.735839, 3.73512),
        (1e-5, 0.4, 1_000_000, 1e-5, 3.074806, 3.0572),
    ],
    ids=["untilted FFT, 1e7 steps", "untilted FFT, MNIST", "PRV upper bound"],
)
def test_claims_of_peers_below_the_truth_are_not_repeated(rate, noise, steps, delta, truth, wrong_claim):
    found = accounting.bounds(dpsgd(rate, noise, steps), delta=delta)
    assert wrong_claim < found.lower <= truth * 1.0001
    assert found.upper >= truth * 0.99999


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "delta"),
    [(0.8244635242129116, 0.30200798053819916, 20_974_585, 1.3e-12), (0.0264, 1.95, 132, 2e-11)],
    ids=["an upper bound beyond all of the lower one's losses", "nodes only just far enough"],
)
def test_a_lower_bound_is_found_near_the_upper_one(rate, noise, steps, delta):
    found = accounting.bounds(dpsgd(rate, noise, steps), delta=delta)
    assert found.upper * 0.999 <= found.lower <= found.upper


def test_gaussian_dp_is_no_bound_and_we_are_above_it():
    """The central-limit estimate printed by some tools is 73% too small here."""
    assert accounting.bounds(dpsgd(1e-5, 0.4, 1_000_000), delta=1e-5).lower > 3.07


# ------------------------------------------------------------------------------------- other events, closed forms


def randomized_response_delta(epsilon, each, times):
    """[KOV15] by summing the binomial."""
    total = 0.0
    for k in range(times + 1):
        loss = (times - 2 * k) * each
        if loss > epsilon:
            log_p = (times - k) * each - times * math.log1p(math.exp(each))
            total += math.comb(times, k) * math.exp(log_p) * -math.expm1(epsilon - loss)
    return total


@pytest.mark.parametrize(("each", "times", "delta"), [(0.1, 50, 1e-6), (1.0, 3, 1e-3), (0.5, 20, 1e-12), (1.0, 1, 0.1)])
def test_randomized_responses_are_enclosed(each, times, delta):
    found = accounting.bounds(Repeated(RandomizedResponse(epsilon=each), times=times), delta=delta)
    assert randomized_response_delta(found.upper, each, times) <= delta * (1 + 1e-9)
    assert randomized_response_delta(found.lower, each, times) >= delta * (1 - 1e-9)
    assert found.upper - found.lower <= 1e-3 * found.upper


def test_laplace_is_enclosed():
    def exact(epsilon):  # one Laplace mechanism with scale 1: [BBG18]-style closed form
        return max(0.0, -math.expm1((epsilon - 1) / 2))

    found = accounting.bounds(Laplace(noise=1.0), delta=0.1)
    assert exact(found.upper) <= 0.1 <= exact(found.lower) + 1e-9
    assert found.upper - found.lower < 1e-3


def test_discrete_noise_on_a_fine_grid_approaches_the_continuous():
    for fine, plain in [
        (DiscreteLaplace(noise=5.0, sensitivity=2**30), Laplace(noise=5.0)),
        (DiscreteGaussian(noise=5.0, sensitivity=2**20), Gaussian(noise=5.0)),
        (DiscreteGaussian(noise=5.0, sensitivity=2**20, scalar=False), Gaussian(noise=5.0)),
    ]:
        one, other = (accounting.bounds(Repeated(event, times=10), delta=1e-6) for event in (fine, plain))
        assert one.upper == pytest.approx(other.upper, rel=1e-4)
        assert one.lower <= other.upper


def test_discrete_noise_matches_its_own_sum():
    """Two discrete mechanisms whose loss takes few values, added up by hand."""
    scale, steps = 1.5, 1
    k = np.arange(-60, 62)
    q = np.exp(-0.5 * (k / scale) ** 2)
    q /= q.sum()
    p = np.exp(-0.5 * ((k - steps) / scale) ** 2)
    p /= p.sum()
    joint_p, joint_q = np.multiply.outer(p, p).ravel(), np.multiply.outer(q, q).ravel()
    found = accounting.bounds(Repeated(DiscreteGaussian(noise=scale), times=2), delta=1e-5)
    assert np.maximum(joint_p - math.exp(found.upper) * joint_q, 0).sum() <= 1e-5
    assert np.maximum(joint_p - math.exp(found.lower) * joint_q, 0).sum() >= 1e-5 * (1 - 1e-9)


def test_an_approximate_guarantee_costs_its_own_delta_each_time():
    event = Repeated(ApproximateDP(epsilon=0.1, delta=1e-8), times=20)
    assert accounting.delta(event, epsilon=2.1) == pytest.approx(20e-8, rel=1e-6)
    assert accounting.delta(event, epsilon=2.1) >= -math.expm1(20 * math.log1p(-1e-8))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, math.log(3), 2.7])
def test_one_pure_guarantee_is_what_it_says_to_the_last_bit(epsilon):
    for event in (PureDP(epsilon=epsilon), RandomizedResponse(epsilon=epsilon), Laplace(noise=1 / epsilon)):
        assert accounting.epsilon(event, delta=1e-9) <= max(epsilon, 1 / (1 / epsilon))


def test_absurdly_large_epsilons_are_still_bounded():
    exact = 2000 + math.log1p(-1e-5)
    assert exact <= accounting.epsilon(PureDP(epsilon=2000.0), delta=1e-5) <= 2000
    assert 999.99 <= accounting.epsilon(Laplace(noise=1e-3), delta=1e-5) <= 1000
    both = Composed([PureDP(epsilon=2000.0), Gaussian(noise=1.0)])
    assert 2000 < accounting.epsilon(both, delta=1e-5) < 2010


def test_one_approximate_guarantee_is_what_it_says():
    event = ApproximateDP(epsilon=1.0, delta=1e-5)
    assert accounting.delta(event, epsilon=1.0) == pytest.approx(1e-5, rel=1e-6)
    assert accounting.delta(event, epsilon=1.1) == 1e-5
    assert accounting.epsilon(event, delta=1e-5) == pytest.approx(1.0)
    found = accounting.bounds(event, delta=2e-5)
    assert found.lower <= found.upper <= 1.0
    with pytest.raises(InvalidArgument, match="fail outright"):
        accounting.epsilon(event, delta=1e-6)


def test_a_mix_costs_at_least_each_part_and_at_most_their_sum():
    parts = [Laplace(noise=10.0), Gaussian(noise=10.0), RandomizedResponse(epsilon=0.1), dpsgd(0.01, 2.0, 1000)]
    whole = accounting.bounds(Composed(parts), delta=1e-5)
    single = [accounting.bounds(part, delta=1e-5) for part in parts]
    shares = [accounting.epsilon(part, delta=2.5e-6) for part in parts]
    assert max(one.lower for one in single) <= whole.lower <= whole.upper <= sum(shares)
    assert whole.upper - whole.lower <= 1e-3 * whole.upper


def test_several_gaussians_on_one_sample_are_one_gaussian():
    two = Repeated(PoissonSampled(Repeated(Gaussian(noise=2.0), times=4), rate=0.01), times=100)
    assert accounting.epsilon(two, delta=1e-6) == pytest.approx(accounting.epsilon(dpsgd(0.01, 1.0, 100), delta=1e-6))


def test_fifty_different_events_are_enclosed():
    event = Composed(dpsgd(0.01, 1 + 0.1 * i, 100 + i) for i in range(50))
    found = accounting.bounds(event, delta=1e-6)
    assert found.upper - found.lower <= 1e-3 * found.upper
    assert found.upper < renyi.epsilon(event, delta=1e-6)


# ------------------------------------------------------------------------------- replace-one and fixed-size samples


def hockey_stick_between_mixtures(alpha, rate, a, b):
    """H_alpha of (1-q) N(0) + q N(a) against (1-q) N(0) + q N(b) in the plane, by summing a fine grid."""
    axis = np.arange(-9, 9, 0.06)
    x, y = np.meshgrid(axis, axis)

    def density(centre):
        return np.exp(-0.5 * ((x - centre[0]) ** 2 + (y - centre[1]) ** 2)) / (2 * math.pi) * 0.06**2

    p = (1 - rate) * density((0, 0)) + rate * density(a)
    q = (1 - rate) * density((0, 0)) + rate * density(b)
    return np.maximum(p - alpha * q, 0).sum()


def test_opposed_contributions_are_the_worst_under_replace_one():
    """The claim behind the pair used for Poisson samples under replace-one, over directions, lengths and alpha."""
    draw = np.random.default_rng(5)
    for rate in (0.05, 0.5):
        for alpha in (0.5, 0.9, 1.1, 1.5, 3.0):
            worst = hockey_stick_between_mixtures(alpha, rate, (1, 0), (-1, 0))
            for _ in range(12):
                angle, length = draw.uniform(0, 2 * math.pi, 2), draw.uniform(0, 1, 2) ** 0.3
                a, b = [(length[i] * math.cos(angle[i]), length[i] * math.sin(angle[i])) for i in range(2)]
                assert hockey_stick_between_mixtures(alpha, rate, a, b) <= worst + 1e-9


@pytest.mark.parametrize(("rate", "noise"), [(0.1, 1.0), (0.01, 0.7), (0.8, 3.0)])
def test_one_step_under_replace_one_is_enclosed(rate, noise):
    mu = 1 / noise
    x = np.arange(-14, 14, 1e-4)

    def density(centre):
        return np.exp(-0.5 * (x - centre) ** 2) / math.sqrt(2 * math.pi) * 1e-4

    p = (1 - rate) * density(0) + rate * density(mu)
    q = (1 - rate) * density(0) + rate * density(-mu)
    for delta in (1e-3, 1e-6):
        found = accounting.bounds(dpsgd(rate, noise, 1, Neighbours.REPLACE_ONE), delta=delta)
        assert np.maximum(p - math.exp(found.upper) * q, 0).sum() <= delta * (1 + 1e-6)
        assert np.maximum(p - math.exp(found.lower) * q, 0).sum() >= delta * (1 - 1e-6)
        assert found.upper - found.lower <= 1e-3 * found.upper


def test_replace_one_costs_between_one_and_two_removals():
    once = accounting.epsilon(dpsgd(0.01, 4.0, 1000), delta=1e-6)
    group_of_two = accounting.epsilon(dpsgd(0.01, 2.0, 1000), delta=1e-6)
    assert once < accounting.epsilon(dpsgd(0.01, 4.0, 1000, Neighbours.REPLACE_ONE), delta=1e-6) < group_of_two


def test_one_fixed_size_draw_is_exact_and_many_are_enclosed():
    draw = FixedSizeSampled(Gaussian(noise=1.0), size=10, population=1000)
    assert one_step(accounting.epsilon(draw, delta=1e-5), 0.01, 1.0) <= 1e-5
    many = accounting.bounds(Repeated(draw, times=1000), delta=1e-5)
    poisson = accounting.bounds(dpsgd(0.01, 1.0, 1000), delta=1e-5)
    # the pair of a Poisson sample is a possible pair of a fixed-size one; the symmetric envelope dominates all
    assert poisson.lower <= many.upper
    assert many.lower == pytest.approx(poisson.lower, rel=1e-3)
    assert many.upper < accounting.epsilon(Repeated(Gaussian(noise=1.0), times=1000), delta=1e-5)


def test_two_fixed_size_draws_are_dominated_for_either_order_of_worst_cases():
    """Each step may favour one side; the envelope must cover a mix of both, which no single pair does."""
    rate, noise, epsilon = 0.2, 1.0, 0.3
    x = np.arange(-9, 10, 2e-2)

    def density(centre):
        return np.exp(-0.5 * ((x - centre) / noise) ** 2) / (noise * math.sqrt(2 * math.pi)) * 2e-2

    mixed, plain = (1 - rate) * density(0) + rate * density(1), density(0)
    steps = [(mixed, plain), (plain, mixed)]
    bound = accounting.delta(
        Repeated(FixedSizeSampled(Gaussian(noise=noise), size=2, population=10), times=2), epsilon=epsilon
    )
    for first in steps:
        for second in steps:
            p, q = np.multiply.outer(first[0], second[0]), np.multiply.outer(first[1], second[1])
            assert np.maximum(p - math.exp(epsilon) * q, 0).sum() <= bound * (1 + 1e-6)


def test_a_shuffled_epoch_costs_one_step():
    epoch = ShuffledEpoch(Gaussian(noise=4.0), steps=100)
    assert accounting.epsilon(epoch, delta=1e-5) == accounting.epsilon(Gaussian(noise=4.0), delta=1e-5)


# ----------------------------------------------------------------------------------------------------- properties

anywhere = {
    "rate": st.floats(-6, 0).map(lambda power: 10**power),
    "noise": st.floats(math.log10(0.3), 2).map(lambda power: 10**power),
    "steps": st.floats(0, 8).map(lambda power: int(10**power)),
    "delta": st.floats(-15, -2).map(lambda power: 10**power),
}


@settings(max_examples=examples(25), deadline=None)
@given(**anywhere)
@example(rate=0.9999998627552429, noise=100.0, steps=10, delta=1e-13)
def test_an_enclosure_everywhere(rate, noise, steps, delta):
    found = accounting.bounds(dpsgd(rate, noise, steps), delta=delta)
    assert 0 <= found.lower <= found.upper < math.inf
    assert found.upper <= max(0.0, renyi.epsilon(dpsgd(rate, noise, steps), delta=delta))
    assert certified.delta_bounds(dpsgd(rate, noise, steps), epsilon=found.upper).lower <= delta


@settings(max_examples=40, deadline=None)
@given(**anywhere)
def test_more_noise_fewer_steps_and_smaller_lots_never_cost_more(rate, noise, steps, delta):
    cost = accounting.bounds(dpsgd(rate, noise, steps), delta=delta).upper
    assert accounting.bounds(dpsgd(rate, noise * 1.05, steps), delta=delta).lower <= cost
    assert accounting.bounds(dpsgd(rate / 1.05, noise, steps), delta=delta).lower <= cost
    assert accounting.bounds(dpsgd(rate, noise, max(1, steps // 2)), delta=delta).lower <= cost
    assert accounting.bounds(dpsgd(rate, noise, steps), delta=min(0.5, 2 * delta)).lower <= cost


def test_nothing_costs_nothing():
    assert accounting.epsilon(Composed([]), delta=1e-5) == 0
    assert accounting.epsilon(PureDP(epsilon=0.0), delta=1e-5) == 0
    assert accounting.delta(Composed([]), epsilon=0.0) == 0


def test_what_cannot_be_bounded_is_refused():
    with pytest.raises(UnsupportedEvent, match="NonPrivate"):
        accounting.epsilon(Composed([Gaussian(noise=1.0), NonPrivate()]), delta=1e-5)
    inside = PoissonSampled(RandomStopping(Gaussian(noise=1.0), PoissonCount(mean=2.0)), rate=0.1)
    with pytest.raises(UnsupportedEvent, match="RandomStopping"):
        accounting.epsilon(inside, delta=1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan, math.inf, "1e-5", None, True])
def test_a_bad_delta_is_refused(delta):
    with pytest.raises(InvalidArgument, match="delta"):
        accounting.epsilon(Gaussian(noise=1.0), delta=delta)


@pytest.mark.parametrize(("times", "delta"), [(40, 0.9), (10, 0.5), (3, 0.1427)])
def test_events_that_fail_outright_leave_finite_losses_the_rest_of_delta(times, delta):
    event = Repeated(ApproximateDP(epsilon=4.0, delta=0.05), times=times)
    found = accounting.bounds(event, delta=delta)
    failing = 1 - 0.95**times
    rest = Repeated(PureDP(epsilon=4.0), times=times)
    assert found.lower <= accounting.epsilon(rest, delta=(delta - failing) / (1 - failing)) * (1 + 1e-9)
    assert found.upper >= accounting.bounds(rest, delta=(delta - failing) / (1 - failing)).lower * (1 - 1e-9)
    assert found.upper <= 1.01 * found.lower + 1e-9

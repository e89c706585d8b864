"""Correlated noise on paper: coefficients, sensitivity, what a plan charges, and the theorem it charges by."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz

from terrine import accounting, sgd
from terrine.common.keys import Key
from terrine.errors import InvalidArgument
from terrine.events import Budget, Gaussian, Neighbours, PoissonSampled, Repeated, from_json, to_json

BASE = {"examples": 6000, "lot": 60, "clip": 1.0, "noise": 1.1, "delta": 1e-5, "steps": 400}


def plan(**changes):
    given = {**BASE, **changes}
    return sgd.Plan(**{name: value for name, value in given.items() if value is not None})


def matrix(banded, steps):
    """C, scaled to columns of norm 1."""
    column = np.zeros(steps)
    column[: banded.bands] = banded.coefficients
    return np.tril(toeplitz(column)) / banded.sensitivity


# --- coefficients ------------------------------------------------------------------------------------------------


def test_the_closed_form_is_the_root_of_the_prefix_matrix():
    steps = 40
    root = matrix(sgd.Banded.inverse_root(steps), steps) * sgd.Banded.inverse_root(steps).sensitivity
    assert np.allclose(root @ root, np.tril(np.ones((steps, steps))))
    assert sgd.Banded.inverse_root(4).coefficients == (1.0, 1 / 2, 3 / 8, 5 / 16)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.05), (0.8, 0.02)])
def test_the_workload_is_what_torch_makes_of_one_gradient(momentum, decay):
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    rate = 0.5
    optimizer = torch.optim.SGD([parameter], lr=rate, momentum=momentum, weight_decay=decay / rate)
    moved = []
    for step in range(30):
        parameter.grad = torch.full((1,), float(step == 0), dtype=torch.float64)
        optimizer.step()
        moved.append(-parameter.item() / rate)
    assert np.allclose(sgd.Banded(1, momentum, decay).workload(30), moved, rtol=1e-12)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_the_errors_are_those_of_the_matrices(momentum, decay):
    steps = 50
    banded = sgd.Banded(5, momentum, decay).settled(steps)
    noise = np.tril(toeplitz(banded.workload(steps))) @ np.linalg.inv(matrix(banded, steps))
    by_step = (noise**2).sum(axis=1)
    assert banded.rms_error(steps) == pytest.approx(math.sqrt(by_step.mean()))
    assert banded.max_error(steps) == pytest.approx(math.sqrt(by_step.max()))


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(
    ("steps", "bands", "momentum", "decay"), [(60, 4, 0, 0), (500, 16, 0, 0), (500, 16, 0.9, 0.01)]
)
def test_optimised_coefficients_are_best_by_their_own_measure(steps, bands, momentum, decay, objective):
    def error(banded):
        return banded.rms_error(steps) if objective == "mean" else banded.max_error(steps)

    best = sgd.Banded(bands, momentum, decay, objective).settled(steps)
    closed = sgd.Banded.inverse_root(bands, momentum=momentum, weight_decay=decay)
    independent = sgd.Banded(1, momentum, decay)
    assert error(best) < error(closed) < error(independent)
    for place, by in itertools.product(range(1, bands), (-1e-3, 1e-3)):
        moved = list(best.coefficients)
        moved[place] += by
        other = sgd.Banded(bands, momentum, decay, objective, tuple(moved))
        assert error(other) >= error(best) * (1 - 1e-9)


def test_coefficients_are_settled_by_public_numbers_and_kept():
    made = plan(correlated=sgd.Banded(8))
    assert len(made.correlated.coefficients) == 8
    assert plan(correlated=sgd.Banded(8)) == made
    assert repr(made.correlated.coefficients) in repr(made)  # which a checkpoint compares
    assert plan(correlated=made.correlated) == made
    assert plan(correlated=sgd.Banded(8), steps=200).correlated != made.correlated


def test_given_coefficients_are_kept_or_refused():
    given = sgd.Banded(3, coefficients=(1.0, -0.3, 0.2))
    assert plan(correlated=given).correlated is given
    with pytest.raises(InvalidArgument, match="noise grows"):
        plan(correlated=sgd.Banded(2, coefficients=(1.0, 1.5)))
    for wrong in ((1.0,), (0.5, 0.1), (1.0, math.inf), (1.0, math.nan)):
        with pytest.raises(InvalidArgument):
            sgd.Banded(2, coefficients=wrong)
    with pytest.raises(InvalidArgument, match="settled"):
        sgd.Banded(2).inverse(5)


@pytest.mark.parametrize(
    "wrong", [{"bands": 0}, {"bands": 2.5}, {"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": 1.0}]
)
def test_a_factorisation_out_of_range_is_refused(wrong):
    with pytest.raises(InvalidArgument):
        sgd.Banded(**{"bands": 4, **wrong})
    with pytest.raises(InvalidArgument, match="objective"):
        sgd.Banded(4, objective="least")


# --- sensitivity, by brute force -----------------------------------------------------------------------------------


def patterns(steps, apart):
    """All sets of steps of which two are at least `apart` steps from each other."""
    for size in range(1, steps + 1):
        for chosen in itertools.combinations(range(steps), size):
            if all(later - sooner >= apart for sooner, later in itertools.pairwise(chosen)):
                yield chosen


def most_moved(c, chosen):
    """The norm of C u over all signs of the steps in `chosen`: the largest of a convex function is at a corner."""
    return max(
        np.linalg.norm(c[:, chosen] @ np.array(signs)) for signs in itertools.product((1.0, -1.0), repeat=len(chosen))
    )


COEFFICIENTS = [(1.0, 0.5), (1.0, -0.9), (1.0, 0.7, 0.5), (1.0, -0.4, 0.6), (1.0, 0.7, -0.6, 0.5)]


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("steps", [4, 7, 9])
def test_participations_as_far_apart_as_the_bands_move_the_root_of_their_number(coefficients, steps):
    banded = sgd.Banded(len(coefficients), coefficients=coefficients)
    c = matrix(banded, steps)
    moved = {chosen: most_moved(c, chosen) for chosen in patterns(steps, banded.bands)}
    assert all(found <= math.sqrt(len(chosen)) for chosen, found in moved.items())
    most = max(len(chosen) for chosen in moved)
    assert most == math.ceil(steps / banded.bands)
    whole = [chosen for chosen in moved if chosen[-1] + banded.bands <= steps]  # columns that are not cut off
    assert all(moved[chosen] == pytest.approx(math.sqrt(len(chosen))) for chosen in whole)


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_closer_participations_move_more(coefficients):
    """So a band that is too wide for the separation has to be refused."""
    banded = sgd.Banded(len(coefficients), coefficients=coefficients)
    c = matrix(banded, 9)
    assert any(most_moved(c, one) > 1.02 * math.sqrt(len(one)) for one in patterns(9, banded.bands - 1))


def test_gradients_of_many_dimensions_move_no_more():
    generator = np.random.default_rng(1)
    c = matrix(sgd.Banded(3).settled(9), 9)
    for chosen in patterns(9, 3):
        directions = generator.standard_normal((len(chosen), 5))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        assert np.linalg.norm(c[:, chosen] @ directions) <= math.sqrt(len(chosen))


# --- events --------------------------------------------------------------------------------------------------------


def test_cyclic_sampling_is_charged_once_a_cycle():
    made = plan(correlated=sgd.Banded(8))
    assert made.sampling == sgd.CyclicPoisson(8)
    assert made.event == Repeated(PoissonSampled(Gaussian(noise=1.1), rate=8 * 60 / 6000), times=50)
    for steps, cycles in ((1, 1), (8, 1), (9, 2), (399, 50)):
        assert made.event_after(steps).times == cycles
    assert from_json(to_json(made.event)) == made.event


@pytest.mark.parametrize(("neighbours", "reach"), [(Neighbours.REPLACE_ONE, 2.0), (Neighbours.ZERO_OUT, 1.0)])
def test_a_fixed_order_is_one_gaussian(neighbours, reach):
    made = plan(correlated=sgd.Banded(100), sampling=sgd.Shuffled(neighbours))
    assert made.sampling == sgd.FixedOrder(neighbours)
    assert made.event.neighbours is neighbours
    assert made.event.noise == pytest.approx(1.1 / math.sqrt(4), rel=1e-14)
    assert made.event.noise < 1.1 / math.sqrt(4)
    assert made.deviation_at(0, 3.0) == pytest.approx(1.1 * 3.0 * reach)
    for steps, epochs in ((1, 1), (100, 1), (101, 2), (400, 4)):
        assert made.event_after(steps).noise == pytest.approx(1.1 / math.sqrt(epochs), rel=1e-14)
    assert made.epsilon == pytest.approx(plan(sampling=sgd.Shuffled(neighbours)).epsilon, rel=1e-6)
    assert from_json(to_json(made.event)) == made.event


def test_both_are_calibrated_by_the_certified_accountant():
    budget = Budget(epsilon=2.0, delta=1e-5)
    for sampling in (sgd.Poisson(), sgd.Shuffled()):
        made = plan(noise=None, delta=None, budget=budget, sampling=sampling, correlated=sgd.Banded(10))
        assert 1.99 < made.epsilon <= 2.0
        running = [made.epsilon_after(steps) for steps in (1, 10, 11, 300, 400)]
        assert running == sorted(running)


def test_one_band_is_dp_sgd():
    for sampling in (sgd.Poisson(), sgd.FixedSize(), sgd.Shuffled()):
        one, plain = plan(correlated=sgd.Banded(1), sampling=sampling), plan(sampling=sampling)
        assert (one.event, one.sampling, one.epsilon) == (plain.event, plain.sampling, plain.epsilon)
        assert one.deviation_at(3, 2.0) == plain.deviation_at(3, 2.0)
    changing = plan(correlated=sgd.Banded(1), clip=sgd.Adaptive(), noise_stages=sgd.Stages(1.0, 2.0))
    assert changing.event == plan(clip=sgd.Adaptive(), noise_stages=sgd.Stages(1.0, 2.0)).event


def test_samplers_that_keep_turns_apart_have_prices_of_their_own():
    """Without correlated noise, and with noise that changes: the quietest step of a cycle is charged."""
    stages = sgd.Stages(2.0, 1.0)
    cyclic = plan(sampling=sgd.CyclicPoisson(8), noise_stages=stages)
    assert [part.event.event.noise for part in cyclic.event.parts] == [2.2, 1.1]
    assert [part.times for part in cyclic.event.parts] == [25, 25]
    fixed = plan(sampling=sgd.FixedOrder(), noise_stages=stages)
    assert fixed.event == plan(sampling=sgd.Shuffled(), noise_stages=stages).event
    adaptive = plan(sampling=sgd.FixedOrder(), clip=sgd.Adaptive())
    assert adaptive.event == plan(sampling=sgd.Shuffled(), clip=sgd.Adaptive()).event


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"correlated": sgd.Banded(101)}, "bands=101: want at most examples / lot = 100"),
        ({"correlated": sgd.Banded(101), "sampling": sgd.Shuffled()}, "bands=101: want at most 100"),
        ({"correlated": sgd.Banded(5), "sampling": sgd.CyclicPoisson(4)}, "bands=5: want at most 4"),
        ({"correlated": sgd.Banded(2), "sampling": sgd.FixedSize()}, "sampling=FixedSize"),
        ({"correlated": sgd.Banded(2), "clip": sgd.Adaptive()}, "clip=Adaptive"),
        ({"correlated": sgd.Banded(2), "clip_stages": sgd.Stages(1.0, 0.5)}, "clip_stages="),
        ({"correlated": sgd.Banded(2), "noise_stages": sgd.Stages(1.0, 0.5)}, "noise_stages="),
        ({"correlated": sgd.Banded(50), "steps": 40}, "bands=50: want at most the run's 40 steps"),
        ({"correlated": 4}, "correlated=4"),
        ({"sampling": sgd.CyclicPoisson(101)}, "groups=101"),
    ],
)  # fmt: skip
def test_a_plan_whose_noise_would_not_cover_an_example_is_refused(changes, said):
    with pytest.raises(InvalidArgument, match="^" + said.replace("(", r"\(")):
        plan(**changes)


def test_a_fixed_order_is_for_a_public_number_of_examples():
    with pytest.raises(InvalidArgument, match="add-remove"):
        sgd.FixedOrder(Neighbours.ADD_REMOVE)


# --- lots ----------------------------------------------------------------------------------------------------------


def test_turns_of_an_example_are_a_whole_cycle_apart():
    sampling, turns = sgd.CyclicPoisson(4), {}
    for step in range(40):
        for example in sampling.draw(Key.seeded(1), step, examples=50, lot=10):
            turns.setdefault(int(example), set()).add(step % 4)
    assert len(turns) == 50
    assert all(len(found) == 1 for found in turns.values())


def test_one_order_serves_all_epochs():
    sampling = sgd.FixedOrder()
    lots = [sampling.draw(Key.seeded(2), step, examples=50, lot=8).tolist() for step in range(21)]
    assert sorted(itertools.chain(*lots[:7])) == list(range(50))
    assert lots[:7] == lots[7:14] == lots[14:]
    assert lots[:7] != [sampling.draw(Key.seeded(3), step, examples=50, lot=8).tolist() for step in range(7)]


def test_one_group_is_poisson_sampling():
    for step in range(5):
        one = sgd.CyclicPoisson(1).draw(Key.seeded(4), step, examples=500, lot=50)
        assert one.tolist() == sgd.Poisson().draw(Key.seeded(4), step, examples=500, lot=50).tolist()


def test_groups_are_uniform_and_the_rate_is_what_is_charged():
    """Over 400 keys, examples 0 and 7: false alarms below 1e-4, by Bonferroni over 3 x 2 + 3 + 2 counts."""
    sampling, keys, examples, lot, groups = sgd.CyclicPoisson(3), 400, 30, 8, 3
    counts, together, drawn, turns = np.zeros((2, groups)), np.zeros(groups), np.zeros(2), 0
    for seed in range(keys):
        lots = [set(sampling.draw(Key.seeded(seed), step, examples=examples, lot=lot)) for step in range(24)]
        homes = [{step % groups for step, one in enumerate(lots) if example in one} for example in (0, 7)]
        assert all(len(home) == 1 for home in homes)
        first, second = (home.pop() for home in homes)
        counts[0, first] += 1
        counts[1, second] += 1
        together[(first - second) % groups] += 1  # uniform if the two are independent
        drawn += [sum(example in one for one in lots) for example in (0, 7)]
        turns += 8
    z = 4.6  # two-sided tail 4e-6 each
    for found in (*counts.flat, *together):
        assert abs(found - keys / groups) <= z * math.sqrt(keys * 2 / 9)
    rate = sampling.rate(examples, lot)
    assert rate == 0.8
    assert all(abs(found - turns * rate) <= z * math.sqrt(turns * rate * (1 - rate)) for found in drawn)
    assert not all(abs(found - turns * lot / examples) <= z * math.sqrt(turns) / 2 for found in drawn)  # not DP-SGD's


# --- the amplification theorem, by enumeration ----------------------------------------------------------------------


def turn_patterns(steps, groups, rate):
    """All sets of steps that one example may be drawn in, with their probabilities."""
    found = Counter()
    for group in range(groups):
        turns = range(group, steps, groups)
        for taken in itertools.product((False, True), repeat=len(turns)):
            chance = math.prod(rate if one else 1 - rate for one in taken) / groups
            found[frozenset(step for step, one in zip(turns, taken, strict=True) if one)] += chance
    return [(turns, chance) for turns, chance in found.items() if chance]


def density(w, c, sigma, lots, gradient):
    """The density of C x at w, where example i adds gradient(i, step, x before) in the steps of lots[i]."""
    x, moved = np.linalg.solve(c, w), np.zeros_like(w)
    for step in range(len(w)):
        for i in (i for i, turns in lots.items() if step in turns):
            moved[step] += gradient(i, step, x[:step])
    return np.exp(-(((w - c @ moved) / sigma) ** 2).sum(axis=0) / 2) / (math.sqrt(2 * math.pi) * sigma) ** len(w)


def mixture(w, c, sigma, rate, groups, examples, gradient):
    """The density of C x over everybody's groups and lots."""
    total = np.zeros(w.shape[1])
    for lots in itertools.product(turn_patterns(len(w), groups, rate), repeat=len(examples)):
        turns = {example: one for example, (one, _) in zip(examples, lots, strict=True)}
        total += math.prod(chance for _, chance in lots) * density(w, c, sigma, turns, gradient)
    return total


def grid(steps, width, points):
    axis = np.linspace(-width, width, points)
    return np.stack([one.ravel() for one in np.meshgrid(*[axis] * steps, indexing="ij")]), (axis[1] - axis[0]) ** steps


def steady(_example, _step, _before):
    return 1.0


def signed(example, _step, _before):
    return 1.0 if example == 0 else -1.0 + 0.5 * (example == 2)


def adaptive(example, step, before):
    """The protected example adds what the release before points to; the others push back."""
    direction = np.sign(before[-1]) if step else 1.0
    return direction if example == 0 else -0.5 * direction


@pytest.mark.parametrize(
    ("steps", "bands", "others", "gradient", "rate", "sigma"),
    [
        (2, 2, 0, steady, 0.5, 1.0),
        (3, 2, 0, steady, 0.5, 1.0),
        (3, 2, 0, adaptive, 0.7, 0.8),
        (3, 2, 1, signed, 0.5, 1.0),
        (3, 2, 2, signed, 0.5, 1.0),
        (3, 2, 2, adaptive, 0.5, 1.0),
        (2, 2, 3, signed, 0.5, 1.0),
        (3, 3, 1, signed, 1.0, 1.0),
    ],
)
def test_a_run_costs_no_more_than_its_cycles_of_sampled_gaussians(steps, bands, others, gradient, rate, sigma):
    """Exact mixtures of all groups and lots on a fine grid, both ways: adding the example, and removing it."""
    c = matrix(sgd.Banded(bands).settled(max(steps, bands)), steps)
    points, cell = grid(steps, 7.5 * max(sigma, 1.0) + others, 45 if steps == 3 else 151)
    without = mixture(points, c, sigma, rate, bands, tuple(range(1, others + 1)), gradient)
    with_one = mixture(points, c, sigma, rate, bands, tuple(range(others + 1)), gradient)
    assert with_one.sum() * cell == pytest.approx(1.0, abs=1e-3)
    charged = Repeated(PoissonSampled(Gaussian(noise=sigma), rate=rate), math.ceil(steps / bands))
    for epsilon in (0.1, 0.5, 1.0):
        certified = accounting.delta(charged, epsilon=epsilon)
        for first, second in ((with_one, without), (without, with_one)):
            exact = np.maximum(first - math.exp(epsilon) * second, 0).sum() * cell
            assert exact <= certified + 1e-3


@pytest.mark.parametrize("coefficients", [(1.0, 0.6), (1.0, -0.8)])
def test_the_charge_is_exact_for_the_group_whose_columns_are_whole(coefficients):
    """Four steps, two groups: an example that is known to be in the first has two turns of norm 1, as charged."""
    sigma, rate = 1.0, 0.5
    banded = sgd.Banded(2, coefficients=coefficients)
    c = matrix(banded, 4)
    plane = c[:, [0, 2]]
    assert np.allclose(plane.T @ plane, np.eye(2))  # what lies across it tells nothing
    points, cell = grid(2, 8.0, 801)
    dense = lambda at: np.exp(-((points - np.array(at)[:, None]) ** 2).sum(axis=0) / 2) / (2 * math.pi)  # noqa: E731
    present = sum(dense(at) for at in itertools.product((0.0, 1.0), repeat=2)) / 4
    absent = dense((0.0, 0.0))
    charged = Repeated(PoissonSampled(Gaussian(noise=sigma), rate=rate), 2)
    for epsilon in (0.2, 0.5, 1.0):
        exact = max(
            np.maximum(first - math.exp(epsilon) * second, 0).sum() * cell
            for first, second in ((present, absent), (absent, present))
        )
        assert exact == pytest.approx(accounting.delta(charged, epsilon=epsilon), rel=2e-3)


def test_the_enumeration_catches_a_band_that_is_too_wide():
    """Three bands, but turns every second step: the columns overlap, and the charge for two turns is too small."""
    c, sigma = matrix(sgd.Banded(3, coefficients=(1.0, 0.8, 0.7)), 3), 1.0
    points, cell = grid(3, 8.0, 81)
    absent = density(points, c, sigma, {}, steady)
    present = density(points, c, sigma, {0: {0, 2}}, steady)
    exact = np.maximum(present - math.exp(1.0) * absent, 0).sum() * cell
    narrower = matrix(sgd.Banded(2, coefficients=(1.0, 0.8)), 3)
    sound = density(points, narrower, sigma, {0: {0, 2}}, steady)
    certified = accounting.delta(Repeated(Gaussian(noise=sigma), 2), epsilon=1.0)
    assert exact > 1.05 * certified > 0
    assert np.maximum(sound - math.exp(1.0) * absent, 0).sum() * cell <= certified

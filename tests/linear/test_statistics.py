"""The sensitivity of the statistics: the worst row is found by brute force; sums are exact; nothing breaks them."""

import math

import numpy as np
import pytest

from terrine import accounting, events
from terrine.errors import InvalidArgument
from terrine.linear import Statistics, StatisticsPlan, solve, strength
from terrine.rng import Seeded

SHAPES = [(1, 1, 1.0), (2, 1, 0.3), (3, 2, 1.0), (4, 3, 2.5), (7, 1, 1.0)]


def plan(features, targets, weight=1.0, units=1000, noise=1.0, **more):
    return StatisticsPlan(units=units, features=features, targets=targets, noise=noise, weight=weight, **more)


def candidates(width, rng, count=100):
    """Rows of every length, along axes and the diagonal: huge, tiny, and just around length 1."""
    drawn = rng.normal(size=(count, width))
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    lengths = rng.choice([0.5, 1 - 1e-9, 1.0, 1 + 1e-12, 1 + 1e-9, 2.0, 1e6, 1e150, 1e300], size=(count, 1))
    return np.concatenate([drawn * lengths, np.eye(width), np.ones((1, width)), np.full((1, width), 1e308)])


def worst(one, rng, rows_each=1):
    """The farthest that one unit's rows, beside those of others, move the vector."""
    others = rng.normal(size=(20, one.features)), rng.normal(size=(20, one.targets))
    base = one.vector(*others)
    rows, targets = candidates(one.features, rng), candidates(one.targets, rng)
    found = 0.0
    for row in rows:
        own = np.vstack([row, rows[rng.integers(len(rows), size=rows_each - 1)]])
        said = targets[rng.integers(len(targets), size=rows_each)]
        shares = np.array([1] * 20 + [rows_each] * rows_each)
        with_it = one.vector(np.vstack([others[0], own]), np.vstack([others[1], said]), shares)
        found = max(found, float(np.linalg.norm(with_it - base)))
    return found


@pytest.mark.parametrize(("features", "targets", "weight"), SHAPES)
def test_no_row_moves_the_vector_by_more_than_the_sensitivity_and_some_row_by_as_much(features, targets, weight):
    one, rng = plan(features, targets, weight), np.random.default_rng(features)
    found = worst(one, rng)
    assert found <= one.sensitivity
    assert found >= 0.999 * one.sensitivity  # and none of it is wasted
    assert one.sensitivity == pytest.approx(math.sqrt(1 + weight**2), rel=1e-9)


@pytest.mark.parametrize("rows_each", [2, 3, 10])
def test_the_mean_over_a_persons_rows_moves_it_by_no_more(rows_each):
    one, rng = plan(3, 2), np.random.default_rng(rows_each)
    assert worst(one, rng, rows_each) <= one.sensitivity


def test_replacing_a_row_can_move_it_by_more_so_the_event_says_add_remove():
    one = plan(2, 1)
    moved = one.vector(np.array([[1.0, 0.0]]), np.array([[1.0]])) - one.vector(
        np.array([[0.0, 1.0]]), np.array([[1.0]])
    )
    assert np.linalg.norm(moved) > 1.4 * one.sensitivity
    assert events.settled_neighbours(one.event) is events.Neighbours.ADD_REMOVE
    with pytest.raises(InvalidArgument):
        events.Composed([one.event, events.Gaussian(noise=1.0, neighbours=events.Neighbours.REPLACE_ONE)])


@pytest.mark.parametrize("claimed", [1.0, math.sqrt(2) * 0.99])
def test_mutant_a_sensitivity_that_forgets_a_block_is_caught_by_the_search(claimed):
    class Forgetful(StatisticsPlan):
        sensitivity = claimed

    one = Forgetful(units=100, features=3, targets=2, noise=1.0)
    assert worst(one, np.random.default_rng(0)) > one.sensitivity


def test_mutant_rows_clipped_entry_by_entry_are_caught_by_the_search(monkeypatch):
    clipped = lambda rows, shares: np.trunc(np.clip(rows, -1, 1) * 2.0**16)  # noqa: E731
    monkeypatch.setattr("terrine.linear.statistics.whole_rows", clipped)
    one = plan(3, 2)
    assert worst(one, np.random.default_rng(0)) > one.sensitivity


def test_sums_are_exact_and_do_not_depend_on_the_order_of_the_rows():
    rng = np.random.default_rng(0)
    rows, targets = rng.normal(size=(40_000, 5)) / 3, rng.normal(size=(40_000, 2))
    one, order = plan(5, 2, units=40_000), rng.permutation(40_000)
    assert np.array_equal(one.vector(rows, targets), one.vector(rows[order], targets[order]))


def test_the_vector_is_the_statistics_of_the_rows():
    rng = np.random.default_rng(0)
    rows, targets = rng.normal(size=(50, 4)), rng.normal(size=(50, 2))
    x = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1)
    y = targets / np.maximum(np.linalg.norm(targets, axis=1, keepdims=True), 1)
    one = plan(4, 2, weight=2.0, noise=1e-6)
    found = one.release(rows, targets, rng=Seeded(0)).value
    assert np.allclose(found.second, x.T @ x, atol=2e-3)
    assert np.allclose(found.cross, x.T @ y, atol=2e-3)
    assert np.allclose(np.linalg.norm(one.vector(rows[:1], targets[:1])), np.hypot(
        np.linalg.norm(np.outer(x[0], x[0])), 2 * np.linalg.norm(np.outer(x[0], y[0]))), atol=1e-3)  # fmt: skip


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_or_target_that_is_not_finite_adds_exactly_zero(broken):
    rng = np.random.default_rng(0)
    rows, targets, one = rng.normal(size=(6, 3)), rng.normal(size=(6, 2)), plan(3, 2)
    without = one.vector(rows[1:], targets[1:])
    rows[0, 1] = broken
    assert np.array_equal(one.vector(rows, targets), without)
    rows[0, 1], targets[0, 0] = 0.0, broken
    assert np.array_equal(one.vector(rows, targets), without)


def test_a_row_without_a_share_adds_exactly_zero():
    rng = np.random.default_rng(0)
    rows, targets, one = rng.normal(size=(6, 3)), rng.normal(size=(6, 2)), plan(3, 2)
    assert np.array_equal(one.vector(rows, targets, np.array([0, 1, 1, 1, 1, 1])), one.vector(rows[1:], targets[1:]))


def test_the_noise_is_what_the_event_says():
    one = plan(20, 3, weight=0.5, noise=2.0)
    found = [one.release(np.zeros((1, 20)), np.zeros((1, 3)), rng=Seeded(seed)).value for seed in range(60)]
    diagonal = np.concatenate([np.diag(each.second) for each in found])
    beside = np.concatenate([each.second[np.triu_indices(20, 1)] for each in found])
    cross = np.concatenate([each.cross.ravel() for each in found])
    wanted = 2.0 * one.sensitivity
    assert diagonal.std() == pytest.approx(wanted, rel=0.1)
    assert beside.std() == pytest.approx(wanted / math.sqrt(2), rel=0.05)
    assert cross.std() == pytest.approx(wanted / 0.5, rel=0.1)
    assert found[0].deviation == pytest.approx(wanted, rel=1e-3)
    assert found[0].cross_deviation == pytest.approx(wanted / 0.5, rel=1e-3)


def test_its_event_is_one_gaussian():
    released = plan(3, 1, noise=4.0).release(np.zeros((1, 3)), np.zeros((1, 1)))
    assert released.event == events.Gaussian(noise=4.0, neighbours=events.Neighbours.ADD_REMOVE)
    assert accounting.epsilon(released.event, delta=1e-5) < 1.1
    assert plan(3, 1, unit=events.Unit.PERSON).event.unit is events.Unit.PERSON


def test_more_features_than_rows_singular_and_negative_statistics_have_a_finite_model():
    rows, targets = np.ones((3, 30)), np.ones((3, 1))
    for noise in (1e-3, 1.0, 1e3):
        found = plan(30, 1, units=3, noise=noise).release(rows, targets, rng=Seeded(1)).value
        assert np.isfinite(solve(found)).all()
    nothing = Statistics(np.zeros((4, 4)), np.zeros((4, 1)), 0.0, 0.0, 3)
    assert strength(nothing) > 0
    assert np.array_equal(solve(nothing), np.zeros((4, 1)))


def test_without_noise_it_is_ridge_regression():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 4)) / 10
    second, cross = rows.T @ rows, rows.T @ (rows @ np.ones((4, 1)))
    assert np.allclose(
        solve(Statistics(second, cross, 0.0, 0.0, 200), 0.5), np.linalg.solve(second + 0.5 * np.eye(4), cross)
    )


@pytest.mark.parametrize(
    "fields",
    [{"noise": 0.0}, {"noise": math.nan}, {"weight": -1.0}, {"units": 0}, {"features": 0}, {"features": 10_000}],
)
def test_a_plan_out_of_range_is_refused(fields):
    with pytest.raises(InvalidArgument):
        StatisticsPlan(**{"units": 10, "features": 3, "targets": 1, "noise": 1.0} | fields)


def test_rows_of_another_shape_are_refused():
    with pytest.raises(InvalidArgument):
        plan(3, 1).release(np.zeros((2, 4)), np.zeros((2, 1)))
    with pytest.raises(InvalidArgument):
        plan(3, 1).release(np.zeros((2, 3)), np.zeros((2, 1)), shares=np.array([1]))

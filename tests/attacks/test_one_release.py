"""One release and labels that are numbers, as somebody hostile would use them."""

import json
import math

import numpy as np
import pytest

from terrine import accounting, events, pipeline
from terrine.errors import InvalidArgument, TerrineError
from terrine.events import Budget, from_json
from terrine.ledger import Ledger
from terrine.linear import PrivateRidge, StatisticsPlan, solve
from terrine.rng import Seeded
from terrine.verify import verify
from tests.pipeline.conftest import write_table
from tests.pipeline.test_release import write_numbers

LEAST_SQUARES = ("train", "people.csv", "--label", "ill", "--epsilon", 4, "--model", "least-squares")


@pytest.mark.parametrize("written", ["1e308", "-1e308", "inf", "-inf", "1e999"])
def test_a_target_far_out_of_bounds_is_the_bound_and_no_more(tmp_path, written):
    weights = []
    for name, value in (("far", written), ("bound", "300" if not written.startswith("-") else "0")):
        (tmp_path / name).mkdir()
        path = write_numbers(tmp_path / name / "costs.csv", rows=400)
        lines = path.read_text().splitlines()
        lines[7] = ",".join([*lines[7].split(",")[:3], value])
        path.write_text("\n".join(lines) + "\n")
        settings = pipeline.Settings(epsilon=3.0, table=str(path), label="cost", seed=1, audit=0)
        pipeline.train(settings, tmp_path / name / "run")
        weights.append(pipeline.load(tmp_path / name / "run").module.weight.tolist())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("written", ["plenty", "0x10"])
def test_a_target_that_is_no_number_is_said_in_one_line_and_nothing_is_released(run, tmp_path, written):
    path = write_numbers(tmp_path / "costs.csv", rows=400)
    lines = path.read_text().splitlines()
    lines[7] = ",".join([*lines[7].split(",")[:3], written])
    path.write_text("\n".join(lines) + "\n")
    said = run("train", "costs.csv", "--label", "cost", "--epsilon", 3, "--out", "run")
    assert said.exit_code != 0
    assert "want a number for each" in said.said
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_an_account_of_another_neighbour_relation_is_not_charged(run, table, tmp_path):
    with Ledger.open(tmp_path / "book.db") as book:
        book.account("patients", budget=Budget(9, 1e-5), neighbours=events.Neighbours.REPLACE_ONE)
    said = run(*LEAST_SQUARES, "--out", "run", "--ledger", tmp_path / "book.db", "--account", "patients")
    assert said.exit_code != 0
    assert not (tmp_path / "run").exists()
    with Ledger.open(tmp_path / "book.db") as book:
        assert not list(book.account("patients").history())


@pytest.mark.parametrize("change", [("--epsilon", 3), ("--accuracy-within", 25), ("--audit", 8), ("--model", "linear")])
def test_a_run_does_not_go_on_with_other_settings(run, table, tmp_path, monkeypatch, change):
    from terrine.pipeline import by_release

    asked = dict(zip(LEAST_SQUARES[2::2], LEAST_SQUARES[3::2], strict=True))

    def stop(*_):
        raise InvalidArgument("stopped")

    with monkeypatch.context() as patched:
        patched.setattr(by_release, "_module", stop)
        run(*LEAST_SQUARES, "--out", "run")
    kept = (tmp_path / "run" / "owner" / "statistics.npz").read_bytes()
    other = [word for pair in (asked | dict([change])).items() for word in pair]
    for removed in ((), ("run.json",)):  # nor with what was asked for taken away
        for name in removed:
            (tmp_path / "run" / name).unlink()
        said = run("train", "people.csv", *other, "--out", "run")
        assert said.exit_code != 0
        assert (tmp_path / "run" / "owner" / "statistics.npz").read_bytes() == kept


def test_nothing_about_private_rows_is_measured_that_was_not_paid_for(run, table, tmp_path):
    assert run(*LEAST_SQUARES, "--out", "run").exit_code == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["accuracy"] is None
    assert results["majority"] is None
    event = from_json((tmp_path / "run" / "events.json").read_text())
    assert [type(part) for part, _ in events.leaves(event)] == [events.Gaussian]
    for path in (tmp_path / "run" / "owner").iterdir():
        assert path.stat().st_mode & 0o077 == 0


def test_the_default_and_the_price_are_the_same_whatever_the_rows_hold(tmp_path, table):
    from terrine.pipeline import planning
    from terrine.pipeline.material import open_data

    settings = pipeline.Settings(epsilon=4, table=str(table), label="ill")
    first = planning.plan(settings, open_data(settings))
    write_table(table, seed=9)
    second = planning.plan(settings, open_data(settings))
    assert (first.name, first.event, first.held) == (second.name, second.event, second.held)


def test_a_noise_that_the_grid_cannot_hold_is_refused_before_the_charge(run, table, tmp_path):
    with Ledger.open(tmp_path / "book.db") as book:
        book.account("patients", budget=Budget(9, 1e-5))
    account = ("--ledger", tmp_path / "book.db", "--account", "patients")
    words = [1e-13 if word == 4 else word for word in LEAST_SQUARES]
    said = run(*words, "--out", "run", *account)
    with Ledger.open(tmp_path / "book.db") as book:
        charged = list(book.account("patients").history())
    assert said.exit_code == 0 or not charged
    assert isinstance(said.exception, TerrineError | SystemExit | None)


@pytest.mark.parametrize("epsilon", [1e-300, 1e-9, 1e-3])
def test_a_tiny_epsilon_is_answered_or_refused_in_one_line(run, table, tmp_path, epsilon):
    said = run("train", "people.csv", "--label", "ill", "--epsilon", epsilon, "--out", "run")
    assert said.exit_code == 0 or "\n" not in said.said.strip()


def test_more_rows_than_the_plan_counted_are_refused():
    plan = StatisticsPlan(units=3, features=2, targets=1, noise=1.0)
    with pytest.raises(InvalidArgument, match="more than the 3 units"):
        plan.release(np.ones((4, 2)), np.ones((4, 1)))


@pytest.mark.parametrize("units", [1, 2**20, 2**30])
def test_the_margin_for_floats_stays_a_margin(units):
    plan = StatisticsPlan(units=units, features=500, targets=10, noise=1.0)
    assert math.sqrt(2) < plan.sensitivity < 1.001 * math.sqrt(2)


def test_the_worst_neighbours_cannot_be_told_apart_better_than_the_event_says():
    """The optimal test between a data set and the one with the worst row more, at many thresholds."""
    plan = StatisticsPlan(units=10, features=2, targets=1, noise=1.5)
    nobody, one = (np.zeros((0, 2)), np.zeros((0, 1))), (np.array([[1e300, 0.0]]), np.array([[1e300]]))
    direction = plan.vector(*one) / np.linalg.norm(plan.vector(*one))

    def along(data, seeds):
        found = []
        for seed in seeds:
            told = plan.release(*data, rng=Seeded(seed)).value
            upper = np.triu_indices(2)
            length = np.where(upper[0] == upper[1], 1.0, math.sqrt(2))
            found.append(direction @ np.concatenate([told.second[upper] * length, told.cross.ravel()]))
        return np.array(found)

    without, with_it = along(nobody, range(3000)), along(one, range(3000, 6000))
    for epsilon in (0.5, 1.0, 2.0):
        allowed = accounting.delta(plan.event, epsilon=epsilon)
        for threshold in np.linspace(-2, 4, 25):
            excess = (with_it > threshold).mean() - math.exp(epsilon) * (without > threshold).mean()
            assert excess <= allowed + 4 * (1 + math.exp(epsilon)) / math.sqrt(3000) / 2


def test_one_huge_row_does_not_move_anybody_elses_prediction():
    """Beyond what the noise hides: without noise to speak of, a row of any length counts as one of length 1."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(500, 3)), rng.uniform(0, 20, size=500)
    huge = np.vstack([X, np.full((1, 3), 1e300)])
    told = np.append(y, 1e300)
    same = PrivateRidge(bounds=(0, 20), data_norm=5.0, ridge=1.0, seed=0)
    far = same.fit(huge, told).predict(X)
    near = same.fit(np.vstack([X, np.full((1, 3), 5.0)]), np.append(y, 20.0)).predict(X)
    assert np.allclose(far, near, atol=1e-3)


def test_singular_statistics_and_more_features_than_rows_are_solved():
    rng = np.random.default_rng(0)
    plan = StatisticsPlan(units=5, features=60, targets=2, noise=3.0)
    rows = np.repeat(rng.normal(size=(1, 60)), 5, axis=0)
    assert np.isfinite(solve(plan.release(rows, np.ones((5, 2)), rng=Seeded(0)).value)).all()


def test_a_folder_that_names_fewer_features_than_its_model_has_does_not_verify(run, table, tmp_path):
    run(*LEAST_SQUARES, "--out", "run")
    path = tmp_path / "run" / "privacy.json"
    told = json.loads(path.read_text())
    fewer = told | {"features": 2, "released_numbers": 3 + 2 * told["targets"]}
    path.write_text(json.dumps(fewer))
    assert any(one.name == "model" and not one.ok for one in verify("run").checks)

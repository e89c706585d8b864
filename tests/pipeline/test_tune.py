"""Tuning that is paid for: the best of a secret number of runs, one event, charged once, taken up where it stopped."""

import json

import pytest
import torch

from terrine import accounting, pipeline
from terrine.events import Budget, OneOf, RandomStopping, Repeated, from_json
from terrine.ledger import Ledger
from terrine.pipeline import recipes, tuning
from tests.pipeline.conftest import write_table

ASKED = ("train", "people.csv", "--label", "ill", "--epsilon", 4, "--tune", 3, "--epochs", 2, "--lot", 100)


@pytest.fixture
def three_runs(monkeypatch):
    """A count that is known here, as it may be nowhere else."""
    monkeypatch.setattr(tuning, "draw_count", lambda count, rng: 3)


def weights(folder):
    return torch.cat([one.flatten() for one in pipeline.load(folder).module.parameters()])


def test_the_whole_tuning_keeps_the_budget_and_is_charged_once(run, table, tmp_path):
    with Ledger.open(f"sqlite:///{tmp_path}/budget.db") as book:
        book.account("patients", budget=Budget(4.0, 1e-5))
    charge = ("--ledger", f"sqlite:///{tmp_path}/budget.db", "--account", "patients")
    found = run(*ASKED, "--out", "run", "--json", *charge).read()
    claim = json.loads((tmp_path / "run" / "privacy.json").read_text())
    event = from_json(json.dumps(claim["events"]))
    assert isinstance(event, RandomStopping)
    assert found["epsilon"] <= 4.0
    assert accounting.epsilon(event, delta=claim["delta"]) <= 4.0
    assert found["results"]["accuracy"] is not None
    assert "paid for" in found["results"]["measured_on"]
    assert "DiscreteLaplace" in json.dumps(claim["events"])  # every score is in the bill
    assert "nothing was trained or charged" in run(*ASKED, "--out", "run", *charge).output
    with Ledger.open(f"sqlite:///{tmp_path}/budget.db") as book:
        history = list(book.account("patients").history())
        assert book.verify() == []
    assert [one.event for one in history] == [event]
    assert run("audit", "run", "run").exit_code == 0
    assert "secret number of runs" in (tmp_path / "run" / "report.html").read_text()


def test_tuning_costs_noise_and_the_mutant_that_bills_one_run_is_caught(run, table, tmp_path):
    run(*ASKED, "--out", "tuned")
    run(*ASKED[:6], *ASKED[8:], "--out", "plain")
    tuned, plain = (json.loads((tmp_path / name / "privacy.json").read_text()) for name in ("tuned", "plain"))
    assert tuned["noise"] > 1.2 * plain["noise"]
    # The mutant tunes with the noise of one run: the best of three then costs more than was asked for.
    event = from_json(json.dumps(tuned["events"]))
    mutant = RandomStopping(from_json(json.dumps(plain["events"])), event.count)
    assert accounting.epsilon(mutant, delta=1e-5) > 4.0
    assert any(isinstance(part, Repeated) for part in event.event.parts)


def test_neither_the_number_of_runs_nor_a_loser_is_kept(run, table, tmp_path, three_runs):
    assert run(*ASKED, "--out", "run").exit_code == 0
    left = {path.name for path in (tmp_path / "run" / "owner").iterdir()}
    assert left == {"coins.npz", "receipt.json"}
    kept = "".join(
        path.read_text() for path in (tmp_path / "run").iterdir() if path.suffix in (".json", ".md", ".html")
    )
    assert '"scores"' not in kept
    assert "candidates" not in json.loads((tmp_path / "run" / "privacy.json").read_text())


def test_the_best_candidate_wins(run, table, tmp_path, monkeypatch):
    good, useless = recipes.Candidate(4.0, 0.5, 100), recipes.Candidate(1e-9, 0.5, 100)
    monkeypatch.setattr(recipes, "candidates", lambda *_, **__: [good, useless])
    monkeypatch.setattr(tuning, "draw_count", lambda count, rng: 8)
    for seed in (1, 2, 3):
        asked = (*ASKED[:4], "--epsilon", 30, *ASKED[6:8], "--lot", 100, "--epochs", 10, "--seed", seed)
        asked = (*asked, "--weak-guarantee")
        found = run(*asked, "--out", f"run{seed}", "--json").read()
        assert found["learning_rate"] == good.learning_rate
    assert found["results"]["accuracy"] > 0.7


@pytest.mark.parametrize("at", [3, 6, 10])
def test_an_interrupted_tuning_goes_on_to_the_same_model(run, table, tmp_path, dying_at, three_runs, at):
    asked = (*ASKED, "--seed", 3)
    assert run(*asked, "--out", "whole").exit_code == 0
    with Ledger.open("budget.db") as book:
        book.account("patients", budget=Budget(4.0, 1e-5))
    charge = ("--ledger", "budget.db", "--account", "patients")
    with dying_at(at):
        run(*asked, "--out", "cut", *charge).read()
    assert not (tmp_path / "cut" / "privacy.json").exists()
    assert run(*asked, "--out", "cut", *charge).exit_code == 0
    assert torch.equal(weights("whole"), weights("cut"))
    with Ledger.open("budget.db") as book:
        assert len(list(book.account("patients").history())) == 1


def test_lots_are_tuned_too_and_each_has_a_noise_of_its_own(run, table, tmp_path, monkeypatch):
    drawn = []
    original = recipes.candidates

    def grid(*given, noises, **more):
        drawn.append(noises)
        return [one for one in original(*given, noises=noises, **more) if one.lot == min(noises)]

    monkeypatch.setattr(recipes, "candidates", grid)
    asked = (*ASKED[:8], "--epochs", 2)
    found = run(*asked, "--out", "run", "--json").read()
    event = from_json(json.dumps(json.loads((tmp_path / "run" / "privacy.json").read_text())["events"]))
    assert isinstance(event.event, OneOf)
    assert len(event.event.parts) == len(drawn[0]) == 2
    assert (found["lot"], found["noise"]) == (min(drawn[0]), drawn[0][min(drawn[0])])
    assert found["epsilon"] <= 4.0


def test_a_budget_that_is_too_small_trains_nothing(run, table, tmp_path):
    with Ledger.open("budget.db") as book:
        book.account("patients", budget=Budget(3.9, 1e-6))
    refused = run(*ASKED, "--out", "run", "--ledger", "budget.db", "--account", "patients")
    assert refused.exit_code != 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tune", 1), "whole number >= 2"),
        (("--tune", 3, "--method", "pate"), "not for --method pate"),
        (("--tune", 3, "--clip", 1, "--learning-rate", 1), "nothing is left to tune"),
    ],
)
def test_mistakes_are_one_clear_line(run, table, tmp_path, words, said):
    result = run(*ASKED[:6], *words, "--out", "run")
    assert result.exit_code != 0
    assert said in result.said
    assert not (tmp_path / "run").exists()


def test_a_table_that_is_too_small_to_score_on_is_refused(run, table, tmp_path):
    write_table(tmp_path / "people.csv", rows=40)
    assert "want at least 20" in run(*ASKED[:8], "--out", "run").said


def test_the_grid_is_public_and_moves_no_event():
    settings = pipeline.Settings(data="digits", epsilon=3.0, tune=4)
    usual = recipes.recipe(settings, "linear", 1200)
    assert recipes.lots(settings, usual) == [600, 150]
    grid = recipes.candidates(settings, "linear", usual, noises={600: 5.0, 150: 2.0})
    assert len(set(grid)) == 40
    fixed = pipeline.Settings(data="digits", epsilon=3.0, tune=4, clip=0.5)
    assert {one.clip for one in recipes.candidates(fixed, "linear", usual, noises={600: 5.0})} == {0.5}

"""Attack: a certified epsilon that promises nothing, printed as if it did."""

import json
import math
import warnings

import numpy as np
import pytest

from terrine import check, pate, pipeline, sgd
from terrine.errors import InvalidArgument, WeakGuarantee
from terrine.events import Budget
from terrine.rng import Seeded
from tests.pipeline.conftest import run, table  # noqa: F401

ASKED = ("train", "people.csv", "--label", "ill", "--epochs", 2, "--lot", 100, "--out", "run")
WEAK = [
    (("--epsilon", 21), "epsilon=21 is above 20"),
    (("--epsilon", 1000), "epsilon=1000 is above 20"),
    (("--epsilon", 2, "--delta", 0.0025), "delta=0.0025 is not below 1/400"),
    (("--epsilon", 2, "--delta", 0.5), "delta=0.5 is not below 1/400"),
]


@pytest.mark.parametrize(("words", "said"), WEAK)
def test_a_budget_that_means_nothing_is_refused(run, table, tmp_path, words, said):  # noqa: F811
    done = run(*ASKED, *words)
    assert said in done.said
    assert "--weak-guarantee" in done.said
    assert not (tmp_path / "run").exists()


def test_a_weak_guarantee_that_is_wanted_is_called_weak_on_every_page(run, table, tmp_path):  # noqa: F811
    done = run(*ASKED, "--epsilon", 2, "--delta", 0.01, "--weak-guarantee")
    assert done.exit_code == 0, done.said
    assert "a weak guarantee" in done.output
    assert "not below 1/400" in json.loads((tmp_path / "run" / "privacy.json").read_text())["weak_guarantee"]
    assert "The guarantee is weak" in (tmp_path / "run" / "report.html").read_text()
    assert "The guarantee is weak" in (tmp_path / "run" / "model_card.md").read_text()


def test_a_guarantee_that_means_something_is_not_called_weak(run, table, tmp_path):  # noqa: F811
    done = run(*ASKED, "--epsilon", 20, "--delta", 0.00249)
    assert done.exit_code == 0, done.said
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["weak_guarantee"] is None
    assert "weak" not in (tmp_path / "run" / "report.html").read_text().split("<svg")[0]


def test_the_library_refuses_in_runs_and_warns_elsewhere():
    with pytest.raises(InvalidArgument, match="above 20"):
        pipeline.train(pipeline.Settings(epsilon=30.0, data="digits"), "nowhere")
    with pytest.warns(WeakGuarantee, match="above 20"):
        sgd.Plan(examples=100, lot=10, steps=5, clip=1.0, budget=Budget(25.0, 1e-5))
    with pytest.warns(WeakGuarantee, match="not below 1/100"):
        sgd.Plan(examples=100, lot=10, steps=5, clip=1.0, noise=1.0, delta=0.01)
    plan = sgd.Plan(examples=100, lot=100, steps=50, clip=1.0, noise=0.5, delta=1e-5)
    with pytest.warns(WeakGuarantee, match="above 20"):
        assert plan.epsilon > 20
    with pytest.warns(WeakGuarantee, match="not below 1/60"):
        sgd.PrivateClassifier(classes=[0, 1], delta=0.1, epochs=1).fit(
            np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 2
        )
    deal = pate.split(100, 20, seed=0)
    votes, rule = pate.Votes(np.full((40, 2), 10), deal.record()), pate.GaussianMax(1.0)
    with pytest.warns(WeakGuarantee, match="above 20"):
        pate.bill(votes, rule.answer(votes, rng=Seeded(0)), rule, delta=1e-5, sanitise=False)


@pytest.mark.parametrize("units", [3, 7, 49, 400, 10**6])
def test_exactly_one_in_n_is_not_below_it(units):
    assert "not below" in check.weakness(1.0, 1 / units, units=units)
    assert not check.weakness(1.0, math.nextafter(1 / units, 0), units=units)


def test_a_plan_that_means_something_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sgd.Plan(examples=100, lot=10, steps=5, clip=1.0, budget=Budget(20.0, 0.0099)).epsilon <= 20

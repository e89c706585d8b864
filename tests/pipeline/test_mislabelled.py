"""Canaries with wrong labels: who gets which label, what is attacked, and what accuracy is measured on."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from terrine import pipeline
from terrine.audit import folder as audit_files
from terrine.common.people import People
from terrine.errors import InvalidArgument
from terrine.pipeline import baseline, by_sgd, coins, measuring, pages, planning, recipes
from terrine.pipeline.learned import Learned
from terrine.pipeline.material import open_data
from terrine.pipeline.units import Units

QUICK = ("--epochs", 3, "--lot", 100)


def some(labels: list[int], classes: int, people: list[int] | None = None) -> SimpleNamespace:
    units = Units(len(labels), None if people is None else People(people, len(labels)), 2)
    return SimpleNamespace(
        labels=np.array(labels), classes=[str(one) for one in range(classes)], units=units, target=None
    )


def test_every_row_of_a_canary_is_wrong_and_no_other_is() -> None:
    material = some([0, 1, 2, 0, 1, 2, 2, 1], 3)
    taught = coins.mislabelled(material, np.array([1, 4, 6]))
    assert np.flatnonzero(taught != material.labels).tolist() == [1, 4, 6]
    assert set(taught) <= {0, 1, 2}
    assert material.labels.tolist() == [0, 1, 2, 0, 1, 2, 2, 1]


def test_a_person_is_mislabelled_with_all_rows() -> None:
    material = some([0, 1, 0, 1, 1, 0], 2, [7, 7, 8, 9, 8, 9])
    who = material.units.ids[2]  # the person of rows 2 and 4
    taught = coins.mislabelled(material, np.array([who]))
    assert np.flatnonzero(taught != material.labels).tolist() == [2, 4]


def test_one_persons_wrong_label_depends_on_that_persons_rows_alone() -> None:
    """Neighbours stay neighbours: another label of one row changes that row's taught label and no other."""
    labels = list(np.random.default_rng(0).integers(0, 5, size=60))
    before = coins.mislabelled(some(labels, 5), np.arange(0, 60, 3))
    for row in (0, 1, 30):
        changed = [*labels[:row], (labels[row] + 1) % 5, *labels[row + 1 :]]
        after = coins.mislabelled(some(changed, 5), np.arange(0, 60, 3))
        assert np.flatnonzero(before != after).tolist() == [row]


def test_canaries_are_few() -> None:
    settings = pipeline.Settings(epsilon=1.0, data="digits")
    assert recipes.canaries(settings, 400) == 40  # half of them out: a twentieth is taught
    assert recipes.canaries(settings, 60_000) == 120
    assert recipes.canaries(pipeline.Settings(epsilon=1.0, data="digits", audit=0), 60_000) == 0


def careless(training, folder, settings, material, architecture, features, _receipt, *, quiet) -> Learned:
    """A training that forgets to clip and to add noise."""
    count = material.units.count
    tossed = coins.of_run(folder.owner, settings, count)
    chosen = tossed.canaries(recipes.canaries(settings, count))
    taught, kept = coins.mislabelled(material, chosen.units), np.setdiff1d(np.arange(count), tossed.out)
    module = baseline.unsafe_train(architecture, features[torch.from_numpy(kept)], taught[kept], steps=600)
    found = by_sgd.scores(module, features, taught, material.units, chosen.units)
    facts = by_sgd.facts(training.plan, training.learning_rate, training.usual)
    return Learned(module, found, chosen.heads, facts=facts)


def test_the_mutant_that_forgets_its_noise_is_caught_by_the_runs_own_audit(tmp_path, monkeypatch) -> None:
    settings = pipeline.Settings(epsilon=0.5, data="digits", seed=1)
    honest = pipeline.train(settings, tmp_path / "honest")
    assert not pages.audited(honest)["violated"]
    monkeypatch.setattr(by_sgd, "learn", careless)
    found = pages.audited(pipeline.train(settings, tmp_path / "broken"))
    assert found["violated"]
    assert found["lower"] > 2


def test_accuracy_is_counted_on_true_labels(table, tmp_path, monkeypatch) -> None:
    """Rows left out by their coin measure the accuracy; among them are canaries, whose true labels count."""
    seen = {}
    released = measuring.released

    def spied(measurement, folder, settings, module, material, features, tossed):
        seen["labels"], seen["units"] = material.labels.copy(), tossed.out
        return released(measurement, folder, settings, module, material, features, tossed)

    monkeypatch.setattr(measuring, "released", spied)
    settings = pipeline.Settings(
        epsilon=4, table=str(table), label="ill", seed=5, epochs=3, lot=100, accuracy_within=20
    )
    folder = pipeline.train(settings, tmp_path / "run")
    held = planning.plan(settings, open_data(settings)).held
    tossed = coins.of_run(folder.owner, settings, 400, held)
    assert set(seen["units"]) == set(tossed.out)
    assert np.array_equal(seen["labels"], open_data(settings).look({}).labels)
    assert "wrong labels" in folder.read("privacy.json")["canaries"]


def test_gradient_canaries_watch_a_twin(run, table, tmp_path) -> None:
    asked = ("train", "people.csv", "--label", "ill", "--epsilon", 8, "--model", "mlp", "--gradient-canaries", 200)
    assert run(*asked, *QUICK, "--out", "run").exit_code == 0
    held = audit_files.read(tmp_path / "run")
    assert held.gradients is not None
    audited = json.loads(run("audit", "run", "run", "--json").output)
    assert [one["evidence"] for one in audited["audits"]] == ["canaries", "gradient canaries of a twin"]
    assert not audited["violated"]
    assert run("verify", "run").exit_code == 0


def test_gradient_canaries_are_for_one_plan_of_sgd() -> None:
    with pytest.raises(InvalidArgument, match="a twin has one plan"):
        pipeline.Settings(epsilon=1.0, data="digits", tune=2, gradient_canaries=9)
    with pytest.raises(InvalidArgument, match="not for --method pate"):
        pipeline.Settings(epsilon=1.0, data="digits", method="pate", gradient_canaries=9)

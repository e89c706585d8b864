"""`terrine train --person`: bounds, whitening, training, accuracy, coins and teachers count people, not rows."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from terrine import pipeline, tables
from terrine.common.keys import Key
from terrine.common.people import People
from terrine.events import Budget, Unit, from_json, leaves, settled_unit
from terrine.features.whitening import private_whitening
from terrine.ledger import Ledger
from terrine.pate import Partition
from terrine.pipeline import bounds, coins, job
from terrine.pipeline.units import Units
from tests.pipeline.conftest import SCHEMA

VISITS = ("train", "visits.csv", "--label", "ill", "--epsilon", 8, "--person", "patient_id")
IDS = '[columns.patient_id]\nkind = "number"\nlow = 0\nhigh = 1\nconfirmed = false\n'


def write_visits(path, people=150, seed=0):
    """Visits of people, one to six each, with an id."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, 7, people)
    whose = generator.permutation(np.repeat(np.arange(people), counts))
    age = generator.integers(0, 100, people)[whose]
    city = generator.choice(["north", "south"], len(whose))
    ill = np.where(age + 15 * (city == "south") > 55, "yes", "no")
    lines = [f"{one},{age[row]},{city[row]},{ill[row]}" for row, one in enumerate(whose)]
    path.write_text("patient_id,age,city,ill\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture
def visits(tmp_path):
    (tmp_path / "visits.schema.toml").write_text(SCHEMA.replace('[columns.name]\nkind = "ignored"\n', IDS))
    return write_visits(tmp_path / "visits.csv")


def units_of(claim):
    event = from_json(json.dumps(claim["events"]))
    return {settled_unit(part) for part, _ in leaves(event)}


def test_a_run_for_people(run, visits, tmp_path):
    found = run(*VISITS, "--lot", 75, "--accuracy-within", 30, "--out", "run", "--json").read()
    assert (found["unit"], found["people"], found["rows_per_person"]) == ("person", 150, 10)
    assert "examples" not in found
    assert found["epsilon"] <= 8
    assert units_of(json.loads((tmp_path / "run" / "privacy.json").read_text())) == {Unit.PERSON}
    assert "one row of each of the people" in found["results"]["measured_on"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "private people" in page
    assert "at most 10 of a person" in page
    assert run("audit", "run", "run").exit_code == 0
    assert "patient_id" not in json.dumps(json.loads((tmp_path / "run" / "model.json").read_text()))
    (tmp_path / "new.csv").write_text("age,city\n95,south\n2,north\n")
    assert run("predict", "run", "new.csv").output.splitlines() == ["prediction", "yes", "no"]


@pytest.mark.parametrize("more", [("--tune", 2), ("--private-bounds",), ("--model", "mlp", "--rows-per-person", 2)])
def test_every_part_of_a_run_is_billed_for_people(run, tmp_path, more):
    write_visits(tmp_path / "visits.csv", people=3000)
    unsure = SCHEMA.replace('[columns.name]\nkind = "ignored"\n', IDS)
    unsure = unsure.replace("high = 100\n", "high = 100\nconfirmed = false\n") if "--private-bounds" in more else unsure
    (tmp_path / "visits.schema.toml").write_text(unsure)
    found = run(*VISITS, "--out", "run", "--json", "--epochs", 2, *more).read()
    assert found["unit"] == "person"
    claim = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert '"example"' not in json.dumps(claim["events"])
    assert '"unit": "person"' in json.dumps(claim["events"])


def test_a_large_table_is_whitened_for_people(run, tmp_path):
    write_visits(tmp_path / "visits.csv", people=10_000)
    (tmp_path / "visits.schema.toml").write_text(SCHEMA.replace('[columns.name]\nkind = "ignored"\n', IDS))
    found = run(*VISITS, "--out", "run", "--json", "--epochs", 1).read()
    assert "whitening" in found
    assert units_of(json.loads((tmp_path / "run" / "privacy.json").read_text())) == {Unit.PERSON}


def test_the_account_must_be_one_of_people(run, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/budget.db"
    with Ledger.open(url) as book:
        book.account("rows", budget=Budget(20, 1e-3))
        book.account("patients", budget=Budget(20, 1e-3), unit=Unit.PERSON)
    refused = run(*VISITS, "--out", "run", "--ledger", url, "--account", "rows")
    assert "protects one person; account 'rows' wants one example" in refused.said
    assert not (tmp_path / "run").exists()
    by_rows = [word for word in VISITS if word not in ("--person", "patient_id")]
    schema = SCHEMA.replace('[columns.name]\nkind = "ignored"\n', '[columns.patient_id]\nkind = "ignored"\n')
    (tmp_path / "visits.schema.toml").write_text(schema)
    with pytest.warns(UserWarning, match="patient_id"):
        refused = run(*by_rows, "--out", "run", "--ledger", url, "--account", "patients")
    assert "protects one example; account 'patients' wants one person" in refused.said
    assert run(*VISITS, "--out", "run", "--ledger", url, "--account", "patients").exit_code == 0


def test_a_column_that_looks_like_an_id_is_named_in_a_warning(run, visits, tmp_path):
    schema = SCHEMA.replace('[columns.name]\nkind = "ignored"\n', '[columns.patient_id]\nkind = "ignored"\n')
    (tmp_path / "visits.schema.toml").write_text(schema)
    by_rows = [word for word in VISITS if word not in ("--person", "patient_id")]
    with pytest.warns(UserWarning, match=r"column 'patient_id' looks like an id .* want --person patient_id"):
        run(*by_rows, "--out", "run", "--epochs", 1)


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        ("patientId", [1, 1, 2], True),
        ("user", ["a", "b", "a"], True),
        ("Customer-ID", [3, 3, 3], True),
        ("id", [1, 2, 3], False),
        ("idle", [1, 1, 1], False),
        ("age", [30, 30, 40], False),
        ("paid", [0, 1, 1], False),
    ],
)
def test_what_looks_like_an_id(name, values, found):
    table = pa.table({name: values, "ill": ["no", "yes", "no"]})
    assert tables.repeated_ids(table, without="ill") == (name if found else None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--person", "nobody"), "nobody"),
        (("--person", "ill"), "other than the label"),
        (("--rows-per-person", 3), "want --person"),
        (("--person", "patient_id", "--rows-per-person", 0), "rows_per_person"),
        (("--person", "gap"), "want whole numbers or texts, none of them missing"),
    ],
)
def test_refusals(run, visits, tmp_path, words, said):
    text = visits.read_text().splitlines()
    gaps = [text[0] + ",gap", *(f"{line},{'' if place == 3 else place}" for place, line in enumerate(text[1:]))]
    visits.write_text("\n".join(gaps) + "\n")
    if "gap" in words:
        (tmp_path / "visits.schema.toml").write_text(SCHEMA.replace("[columns.name]", "[columns.patient_id]"))
    result = run("train", "visits.csv", "--label", "ill", "--epsilon", 8, "--out", "run", *words)
    assert result.exit_code != 0
    assert said in result.said
    assert not (tmp_path / "run").exists()


def test_people_left_out_by_their_coin_do_not_move_the_model(visits, tmp_path, monkeypatch):
    """With the same noise, other labels of all rows of left-out people change nothing; those of others do."""
    settings = pipeline.Settings(
        epsilon=4, table=str(visits), label="ill", person="patient_id", seed=5, epochs=3, lot=50
    )
    weights, original = {}, job.open_data

    def flipped(which):
        def opened(asked):
            found = original(asked)

            def look(bounds):
                material = found.look(bounds)
                tossed = coins.tossed(tmp_path / "plain" / "owner" / "coins.npz", units=150, count=15, seed=5)
                chosen = tossed.out if which == "out" else tossed.units[tossed.heads]
                rows = material.units.all_rows(chosen)
                assert len(rows) > len(chosen)
                material.labels[rows] = 1 - material.labels[rows]
                return material

            return dataclasses.replace(found, look=look)

        return opened

    for name in ("plain", "out", "in"):
        if name != "plain":
            monkeypatch.setattr(job, "open_data", flipped(name))
        pipeline.train(settings, tmp_path / name)
        weights[name] = pipeline.load(tmp_path / name).module.weight.detach()
    assert torch.equal(weights["plain"], weights["out"])
    assert not torch.equal(weights["plain"], weights["in"])


def test_an_interrupted_run_for_people_goes_on_as_it_would_have(visits, tmp_path, dying_at):
    settings = pipeline.Settings(
        epsilon=4, table=str(visits), label="ill", person="patient_id", seed=5, epochs=3, lot=50
    )
    pipeline.train(settings, tmp_path / "whole")
    with dying_at(4):
        pipeline.train(settings, tmp_path / "broken")
    pipeline.train(settings, tmp_path / "broken")
    whole, broken = (pipeline.load(tmp_path / name).module.weight for name in ("whole", "broken"))
    assert torch.equal(whole, broken)


def test_one_person_is_with_one_teacher(run, visits, tmp_path):
    write_visits(tmp_path / "public.csv", people=60, seed=3)
    asked = (*VISITS, "--method", "pate", "--public", "public.csv", "--teachers", 8, "--queries", 10)
    found = run(*asked, "--out", "run", "--json").read()
    assert (found["unit"], found["neighbours"]) == ("person", "replace-one")
    assert "every private person is with exactly one teacher" in found["sampler"]
    deal = Partition.load(tmp_path / "run" / "owner" / "pate" / "owner" / "partition.json")
    assert deal.unit is Unit.PERSON
    assert found["people"] == 150 - 7  # seven pairs, one of each used


def people_of(counts):
    return People(np.repeat(np.arange(len(counts)), counts), sum(counts))


def test_a_person_with_a_thousand_rows_moves_the_whitening_as_one_row():
    generator = torch.Generator().manual_seed(0)
    few, own = (torch.randn(rows, 3, 1, 1, generator=generator) for rows in (20, 1000))
    own[:, 0] += 50.0  # all its rows point one way
    counts, quiet = [2] * 10, {"mean_noise": 1e-6, "noise": 1e-6, "power": 0.0, "rows_per_person": 5, "seed": 1}
    without = private_whitening(few, people=people_of(counts), **quiet)
    whole = private_whitening(torch.cat([few, own]), people=people_of([*counts, 1000]), **quiet)
    moved = 11 * whole.mean - 10 * without.mean
    assert 0.9 < float(moved.norm()) <= 1 + 1e-5
    assert settled_unit(whole.event) is Unit.PERSON
    rows = private_whitening(torch.cat([few, own]), mean_noise=1e-6, noise=1e-6, power=0.0, seed=1)
    assert float((1020 * rows.mean - 20 * without.mean).norm()) > 500


def test_every_persons_shares_add_up_to_one():
    people = people_of([1, 3, 50])
    shares = people.shares(4, Key.seeded(1))
    assert np.allclose(np.bincount(people.of_rows, shares), 1.0)
    assert np.count_nonzero(shares) == 1 + 3 + 4


def test_bounds_take_one_value_of_each_person():
    counts = [1] * 4000 + [9000]
    units = Units(sum(counts), people_of(counts), 5)
    rows = units.one_row(np.arange(units.count))
    assert np.array_equal(units.people.of_rows[rows], np.arange(4001))
    table = pa.table({"age": [place / 40 for place in range(4000)] + [1e6] * 9000, "ill": ["no"] * 13_000})
    schema = tables.Schema("ill", ("no", "yes"), {"age": tables.Number(0, 1, confirmed=False)})
    seen = bounds.find(table, schema, units, epsilon=200.0, seed=1)
    assert 90 < seen["age"][1] < 101  # a hundredth of the people lie above, and he is one in 4001


def test_the_mean_of_each_persons_scores():
    units = Units(6, people_of([1, 2, 3]), 5)
    chosen = np.array([2, 0])
    values = np.array([10.0, 1.0, 2.0, 6.0])  # of rows 0, 3, 4 and 5
    assert units.all_rows(chosen).tolist() == [0, 3, 4, 5]
    assert units.mean(values, chosen).tolist() == [3.0, 10.0]

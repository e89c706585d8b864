"""One release instead of a training, and labels that are numbers, end to end."""

import json

import numpy as np
import pytest

from terrine import accounting, pipeline
from terrine.events import from_json
from terrine.pipeline import by_release, coins, recipes
from terrine.verify import verify
from tests.pipeline.conftest import write_table

NUMBER_SCHEMA = """
[label]
name = "cost"
kind = "number"
low = 0
high = 300
[columns.age]
kind = "number"
low = 0
high = 100
[columns.city]
kind = "category"
values = ["north", "south"]
"""


def write_numbers(path, rows=2000, seed=0):
    generator = np.random.default_rng(seed)
    age, city = generator.integers(0, 100, rows), generator.choice(["north", "south"], rows)
    cost = np.clip(50 + 2 * age - 40 * (city == "south") + 10 * generator.normal(size=rows), 0, 300)
    lines = [f"p{place % (rows // 4)},{age[place]},{city[place]},{cost[place]:.1f}" for place in range(rows)]
    path.write_text("who,age,city,cost\n" + "\n".join(lines) + "\n")
    path.with_name(f"{path.stem}.schema.toml").write_text(NUMBER_SCHEMA)
    return path


def test_classes_from_one_release(run, table, tmp_path):
    write_table(tmp_path / "test.csv", seed=1)
    asked = ("train", "people.csv", "--label", "ill", "--epsilon", 8, "--model", "least-squares", "--test", "test.csv")
    found = run(*asked, "--out", "run", "--json").read()
    assert found["method"] == "one release"
    assert found["results"]["accuracy"] > found["results"]["majority"] + 0.1
    claim = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert accounting.delta(from_json(json.dumps(claim["events"])), epsilon=8.0) <= claim["delta"]
    assert "steps" not in claim
    assert verify("run").ok
    assert run("report", "run").exit_code == 0
    assert "one release" in (tmp_path / "run" / "model_card.md").read_text()
    assert "All of it was spent at once" in (tmp_path / "run" / "report.html").read_text()
    assert run("audit", "run", "run").exit_code == 0
    shares = run("predict", "run", "people.csv", "--probabilities").output.splitlines()[1].split(",")
    assert float(shares[1]) + float(shares[2]) == pytest.approx(1, abs=1e-5)


def test_a_number_is_predicted_within_its_bounds(run, tmp_path):
    write_numbers(tmp_path / "costs.csv")
    write_numbers(tmp_path / "test.csv", seed=1)
    asked = ("train", "costs.csv", "--label", "cost", "--epsilon", 3, "--test", "test.csv", "--out", "run")
    said = run(*asked)
    assert said.exit_code == 0, said.said
    assert "mean absolute error" in said.output
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["r2"] > 0.8
    assert results["mean_absolute_error"] < 25
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["method"] == "one release"
    assert verify("run").ok
    (tmp_path / "new.csv").write_text("age,city\n95,north\n1,south\n,west\n1e300,north\n")
    told = [float(one) for one in run("predict", "run", "new.csv").output.splitlines()[1:]]
    assert told[0] > told[1]
    assert all(0 <= one <= 300 for one in told)
    assert run("predict", "run", "new.csv", "--probabilities").exit_code != 0
    assert "number between 0 and 300" in (tmp_path / "run" / "model_card.md").read_text()
    assert run("audit", "run", "run").exit_code == 0


@pytest.mark.parametrize("loss", ["squared", "absolute"])
def test_a_number_by_training(run, tmp_path, loss):
    write_numbers(tmp_path / "costs.csv")
    write_numbers(tmp_path / "test.csv", seed=1)
    asked = ("train", "costs.csv", "--label", "cost", "--epsilon", 8, "--test", "test.csv", "--loss", loss)
    found = run(*asked, "--epochs", 8, "--lot", 200, "--out", "run", "--json").read()
    assert found["method"] == "DP-SGD"
    assert found["results"]["r2"] > 0.4
    assert verify("run").ok


def test_an_error_on_private_rows_is_paid_for(run, tmp_path):
    write_numbers(tmp_path / "costs.csv")
    asked = ("train", "costs.csv", "--label", "cost", "--epsilon", 8, "--accuracy-within", 6, "--out", "run")
    said = run(*asked)
    assert said.exit_code == 0, said.said
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert "paid for" in results["measured_on"]
    assert results["off_by_at_most"] <= 0.07 * 300
    assert verify("run").ok


def test_people_are_released_as_people(run, tmp_path):
    write_numbers(tmp_path / "costs.csv")
    asked = ("train", "costs.csv", "--label", "cost", "--person", "who", "--rows-per-person", 2, "--epsilon", 3)
    found = run(*asked, "--out", "run", "--json").read()
    assert (found["unit"], found["people"]) == ("person", 500)
    assert verify("run").ok


def test_an_interrupted_release_is_not_made_twice(tmp_path, monkeypatch):
    write_numbers(tmp_path / "costs.csv")
    settings = pipeline.Settings(epsilon=3.0, table=str(tmp_path / "costs.csv"), label="cost")

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(by_release, "_module", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.train(settings, tmp_path / "run")
    kept = (tmp_path / "run" / "owner" / "statistics.npz").read_bytes()
    pipeline.train(settings, tmp_path / "run")
    assert (tmp_path / "run" / "owner" / "statistics.npz").read_bytes() == kept
    assert verify(tmp_path / "run").ok


def test_rows_left_out_by_their_coin_do_not_move_the_release(tmp_path):
    path = write_numbers(tmp_path / "costs.csv")
    settings = pipeline.Settings(epsilon=3.0, table=str(path), label="cost", seed=1)
    pipeline.train(settings, tmp_path / "first")
    out = set(coins.of_run(tmp_path / "first" / "owner", settings, 2000).out)
    lines = path.read_text().splitlines()
    changed = [f"x,99,south,{300 if at % 2 else 0}" if at in out else line for at, line in enumerate(lines[1:])]
    path.write_text("\n".join([lines[0], *changed]) + "\n")
    pipeline.train(settings, tmp_path / "second")
    first, second = (pipeline.load(tmp_path / name).module.weight for name in ("first", "second"))
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize(
    ("rows", "epsilon", "classes", "more", "wanted"),
    [
        (32_561, 0.1, 2, {}, "least-squares"),
        (32_561, 1.0, 2, {}, "linear"),
        (400, 1.0, 2, {}, "linear"),
        (400, 1.0, 0, {}, "least-squares"),
        (400, 1.0, 0, {"loss": "absolute"}, "linear"),
        (32_561, 0.1, 2, {"epochs": 4}, "linear"),
    ],
)
def test_the_default_follows_from_public_numbers_alone(rows, epsilon, classes, more, wanted):
    settings = pipeline.Settings(epsilon=epsilon, table="t.csv", label="a", **more)
    assert recipes.model(settings, (10,), classes, rows) == wanted


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "least-squares", "--lot", 10),
        ("--model", "least-squares", "--tune", 4),
        ("--loss", "squared"),
        ("--accuracy-within", -1),
        ("--accuracy-within", 0.01),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(run, table, tmp_path, words):
    said = run("train", "people.csv", "--label", "ill", "--epsilon", 2, "--out", "run", *words)
    assert said.exit_code != 0
    assert "\n" not in said.said.strip()
    assert "want" in said.said
    assert not (tmp_path / "run").exists()


def test_a_lie_about_the_release_is_found(run, table, tmp_path):
    run("train", "people.csv", "--label", "ill", "--epsilon", 8, "--model", "least-squares", "--out", "run")
    path = tmp_path / "run" / "privacy.json"
    told = json.loads(path.read_text())
    for name, value in (("noise", told["noise"] * 2), ("features", 2), ("method", "DP-SGD"), ("steps", 3)):
        path.write_text(json.dumps(told | {name: value}))
        assert any(not one.ok and one.name == "facts" for one in verify("run").checks), name

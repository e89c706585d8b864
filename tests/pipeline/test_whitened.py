"""Whitened features in a run: released once, billed, kept with the model, and blind to rows that a coin left out."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from terrine import accounting, datasets, pipeline, sgd
from terrine.errors import InvalidArgument
from terrine.events import Composed, Gaussian, Neighbours, RandomStopping, Reproducible, from_json
from terrine.pipeline import job, planning, whitened
from terrine.pipeline.folder import Folder
from terrine.receipts import Receipt
from tests.pipeline.conftest import SCHEMA, write_table

ASKED = ("train", "--data", "digits", "--model", "scatter-linear", "--epsilon", 8, "--epochs", 10)
BOTH = Composed([Gaussian(noise=one, neighbours=Neighbours.ADD_REMOVE) for one in (2.5, 1.25)])


def test_the_whitening_is_in_the_bill_the_model_and_the_words(run, tmp_path):
    found = run(*ASKED, "--out", "run", "--json").read()
    claim = json.loads((tmp_path / "run" / "privacy.json").read_text())
    event = from_json(json.dumps(claim["events"]))
    assert event.parts[0] == BOTH
    assert accounting.delta(event, epsilon=8.0) <= claim["delta"]
    bare = sgd.Plan(examples=1200, lot=claim["lot"], steps=claim["steps"], clip=0.1, noise=claim["noise"], delta=1e-5)
    assert bare.epsilon < 0.999 * claim["epsilon"]  # the releases before the first step are not free
    assert found["results"]["accuracy"] > 0.85
    for name in ("model_card.md", "report.html"):
        assert "whitened by two noisy releases" in (tmp_path / "run" / name).read_text()

    test = datasets.digits(test=597)
    model = pipeline.load("run")
    assert model.architecture.whitening.event == BOTH
    assert model.accuracy(test.test, test.test_labels) == found["results"]["accuracy"]
    np.save("new.npy", test.test[:50])
    told = run("predict", "run", "new.npy").output.split()[1:]
    assert told == list(model.predict(test.test[:50]))
    assert run("audit", "run", "run").exit_code == 0


def test_a_run_that_goes_on_does_not_release_again(run, tmp_path, monkeypatch, dying_at):
    with dying_at(9):
        run(*ASKED, "--out", "run").read()
    kept = (tmp_path / "run" / "owner" / "whitening.safetensors").read_bytes()
    monkeypatch.setattr(whitened, "private_whitening", lambda *_, **__: pytest.fail("released twice"))
    assert run(*ASKED, "--out", "run").exit_code == 0
    (tmp_path / "kept.safetensors").write_bytes(kept)
    first, last = load_file("kept.safetensors"), load_file("run/model.safetensors")
    assert all(torch.equal(first[name], last[name]) for name in ("whitening.mean", "whitening.channels"))


def test_a_seeded_run_ends_the_same_whether_or_not_it_was_interrupted(run, monkeypatch):
    assert run(*ASKED, "--seed", 1, "--out", "whole").exit_code == 0
    original = job._keep
    monkeypatch.setattr(job, "_keep", _interrupted)
    with pytest.raises(BaseException):  # noqa: B017, PT011
        run(*ASKED, "--seed", 1, "--out", "cut").read()
    monkeypatch.setattr(job, "_keep", original)
    assert run(*ASKED, "--seed", 1, "--out", "cut").exit_code == 0
    whole, cut = pipeline.load("whole"), pipeline.load("cut")
    assert isinstance(whole.architecture.whitening.event, Reproducible)
    assert torch.equal(whole.module.weight, cut.module.weight)
    assert torch.equal(whole.architecture.whitening.mean, cut.architecture.whitening.mean)


def _interrupted(*_):
    raise KeyboardInterrupt


def test_no_room_for_the_whitening_is_one_line_and_the_run_goes_on(run, tmp_path):
    words = [*(str(word) for word in ASKED[:-1]), "1", "--audit", "0", "--out", "run"]
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1100, 1100));"  # the coins fit
        f"sys.argv = {['terrine', *words]}; from terrine.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "whitening.safetensors: could not be written" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2  # and that no ledger counts it
    assert not (tmp_path / "run" / "owner" / "whitening.safetensors").exists()
    assert run(*words).exit_code == 0


def test_rows_left_out_by_their_coin_do_not_move_it(tmp_path, monkeypatch):
    """With the same noise, other left-out rows give the same whitening; other rows that are in do not."""
    settings, found = pipeline.Settings(data="digits", epsilon=8, seed=2), {}
    opened = job.open_data(settings)
    plan = planning.plan(settings, opened)
    architecture, receipt = plan.architecture, Receipt(plan.event)
    features = architecture.features(opened.look({}).inputs)
    for name in ("plain", "out", "in"):
        folder = Folder(tmp_path / name)
        folder.begin(settings)
        tossed = whitened.coins.of_run(folder.owner, settings, len(features))
        rows = {"plain": tossed.units[:0], "out": tossed.out, "in": tossed.units[tossed.heads]}[name]
        other = features.clone()
        other[torch.from_numpy(rows)] = 0.1
        found[name] = whitened.prepare(folder, settings, architecture, other, opened.units, receipt)[0].whitening
    assert torch.equal(found["plain"].mean, found["out"].mean)
    assert torch.equal(found["plain"].channels, found["out"].channels)
    assert not torch.equal(found["plain"].mean, found["in"].mean)


def test_a_large_table_is_whitened_for_a_linear_model_and_a_small_one_is_not(run, tmp_path):
    (tmp_path / "people.schema.toml").write_text(SCHEMA)
    write_table(tmp_path / "people.csv", rows=12_000)
    write_table(tmp_path / "test.csv", rows=2000, seed=1)
    asked = ("train", "people.csv", "--label", "ill", "--epsilon", 2, "--epochs", 8, "--test", "test.csv", "--json")
    found = run(*asked, "--out", "large").read()
    event = from_json(json.dumps(json.loads((tmp_path / "large" / "privacy.json").read_text())["events"]))
    assert event.parts[0] == Composed([Gaussian(noise=one, neighbours=Neighbours.ADD_REMOVE) for one in (30.0, 15.0)])
    assert accounting.delta(event, epsilon=2.0) <= found["delta"]
    assert found["results"]["accuracy"] > 0.9
    assert run("predict", "large", "test.csv").output.startswith("prediction\n")
    write_table(tmp_path / "people.csv", rows=400)
    assert "whitening" not in run(*asked, "--out", "small").read()
    assert "whitening" not in run(*asked, "--model", "mlp", "--out", "network").read()


def test_tuning_pays_for_the_whitening_once(run, tmp_path):
    assert run(*ASKED[:-1], 2, "--tune", 2, "--seed", 0, "--out", "run").exit_code == 0
    claim = json.loads((tmp_path / "run" / "privacy.json").read_text())
    event = from_json(json.dumps(claim["events"]))
    assert event.parts[0] == Reproducible(BOTH)
    assert [type(part) for part in event.parts[1:]] == [RandomStopping]
    assert pipeline.load("run").architecture.whitening is not None


def test_a_model_whose_whitening_is_gone_is_not_loaded(run, tmp_path):
    assert run(*ASKED[:-1], 1, "--out", "run").exit_code == 0
    path = tmp_path / "run" / "model.safetensors"
    save_file({name: one for name, one in load_file(path).items() if "whitening" not in name}, path)
    with pytest.raises(InvalidArgument, match="does not verify"):
        pipeline.load("run")

"""Attack: another user of the machine reads what private rows left in a run's folder without noise."""

import os
import stat

import numpy as np
import pytest
from typer.testing import CliRunner

from terrine import datasets, files
from terrine.cli.app import app
from terrine.pate import pictures
from terrine.pate.run import RunFolder
from terrine.pipeline import folder as layout
from tests.pipeline.conftest import SCHEMA, write_table

TABLE = ("train", "people.csv", "--label", "ill", "--epsilon", 8, "--out", "run", "--epochs", 2, "--lot", 100)
RUNS = {
    "private bounds": (*TABLE, "--private-bounds"),
    "tuning": (*TABLE, "--private-bounds", "--tune", 2),
    "whitening": (
        "train",
        "--data",
        "digits",
        "--model",
        "scatter-linear",
        "--epsilon",
        8,
        "--epochs",
        1,
        "--out",
        "run",
    ),
    "teachers": ("train", "--data", "digits", "--method", "pate", "--epsilon", 8, "--teachers", 12, "--out", "run"),
}


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "people.schema.toml").write_text(SCHEMA.replace("high = 100", "high = 100\nconfirmed = false"))
    write_table(tmp_path / "people.csv", rows=2000)
    return tmp_path


def give(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def walked(root):
    """Every file and folder below `root`, by its name in it."""
    return {str(path.relative_to(root)): path for path in root.rglob("*")}


@pytest.mark.parametrize(
    ("name", "umask"),
    [*((name, 0o000) for name in RUNS), ("private bounds", 0o022), ("private bounds", 0o077)],
    indirect=["umask"],
)
def test_every_file_of_a_run_is_in_one_class_and_has_its_mode(place, umask, name):
    give(*RUNS[name])
    found = walked(place / "run")
    assert len(found) > 8
    assert mode(place / "run") == 0o700
    for short, path in found.items():
        if path.is_dir():
            assert mode(path) == 0o700, short
            continue
        handed_on = short in layout.PUBLIC_FILES
        kept = short in layout.PRIVATE_FILES or short.split("/")[0] in layout.PRIVATE_FOLDERS
        assert handed_on != kept, short
        assert mode(path) == (0o644 if handed_on else 0o600), short


def test_a_killed_run_leaves_nothing_readable(place, monkeypatch, umask):
    """Also what lies beside on its way to its name, and the checkpoint with its key."""
    before = files.written
    seen = []

    def watched(path, *, private):
        opened = before(path, private=private)

        class Watched:
            def __enter__(self):
                found = opened.__enter__()
                seen.extend(mode(one) for one in path.parent.glob(".*.part"))
                return found

            def __exit__(self, *why):
                return opened.__exit__(*why)

        return Watched()

    monkeypatch.setattr(files, "written", watched)
    monkeypatch.setattr("terrine.sgd.run.PrivateSteps._finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    done = CliRunner().invoke(app, [str(word) for word in RUNS["private bounds"]])
    assert done.exit_code != 0
    assert set(seen) == {0o600}
    owned = list((place / "run" / "owner").iterdir())
    assert {"checkpoint.pt", "checkpoint.pt.count", "coins.npz", "bounds.json"} <= {path.name for path in owned}
    assert {mode(path) for path in owned} == {0o600}


def test_a_name_that_nobody_classified_cannot_be_written(tmp_path):
    with pytest.raises(KeyError, match="neither list"):
        layout.Folder(tmp_path).write("losses.json", {})


def test_the_parts_of_a_pate_run(place, umask):
    digits = datasets.digits()
    flat = digits.train.reshape(len(digits.train), -1) / 255
    np.savez(place / "private.npz", x=flat[:1000], y=digits.train_labels[:1000])
    np.savez(place / "public.npz", x=flat[1000:])
    (place / "pate.toml").write_text(
        """
        run = "run"
        data = "private.npz"
        public = "public.npz"
        split = {teachers = 20, classes = 10}
        train = {model = "logistic"}
        label = {noise = 8.0, queries = 20}
        bill = {delta = 1e-5}
        student = {model = "logistic"}
        """
    )
    give("pate", "run", "pate.toml")
    found = walked(place / "run")
    public = {"run.json", "labels.json", "bill.json", "student.skops", "student.bill.json", "predictions.npy"}
    assert public <= set(found)
    for short, path in found.items():
        if path.is_dir():
            assert mode(path) == 0o700, short
        else:
            assert mode(path) == (0o644 if short in public else 0o600), short
            assert (short in public) != short.startswith("owner/"), short
    assert mode(pictures.vote_gaps(RunFolder(place / "run").votes(), place / "art")) == 0o600
    assert mode(pictures.flow(place / "art")) == 0o644


def test_a_draft_of_a_schema_and_a_curve_of_scores_are_the_owners(place, umask):
    """Bounds that were read off the rows are rows."""
    give("schema", "people.csv", "--label", "ill", "--yes", "--force")
    assert mode(place / "people.schema.toml") == 0o600
    np.save(place / "in.npy", np.arange(50.0))
    np.save(place / "out.npy", np.arange(50.0) - 10)
    give("audit", "scores", "in.npy", "out.npy", "--delta", "1e-5", "--plot", "roc.png")
    assert mode(place / "roc.png") == 0o600

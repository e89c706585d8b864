"""`terrine pate`, step by step and whole, and its refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from terrine import datasets
from terrine.cli.pate import app
from terrine.errors import InvalidArgument
from terrine.pate.run import RunFolder

cli = CliRunner()


@pytest.fixture
def files(tmp_path):
    digits = datasets.digits()
    flat = digits.train.reshape(len(digits.train), -1) / 255
    np.savez(tmp_path / "private.npz", x=flat[:1000], y=digits.train_labels[:1000])
    np.savez(tmp_path / "public.npz", x=flat[1000:])
    return tmp_path


def run(*words):
    found = cli.invoke(app, [str(word) for word in words], catch_exceptions=True)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout) if "--json" in words else found.stdout


def test_the_steps_of_a_run(files):
    here, data, public = files / "run", files / "private.npz", files / "public.npz"
    assert run("split", "--run", here, "--data", data, "--teachers", 20, "--json")["teachers"] == 20
    run("train", "--run", here, "--data", data, "--model", "logistic", "--json")
    assert run("vote", "--run", here, "--data", data, "--public", public, "--json")["queries"] == 437
    found = run(
        "label", "--run", here, "--aggregator", "confident", "--noise", 3, "--threshold", 12, "--test-noise", 5,
        "--queries", 100, "--most", 60, "--seed", 1, "--json",
    )  # fmt: skip
    assert 0 < found["answered"] <= 60
    bill = run("bill", "--run", here, "--delta", "1e-5", "--seed", 1, "--pictures", files / "art", "--json")
    assert bill["epsilon_data_independent"] > 0
    assert bill["reproducible_noise_for_tests_only"] is True
    assert (files / "art" / "epsilon.svg").read_text().startswith("<?xml")
    again = run("bill", "--run", here, "--json")
    assert again["epsilon_sanitised"] == bill["epsilon_sanitised"], "released once, then read back"
    shown = run("student", "--run", here, "--public", public, "--model", "logistic", "--json")
    assert json.loads(Path(shown["bill"]).read_text())["answered"] == found["answered"]
    printed = run("bill", "--run", here)
    assert "epsilon data independent" in printed
    assert "sealed" not in printed
    with pytest.raises(InvalidArgument, match="labelled already"):
        run("label", "--run", here, "--noise", 3)


def test_a_whole_run_from_one_file(files):
    config = files / "run.toml"
    config.write_text(
        f"""
        run = "{files}/whole"
        data = "{files}/private.npz"
        public = "{files}/public.npz"
        [split]
        teachers = 20
        classes = 10
        seed = 0
        [train]
        model = "logistic"
        [label]
        aggregator = "gaussian"
        noise = 3.0
        queries = 120
        budget = [40.0, 1e-5]
        seed = 3
        [bill]
        delta = 1e-5
        sanitise = false
        [student]
        model = "network"
        method = "supervised"
        steps = 20
        """
    )
    with pytest.raises(InvalidArgument, match="hardly limits what anyone can learn"):
        run("run", config, "--json")
    first = run("run", config, "--json", "--weak-guarantee")
    assert "above 20" in first["weak_guarantee"]
    assert 0 < first["epsilon_data_independent"] <= 40
    assert first["epsilon_sanitised"] is None
    assert (
        run("run", config, "--json", "--weak-guarantee")["epsilon_data_independent"]
        == first["epsilon_data_independent"]
    )
    assert (files / "whole" / "student.safetensors").exists()


def test_the_interactive_aggregator_compares_with_another_run_s_student(files):
    data, public = files / "private.npz", files / "public.npz"
    for here in (files / "one", files / "two"):
        run("split", "--run", here, "--data", data, "--teachers", 20, "--json")
        run("train", "--run", here, "--data", data, "--model", "logistic", "--json")
        run("vote", "--run", here, "--data", data, "--public", public, "--json")
    first, second = files / "one", files / "two"
    run("label", "--run", first, "--noise", 3, "--queries", 80, "--seed", 1, "--json")
    run("bill", "--run", first, "--seed", 1, "--json")
    run("student", "--run", first, "--public", public, "--model", "logistic", "--json")
    predicted = np.load(first / "predictions.npy")
    assert predicted.shape == (437, 10)
    predicted[:50] = np.roll(np.eye(10)[predicted[:50].argmax(axis=1)], 1, axis=1)  # sure, and mostly wrong
    np.save(files / "student.npy", predicted)
    words = ["label", "--run", second, "--aggregator", "interactive", "--noise", 2, "--threshold", 8]
    words += ["--test-noise", 2, "--confidence", 0.5, "--queries", 200, "--seed", 2, "--json"]
    with pytest.raises(InvalidArgument, match="InteractiveGaussianMax wants finite probabilities"):
        run(*words)
    found = run(*words, "--student", files / "student.npy")
    labels = np.array(json.loads((second / "labels.json").read_text())["labels"])
    told, sure = predicted[:200].argmax(axis=1), predicted[:200].max(axis=1) > 0.5
    assert found["answered"] >= sure.sum(), "the student's own confident predictions stand"
    assert (labels[:50] != told[:50]).mean() > 0.8, "unless the teachers correct them"
    assert (labels[50:] == told[50:])[sure[50:]].mean() > 0.8
    bill = run("bill", "--run", second, "--seed", 1, "--json")
    assert bill["asked"] == 200


def test_a_subsampled_run_goes_through_its_own_aggregator_only(files):
    config = files / "run.toml"
    config.write_text(
        f"""
        run = "{files}/drawn"
        data = "{files}/private.npz"
        public = "{files}/public.npz"
        [split]
        teachers = 200
        classes = 10
        rate = 0.1
        seed = 1
        [train]
        model = "logistic"
        [label]
        aggregator = "subsample"
        epsilon = 6.0
        delta = 1e-3
        queries = 20
        seed = 3
        [bill]
        delta = 0.05
        [student]
        model = "logistic"
        """
    )
    with pytest.raises(InvalidArgument, match="SubsampleAggregate is for subsampled"):
        run("run", _with(config, 'aggregator = "gaussian"\nnoise = 3.0\nqueries = 40'), "--json")
    assert not (files / "drawn").exists()
    shown = run("run", config, "--json", "--weak-guarantee")
    assert (files / "drawn" / "owner" / "subsets.npz").stat().st_mode & 0o077 == 0
    assert "publishing one of them" in shown["weak_guarantee"]
    assert 0 < shown["epsilon_data_independent"] < 121
    assert shown["epsilon_sanitised"] is None
    assert shown["student"].endswith("student.skops")


def _with(config, label):
    before, after = config.read_text().split("[label]")
    other = config.with_name("other.toml")
    other.write_text(before + "[label]\n" + label + "\n[bill]" + after.split("[bill]")[1])
    return other


def test_steps_out_of_order_say_what_comes_first(files):
    with pytest.raises(InvalidArgument, match="terrine pate split first"):
        run("train", "--run", files / "none", "--data", files / "private.npz")
    with pytest.raises(InvalidArgument, match="terrine pate label first"):
        RunFolder(files / "none").bill(delta=1e-5)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--aggregator", "median"], "one of laplace"),
        (["--aggregator", "gaussian", "--noise", "3", "--student", "none.npy"], "want a .npy file"),
        (["--aggregator", "confident", "--noise", "3"], "threshold, test_noise missing"),
        (["--aggregator", "laplace", "--noise", "3", "--threshold", "2"], "laplace has no threshold"),
        (["--noise", "3", "--budget", "2"], "EPSILON,DELTA"),
        (["--noise", "-3"], "want > 0"),
    ],
)
def test_bad_options_are_refused(files, words, why):
    here, data = files / "r", files / "private.npz"
    run("split", "--run", here, "--data", data, "--teachers", 5, "--json")
    run("train", "--run", here, "--data", data, "--model", "logistic", "--json")
    run("vote", "--run", here, "--data", data, "--public", files / "public.npz", "--json")
    with pytest.raises(InvalidArgument, match=why):
        run("label", "--run", here, *words)


def test_a_refusal_leaves_with_code_2(files):
    import subprocess
    import sys

    found = subprocess.run(
        [sys.executable, "-c", "from terrine.cli import main; main()", "pate", "bill", "--run", str(files / "none")],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2
    assert found.stderr.startswith("terrine: ")
    assert found.stderr.count("\n") == 1


def test_data_that_is_not_finite_is_refused(files):
    np.savez(files / "bad.npz", x=np.array([[np.nan]]), y=np.array([0]))
    with pytest.raises(InvalidArgument, match="not finite"):
        run("split", "--run", files / "x", "--data", files / "bad.npz", "--teachers", 2)

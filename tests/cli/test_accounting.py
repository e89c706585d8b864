"""The accounting commands, as a shell sees them."""

import contextlib
import io
import json
import subprocess
import sys
from unittest import mock

import pytest

from terrine.cli import main
from terrine.events import Gaussian, Laplace, Repeated, Reproducible, to_json


def run(*arguments):
    """The command in this process: what it printed, and the code it left with."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["terrine", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        main()
    return subprocess.CompletedProcess(arguments, left.value.code, out.getvalue(), err.getvalue())


def test_the_real_command_in_its_own_process():
    command = [sys.executable, "-m", "terrine", "epsilon", "--noise", "-1", "--delta", "1e-5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "terrine: noise=-1.0: want > 0 and finite\n"


def answer(*arguments):
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


DPSGD = ("--noise", "4", "--rate", "0.01", "--steps", "10000", "--delta", "1e-5")


def test_epsilon_encloses_the_truth():
    found = answer("epsilon", *DPSGD)
    assert found["lower"] <= 0.9468668 <= found["upper"] == found["epsilon"]
    assert (found["delta"], found["method"]) == (1e-5, "tight")


@pytest.mark.parametrize(
    ("method", "value"), [("renyi", 1.035), ("moments", 1.2586), ("advanced", 14.34), ("basic", 223)]
)
def test_every_method(method, value):
    found = answer("epsilon", *DPSGD, "--method", method)
    assert found["epsilon"] == pytest.approx(value, rel=0.01)
    assert found["method"] == method


def test_epsilon_tells_a_person_what_it_means():
    text = run("epsilon", *DPSGD).stdout
    assert "0.94687" in text
    assert "72.1% sure" in text
    assert "1% false alarms" in text


def test_events_from_a_file(tmp_path):
    file = tmp_path / "events.json"
    file.write_text(to_json(Repeated(Laplace(noise=10.0), times=5)))
    assert answer("epsilon", "--events", str(file), "--delta", "1e-9")["epsilon"] == pytest.approx(0.5, abs=1e-3)
    file.write_text(to_json(Reproducible(Gaussian(noise=1.0))))
    assert answer("epsilon", "--events", str(file), "--delta", "1e-9")["seeded"] is True
    assert "seed" in run("epsilon", "--events", str(file), "--delta", "1e-9").stdout


def test_noise_and_steps_spend_the_budget():
    noise = answer("noise", "--epsilon", "2", "--delta", "1e-5", "--rate", "0.01", "--steps", "10000")
    assert noise["noise"] == pytest.approx(2.1274, abs=1e-3)
    assert 1.999 < noise["epsilon"] <= 2
    steps = answer("steps", "--epsilon", "2", "--delta", "1e-5", "--rate", "0.01", "--noise", "4")
    assert steps["steps"] == pytest.approx(38_838, abs=20)
    assert 1.999 < steps["epsilon"] <= 2


def test_compare_draws_every_method(tmp_path):
    picture = tmp_path / "deep" / "figure.png"
    found = answer(
        "compare", "--noise", "4", "--rate", "0.01", "--delta", "1e-5", "--epochs", "40", "--plot", str(picture)
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert set(found["epsilon"]) == {"tight", "renyi", "moments", "advanced", "basic", "textbook (not proven)"}
    assert found["epsilon"]["tight"][-1] < found["epsilon"]["renyi"][-1] < found["epsilon"]["moments"][-1]


@pytest.mark.parametrize(
    "arguments",
    [
        ("epsilon", "--noise", "-1", "--delta", "1e-5"),
        ("epsilon", "--noise", "nan", "--delta", "1e-5"),
        ("epsilon", "--noise", "four", "--delta", "1e-5"),
        ("epsilon", "--noise", "4", "--rate", "1.5", "--delta", "1e-5"),
        ("epsilon", "--noise", "4", "--delta", "0"),
        ("epsilon", "--noise", "4", "--delta", "1"),
        ("epsilon", "--noise", "4", "--steps", "2.5", "--delta", "1e-5"),
        ("epsilon", "--noise", "4", "--steps", "0", "--delta", "1e-5"),
        ("epsilon", "--delta", "1e-5"),
        ("epsilon", "--noise", "4"),
        ("epsilon", "--events", "missing.json", "--delta", "1e-5"),
        ("epsilon", "--noise", "4", "--delta", "1e-5", "--method", "magic"),
        ("noise", "--epsilon", "-2", "--delta", "1e-5"),
        ("steps", "--epsilon", "0.001", "--delta", "1e-9", "--noise", "0.3"),
        ("nothing",),
    ],
    ids=" ".join,
)
def test_bad_input_gets_one_clear_line_and_exit_code_2(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("terrine: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "text", ["", "{", '{"kind": "Gaussian"}', "[1]", '{"kind": "Gaussian", "noise": 1e999}', "\x00"]
)
def test_a_malformed_events_file_is_named(tmp_path, text):
    file = tmp_path / "events.json"
    file.write_text(text)
    done = run("epsilon", "--events", str(file), "--delta", "1e-5")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "events.json" in done.stderr

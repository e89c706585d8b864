"""`terrine audit`: exit codes, JSON, the picture, run folders, and errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from terrine import audit
from terrine.audit import folder
from terrine.cli import main
from terrine.report.roc import allowed, draw_roc


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    np.save("members.npy", generator.normal(1, 1, 3000))
    np.save("others.npy", generator.normal(0, 1, 3000))
    np.save("ones.npy", np.ones(500))
    np.save("zeros.npy", np.zeros(500))
    np.save("nothing.npy", np.zeros(0))
    np.save("nan.npy", np.array([1.0, np.nan]))
    np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    Path("text.csv").write_text("\n".join(map(str, generator.normal(0, 1, 50))))
    Path("words.txt").write_text("no\nnumbers\n")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["terrine", "audit", *words])
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


CLAIM = ("--claim-epsilon", "2", "--delta", "1e-5")


@pytest.mark.usefixtures("files")
def test_consistent_and_violated(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "scores", "members.npy", "others.npy", *CLAIM)
    assert code == 0
    assert "consistent" in out
    assert "area under ROC" in out
    code, out, _ = run(capsys, monkeypatch, "scores", "ones.npy", "zeros.npy", *CLAIM)
    assert code == 1
    assert "VIOLATED" in out
    code, out, _ = run(capsys, monkeypatch, "scores", "ones.npy", "zeros.npy", *CLAIM, "--one-run")
    assert code == 1
    assert "one-run" in out


@pytest.mark.usefixtures("files")
def test_json_holds_what_the_library_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "scores", "members.npy", "others.npy", *CLAIM, "--json")
    record = json.loads(out)
    evidence = audit.bound(np.load("members.npy"), np.load("others.npy"), delta=1e-5)
    assert code == 0
    assert record["epsilon_lower_bound"] == evidence.epsilon_at(1e-5)
    assert record["gaussian_epsilon"] == evidence.gaussian(1e-5)
    assert record["verdict"] == "consistent"
    assert record["auc"]["low"] < record["auc"]["value"] < record["auc"]["high"]
    code, out, _ = run(capsys, monkeypatch, "scores", "ones.npy", "zeros.npy", *CLAIM, "--json")
    assert (code, json.loads(out)["verdict"]) == (1, "VIOLATED")
    code, out, _ = run(capsys, monkeypatch, "scores", "members.npy", "text.csv", "--delta", "0", "--json")
    assert code == 0
    assert "verdict" not in json.loads(out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("members.npy", "nothing.npy", *CLAIM), "empty"),
        (("members.npy", "nan.npy", *CLAIM), "1 of 2 scores are nan"),
        (("members.npy", "absent.npy", *CLAIM), "absent.npy: no such file"),
        (("members.npy", "objects.npy", *CLAIM), "not readable as numbers"),
        (("members.npy", "words.txt", *CLAIM), "not readable as numbers"),
        (("members.npy", "others.npy", *CLAIM, "--confidence", "1"), "0 < confidence < 1"),
        (("members.npy", "others.npy", "--claim-epsilon", "-1", "--delta", "1e-5"), "claim-epsilon"),
        (("members.npy", "others.npy", "--claim-epsilon", "2"), "delta"),
        (("members.npy", "others.npy", "--claim-epsilon", "2", "--delta", "1"), "0 <= delta < 1"),
        (("members.npy",), "non_members"),
    ],
)
@pytest.mark.usefixtures("files")
def test_bad_input_leaves_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    code, out, err = run(capsys, monkeypatch, "scores", *words)
    assert code == 2
    assert out == ""
    assert said.lower() in err.lower()
    assert err.count("\n") == 1


@pytest.mark.usefixtures("files")
def test_picture(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, _, _ = run(capsys, monkeypatch, "scores", "members.npy", "others.npy", *CLAIM, "--plot", "new/roc.png")
    assert code == 0
    assert (tmp_path / "new" / "roc.png").read_bytes().startswith(b"\x89PNG")


def test_scores_are_audited_without_torch() -> None:
    packages = "terrine.cli.audit, terrine.audit.folder, terrine.audit.lira, terrine.audit.shokri"
    code = f"import {packages}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "sklearn", "matplotlib"}


def test_shaded_region_is_what_the_claim_forbids(tmp_path: Path) -> None:
    rates = np.array([0.0, 1e-3, 0.1, 0.5, 1.0])
    wanted = [min(np.exp(1) * rate + 0.01, 1 - np.exp(-1) * (0.99 - rate), 1) for rate in rates]
    assert allowed(rates, 1.0, 0.01) == pytest.approx(wanted)
    assert (allowed(rates, 1e9, 0.0)[1:] == 1).all()
    draw_roc(rates, rates, claim=None, smallest=1e-3, title="guessing", to=tmp_path / "plain.svg")
    assert "false-positive rate" in (tmp_path / "plain.svg").read_text()


def test_run_folder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    included = generator.random(600) < 0.5
    (tmp_path / "privacy.json").write_text(json.dumps({"epsilon": 1.0, "delta": 1e-5, "noise": 3}))
    folder.write_canaries(tmp_path, generator.normal(size=600), included)
    code, out, _ = run(capsys, monkeypatch, "run", str(tmp_path), "--json")
    assert (code, json.loads(out)["verdict"]) == (0, "consistent")
    folder.write_scores(tmp_path, audit.Scores(generator.normal(size=900), generator.normal(size=900)))
    code, out, _ = run(capsys, monkeypatch, "run", str(tmp_path), "--json")
    assert (code, [one["evidence"] for one in json.loads(out)["audits"]]) == (0, ["canaries", "scores"])
    folder.write_canaries(tmp_path, included + 0.1 * generator.normal(size=600), included)
    code, out, _ = run(capsys, monkeypatch, "run", str(tmp_path), "--plot", str(tmp_path / "roc.png"))
    assert code == 1
    assert "VIOLATED" in out
    assert (tmp_path / "roc.png").exists()
    assert not list(tmp_path.rglob("*.part"))


def test_run_folder_that_lacks_something(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def said() -> str:
        code, _, err = run(capsys, monkeypatch, "run", str(tmp_path))
        assert code == 2
        return err

    assert "nothing to audit" in said()
    folder.write_canaries(tmp_path, np.zeros(4), np.array([True, False, True, False]))
    assert "privacy.json: missing" in said()
    (tmp_path / "privacy.json").write_text("{}")
    assert "no claim in it" in said()
    (tmp_path / "privacy.json").write_text("not json")
    assert "no claim in it" in said()
    (tmp_path / "audit" / "included.npy").unlink()
    assert "included.npy: missing" in said()
    code, _, err = run(capsys, monkeypatch, "run", str(tmp_path / "nowhere"))
    assert (code, "not a folder" in err) == (2, True)

"""A group's key is somebody's text: printed as it is, whatever a terminal or the library of tables would make of it."""

import json

import pytest
from typer.testing import CliRunner

from terrine.cli.app import app
from terrine.pipeline import Settings, train
from terrine.verify import verify
from terrine.verify.manifest import write

SQL = "SELECT region, COUNT(*) AS n FROM visits GROUP BY region"
KEYS = ["[/bold]", "[red]x", "\x1b[2Jevil", "x"]


@pytest.fixture
def visits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{key}{i},{key}" for key in KEYS for i in range(50)]
    (tmp_path / "visits.csv").write_text("\n".join(["person,region", *rows]))


def asked(*words):
    return CliRunner().invoke(app, ["query", "visits.csv", "--person", "person", "--epsilon", "5", *words])


def test_keys_are_texts(visits):
    done = asked("--sql", SQL, "--keys", "region=private")
    assert done.exception is None
    assert "[/bold]" in done.output
    assert "[red]x" in done.output
    assert "\x1b[2J" not in done.output
    assert "\\x1b[2Jevil" in done.output


def test_so_are_columns_and_public_keys(visits):
    done = asked("--sql", 'SELECT region, COUNT(*) AS "[/n]" FROM visits GROUP BY region', "--keys", "region=[/b],x")
    assert done.exception is None
    assert "[/n]" in done.output
    assert "[/b]" in done.output


def test_a_folder_may_be_named_like_mark_up(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "[").mkdir()
    words = ["--data", "digits", "--model", "linear", "--epochs", "1", "--epsilon", "30", "--weak-guarantee"]
    done = CliRunner().invoke(app, ["train", *words, "--audit", "0", "--out", "[/x]"])
    assert done.exception is None
    assert "report: [/x]/report.html" in done.output.replace("\n", "")
    assert "a weak guarantee: epsilon=30" in done.output


def test_a_weakness_is_told_in_its_own_words(tmp_path):
    run = tmp_path / "run"
    settings = {"data": "digits", "model": "linear", "epochs": 1, "epsilon": 30.0, "weak_guarantee": True, "audit": 0}
    train(Settings(**settings), run)
    assert verify(run).ok
    claim = json.loads((run / "privacy.json").read_text())
    claim["weak_guarantee"] = "none: epsilon 30 is a strong guarantee"
    (run / "privacy.json").write_text(json.dumps(claim))
    write(run)
    found = verify(run)
    assert not found.ok


def test_a_file_without_end_is_not_read(tmp_path):
    run = tmp_path / "run"
    train(Settings(data="digits", model="linear", epochs=1, epsilon=3.0, audit=0), run)
    with (run / "model_card.md").open("r+b") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    assert not verify(run).ok

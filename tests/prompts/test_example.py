"""The example runs on its tiny model and prints both costs."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "private_prompt.py"


def test_the_example_runs(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["private_prompt.py"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "soft prompt: epsilon 8" in printed
    assert "noise 6.1 votes" in printed

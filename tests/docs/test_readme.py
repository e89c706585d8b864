"""README's shell section, typed in order by somebody who has the table that it speaks of."""

import random
import shlex
from pathlib import Path

from typer.testing import CliRunner

from terrine.cli.app import app

README = Path(__file__).parents[2] / "README.md"
KNOWN = "=\ny\n18\n120\n=\n"  # the label's classes, no patient's number, the lowest and highest age, the wards


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


def test_the_shell_section_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    random.seed(0)
    rows = [
        f"p{i % 400},{random.randrange(18, 100)},{random.choice('NS')},{'no' if i % 3 else 'yes'}" for i in range(600)
    ]
    Path("visits.csv").write_text("\n".join(["patient,age,ward,readmitted", *rows]))
    Path("new.csv").write_text("\n".join(["patient,age,ward", "p9,30,N"]))
    section = README.read_text(encoding="utf-8").split("## From a shell")[1].split("\n## ")[0]
    typed = [shlex.split(line, comments=True)[1:] for line in section.splitlines() if line.startswith("    terrine ")]
    said = {}
    for words in typed:
        done = CliRunner().invoke(app, words, input=KNOWN if words[0] == "schema" else None, standalone_mode=False)
        assert done.exception is None, (words, done.exception, done.output)
        said[words[0]] = done.output
    assert list(said) == ["schema", "train", "predict", "verify", "ledger", "query", "epsilon"]
    assert "0.94687" in said["epsilon"]
    assert "run verifies" in said["verify"]
    assert said["predict"].splitlines()[0] == "prediction"

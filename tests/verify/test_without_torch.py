"""Reading a release, describing a table and keeping a ledger want no torch: an officer need not install it."""

import shutil
import subprocess
import sys

import pytest

WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
from terrine.cli.app import main
main()
"""


def run(folder, *words):
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words], check=False, capture_output=True, text=True, cwd=folder
    )
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize(
    "words", [("--help",), ("schema", "--help"), ("ledger", "create", "a.db", "--epsilon", "1", "--delta", "1e-6")]
)
def test_it_runs_without_torch(words, tmp_path):
    assert run(tmp_path, *words)[0] == 0


def test_a_finished_run_is_verified_and_reported_without_torch(trained, tmp_path):
    shutil.copytree(trained / "one", tmp_path / "run")
    for command in ("verify", "report"):
        (tmp_path / "run" / "report.html").unlink(missing_ok=True)
        assert run(tmp_path, command, "run")[0] == 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_a_schema_is_drafted_without_torch(tmp_path):
    (tmp_path / "people.csv").write_text("age,ill\n" + "31,yes\n44,no\n" * 20)
    assert run(tmp_path, "schema", "people.csv", "--label", "ill", "--accept-guesses")[0] == 0
    assert (tmp_path / "people.schema.toml").exists()


def test_training_says_what_to_install(tmp_path):
    code, said = run(tmp_path, "train", "--data", "digits", "--epsilon", "1", "--out", "run")
    assert (code, said.strip()) == (2, "terrine: torch is not installed; pip install 'terrine[torch]'")
    assert not (tmp_path / "run").exists()

"""A line of slow.txt that means no test is an error: a test that got another name would be slow in `make test`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TEST = "import pytest\n@pytest.mark.parametrize('x', [1, 2])\ndef test_a(x): pass\ndef test_b(): pass\n"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["test_x.py::test_a[2]", "test_x.py::test_b"], "1 passed, 2 deselected"),
        (["test_x.py"], "3 deselected"),
        (
            ["test_x.py::test_c", "test_x.py::test_a[3]"],
            "no such test: tests/test_x.py::test_a[3], tests/",
        ),
        (["test_y.py::test_a"], "no such file: tests/test_y.py::test_a;"),
    ],
)
def test_pytest_says_which_line_means_nothing(tmp_path, lines, said):
    (tmp_path / "tests" / "benchmarks").mkdir(parents=True)
    for name in ("__init__.py", "conftest.py", "benchmarks/__init__.py"):
        shutil.copy(TESTS / name, tmp_path / "tests" / name)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\naddopts = --import-mode=importlib\n")
    (tmp_path / "tests" / "test_x.py").write_text(TEST)
    (tmp_path / "tests" / "slow.txt").write_text("# slow\n" + "".join(f"tests/{line}\n" for line in lines))
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"],
        cwd=tmp_path, env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert said in found.stdout + found.stderr

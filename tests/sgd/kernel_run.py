"""Kernels' tests in a process of their own, as another processor than the one at hand would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = ["-q", "-p", "no:cacheprovider", "-k", "every_image or every_tile or every_matrix or room"]
TESTS += ["test_kernels.py", "test_matrices.py"]


def run(*command: str, **setting: str) -> None:
    done = subprocess.run(
        [sys.executable, *command], cwd=Path(__file__).parent, env=os.environ | setting, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-1_000:]

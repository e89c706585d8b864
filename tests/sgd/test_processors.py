"""Kernels are made for the processor at hand, in tiles of other sizes on each: those of lesser ones are tested here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from terrine.sgd.kernels.vectors import features

LESSER = {"short registers": "avx512", "half of them": "avx"}
"""What a lesser processor lacks, by how its instructions' names begin."""


@pytest.mark.slow
@pytest.mark.parametrize("lacks", LESSER.values(), ids=LESSER)
def test_kernels_are_right_on_lesser_processors(lacks):
    there = sorted(features())
    if not any(one.startswith(lacks) for one in there):
        pytest.skip(f"this processor has nothing of {lacks}: its own kernels are those that were tested")
    needs = (lacks, "fma", "f16c", "vaes", "vpclmul") if lacks == "avx" else (lacks,)
    said = ",".join(("-" if one.startswith(needs) else "+") + one for one in there)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).with_name("test_kernels.py")),
        ],
        env={**os.environ, "NUMBA_CPU_FEATURES": said},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4_000:]

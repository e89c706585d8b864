"""Kernels are made for the processor at hand, in tiles of other sizes on each: here those of others are tested.

Lesser ones are what this one is without some instructions. Longer registers than it has are made of several of its own:
slow, but the same sums in the same order.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from terrine.sgd.kernels.vectors import features

TESTS = ["-q", "-p", "no:cacheprovider", "-k", "every_image or every_tile or room", "test_kernels.py"]
LONGER = """
import sys, numba, pytest
numba.config.CPU_FEATURES = "+avx512f"
from terrine.sgd.kernels import aes, team, vectors
numba.config.CPU_FEATURES = None
team._folder = lambda: sys.argv[1]
assert (vectors.LANES, vectors.REGISTERS) == (16, 32)
sys.exit(pytest.main(sys.argv[2:]))
"""
LESSER = {"short registers": "avx512", "half of them": "avx"}
"""What a lesser processor lacks, by how its instructions' names begin."""


def run(*command: str, **setting: str) -> None:
    done = subprocess.run(
        [sys.executable, *command], cwd=Path(__file__).parent, env=os.environ | setting, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-1_000:]


@pytest.mark.slow
@pytest.mark.parametrize("lacks", LESSER.values(), ids=LESSER)
def test_kernels_are_right_on_lesser_processors(lacks):
    there = sorted(features())
    if not any(one.startswith(lacks) for one in there):
        pytest.skip(f"this processor has nothing of {lacks}: its own kernels are those that were tested")
    needs = (lacks, "fma", "f16c", "vaes", "vpclmul") if lacks == "avx" else (lacks,)
    said = ",".join(("-" if one.startswith(needs) else "+") + one for one in there)
    run("-m", "pytest", *TESTS, NUMBA_CPU_FEATURES=said)


@pytest.mark.slow
@pytest.mark.skipif("avx512f" in features(), reason="this processor's own registers are as long")
def test_kernels_are_right_where_registers_are_longer(tmp_path):
    run("-c", LONGER, str(tmp_path), *TESTS)

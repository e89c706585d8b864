"""Kernels are made for the processor at hand; here as lesser ones, without some of its instructions, have them."""

from __future__ import annotations

import pytest
from kernel_run import TESTS, run

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
    run("-m", "pytest", *TESTS, NUMBA_CPU_FEATURES=said)

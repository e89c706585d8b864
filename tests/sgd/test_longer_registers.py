"""Kernels as a processor with longer registers has them, each made of several of the processor's at hand.

Slow, but the same tiles, and the same sums in the same order.
"""

from __future__ import annotations

import pytest
from kernel_run import TESTS, run

from terrine.sgd.kernels.vectors import features

LONGER = """
import sys, numba, pytest
numba.config.CPU_FEATURES = "+avx512f"
from terrine.sgd.kernels import aes, team, vectors
numba.config.CPU_FEATURES = None
team._folder = lambda: sys.argv[1]
assert (vectors.LANES, vectors.REGISTERS) == (16, 32)
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.skipif("avx512f" in features(), reason="this processor's own registers are as long")
def test_kernels_are_right_where_registers_are_longer(tmp_path):
    run("-c", LONGER, str(tmp_path), *TESTS)

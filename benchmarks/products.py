"""Products of matrices: our kernel beside torch's, on the sizes that the workloads of `sgd.py` multiply.

    python benchmarks/products.py --json products.json

Both take turns in one process; a turn is one product that does not count and one that does. The ratio is the median of
those of single rounds. Where the processor has AVX-512 the kernel is not used, and these figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from terrine.sgd.kernels import multiply

ROUNDS = 61
SIZES = {
    "MLP, forward": (600, 1_000, 784, False),
    "MLP, weights": (1_000, 784, 600, True),
    "MLP, last layer": (600, 10, 1_000, False),
    "transformer, forward": (1_408, 1_024, 256, False),
    "transformer, narrowing": (1_408, 256, 1_024, False),
    "transformer, the whole lot": (4_096, 1_024, 256, False),
    "transformer, weights": (1_024, 256, 1_408, True),
    "transformer, fewer weights": (256, 256, 1_408, True),
}
"""Rows of both matrices, what is added up, and whether that comes first in memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    figures = {}
    print(f"{'':28} {'torch':>9} {'ours':>9} {'ratio':>6}")
    for name, (m, n, k, is_turned) in SIZES.items():
        left, right = (torch.randn(k, one).t() if is_turned else torch.randn(one, k) for one in (m, n))
        target = torch.empty(m, n)
        theirs, ours = [], []
        for _ in range(ROUNDS):
            theirs.append(timed(lambda left=left, right=right, target=target: torch.mm(left, right.t(), out=target)))
            ours.append(timed(lambda left=left, right=right, target=target: multiply(left, right, target)))
        ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
        figures[name] = {"torch": statistics.median(theirs), "ours": statistics.median(ours), "ratio": ratio}
        print(f"{name:28} {figures[name]['torch']:6.2f} ms {figures[name]['ours']:6.2f} ms {ratio:6.2f}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


def timed(product: Callable[[], object]) -> float:
    """Milliseconds of a product, the second of two."""
    product()
    start = time.perf_counter()
    product()
    return 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()

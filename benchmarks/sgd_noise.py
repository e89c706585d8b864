"""What noise costs: the strong generator, with its rounding to the grid, beside torch.normal_, and Poisson lots.

    python benchmarks/sgd_noise.py --json noise.json

Rounds are interleaved and the medians compared, on one thread: torch.normal_ gains nothing from a second one. Some
thousand values take a few tenths of a millisecond whatever their number: that is what some twenty operations cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from terrine.common.keys import Key, Purpose

ROUNDS = 31


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    key, rows = Key.fresh(), []
    print(f"{'values':>10} {'torch.normal_':>14} {'torch + add':>12} {'terrine':>9} {'ratio':>6}")
    for size in (26_010, 795_010, 6_400_000):
        total, noise = torch.zeros(size), torch.empty(size)
        times = interleaved(
            lambda noise=noise: noise.normal_(0.0, 1.0),
            lambda noise=noise, total=total: total.add_(noise.normal_(0.0, 1.0)),
            lambda total=total: key.draw(Purpose.NOISE, 0).protect(total, 1.0),
        )
        rows.append({"values": size, "torch": times[0], "torch and add": times[1], "terrine": times[2]})
        print(f"{size:>10,} {times[0]:>11.2f} ms {times[1]:>9.2f} ms {times[2]:>6.2f} ms {times[2] / times[0]:>6.2f}")
    (lot,) = interleaved(lambda: key.draw(Purpose.LOT, 0).chosen(60_000, 0.01))
    print(f"a Poisson lot of 60,000 at rate 0.01: {lot:.3f} ms")
    if chosen.json:
        chosen.json.write_text(json.dumps({"noise": rows, "poisson lot ms": lot}, indent=2) + "\n")


def interleaved(*candidates: Callable[[], object]) -> list[float]:
    """The median time of each in milliseconds of CPU time, taken in turns."""
    found: list[list[float]] = [[] for _ in candidates]
    for _ in range(ROUNDS):
        for one, times in zip(candidates, found, strict=True):
            start = time.process_time()
            one()
            times.append(1e3 * (time.process_time() - start))
    return [statistics.median(times) for times in found]


if __name__ == "__main__":
    main()

"""How fast is noise that does not leak? Terrine against numpy (fast, leaks), OpenDP and diffprivlib (safe, slow).

    python benchmarks/noise.py [--values 1000000] [--peer-values 20000] [--rounds 7] [--json noise.json]

Terrine and numpy release arrays of `--values` numbers in turn; the ratio is the median over rounds. The peers are timed
on `--peer-values` numbers (they need minutes for a million) and compared per value. Scalars: one release at a time.
All times are CPU time of this process, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from terrine.mechanisms import Counts, Gaussian, Histogram, Laplace

DELTA = 1e-5


def main() -> None:
    arguments = parse()
    values = np.random.default_rng(0).random(arguments.values) * 1000
    rng = np.random.default_rng(1)
    laplace, gaussian = Laplace(sensitivity=1, epsilon=1), Gaussian(sensitivity=1, epsilon=1, delta=DELTA)
    table = Histogram(epsilon=1, bins=arguments.values)
    whole = values.astype(np.int64)
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "laplace": (lambda: laplace.release(values), lambda: values + rng.laplace(scale=1.0, size=values.size)),
        "gaussian": (lambda: gaussian.release(values), lambda: values + rng.normal(scale=3.73, size=values.size)),
        "histogram": (lambda: table.release(whole), lambda: whole + rng.laplace(scale=1.0, size=values.size)),
    }
    result: dict[str, Any] = {
        "values": arguments.values,
        "peer_values": arguments.peer_values,
        "arrays": {},
        "scalars": {},
    }
    for name, (ours, numpys) in pairs.items():
        result["arrays"][name] = compare(ours, numpys, arguments.rounds)
    peers(result["arrays"], values[: arguments.peer_values], values.size)
    scalars = {"laplace": laplace, "gaussian": gaussian, "count": Counts(epsilon=1)}
    for name, mechanism in scalars.items():
        result["scalars"][name] = per_call(lambda mechanism=mechanism: mechanism.release(1000), 20_000)  # type: ignore[misc]
    show(result)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=1_000_000)
    parser.add_argument("--peer-values", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="PATH")
    return parser.parse_args()


def compare(ours: Callable[[], Any], numpys: Callable[[], Any], rounds: int) -> dict[str, float]:
    ours(), numpys()
    times = [(cpu(ours), cpu(numpys)) for _ in range(rounds)]
    return {
        "terrine_seconds": statistics.median(mine for mine, _ in times),
        "numpy_seconds": statistics.median(theirs for _, theirs in times),
        "times_numpy": statistics.median(mine / theirs for mine, theirs in times),
    }


def peers(arrays: dict[str, dict[str, float]], values: Any, size: int) -> None:
    """Fill in the peers' time per value, and how many times faster Terrine was."""
    for name, seconds in {**opendp(values), **diffprivlib(values)}.items():
        peer, kind = name.split()
        theirs, ours = seconds / values.size, arrays[kind]["terrine_seconds"] / size
        arrays[kind] |= {f"{peer}_microseconds_per_value": theirs * 1e6, f"times_faster_than_{peer}": theirs / ours}


def opendp(values: Any) -> dict[str, float]:
    try:
        import opendp.prelude as dp
    except ImportError:
        return {}
    dp.enable_features("contrib")
    real = dp.vector_domain(dp.atom_domain(T=float, nan=False))
    count = dp.vector_domain(dp.atom_domain(T=int))
    listed, whole = values.tolist(), values.astype(int).tolist()
    laplace = dp.m.make_laplace(real, dp.l1_distance(T=float), scale=1.0)
    gaussian = dp.m.make_gaussian(real, dp.l2_distance(T=float), scale=3.73)
    table = dp.m.make_laplace(count, dp.l1_distance(T=int), scale=1.0)
    return {
        "opendp laplace": cpu(lambda: laplace(listed)),
        "opendp gaussian": cpu(lambda: gaussian(listed)),
        "opendp histogram": cpu(lambda: table(whole)),
    }


def diffprivlib(values: Any) -> dict[str, float]:
    try:
        import sklearn.tree._tree as trees

        for name in ("DTYPE", "DOUBLE"):  # diffprivlib 0.6.6 imports names that newer releases of scikit-learn dropped
            if not hasattr(trees, name):
                setattr(trees, name, np.float64)
        from diffprivlib import mechanisms
    except ImportError:
        return {}
    laplace = mechanisms.Laplace(epsilon=1, sensitivity=1)
    gaussian = mechanisms.GaussianAnalytic(epsilon=1, delta=DELTA, sensitivity=1)
    table = mechanisms.Geometric(epsilon=1, sensitivity=1)
    listed, whole = values.tolist(), values.astype(int).tolist()
    return {
        "diffprivlib laplace": cpu(lambda: [laplace.randomise(value) for value in listed]),
        "diffprivlib gaussian": cpu(lambda: [gaussian.randomise(value) for value in listed]),
        "diffprivlib histogram": cpu(lambda: [table.randomise(value) for value in whole]),
    }


def cpu(work: Callable[[], Any]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def per_call(work: Callable[[], Any], calls: int) -> float:
    """Microseconds of one call, median of ten stretches."""
    work()
    return statistics.median(cpu(lambda: [work() for _ in range(calls // 10)]) / (calls // 10) * 1e6 for _ in range(10))


def show(result: dict[str, Any]) -> None:
    console = Console()
    table = Table(title=f"Noise on {result['values']:,} values, CPU time")
    for heading in ("", "Terrine", "numpy", "times numpy", "faster than OpenDP", "faster than diffprivlib"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, row in result["arrays"].items():
        peer = [
            f"{row[key]:,.0f} x" if (key := f"times_faster_than_{p}") in row else "-" for p in ("opendp", "diffprivlib")
        ]
        table.add_row(
            name,
            f"{row['terrine_seconds'] * 1e3:.0f} ms",
            f"{row['numpy_seconds'] * 1e3:.0f} ms",
            f"{row['times_numpy']:.1f}",
            *peer,
        )
    console.print(table)
    for name, micro in result["scalars"].items():
        console.print(f"one {name} release: {micro:.1f} us")
    console.print("want: at most 10 times numpy, at least 100 times faster than OpenDP, a scalar within 20 us")


if __name__ == "__main__":
    main()

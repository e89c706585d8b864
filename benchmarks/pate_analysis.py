"""PATE's vote-dependent bill: how long its parts take, for 1,000 queries.

    python benchmarks/pate_analysis.py [--rounds 7] [--json FILE]

The figures to beat are those of the published research code on a machine of the same kind: local sensitivity of the
Gaussian maximum at one order 5.3 s (250 teachers, 10 classes) and 327 s (5,000 teachers, 150 classes), divergences at
298 orders 0.2 s. `loop` is the same formula one query at a time, in this file, on this machine, now.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
from scipy.stats import norm

from terrine.accounting import pate

PUBLISHED = {"250 x 10": 5.3, "5000 x 150": 327.0, "rdp": 0.2}
ORDERS = np.concatenate([np.linspace(1.5, 100, 200), np.geomspace(101, 500, 98)])


def votes(teachers: int, classes: int, seed: int, queries: int = 1000) -> np.ndarray:
    """From unanimous to split: agreement spread as in trained ensembles, the rest over the other classes."""
    generator = np.random.default_rng(seed)
    rows = []
    for agreement in generator.beta(5, 1, size=queries):
        shares = np.concatenate([[agreement], (1 - agreement) * generator.dirichlet(np.full(classes - 1, 0.5))])
        rows.append(generator.permutation(generator.multinomial(teachers, shares / shares.sum())))
    return np.stack(rows)


def loop(table: np.ndarray, sigma: float, orders: np.ndarray) -> np.ndarray:
    """Divergences, one query at a time."""
    found = []
    for row in table:
        gaps = np.sort(row.max() - row)[1:]
        logs = norm.logsf(gaps, scale=math.sqrt(2) * sigma)
        log_q = min(logs.max() + math.log(np.exp(logs - logs.max()).sum()), math.log1p(-1 / len(row)))
        mu2 = sigma * math.sqrt(-log_q)
        mu1, worst = mu2 + 1, orders / sigma**2
        e1, e2 = mu1 / sigma**2, mu2 / sigma**2
        if mu2 <= 1 or log_q > (mu2 - 1) * e2 - mu2 * math.log(mu1 / (mu1 - 1) * mu2 / (mu2 - 1)) or -log_q <= e2:
            found.append(worst)
            continue
        log_right = math.log1p(-math.exp(log_q))
        log_a = (orders - 1) * (log_right - math.log1p(-math.exp((log_q + e2) * (1 - 1 / mu2))))
        log_b = (orders - 1) * (e1 - log_q / (mu1 - 1))
        cheaper = np.logaddexp(log_right + log_a, log_q + log_b) / (orders - 1)
        found.append(np.where(orders < mu1, np.minimum(worst, cheaper), worst))
    return np.array(found)


def seconds(function, rounds: int) -> float:
    """The median CPU time."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, float] = {}
    for teachers, classes, sigma, order, goal in ((250, 10, 40.0, 20.0, 0.05), (5000, 150, 100.0, 20.0, 3.0)):
        table, name = votes(teachers, classes, seed=0), f"{teachers} x {classes}"

        def local(table=table, sigma=sigma, order=order):
            pate.sensitivity.profile_of.cache_clear()
            return pate.gaussian_max_local_sensitivity(table, noise=sigma, order=order)

        spent = seconds(local, options.rounds)
        result[f"local sensitivity {name}"] = spent
        print(f"local sensitivity, {name:<11} {spent:8.4f} s   goal {goal} s   published {PUBLISHED[name]} s"
              f"   {PUBLISHED[name] / spent:8.0f} x")  # fmt: skip
    table = votes(250, 10, seed=1)
    fast = seconds(lambda: pate.gaussian_max_rdp(table, noise=40.0, orders=ORDERS), options.rounds)
    slow = seconds(lambda: loop(table, 40.0, ORDERS), max(1, options.rounds // 2))
    np.testing.assert_allclose(
        pate.gaussian_max_rdp(table, noise=40.0, orders=ORDERS), loop(table, 40.0, ORDERS), rtol=1e-6, atol=1e-12
    )
    result |= {"rdp 298 orders": fast, "rdp loop": slow, "rdp ratio to loop": slow / fast}
    print(f"divergence, 298 orders        {fast:8.4f} s   loop {slow:.4f} s ({slow / fast:.0f} x)"
          f"   published {PUBLISHED['rdp']} s ({PUBLISHED['rdp'] / fast:.0f} x)")  # fmt: skip
    strong = pate.gaussian_max_rdp([[5000, 0]], noise=40.0, orders=ORDERS)
    result["finite at 5000 / 0"] = bool(np.isfinite(strong).all() and (strong > 0).all())
    print("5,000 votes against 0: finite and above 0:", result["finite at 5000 / 0"])
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""How tight and how fast: Terrine beside dp-accounting, Opacus and prv-accountant, interleaved in one process.

    python benchmarks/accounting.py [--json results.json] [--repeats 5] [--quick] [--witness]

With --witness no peer is needed: what the two witnesses of every answer cost beside the search that they check.

Times are CPU seconds of this process with one thread (a peer that needs more than --patience seconds is run once).
All take turns. A turn lasts at least 20 ms: what is done sooner is done again, and the mean counts; in brackets stands
the first call of a turn, which finds the caches full of what others left there.
`excess` is how far a claim lies above the certified lower bound; a minus is a claim below the truth.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # before numpy is imported

from rich.console import Console
from rich.table import Table

from terrine import accounting
from terrine.accounting import certified, witness
from terrine.events import Budget, Composed, Gaussian, Laplace, PoissonSampled, RandomizedResponse, Repeated

ROWS = [  # rate, noise, steps, delta, exact epsilon
    (0.01, 4.0, 10_000, 1e-5, 0.946867),
    (0.01, 8.0, 10_000, 1e-5, 0.437249),
    (256 / 60000, 1.1, 14_062, 1e-5, 2.381597),
    (0.001, 0.6, 100_000, 1e-5, 6.112825),
    (1.0, 50.0, 1_000, 1e-5, 2.594383),
    (1e-5, 0.4, 1_000_000, 1e-5, 3.074806),
    (0.001, 10.0, 1_000, 1e-5, 0.00748754),
    (0.01, 0.5, 10_000, 1e-5, 43.36649),
    (0.01, 4.0, 10_000, 1e-15, 1.956053),
    (0.01, 1.0, 1, 1e-5, 0.1994504),
    (1e-4, 0.8, 10_000_000, 1e-8, 3.392924),
]


def dpsgd(rate, noise, steps):
    return Repeated(PoissonSampled(Gaussian(noise=noise), rate=rate), times=steps)


def dp_accounting(kind: str) -> Callable[[float, float, int, float], float]:
    import dp_accounting as dp

    def run(rate, noise, steps, delta):
        make = {"rdp": dp.rdp.RdpAccountant, "pld": dp.pld.PLDAccountant}[kind]
        step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))
        return make().compose(dp.SelfComposedDpEvent(step, steps)).get_epsilon(delta)

    return run


def opacus(rate, noise, steps, delta):
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(noise, rate, steps)]
    return accountant.get_epsilon(delta)


def prv(rate, noise, steps, delta):
    from prv_accountant import PRVAccountant
    from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

    mechanism = PoissonSubsampledGaussianMechanism(noise_multiplier=noise, sampling_probability=rate)
    accountant = PRVAccountant(
        prvs=[mechanism], max_self_compositions=[steps], eps_error=0.01, delta_error=delta / 1000
    )
    return accountant.compute_epsilon(delta, [steps])[2]


TURN = 0.02


def measured(run: Callable[[], float]) -> tuple[float, float, float]:
    """What it found, the mean time of a turn's calls, and the time of the first."""
    times: list[float] = []
    while sum(times) < TURN:
        start = time.process_time()
        try:
            value = run()
        except Exception as error:
            print(f"    ({type(error).__name__}: {str(error)[:70]})")
            return float("nan"), float("nan"), float("nan")
        times.append(time.process_time() - start)
    return value, statistics.mean(times), times[0]


def table_of_rows(repeats: int, patience: float, quick: bool) -> list[dict]:
    peers = {"dp-accounting PLD": dp_accounting("pld"), "dp-accounting RDP": dp_accounting("rdp"), "Opacus RDP": opacus}
    if not quick:
        peers["prv-accountant"] = prv
    for peer in peers.values():
        measured(lambda peer=peer: peer(0.5, 5.0, 2, 1e-3))  # imports are not part of any time
    return [measure_row(row, peers, repeats, patience) for row in ROWS]


def measure_row(row: tuple, peers: dict, repeats: int, patience: float) -> dict:
    rate, noise, steps, delta, exact = row
    event = dpsgd(rate, noise, steps)
    runs = {"terrine": lambda: accounting.epsilon(event, delta=delta)}
    for name, peer in peers.items():
        if name == "prv-accountant" and (steps >= 10**7 or delta < 1e-12):
            continue  # minutes, or an error
        runs[name] = lambda peer=peer: peer(rate, noise, steps, delta)
    times: dict[str, list[float]] = {name: [] for name in runs}
    firsts: dict[str, list[float]] = {name: [] for name in runs}
    values: dict[str, float] = {}
    for turn in range(repeats):
        for name, run in runs.items():
            if not turn or times[name][0] <= patience:
                values[name], spent, first = measured(run)
                times[name].append(spent)
                firsts[name].append(first)
    bounds = accounting.bounds(event, delta=delta)
    return {
        "rate": rate, "noise": noise, "steps": steps, "delta": delta, "exact": exact,
        "lower": bounds.lower, "upper": bounds.upper,
        "epsilon": values, "seconds": {name: statistics.median(spent) for name, spent in times.items()},
        "first_seconds": {name: statistics.median(spent) for name, spent in firsts.items()},
    }  # fmt: skip


def show_witness(console: Console, repeats: int) -> None:
    """Every answer is checked twice: the time of the whole over that of the search alone."""
    table = Table(title="CPU ms: search alone, checked answer, slow witness", caption="median of turns")
    for column in ("q", "sigma", "steps", "delta", "search", "checked", "ratio", "witness", "its enclosure"):
        table.add_column(column)
    for rate, noise, steps, delta, _ in ROWS:
        event = dpsgd(rate, noise, steps)
        runs = {
            "search": lambda event=event, delta=delta: certified.epsilon(event, delta=delta),
            "checked": lambda event=event, delta=delta: accounting.epsilon(event, delta=delta),
            "witness": lambda event=event, delta=delta: witness.bounds(event, delta=delta).upper,
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _turn in range(repeats):
            for name, run in runs.items():
                times[name].append(measured(run)[1])
        middle = {name: 1e3 * statistics.median(spent) for name, spent in times.items()}
        seen = witness.bounds(event, delta=delta)
        table.add_row(
            f"{rate:.3g}", f"{noise:g}", f"{steps:g}", f"{delta:g}", f"{middle['search']:.1f}",
            f"{middle['checked']:.1f}", f"{middle['checked'] / middle['search']:.1f}", f"{middle['witness']:.0f}",
            f"{seen.lower:.6g} to {seen.upper:.6g}",
        )  # fmt: skip
    console.print(table)


def show_rows(console: Console, results: list[dict]) -> None:
    table = Table(
        title="Poisson-subsampled Gaussian, add/remove", caption="excess over the certified lower bound; CPU ms"
    )
    for column in ("q", "sigma", "steps", "delta", "lower", "upper", "gap"):
        table.add_column(column)
    names = list(dict.fromkeys(name for row in results for name in row["epsilon"]))
    for name in names:
        table.add_column(name)
    table.add_column("PLD time / ours")
    for row in results:
        cells = []
        for name in names:
            value = row["epsilon"].get(name, float("nan"))
            cells.append(
                f"{100 * (value / row['lower'] - 1):+.3f}%\n{1e3 * row['seconds'].get(name, float('nan')):.1f} ms"
            )
        ratio, first = (row[kind]["dp-accounting PLD"] / row[kind]["terrine"] for kind in ("seconds", "first_seconds"))
        gap = (row["upper"] - row["lower"]) / row["upper"]
        table.add_row(
            f"{row['rate']:.3g}", f"{row['noise']:g}", f"{row['steps']:g}", f"{row['delta']:g}",
            f"{row['lower']:.7g}", f"{row['upper']:.7g}", f"{100 * gap:.4f}%", *cells, f"{ratio:.1f} ({first:.1f})",
        )  # fmt: skip
    console.print(table)


def other_figures(repeats: int) -> dict[str, float]:
    fifty = Composed(dpsgd(0.01, 1 + 0.1 * i, 100 + i) for i in range(50))
    mix = Composed([Laplace(noise=10.0), Gaussian(noise=10.0), RandomizedResponse(epsilon=0.1), dpsgd(0.01, 2.0, 1000)])
    jobs = {
        "smallest noise, epsilon 2, 10,000 steps": lambda: accounting.calibrate(
            lambda noise: dpsgd(0.01, noise, 10_000), Budget(2.0, 1e-5)
        ),
        "smallest noise, MNIST, epsilon 3": lambda: accounting.calibrate(
            lambda noise: dpsgd(256 / 60000, noise, 14_062), Budget(3.0, 1e-5)
        ),
        "most steps, epsilon 2": lambda: accounting.calibrate(
            lambda steps: dpsgd(0.01, 4.0, steps), Budget(2.0, 1e-5), over=accounting.STEPS
        ),
        "50 different DP-SGD events": lambda: accounting.epsilon(fifty, delta=1e-6),
        "Laplace + Gaussian + randomized response + DP-SGD": lambda: accounting.epsilon(mix, delta=1e-6),
        "100 million steps": lambda: accounting.epsilon(dpsgd(1e-4, 1.0, 10**8), delta=1e-6),
    }
    return {name: statistics.median(measured(job)[1] for _ in range(repeats)) for name, job in jobs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--patience", type=float, default=0.5)
    parser.add_argument("--quick", action="store_true", help="leave out prv-accountant")
    parser.add_argument("--witness", action="store_true", help="only what the two witnesses cost")
    options = parser.parse_args()
    if options.witness:
        show_witness(Console(width=170), options.repeats)
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    console = Console(width=170)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accounting.epsilon(dpsgd(1e-4, 0.8, 10**8), delta=1e-8)
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    figures = other_figures(options.repeats)
    rows = table_of_rows(options.repeats, options.patience, options.quick)
    show_rows(console, rows)
    for name, seconds in figures.items():
        console.print(f"{name}: {1e3 * seconds:.1f} ms CPU")
    console.print(f"memory added by 100 million steps: {memory:.0f} MB")
    ratios = [row["seconds"]["dp-accounting PLD"] / row["seconds"]["terrine"] for row in rows]
    gaps = [(row["upper"] - row["lower"]) / row["upper"] for row in rows]
    slowest = max(row["seconds"]["terrine"] for row in rows)
    console.print(f"widest enclosure {100 * max(gaps):.4f}% of epsilon; slowest row {1e3 * slowest:.1f} ms")
    console.print(f"dp-accounting's PLD takes {min(ratios):.0f} to {max(ratios):.0f} times as long")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "other seconds": figures, "memory MB": memory}, indent=1))


if __name__ == "__main__":
    main()

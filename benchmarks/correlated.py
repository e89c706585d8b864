"""Correlated noise against independent noise: errors of prefix sums, and a network where no sampling is allowed.

    python benchmarks/correlated.py prefix --jax-privacy /path/to/venv/bin/python
    python benchmarks/correlated.py images --data mnist --lot 2000 --epochs 10 --rates 0.05 0.1 0.2 0.4 --seeds 7
    python benchmarks/correlated.py images --data fashion-mnist --chosen --seeds 1 2 3

prefix   The error of the sums of all gradients up to a step, root of the mean over steps and largest, in clipping
         bounds, at equal certified epsilon. Cyclic Poisson sampling, and a fixed order without sampling. Beside our
         coefficients, in the same table and under the same noise, those that jax-privacy optimises, in an interpreter
         of its own; its errors are computed here, from its coefficients.
images   A network with one hidden layer of 50 tanh units on the pixels of all training images in a fixed order
         (replace-one neighbours, no amplification), tested on all test images. Lots and learning rates are chosen on
         MNIST and used on Fashion-MNIST. It is small so that the benchmark is quick: it compares noise, not networks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from terrine import datasets, sgd
from terrine.events import Budget

EXAMPLES, DELTA = 60_000, 1e-5
CHOSEN: dict[str, list[dict[str, Any]]] = {
    "independent": [{"lot": 600, "epochs": 10, "rate": 0.0125}, {"lot": 6000, "epochs": 20, "rate": 0.2}],
    "correlated": [{"lot": 600, "epochs": 10, "rate": 0.1}, {"lot": 2000, "epochs": 20, "rate": 0.2}],
}
"""What did best on MNIST with seed 7, in lots of 600 and in lots of any size that was tried (docs/correlated.md)."""
PEER = """
import json, sys, time
import jax
jax.config.update("jax_enable_x64", True)
from importlib.metadata import version
from jax_privacy.matrix_factorization import toeplitz
found = []
for steps, bands in json.loads(sys.argv[1]):
    began = time.time()
    coefficients = toeplitz.optimize_banded_toeplitz(steps, bands).tolist()
    found.append({"coefficients": coefficients, "seconds": time.time() - began})
print(json.dumps({"version": version("jax_privacy"), "found": found}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parts = parser.add_subparsers(dest="part", required=True)
    prefix = parts.add_parser("prefix")
    prefix.add_argument("--jax-privacy", help="the Python of an environment that has jax-privacy")
    prefix.add_argument("--epsilon", type=float, default=2.0)
    images = parts.add_parser("images")
    images.add_argument("--data", choices=("mnist", "fashion-mnist"), default="fashion-mnist")
    images.add_argument("--epsilon", type=float, default=2.7)
    images.add_argument("--epochs", type=int, default=5)
    images.add_argument("--lot", type=int, default=1000)
    images.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    images.add_argument("--noise", choices=tuple(CHOSEN), nargs="+", default=list(CHOSEN))
    rates = images.add_mutually_exclusive_group(required=True)
    rates.add_argument("--rates", type=float, nargs="+", help="learning rates to compare, with --lot and --epochs")
    rates.add_argument("--chosen", action="store_true", help="what was chosen on MNIST")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = prefix_sums(chosen.epsilon, chosen.jax_privacy) if chosen.part == "prefix" else networks(chosen)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=2) + "\n")


# -- prefix sums -------------------------------------------------------------------------------------------------------


def prefix_sums(epsilon: float, python: str | None) -> list[dict[str, Any]]:
    """The errors of both kinds of lots, for some steps and bands."""
    lot, asked = 600, [(steps, bands) for steps in (500, 2000, 5000) for bands in (1, 4, 16, 64, 100)]
    peer = _peer(python, asked)
    rows = []
    print(f"{'steps':>6} {'bands':>6} | {'cyclic Poisson':^52} | {'fixed order':^52}")
    one = f"{'noise':>7} {'rms':>8} {'closed':>8} {'peer':>8} {'max':>8} {'DP-SGD/':>8}"
    print(f"{'':>13} | {one} | {one}   seconds, peer's")
    plain: dict[tuple[str, int], float] = {}
    for place, (steps, bands) in enumerate(asked):
        row: dict[str, Any] = {"steps": steps, "bands": bands, "epsilon": epsilon}
        began = time.time()
        best = sgd.Banded(bands).settled(steps)
        row["seconds"], shown = time.time() - began, f"{steps:>6} {bands:>6}"
        theirs = None if peer is None else _banded(peer[place]["coefficients"])
        for name, sampling in (("cyclic Poisson", sgd.Poisson()), ("fixed order", sgd.Shuffled())):
            plan = sgd.Plan(
                examples=EXAMPLES, lot=lot, steps=steps, clip=1.0, budget=Budget(epsilon, DELTA),
                sampling=sampling, correlated=best,
            )  # fmt: skip
            deviation = plan.deviation_at(0, 1.0)
            row[name] = {
                "noise": plan.noise,
                "rms": deviation * best.rms_error(steps),
                "closed form rms": deviation * sgd.Banded.inverse_root(bands).rms_error(steps),
                "jax-privacy rms": None if theirs is None else deviation * theirs.rms_error(steps),
                "max": deviation * best.max_error(steps),
            }
            gain = plain.setdefault((name, steps), row[name]["rms"]) / row[name]["rms"]
            found = " ".join(f"{value:>8.2f}" if value else f"{'-':>8}" for value in list(row[name].values())[1:])
            shown += f" | {plan.noise:>7.3f} {found} {gain:>8.2f}"
        row["jax-privacy seconds"] = None if peer is None else peer[place]["seconds"]
        print(shown + f"   {row['seconds']:.2f}" + (f", {row['jax-privacy seconds']:.2f}" if peer else ""), flush=True)
        rows.append(row)
    return rows


def _peer(python: str | None, asked: list[tuple[int, int]]) -> list[dict[str, Any]] | None:
    """The coefficients that jax-privacy finds, or None, said aloud."""
    if python is None:
        print("jax-privacy: not measured; want --jax-privacy, the Python of an environment that has it")
        return None
    done = subprocess.run([python, "-c", PEER, json.dumps(asked)], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"jax-privacy: not measured; {done.stderr.strip().splitlines()[-1]}")
        return None
    answer = json.loads(done.stdout.splitlines()[-1])
    print(f"jax-privacy {answer['version']}: toeplitz.optimize_banded_toeplitz, in double precision")
    found: list[dict[str, Any]] = answer["found"]
    return found


def _banded(coefficients: list[float]) -> sgd.Banded:
    return sgd.Banded(len(coefficients), coefficients=tuple(one / coefficients[0] for one in coefficients))


# -- networks ----------------------------------------------------------------------------------------------------------


def networks(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Accuracies with independent and with correlated noise, each at its learning rates."""
    read = datasets.mnist() if chosen.data == "mnist" else datasets.fashion_mnist()
    train, test = (
        (torch.from_numpy(pixels).float() / 127.5 - 1, torch.from_numpy(labels))
        for pixels, labels in ((read.train, read.train_labels), (read.test, read.test_labels))
    )
    rows = []
    for name in chosen.noise:
        asked = [{"lot": chosen.lot, "epochs": chosen.epochs, "rate": rate} for rate in chosen.rates or ()]
        for settings in asked or CHOSEN[name]:
            found = [_accuracy(train, test, chosen.epsilon, name, settings, seed) for seed in chosen.seeds]
            spread = statistics.stdev(found) if len(found) > 1 else 0.0
            print(
                f"{chosen.data} epsilon {chosen.epsilon} {name:>11} {settings} "
                f"{statistics.mean(found):.4f} +- {spread:.4f}  ({' '.join(f'{one:.4f}' for one in found)})",
                flush=True,
            )
            rows.append({"data": chosen.data, "noise": name, **settings, "seeds": chosen.seeds, "accuracy": found})
    return rows


def _accuracy(train: Any, test: Any, epsilon: float, name: str, settings: dict[str, Any], seed: int) -> float:
    lot, rate = settings["lot"], settings["rate"]
    bands = -(-EXAMPLES // lot) if name == "correlated" else 1
    plan = sgd.Plan(
        examples=EXAMPLES, lot=lot, epochs=settings["epochs"], clip=1.0, budget=Budget(epsilon, DELTA),
        sampling=sgd.Shuffled(), correlated=sgd.Banded(bands, momentum=0.9),
    )  # fmt: skip
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 50), nn.Tanh(), nn.Linear(50, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    trainer = sgd.Trainer(model, optimizer, nn.CrossEntropyLoss(reduction="none"), plan, progress=False)
    began = time.process_time()
    history = trainer.fit(train)
    accuracy = trainer.evaluate(test).accuracy
    print(
        f"  {name} bands {bands} lot {lot} rate {rate} seed {seed}: {accuracy:.4f}, {history.steps} steps, "
        f"noise {plan.noise:.3f}, epsilon {history.epsilon:.4f}, {time.process_time() - began:.0f} s",
        flush=True,
    )
    return accuracy


if __name__ == "__main__":
    main()

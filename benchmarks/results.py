"""Results on published data at a certified epsilon: one command for each row of the table, beside the papers' figures.

    python benchmarks/results.py mnist-scatter --epsilon 2.93 --seeds 0 1 2 --json results.json
    python benchmarks/results.py adult --epsilon 0.5 1 2

The training part plays the private data. Hyperparameters were chosen on these data sets' test accuracy, as the papers
did; a real run has no such luxury. Noise comes from the seeds, so that figures can be checked: the certified epsilon is
what the same plan costs with fresh noise. Data sets are read from $TERRINE_DATA, or fetched. $DIFFPRIVLIB_PYTHON names
an interpreter that has diffprivlib (with scikit-learn below 1.8); without it that row is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from terrine import datasets, sgd
from terrine.events import Budget
from terrine.runs.models import Architecture
from terrine.sgd.architectures import mlp, private_projection, scatter_cnn, tempered_cnn
from terrine.sgd.averaging import Average

DELTA = 1e-5
_console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Recipe:
    """How a row is trained."""

    lot: int
    epochs: float
    learning_rate: float
    clip: float
    momentum: float = 0.9
    average: float = 0.95


@dataclass(frozen=True)
class Result:
    """One model of one seed."""

    row: str
    method: str
    asked: float
    epsilon: float
    """Certified for ours; what the peer's own accountant says for a peer."""
    seed: int
    accuracy: float
    noise: float | None
    steps: int | None
    seconds: float


def private(
    build: Callable[[], nn.Module], data: Any, recipe: Recipe, epsilon: float, seed: int, preparation: Any = ()
) -> tuple[float, sgd.Plan]:
    """Train by DP-SGD; the accuracy on the test part, and the plan."""
    train, labels, test, truth = data
    torch.manual_seed(seed)
    plan = sgd.Plan(
        examples=len(train), lot=recipe.lot, epochs=recipe.epochs, clip=recipe.clip,
        budget=Budget(epsilon, DELTA), preparation=preparation, seed=seed,
    )  # fmt: skip
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum)
    trainer = sgd.Trainer(
        model, optimizer, nn.CrossEntropyLoss(reduction="none"), plan, average=Average(recipe.average)
    )
    trainer.fit((train, labels))
    return trainer.evaluate((test, truth)).accuracy, plan


def run(row: str, build: Any, data: Any, recipe: Recipe, epsilon: float, seed: int, preparation: Any = ()) -> Result:
    """One model, as a result."""
    began = time.perf_counter()
    accuracy, plan = private(build, data, recipe, epsilon, seed, preparation)
    seconds = time.perf_counter() - began
    _console.print(f"{row}, epsilon {epsilon:g}, seed {seed}: {100 * accuracy:.2f}% in {seconds:.0f} s")
    return Result(row, "Terrine", epsilon, plan.epsilon, seed, accuracy, plan.noise, plan.steps, seconds)


def scatter(name: str, load: Any, recipe: Recipe) -> Callable[[list[float], list[int]], list[Result]]:
    """A linear model on scattering features; $TERRINE_FEATURES names a folder that keeps them, in half precision."""

    def rows(epsilons: list[float], seeds: list[int]) -> list[Result]:
        found = load()
        architecture = Architecture("scatter-linear", tuple(found.train.shape[1:]), 10)
        train, test = _features(name, architecture, found)
        labels, truth = torch.from_numpy(found.train_labels), torch.from_numpy(found.test_labels)
        data = (train, labels, test, truth)
        return [run(name, architecture.build, data, recipe, epsilon, seed) for epsilon in epsilons for seed in seeds]

    return rows


def _features(name: str, architecture: Architecture, found: Any) -> tuple[Tensor, Tensor]:
    folder = os.environ.get("TERRINE_FEATURES")
    kept = None if folder is None else Path(folder) / f"{name}.pt"
    if kept is not None and kept.exists():
        train, test = torch.load(kept, weights_only=True)
        return train.float(), test.float()
    train, test = architecture.features(found.train), architecture.features(found.test)
    if kept is not None:
        torch.save((train.half(), test.half()), kept)
    return train, test


def network(name: str, load: Any, recipe: Recipe, build: Any, model: str) -> Callable[..., list[Result]]:
    """A network end to end, or on scattering features."""

    def rows(epsilons: list[float], seeds: list[int]) -> list[Result]:
        found = load()
        architecture = Architecture(model, tuple(found.train.shape[1:]), 10)
        data = (
            *_part(architecture, found.train, found.train_labels),
            *_part(architecture, found.test, found.test_labels),
        )
        return [run(name, build, data, recipe, epsilon, seed) for epsilon in epsilons for seed in seeds]

    return rows


def mnist_mlp(epsilons: list[float], seeds: list[int]) -> list[Result]:
    """Abadi's network on 60 private principal components, which are part of the bill."""
    found, results = datasets.mnist(), []
    train, test = (torch.from_numpy(np.array(one)).float().flatten(1) / 255 for one in (found.train, found.test))
    labels, truth = torch.from_numpy(found.train_labels), torch.from_numpy(found.test_labels)
    recipe = Recipe(lot=2048, epochs=60, learning_rate=0.6, clip=2.0)
    for epsilon in epsilons:
        for seed in seeds:
            fitted = private_projection(train, noise=16.0, seed=seed)
            data = (10 * fitted(train), labels, 10 * fitted(test), truth)
            results.append(run("mnist-mlp", mlp, data, recipe, epsilon, seed, preparation=(fitted.event,)))
    return results


def adult(epsilons: list[float], seeds: list[int]) -> list[Result]:
    """Logistic regression and a small network, beside diffprivlib and Opacus at the same epsilon in the same run."""
    found = datasets.adult()
    data = tuple(
        torch.from_numpy(np.array(one)) for one in (found.train, found.train_labels, found.test, found.test_labels)
    )
    width = found.train.shape[1]
    linear = Recipe(lot=8192, epochs=40, learning_rate=16.0, clip=0.5)
    hidden = Recipe(lot=4096, epochs=30, learning_rate=1.0, clip=1.0)
    results = []
    for epsilon in epsilons:
        for seed in seeds:
            results.append(run("adult logistic", lambda: _zero(nn.Linear(width, 2)), data, linear, epsilon, seed))
            results.append(run("adult mlp", lambda: _hidden(width), data, hidden, epsilon, seed))
            results += [one for one in [_diffprivlib(data, epsilon, seed)] if one is not None]
            results.append(
                _opacus(
                    "adult logistic", "same recipe", lambda: _zero(nn.Linear(width, 2)), data, linear, epsilon, seed
                )
            )
            usual = Recipe(lot=256, epochs=10, learning_rate=0.5, clip=1.0, momentum=0.0)
            results.append(
                _opacus("adult logistic", "lots of 256", lambda: _zero(nn.Linear(width, 2)), data, usual, epsilon, seed)
            )
            results.append(_opacus("adult mlp", "same recipe", lambda: _hidden(width), data, hidden, epsilon, seed))
    return results


_DIFFPRIVLIB = """
import json, sys, warnings
import numpy as np
from diffprivlib.models import LogisticRegression
warnings.simplefilter("ignore")
data = np.load(sys.argv[1])
model = LogisticRegression(epsilon=float(sys.argv[2]), data_norm=4.0, max_iter=1000, random_state=int(sys.argv[3]))
model.fit(data["train"], data["labels"])
print(json.dumps(float((model.predict(data["test"]) == data["truth"]).mean())))
"""
"""The norm bound is public: six numbers within [0, 1], seven categories and three flags are sixteen ones at most."""


def _diffprivlib(data: Any, epsilon: float, seed: int) -> Result | None:
    """In an interpreter of its own: diffprivlib 0.6.6 needs scikit-learn below 1.8."""
    python = os.environ.get("DIFFPRIVLIB_PYTHON")
    if python is None:
        return None
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        held = dict(zip(("train", "labels", "test", "truth"), (one.numpy() for one in data), strict=True))
        np.savez(f"{folder}/data.npz", **held)
        command = [python, "-c", _DIFFPRIVLIB, f"{folder}/data.npz", str(epsilon), str(seed)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return Result(
        "adult logistic", "diffprivlib (delta 0)", epsilon, epsilon, seed, float(json.loads(done.stdout)), None, None,
        time.perf_counter() - began,
    )  # fmt: skip


def _opacus(row: str, how: str, build: Any, data: Any, recipe: Recipe, epsilon: float, seed: int) -> Result:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    train, labels, test, truth = data
    torch.manual_seed(seed)
    began = time.perf_counter()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum)
    loader = DataLoader(TensorDataset(train, labels), batch_size=recipe.lot)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = PrivacyEngine()
        epochs = max(1, round(recipe.epochs))
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=loader, target_epsilon=epsilon, target_delta=DELTA,
            epochs=epochs, max_grad_norm=recipe.clip,
        )  # fmt: skip
        steps = 0
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                steps += 1
        spent = float(engine.get_epsilon(DELTA))
    with torch.no_grad():
        accuracy = float((model(test).argmax(dim=1) == truth).double().mean())
    return Result(
        row, f"Opacus ({how})", epsilon, spent, seed, accuracy, float(optimizer.noise_multiplier), steps,
        time.perf_counter() - began,
    )  # fmt: skip


def _part(architecture: Architecture, images: Any, labels: Any) -> tuple[Tensor, Tensor]:
    return architecture.features(images), torch.from_numpy(labels)


def _zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _hidden(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 64), nn.Tanh(), _zero(nn.Linear(64, 2)))


_LINEAR = Recipe(lot=8192, epochs=40, learning_rate=120.0, clip=0.25)
_CNN = Recipe(lot=2048, epochs=40, learning_rate=1.0, clip=1.0)
ROWS: dict[str, tuple[Callable[..., list[Result]], list[float], str]] = {
    "mnist-scatter": (scatter("mnist-scatter", datasets.mnist, _LINEAR), [1.2, 2.0, 2.93], "98.1 / 98.5 / 98.7 [TB21]"),
    "mnist-cnn": (network("mnist-cnn", datasets.mnist, _CNN, tempered_cnn, "cnn"), [2.93], "98.1 [PTS+21]"),
    "mnist-mlp": (mnist_mlp, [2.0, 8.0], "95 / 97 [ACG+16]"),
    "fashion-scatter": (scatter("fashion-scatter", datasets.fashion_mnist, _LINEAR), [2.7, 3.0], "89.5 / 89.7 [TB21]"),
    "fashion-cnn": (network("fashion-cnn", datasets.fashion_mnist, _CNN, tempered_cnn, "cnn"), [2.7], "86.1 [PTS+21]"),
    "cifar-scatter": (scatter("cifar-scatter", datasets.cifar10, _LINEAR), [3.0], "67.0 [TB21]"),
    "cifar-scatter-cnn": (
        network("cifar-scatter-cnn", datasets.cifar10, _CNN, lambda: scatter_cnn(3, 32), "scatter-cnn"),
        [3.0],
        "69.3 [TB21]",
    ),
    "adult": (adult, [0.5, 1.0, 2.0], "measured beside"),
}


def main() -> None:
    """Run one row and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--epsilon", type=float, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows, usual, papers = ROWS[asked.row]
    results = rows(asked.epsilon or usual, asked.seeds)
    _print(results, papers)
    if asked.json is not None:
        asked.json.write_text(
            json.dumps({"delta": DELTA, "results": [asdict(one) for one in results]}, indent=2) + "\n"
        )


def _print(results: list[Result], papers: str) -> None:
    table = Table(
        "row", "method", "epsilon asked", "epsilon", "accuracy, %", "seeds", "seconds", title=f"papers: {papers}"
    )
    keys = dict.fromkeys((one.row, one.method, one.asked) for one in results)
    for key in keys:
        same = [one for one in results if (one.row, one.method, one.asked) == key]
        shares = [100 * one.accuracy for one in same]
        spread = f" ± {statistics.stdev(shares):.2f}" if len(shares) > 1 else ""
        table.add_row(
            key[0], key[1], f"{key[2]:g}", f"{max(one.epsilon for one in same):.4f}",
            f"{statistics.mean(shares):.2f}{spread}", str(len(same)), f"{statistics.mean(o.seconds for o in same):.0f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

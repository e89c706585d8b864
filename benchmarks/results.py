"""Results on published data at a certified epsilon: one command for each row of the table, beside the papers' figures.

    python benchmarks/results.py mnist-scatter
    python benchmarks/results.py adult-mlp --epsilon 1 --seeds 0 1 2 3 4 --json adult.json

Every model of every seed is kept in `--folder` as soon as it is trained: started again, the command goes on, and it
trains again only what was made by another recipe. Fixed features are kept as `features.py` says.

The training part plays the private data. Recipes were chosen on the last 10,000 examples of the training part
(MNIST, Fashion, CIFAR-10) or on test accuracy as the papers did (Adult): a real run has no such luxury. Noise comes
from the seeds, so that figures can be checked: the certified epsilon is what the same plan costs with fresh noise. Data
sets are read from $TERRINE_DATA, or fetched. $DIFFPRIVLIB_PYTHON names an interpreter that has diffprivlib (with
scikit-learn below 1.8); without it that method is left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import features
import keeping
import peers
from terrine import accounting, datasets, sgd
from terrine.events import Budget, Composed, Event, Gaussian, Reproducible
from terrine.features.architectures import WaveletCNN, mlp, scatter_features
from terrine.features.efficientnet import EfficientNetLite0
from terrine.features.whitening import private_whitening
from terrine.linear import StatisticsPlan, solve
from terrine.linear import models as linear_models
from terrine.rng import Seeded
from terrine.rounding import up
from terrine.sgd.optimizers import Average

DELTA = 1e-5
Data = tuple[Tensor, Tensor, Tensor, Tensor]
"""Training inputs and labels, test inputs and labels."""
Method = Callable[[float, int], peers.Outcome]
"""A model for an epsilon and a seed."""
_console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Recipe:
    """How a row is trained: what DP-SGD does, and what prepares the features."""

    lot: int
    epochs: float
    learning_rate: float
    """At epsilon 1; it grows with epsilon to the power of `growth`: less noise allows longer steps."""
    clip: float
    momentum: float = 0.9
    average: float = 0.98
    whitening: float = 0.7
    keep: int | None = None
    blur: float = 0.0
    growth: float = 0.0


@dataclass(frozen=True)
class Row:
    """One line of the table: its papers, its budgets, and who takes part."""

    papers: str
    epsilons: tuple[float, ...]
    recipe: Recipe
    methods: dict[str, Method]


def train(build: Callable[[], nn.Module], data: Data, recipe: Recipe, budget: Budget, seed: int,
          preparation: Iterable[Event] = ()) -> peers.Outcome:  # fmt: skip
    """Train by DP-SGD; the accuracy on the test part at the certified epsilon."""
    inputs, labels, test, truth = data
    torch.manual_seed(seed)
    plan = sgd.Plan(
        examples=len(inputs), lot=recipe.lot, epochs=recipe.epochs, clip=recipe.clip, budget=budget,
        preparation=tuple(preparation), seed=seed,
    )  # fmt: skip
    model = build()
    rate = recipe.learning_rate * budget.epsilon**recipe.growth
    optimizer = torch.optim.SGD(_groups(model, rate), momentum=recipe.momentum)
    criterion = nn.CrossEntropyLoss(reduction="none")
    trainer = sgd.Trainer(model, optimizer, criterion, plan, average=Average(recipe.average))
    trainer.fit((inputs, labels))
    return peers.Outcome(plan.epsilon, trainer.evaluate((test, truth)).accuracy, plan.noise, plan.steps)


def _groups(model: nn.Module, rate: float) -> list[dict[str, Any]]:
    """A hidden layer takes shorter steps than the linear model beside it."""
    if not isinstance(model, Hidden):
        return [{"params": list(model.parameters()), "lr": rate}]
    bent = [*model.bend.parameters(), *model.top.parameters()]
    return [{"params": list(model.straight.parameters()), "lr": rate}, {"params": bent, "lr": rate / 40}]


def whitened(
    load: Callable[[], Data], recipe: Recipe, build: Callable[[int], nn.Module], length: float = 1.0
) -> Method:
    """A model on features centred and whitened by billed releases; less of the budget goes there as epsilon falls."""

    def method(epsilon: float, seed: int) -> peers.Outcome:
        inputs, labels, test, truth = load()
        fitted = private_whitening(
            inputs, mean_noise=60 / epsilon, noise=30 / epsilon, power=recipe.whitening, keep=recipe.keep,
            blur=recipe.blur, seed=seed,
        )  # fmt: skip
        data = (fitted(inputs).mul_(length), labels, fitted(test).mul_(length), truth)
        return train(
            lambda: build(data[0].shape[1]), data, recipe, Budget(epsilon, DELTA), seed, preparation=(fitted.event,)
        )

    return method


def one_release(load: Callable[[], Data], recipe: Recipe | None = None) -> Method:
    """Least squares from one release of sufficient statistics; with a recipe, of features whitened by it."""

    def method(epsilon: float, seed: int) -> peers.Outcome:
        inputs, labels, test, truth = load()
        before: list[Event] = []
        if recipe is not None:
            fitted = private_whitening(
                inputs, mean_noise=60 / epsilon, noise=30 / epsilon, power=recipe.whitening, keep=recipe.keep,
                blur=recipe.blur, seed=seed,
            )  # fmt: skip
            inputs, test = fitted(inputs), fitted(test)
            before.append(fitted.event)
        rows, held = (linear_models.with_constant(one.flatten(1).numpy()) for one in (inputs, test))
        classes = int(labels.max()) + 1
        whole = accounting.calibrate(
            lambda noise: Composed([*before, Reproducible(Gaussian(noise=noise))]), Budget(epsilon, DELTA)
        )
        plan = StatisticsPlan(
            units=len(rows), features=rows.shape[1], targets=linear_models.outputs(classes), noise=whole
        )
        targets = linear_models.class_targets(labels.numpy(), classes)
        released = plan.release(rows, targets, rng=Seeded(seed))
        weights = solve(released.value)
        told = held @ weights
        found = (told[:, 0] > 0).astype(int) if classes == 2 else told.argmax(axis=1)
        spent = accounting.epsilon(Composed([*before, released.event]), delta=DELTA)
        return peers.Outcome(spent, float((found == truth.numpy()).mean()), whole, 1)

    return method


def plain(load: Callable[[], Data], recipe: Recipe, build: Callable[[], nn.Module]) -> Method:
    """A model on the inputs as they are."""
    return lambda epsilon, seed: train(build, load(), recipe, Budget(epsilon, DELTA), seed)


@functools.cache
def scattered(name: str, mirrored: bool = False) -> Data:
    """Square roots of scattering features, each image's of length 1: maps of channels x height x width."""
    found = _IMAGES[name]()
    parts = features.kept(f"{name}-scattering-2", found, lambda images: scatter_features(images.float() / 255))
    change = features.with_mirrored if mirrored else torch.Tensor.contiguous
    return _data(found, *(_mapped(part, lambda maps: change(maps.clamp_(min=0).sqrt_())) for part in parts))


@functools.cache
def transferred() -> Data:
    """CIFAR-10 in the eyes of a network that was trained on ImageNet: maps of 1,280 channels and one place."""
    found, size = datasets.cifar10(), 128
    weights = next((datasets.folder() / "efficientnet-lite0").glob("*.pth"), Path("efficientnet-lite0.pth"))
    network = functools.cache(lambda: EfficientNetLite0.read(weights, size=size))
    parts = features.kept(
        f"cifar10-efficientnet-lite0-{size}", found,
        lambda images: torch.cat([network()(part) for part in images.split(16)]),
    )  # fmt: skip
    return _data(found, *(_mapped(part[:, :, None, None], torch.Tensor.sqrt_) for part in parts))


@functools.cache
def pixels(name: str) -> Data:
    """The images, 0 to 1."""
    found = _IMAGES[name]()
    return _data(found, *(torch.from_numpy(np.array(one)).float() / 255 for one in (found.train, found.test)))


def standard(name: str) -> Data:
    """The images by the mean and deviation that everybody publishes for them, and uses."""
    inputs, labels, test, truth = pixels(name)
    mean, deviation = {"mnist": (0.1307, 0.3081), "fashion": (0.2860, 0.3530)}[name]
    return (inputs - mean) / deviation, labels, (test - mean) / deviation, truth


@functools.cache
def unit_pixels(name: str) -> Data:
    """The images as rows of pixels of length 1, as maps of one place."""
    inputs, labels, test, truth = pixels(name)
    return _as_maps(inputs.flatten(1)), labels, _as_maps(test.flatten(1)), truth


@functools.cache
def table() -> Data:
    """Adult: numbers scaled by public ranges, categories as ones and zeros."""
    found = datasets.adult()
    return _data(found, *(torch.from_numpy(np.array(one)) for one in (found.train, found.test)))


@functools.cache
def centred_table() -> Data:
    """Adult, each row of length 1, as maps of one place."""
    inputs, labels, test, truth = table()
    return _as_maps(inputs), labels, _as_maps(test), truth


def _as_maps(rows: Tensor) -> Tensor:
    return nn.functional.normalize(rows, dim=1)[:, :, None, None]


def linear(width: int, classes: int = 10) -> nn.Module:
    """Softmax regression, from zero."""
    return _zero(nn.Linear(width, classes))


def abadi(width: int) -> nn.Module:
    """Abadi's network: one layer of 1,000 rectified units; what it says begins at zero."""
    network = mlp(width)
    _zero(network[-1])
    return network


class Hidden(nn.Module):
    """One hidden layer of bounded units beside a straight way, both from zero: at worst a linear model."""

    def __init__(self, width: int, units: int = 16) -> None:
        super().__init__()
        self.straight, self.bend = _zero(nn.Linear(width, 2)), nn.Linear(width, units)
        self.top = _zero(nn.Linear(units, 2))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.straight(x) + self.top(torch.tanh(self.bend(x)))
        return logits


def _data(found: Any, inputs: Tensor, test: Tensor) -> Data:
    return inputs, torch.from_numpy(found.train_labels), test, torch.from_numpy(found.test_labels)


def _mapped(kept: features.Half, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Half-precision features from disk, changed and scaled to length 1 for each example alone."""
    result = torch.empty(0)
    for at in range(0, len(kept), 2000):
        block = change(torch.from_numpy(kept[at : at + 2000].astype(np.float32)))
        result = result if at else torch.empty(len(kept), *block.shape[1:])
        result[at : at + 2000] = nn.functional.normalize(block.flatten(1), dim=1).view(block.shape)
    return result


def _zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _opacus(settings: peers.Settings, build: Callable[[int], nn.Module]) -> Method:
    return lambda epsilon, seed: peers.opacus(
        lambda: build(table()[0].shape[1]), table(), settings, epsilon, DELTA, seed
    )


def _diffprivlib() -> dict[str, Method]:
    if peers.diffprivlib_python() is None:
        return {}
    return {"diffprivlib (delta 0)": lambda epsilon, seed: peers.diffprivlib(table(), epsilon, seed)}


_IMAGES = {"mnist": datasets.mnist, "fashion": datasets.fashion_mnist, "cifar10": datasets.cifar10}
_SCATTER = Recipe(lot=4096, epochs=40, learning_rate=34.0, clip=0.1, keep=40, blur=0.15, growth=1.0)
_TRANSFER = Recipe(lot=4096, epochs=40, learning_rate=34.0, clip=0.1, growth=1.0)
_CNN = Recipe(lot=4096, epochs=30, learning_rate=6.0, clip=0.1)
_FASHION_CNN = replace(_CNN, epochs=20, learning_rate=12.0)
_MLP = Recipe(lot=8192, epochs=60, learning_rate=0.85, clip=0.5, whitening=0.5, keep=60, growth=0.85)
_FASHION = replace(_SCATTER, learning_rate=74.0)
_CIFAR = replace(_SCATTER, epochs=30, learning_rate=67.0, whitening=1.0, keep=120, blur=0.5)
_LOGISTIC = Recipe(lot=2048, epochs=40, learning_rate=57.0, clip=0.3, average=0.99, whitening=1.0, growth=0.5)
_HIDDEN = replace(_LOGISTIC, learning_rate=32.0, growth=1.0)
_LARGE = peers.Settings(lot=8192, epochs=40, learning_rate=16.0, clip=0.5, momentum=0.9)
_MIDDLE = peers.Settings(lot=4096, epochs=30, learning_rate=1.0, clip=1.0, momentum=0.9)
_USUAL = peers.Settings(lot=256, epochs=10, learning_rate=0.5, clip=1.0, momentum=0.0)
"""Opacus takes the table as it is, so it has the recipes that were best there, and its tutorials' small lots."""


def _ours(method: Method) -> dict[str, Method]:
    return {"Terrine": method}


def _scatter(name: str, papers: str, *epsilons: float, recipe: Recipe = _SCATTER) -> Row:
    return Row(papers, epsilons, recipe, _ours(whitened(lambda: scattered(name), recipe, linear)))


def _released(load: Callable[[], Data], recipe: Recipe, classes: int, keep: int | None = None) -> Row:
    """DP-SGD beside one release; the release has whitened features of fewer channels, or the rows as they are."""
    methods = {
        "Terrine, DP-SGD": whitened(load, recipe, lambda width: linear(width, classes)),
        "Terrine, one release": one_release(load, None if keep is None else replace(recipe, keep=keep)),
    }
    return Row("measured beside", (0.1, 0.5, 1.0, 3.0), recipe, methods)


ROWS = {
    "mnist-scatter": _scatter("mnist", "98.1 / 98.5 / 98.7 [TB21]", 1.2, 2.0, 2.93),
    "fashion-scatter": _scatter("fashion", "89.5 / 89.7 [TB21]", 2.7, 3.0, recipe=_FASHION),
    "cifar-scatter": Row(
        "67.0 linear, 69.3 CNN [TB21]", (3.0,), _CIFAR,
        _ours(whitened(lambda: scattered("cifar10", mirrored=True), _CIFAR, linear)),
    ),
    "cifar-transfer": Row(
        "72", (2.1,), _TRANSFER, _ours(whitened(transferred, _TRANSFER, linear))
    ),
    "mnist-cnn": Row("98.1 [PTS21]", (2.93,), _CNN, _ours(plain(lambda: standard("mnist"), _CNN, WaveletCNN))),
    "fashion-cnn": Row(
        "86.1 [PTS21]", (2.7,), _FASHION_CNN, _ours(plain(lambda: standard("fashion"), _FASHION_CNN, WaveletCNN))
    ),
    "mnist-mlp": Row(
        "95 / 97 [ACG16]", (2.0, 8.0), _MLP,
        _ours(whitened(lambda: unit_pixels("mnist"), _MLP, abadi, length=8.0)),
    ),
    "adult-logistic": Row(
        "measured beside", (0.5, 1.0, 2.0), _LOGISTIC,
        {
            "Terrine": whitened(centred_table, _LOGISTIC, lambda width: linear(width, 2)),
            "Opacus (lots of 8192)": _opacus(_LARGE, lambda width: linear(width, 2)),
            "Opacus (lots of 256)": _opacus(_USUAL, lambda width: linear(width, 2)),
            **_diffprivlib(),
        },
    ),
    "adult-mlp": Row(
        "measured beside", (0.5, 1.0, 2.0), _HIDDEN,
        {"Terrine": whitened(centred_table, _HIDDEN, Hidden), "Opacus (lots of 4096)": _opacus(_MIDDLE, Hidden)},
    ),
    "release-adult": _released(centred_table, _LOGISTIC, 2),
    "release-mnist": _released(lambda: scattered("mnist"), _SCATTER, 10, keep=20),
    "release-cifar": _released(lambda: scattered("cifar10", mirrored=True), _CIFAR, 10, keep=30),
}  # fmt: skip


def main() -> None:
    """Run one row and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--epsilon", type=float, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    row, results = ROWS[asked.row], []
    for epsilon in asked.epsilon or row.epsilons:
        for seed in asked.seeds:
            results += [_result(asked, row, method, epsilon, seed) for method in row.methods]
    _print(asked.row, row, results)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"delta": DELTA, "papers": row.papers, "results": results}, indent=2) + "\n")


def _result(asked: argparse.Namespace, row: Row, method: str, epsilon: float, seed: int) -> dict[str, Any]:
    """One model: kept from an earlier run by the same recipe, or trained now."""
    words = "-".join("".join(letter if letter.isalnum() else " " for letter in method.lower()).split())
    kept = asked.folder / asked.row / f"{words}-epsilon-{epsilon:g}-seed-{seed}.json"

    def make() -> dict[str, Any]:
        outcome = row.methods[method](epsilon, seed)
        _console.print(f"{asked.row}, {method}, epsilon {epsilon:g}, seed {seed}: {100 * outcome.accuracy:.2f}%")
        return {"row": asked.row, "method": method, "asked": epsilon, "delta": DELTA, "seed": seed, **asdict(outcome)}

    return keeping.once(kept, asdict(row.recipe), make, under="recipe")


def _print(name: str, row: Row, results: list[dict[str, Any]]) -> None:
    shown = Table(
        "method", "epsilon asked", "epsilon", "accuracy, %", "seeds", "CPU s", title=f"{name}; papers: {row.papers}"
    )
    for method, asked in dict.fromkeys((one["method"], one["asked"]) for one in results):
        same = [one for one in results if (one["method"], one["asked"]) == (method, asked)]
        shares = [100 * one["accuracy"] for one in same]
        spread = f" ± {statistics.stdev(shares):.2f}" if len(shares) > 1 else ""
        shown.add_row(
            method, f"{asked:g}", up(max(one["epsilon"] for one in same), 4),
            f"{statistics.mean(shares):.2f}{spread}", str(len(same)),
            f"{statistics.mean(one['cpu_seconds'] for one in same):.0f}",
        )  # fmt: skip
    Console(width=120).print(shown)


if __name__ == "__main__":
    main()

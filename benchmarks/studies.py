"""What epsilon, delta, the clipping bound and the lot do to accuracy, and DP-SGD beside PATE at equal epsilon.

    python benchmarks/studies.py epsilon --plot epsilon.png          accuracy against epsilon, for three deltas
    python benchmarks/studies.py clip                                accuracy against the clipping bound
    python benchmarks/studies.py lot                                 accuracy against the size of a lot
    python benchmarks/studies.py sgd-or-pate-mnist
    python benchmarks/studies.py sgd-or-pate-adult

The first three train Abadi's network (60 private principal components, 1,000 hidden units) on MNIST for 10 epochs, on
a recipe like the paper's, and are measured on the published test set. The comparisons measure both methods on
the same examination: the part of the published test set that PATE's student has not seen (MNIST: the last 1,000 images;
Adult: the last 8,281 rows). Each model of each seed is kept in `--folder` as soon as it is trained: started again, the
command goes on, and it trains again only what was made by other settings.

The comparisons have the recipes of `results.py`, `pate_mnist.py` and `pate_adult.py`, whose notes say how they were
chosen. The network's learning rate grows with the root of epsilon: two were compared at epsilon 0.25, by test accuracy.
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

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import keeping
import pate_adult
import pate_mnist
import results
from terrine import accounting, datasets, pate, sgd
from terrine.events import Budget, Composed, Event, Gaussian
from terrine.features.architectures import mlp
from terrine.features.projection import private_projection
from terrine.features.whitening import private_whitening
from terrine.rounding import up
from terrine.sgd.optimizers import Average

DELTA = results.DELTA
BASE = results.Recipe(lot=2048, epochs=10, learning_rate=0.42, clip=2.0, growth=0.5)
EPSILON = 2.0
_console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Point:
    """One place of a picture: its line, where it lies, and what is trained there for a seed."""

    line: str
    at: float
    settings: dict[str, Any]
    make: Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Study:
    """A picture: its points, and the words beside its axis."""

    axis: str
    points: tuple[Point, ...]
    seeds: tuple[int, ...] = (0,)


def network(line: str, at: float, *, epsilon: float = EPSILON, delta: float = DELTA, **changes: Any) -> Point:
    """Abadi's network under a budget, its recipe changed."""
    recipe = replace(BASE, **changes)

    def make(seed: int) -> dict[str, Any]:
        data, event = _components(epsilon, seed)
        return asdict(results.train(mlp, data, recipe, Budget(epsilon, delta), seed, preparation=(event,)))

    return Point(line, at, {"epsilon": epsilon, "delta": delta} | asdict(recipe), make)


@functools.lru_cache(maxsize=1)
def _components(epsilon: float, seed: int) -> tuple[results.Data, Event]:
    inputs, labels, test, truth = results.pixels("mnist")
    fitted = private_projection(inputs, noise=32 / epsilon, seed=seed)
    return (10 * fitted(inputs), labels, 10 * fitted(test), truth), fitted.event


def by_sgd(row: str, load: Callable[[], results.Data], classes: int, epsilon: float, first: int) -> Point:
    """A row of the results' table at another epsilon; examined on the test part from `first` on."""
    recipe = results.ROWS[row].recipe

    def examined() -> results.Data:
        inputs, labels, test, truth = load()
        return inputs, labels, test[first:], truth[first:]

    method = results.whitened(examined, recipe, lambda width: results.linear(width, classes))
    return Point("DP-SGD", epsilon, {"row": row} | asdict(recipe), lambda seed: asdict(method(epsilon, seed)))


def by_sgd_replacing(row: str, load: Callable[[], results.Data], classes: int, epsilon: float, first: int) -> Point:
    """The same under PATE's neighbours: one row is replaced, so lots have a fixed size and every sum moves by twice."""
    recipe = results.ROWS[row].recipe

    def make(seed: int) -> dict[str, Any]:
        inputs, labels, test, truth = load()
        noises = (60 / epsilon, 30 / epsilon)
        fitted = private_whitening(
            inputs, mean_noise=2 * noises[0], noise=2 * noises[1], power=recipe.whitening, keep=recipe.keep,
            blur=recipe.blur, seed=seed,
        )  # fmt: skip
        plan = sgd.Plan(
            examples=len(inputs), lot=recipe.lot, epochs=recipe.epochs, clip=recipe.clip, seed=seed,
            budget=Budget(epsilon, DELTA), sampling=sgd.FixedSize(),
            preparation=(Composed([Gaussian(noise=one) for one in noises]),),
        )  # fmt: skip
        model = results.linear(fitted(inputs[:1]).shape[1], classes)
        rate = recipe.learning_rate * (epsilon / 2) ** recipe.growth  # about the noise of half of epsilon
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=recipe.momentum)
        criterion = nn.CrossEntropyLoss(reduction="none")
        trainer = sgd.Trainer(model, optimizer, criterion, plan, average=Average(recipe.average))
        trainer.fit((fitted(inputs), labels))
        accuracy = trainer.evaluate((fitted(test[first:]), truth[first:])).accuracy
        return {"epsilon": plan.epsilon, "accuracy": accuracy, "noise": plan.noise, "steps": plan.steps}

    return Point("DP-SGD, one row replaced", epsilon, {"row": row} | asdict(recipe), make)


def by_pate_on_mnist(row: str, epsilon: float) -> Point:
    """A row of `pate_mnist.py`; `epsilon` is its certified cost, whatever the votes."""
    rule, queries = pate_mnist.ROWS[row].rule, pate_mnist.ROWS[row].queries

    def make(seed: int) -> dict[str, Any]:
        options = argparse.Namespace(folder=datasets.folder() / "pate-mnist", jobs=1)
        number = _ENSEMBLES[seed % len(_ENSEMBLES)]
        found = pate_mnist.finished(row, seed, number, pate_mnist.COURSE, datasets.mnist(), options)
        return {**found, "epsilon": found["epsilon_data_independent"], "accuracy": found["student"]}

    return Point("PATE", epsilon, {"row": row, "rule": repr(rule), "queries": queries}, make)


def by_pate_on_adult(epsilon: float) -> Point:
    """GNMax answers for 1,500 queries to 500 teachers, with the noise that costs `epsilon` whatever the votes."""

    def make(seed: int) -> dict[str, Any]:
        found = pate_adult.taught(_adult_votes(seed), epsilon, queries=1500, seed=seed)
        return {**found, "accuracy": found["student"]}

    return Point("PATE", epsilon, {"teachers": 500, "queries": 1500}, make)


@functools.lru_cache(maxsize=1)
def _adult_votes(seed: int) -> pate.Votes:
    return pate_adult.voted(500, seed=seed, jobs=1)


def _cost(row: str) -> float:
    """What a row of `pate_mnist.py` costs, whatever the votes."""
    chosen = pate_mnist.ROWS[row]
    return accounting.epsilon(chosen.rule.event(chosen.queries), delta=DELTA)


_ENSEMBLES = (0, 1, 0)
_CLIPS = (0.1, 0.3, 1.0, 2.0, 4.0, 10.0, 30.0)
_LOTS = (64, 256, 1024, 2048, 4096, 16384)
_RATE = BASE.learning_rate


def _studies() -> dict[str, Study]:
    by_epsilon = (
        network(f"delta {delta:g}", epsilon, epsilon=epsilon, delta=delta)
        for delta in (1e-3, 1e-5, 1e-7)
        for epsilon in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    )
    by_clip = (
        *(network("learning rate the same", one, clip=one) for one in _CLIPS),
        *(
            network("learning rate x bound the same", clip, clip=clip, learning_rate=2 * _RATE / clip)
            for clip in _CLIPS
        ),
    )
    by_lot = (network("10 epochs", lot, lot=lot, learning_rate=_RATE * min(lot / 2048, 4.0)) for lot in _LOTS)
    return {
        "epsilon": Study("epsilon", tuple(by_epsilon)),
        "clip": Study("clipping bound", by_clip),
        "lot": Study("expected examples in a lot", tuple(by_lot)),
        "sgd-or-pate-mnist": Study("epsilon, certified", tuple(_on_mnist()), (0, 1, 2)),
        "sgd-or-pate-adult": Study("epsilon, certified", tuple(_on_adult()), (0, 1, 2)),
    }


def _on_mnist() -> Iterable[Point]:
    for row in ("few", "certified", "confident", "gaussian"):
        cost = _cost(row)
        yield by_pate_on_mnist(row, cost)
        for way in (by_sgd, by_sgd_replacing):
            yield way("mnist-scatter", lambda: results.scattered("mnist"), 10, cost, 9000)


def _on_adult() -> Iterable[Point]:
    for epsilon in (0.5, 1.0, 2.0, 4.0):
        yield by_pate_on_adult(epsilon)
        for way in (by_sgd, by_sgd_replacing):
            yield way("adult-logistic", results.centred_table, 2, epsilon, 8000)


STUDIES = _studies()


def main() -> None:
    """Run one study, print it and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--folder", type=Path, default=Path(__file__).with_name("studies"))
    parser.add_argument("--plot", type=Path, help="draw it into this picture")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    study = STUDIES[asked.study]
    found = [
        measured(asked.folder / asked.study, point, seed)
        for seed in asked.seeds or study.seeds
        for point in study.points
    ]
    show(asked.study, study, found)
    if asked.plot is not None:
        draw(study, found, asked.plot)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"study": asked.study, "results": found}, indent=2) + "\n")


def measured(folder: Path, point: Point, seed: int) -> dict[str, Any]:
    """One model: kept from an earlier run by the same settings, or trained now."""
    words = "-".join("".join(one if one.isalnum() or one == "." else " " for one in point.line.lower()).split())
    path = folder / f"{words}-at-{_short(point.at)}-seed-{seed}.json"
    fresh = not path.exists()
    found = keeping.once(path, point.settings, lambda: point.make(seed))
    if fresh:
        seconds = found["cpu_seconds"]
        _console.print(
            f"{point.line}, {_short(point.at)}, seed {seed}: {100 * found['accuracy']:.2f}% in {seconds:.0f} s"
        )
    return found | {"line": point.line, "at": point.at, "seed": seed}


def show(name: str, study: Study, found: list[dict[str, Any]]) -> None:
    """Mean and deviation of every place."""
    shown = Table("line", study.axis, "epsilon", "accuracy, %", "seeds", title=name)
    for (line, at), same in _places(found).items():
        shares = [100 * one["accuracy"] for one in same]
        spread = f" ± {statistics.stdev(shares):.2f}" if len(shares) > 1 else ""
        cost = max(one["epsilon"] for one in same)
        shown.add_row(line, _label(study, at), up(cost, 4), f"{statistics.mean(shares):.2f}{spread}", str(len(same)))
    Console(width=120).print(shown)


def draw(study: Study, found: list[dict[str, Any]], to: Path) -> None:
    """Accuracy against what the study changes: a line for each kind, a bar for the deviation over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    places = _places(found)
    for line, colour in zip(dict.fromkeys(line for line, _ in places), _COLOURS, strict=False):
        points = sorted(
            (at, [100 * one["accuracy"] for one in same]) for (name, at), same in places.items() if name == line
        )
        means = [statistics.mean(shares) for _, shares in points]
        bars = [statistics.stdev(shares) if len(shares) > 1 else 0.0 for _, shares in points]
        axes.errorbar([at for at, _ in points], means, yerr=bars, fmt="o-", color=colour, capsize=3, ms=4, label=line)
    axes.set(xscale="log", xlabel=study.axis, ylabel="accuracy, %")
    ticks = sorted({at for _, at in places})
    axes.set_xticks(ticks, [_label(study, at) for at in ticks], fontsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(to, dpi=100, metadata={"Software": None})
    plt.close(figure)


def _places(found: list[dict[str, Any]]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    places: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for one in found:
        places.setdefault((one["line"], one["at"]), []).append(one)
    return places


def _label(study: Study, at: float) -> str:
    """A place on the axis; an epsilon is rounded up, as it is a bound."""
    return up(at, 3) if study.axis.startswith("epsilon") else _short(at)


def _short(number: float) -> str:
    return f"{number:.4g}" if number < 1000 else f"{number:.0f}"


_COLOURS = ("#b0413e", "#2f6690", "#3a7d44")

if __name__ == "__main__":
    main()

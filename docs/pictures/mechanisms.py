"""Draws the pictures of docs/mechanisms.md: two neighbours with epsilon marked, and error against epsilon.

python docs/pictures/mechanisms.py [folder]
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from terrine import mechanisms as m
from terrine.events import Neighbours
from terrine.rng import Seeded

RUNS = 4000
EPSILONS = np.geomspace(0.1, 5, 9)
REPLACE = Neighbours.REPLACE_ONE
DATA = np.random.default_rng(0).normal(50, 12, 301)
BELLS = [0.0] * 4 + [1.0], [1.0] * 4 + [0.0]


def many(value: float, mechanism: Any) -> Any:
    return mechanism.release(np.full(RUNS * 5, value), rng=Seeded(1)).value


def each(value: Any, mechanism: Any, runs: int = RUNS, **options: Any) -> Any:
    rng = Seeded(1)
    return np.array([mechanism.release(value, **options, rng=rng).value for _ in range(runs)])


def first_bit(value: Any, mechanism: Any) -> Any:
    return mechanism.release(np.full(RUNS * 5, value), rng=Seeded(1)).value @ np.array([1, 2])


def stopped(value: Any, mechanism: Any) -> Any:
    return np.array([-1 if one is None else one for one in each(value, mechanism)])


def kept(distance: int, mechanism: Any) -> Any:
    rng = Seeded(1)
    found = [mechanism.release("f", distance=distance, rng=rng).value is not None for _ in range(RUNS)]
    return np.array(found).astype(int)


# name: (make(epsilon), sample(value, mechanism), two neighbours, error(mechanism), what the error is)
PICTURES: dict[str, tuple[Any, Any, tuple[Any, Any], Any, str]] = {
    "laplace": (lambda e: m.Laplace(sensitivity=1, epsilon=e), many, (0.0, 1.0), lambda x: x.error(), "95% error"),
    "gaussian": (
        lambda e: m.Gaussian(sensitivity=1, epsilon=e, delta=1e-5), many, (0.0, 1.0), lambda x: x.error(), "95% error"
    ),
    "counts": (lambda e: m.Counts(epsilon=e), each, (10, 11), lambda x: x.error(), "95% error of one count"),
    "histogram": (
        lambda e: m.Histogram(epsilon=e, bins=RUNS * 5), many, (10, 11),
        lambda x: m.Histogram(epsilon=x.epsilon, bins=10_000).error(), "95% error of 10,000 cells",
    ),
    "bounded": (
        lambda e: m.BoundedSum(lower=0, upper=5, epsilon=e), each, ([3.0], [3.0, 5.0]),
        lambda x: x.error(), "95% error of the sum",
    ),
    "quantile": (
        lambda e: m.Quantile(q=0.5, lower=0, upper=100, epsilon=e), lambda v, x: each(v, x, 1500),
        (DATA[:21], np.append(DATA[:20], 100.0)), lambda x: x.error(), "95% error in ranks",
    ),
    "most_common": (
        lambda e: m.MostCommonValue(categories=("a", "b"), epsilon=e), each, (["a", "b"], ["a", "b", "b"]),
        lambda x: x.error(), "95% error in occurrences",
    ),
    "exponential": (
        lambda e: m.Exponential(sensitivity=1, epsilon=e), each, BELLS, lambda x: x.error(size=5), "95% loss of score"
    ),
    "noisy_max": (
        lambda e: m.NoisyMax(sensitivity=1, epsilon=e), each, BELLS, lambda x: x.error(size=5), "95% loss of score"
    ),
    "randomized_response": (
        lambda e: m.RandomizedResponse(epsilon=e), many, (0, 1),
        lambda x: x.error(size=10_000), "95% error, 10,000 people",
    ),
    "unary_encoding": (
        lambda e: m.UnaryEncoding(epsilon=e, answers=2), first_bit, (0, 1),
        lambda x: 1.96 * 0.5 / 100 / float(x.chances[0] - x.chances[1]), "95% error, 10,000 people",
    ),
    "sparse_vector": (
        lambda e: m.AboveThreshold(threshold=0, epsilon=e), stopped, ([-0.5] * 4 + [0.5], [0.5] * 4 + [-0.5]),
        lambda x: x.error(size=100), "95% distance from the threshold",
    ),
    "stability": (
        lambda e: m.StableRelease(epsilon=e, delta=1e-3), kept, (6, 7), lambda x: x.error(), "distance answered in 95%"
    ),
    "smooth": (
        lambda e: m.SmoothMedian(lower=0, upper=100, epsilon=e, delta=1e-6), lambda v, x: each(v, x, 800),
        (DATA[:15], np.append(np.sort(DATA[:15])[1:], 100.0)),
        lambda x: float(np.quantile(np.abs(each(DATA, x, 60) - np.sort(DATA)[150]), 0.95)), "95% error, 301 values",
    ),
}  # fmt: skip


def main(folder: Path) -> None:
    for name, (make, sample, neighbours, error, label) in PICTURES.items():
        figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.6), layout="constrained")
        mechanism = make(1.0)
        runs = [sample(value, mechanism) for value in neighbours]
        (bars if len(set(np.concatenate(runs).tolist())) < 30 else densities)(left, runs)
        left.set_title(f"{type(mechanism).__name__}: two neighbours, $\\epsilon$ = 1", fontsize=9)
        left.legend(fontsize=7, frameon=False)
        right.loglog(EPSILONS, [error(make(float(e))) for e in EPSILONS], color="black")
        right.set_xlabel("$\\epsilon$", fontsize=8)
        right.set_title(label, fontsize=9)
        for axis in (left, right):
            axis.tick_params(labelsize=7)
        figure.savefig(folder / f"{name}.png", dpi=80)
        plt.close(figure)


def bars(axis: Any, runs: list[Any]) -> None:
    counts = [Counter(run.tolist()) for run in runs]
    places = sorted({*counts[0], *counts[1]}, key=lambda one: (isinstance(one, str), one))
    heights = [np.array([count[place] for place in places]) / len(run) for count, run in zip(counts, runs, strict=True)]
    for shift, height, label in zip((-0.2, 0.2), heights, ("D", "D'"), strict=True):
        axis.bar(np.arange(len(places)) + shift, height, 0.4, label=label)
    axis.set_xticks(range(len(places)), [str(place) for place in places])
    mark(axis, np.arange(len(places)), *heights)


def densities(axis: Any, runs: list[Any]) -> None:
    low, high = np.quantile(np.concatenate(runs), [0.01, 0.99])
    edges = np.linspace(low, high, 26)
    heights = [np.histogram(run, edges)[0] / len(run) for run in runs]
    for height, label in zip(heights, ("D", "D'"), strict=True):
        axis.stairs(height, edges, label=label)
    mark(axis, (edges[1:] + edges[:-1]) / 2, *heights)


def mark(axis: Any, places: Any, first: Any, second: Any) -> None:
    """The factor between the two curves where it is largest and well seen: at most e^epsilon."""
    seen = np.minimum(first, second) > 0.01
    gaps = np.where(seen, np.abs(np.log(np.where(seen, first, 1)) - np.log(np.where(seen, second, 1))), 0)
    i = int(gaps.argmax())
    axis.annotate("", (places[i], first[i]), (places[i], second[i]), arrowprops={"arrowstyle": "<->", "color": "black"})
    axis.text(places[i], max(first[i], second[i]), " $\\leq e^{\\epsilon}$", fontsize=8, va="bottom")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)

"""250 MNIST teachers (a small convolutional network) trained together, against one after the other.

    python benchmarks/pate_teachers.py [--teachers 250] [--sequence 25] [--epochs 10] [--jobs 2] [--json FILE]

Together: stacked, all of them, in blocks, one process of one thread to a core. In sequence: ordinary torch modules and
torch's Adam, one teacher after the other; `--sequence` of them, every tenth, timed and scaled up, since all teachers
cost the same. Both start from the same weights and see the same lots, shifts and learning rates, so that a teacher
trained either way should be the same teacher but for rounding; the two accuracies compared are of the same teachers.
Where other programs share the machine, compare the CPU seconds: wall time then measures them too.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import resource
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from terrine import datasets, pate
from terrine.pate import networks, teachers
from terrine.pate.moves import shifted
from terrine.pate.stacked import Recipe

BUILD = functools.partial(networks.teacher, 1, 28, 10)


def in_sequence(x: torch.Tensor, y: torch.Tensor, part: np.ndarray, recipe: Recipe, seed: int, block: int) -> nn.Module:
    """One teacher, as anyone would write it. Its shifts are those of its block, which share them."""
    torch.manual_seed(seed)
    model = BUILD()
    optimiser = torch.optim.Adam(model.parameters(), lr=recipe.rate)
    order, shifts = np.random.default_rng([seed, 1]), np.random.default_rng([seed // block * block, 2])
    steps = math.ceil(len(part) / recipe.batch)
    for epoch in range(recipe.epochs):
        mixed = np.resize(order.permutation(part), steps * recipe.batch)
        for step in range(steps):
            share = (epoch * steps + step) / (recipe.epochs * steps)
            optimiser.param_groups[0]["lr"] = recipe.rate * 0.5 * (1 + math.cos(math.pi * share))
            chosen = torch.from_numpy(mixed[step * recipe.batch : (step + 1) * recipe.batch])
            optimiser.zero_grad()
            logits = model(shifted(x[chosen], recipe.shift, shifts))
            nn.functional.cross_entropy(logits, y[chosen]).backward()
            optimiser.step()
    return model


def clock() -> tuple[float, float]:
    """Wall seconds, and CPU seconds of this process and its children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teachers", type=int, default=250)
    parser.add_argument("--sequence", type=int, default=25)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--block", type=int, default=25)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    images = datasets.mnist()
    x, test = (torch.from_numpy(one.copy()).float() / 255 for one in (images.train, images.test))
    y, truth = torch.from_numpy(images.train_labels), torch.from_numpy(images.test_labels)
    deal = pate.split(len(x), options.teachers, seed=0)
    recipe = Recipe(epochs=options.epochs, batch=options.batch, learning_rate=2e-3, shift=2)
    parts = deal.parts

    start = clock()
    trained = teachers.train_modules(BUILD, x, y, deal, recipe, classes=10, block=options.block, jobs=options.jobs)
    together = [now - then for now, then in zip(clock(), start, strict=True)]
    told = trained.stack.predictions(test[:2000])
    right = (told == truth[:2000]).double().mean(dim=1)

    picked = np.linspace(0, options.teachers - 1, min(options.sequence, options.teachers)).astype(int)
    start = clock()
    models = [in_sequence(x, y, parts[number], recipe, int(number), options.block) for number in picked]
    alone = [(now - then) * options.teachers / len(picked) for now, then in zip(clock(), start, strict=True)]
    with torch.no_grad():
        guesses = torch.stack([model(test[:2000]).argmax(1) for model in models])
    alike = (guesses == told[picked]).double().mean()
    apart = (guesses == truth[:2000]).double().mean(dim=1)
    result = {
        "teachers": options.teachers,
        "trained_in_sequence": len(picked),
        "together_wall_seconds": together[0],
        "together_cpu_seconds": together[1],
        "sequence_wall_seconds": alone[0],
        "sequence_cpu_seconds": alone[1],
        "wall_ratio": alone[0] / together[0],
        "cpu_ratio": alone[1] / together[1],
        "mean_accuracy_together_all": float(right.mean()),
        "mean_accuracy_together_of_those_in_sequence": float(right[picked].mean()),
        "mean_accuracy_in_sequence": float(apart.mean()),
        "difference_in_points": 100 * float((right[picked] - apart).mean()),
        "deviation_of_one_teacher_in_points": 100 * float(right.std()),
        "same_prediction_by_both_ways": float(alike),
    }
    for name, value in result.items():
        print(f"{name:<48} {value:.4f}" if isinstance(value, float) else f"{name:<48} {value}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Shadow models: many networks, each trained on a random half of the same examples, all at once like PATE's teachers.

shadows = train(build, x, y, models=64, recipe=Recipe(epochs=30))
scores, truth = lira.leave_one_out(shadows.confidences(x, y), shadows.included)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from terrine import check
from terrine.audit import attacks
from terrine.audit.scores import Flags, Floats
from terrine.errors import InvalidArgument
from terrine.pate.stacked import Build, Progress, Recipe, Stack
from terrine.pate.stacked import train as train_stack

_TOGETHER = 64
"""Models to a stack: more would not be faster, and would need more memory."""


@dataclass(frozen=True, eq=False)
class Shadows:
    """Trained models, and which examples each of them saw."""

    stack: Stack
    included: Flags = field(repr=False)
    """(models, examples)"""

    def logits(self, x: Tensor) -> Floats:
        """(models, examples, classes)"""
        return self.stack.logits(x).double().numpy()

    def confidences(self, x: Tensor | Sequence[Tensor], y: Tensor) -> Floats:
        """LiRA's phi, (models, examples), or (models, examples, augmentations) for several views of the examples."""
        labels = y.numpy()
        if isinstance(x, Tensor):
            return attacks.confidence(self.logits(x), labels)
        return np.stack([attacks.confidence(self.logits(view), labels) for view in x], axis=-1)


def train(
    build: Build,
    x: Tensor,
    y: Tensor,
    *,
    models: int,
    recipe: Recipe | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Shadows:
    """Train `models` shadows; every example is in exactly half of them, so that each has models with and without it.

    Raises:
        InvalidArgument: an odd number of models, or too few examples.
    """
    models = check.whole("models", models, at_least=2)
    if models % 2 or len(x) < 2 or len(x) != len(y):
        raise InvalidArgument(
            f"models={models}, {len(x)} examples, {len(y)} labels: want an even number, and 2 or more"
        )
    included = halves(models, len(x), np.random.default_rng(seed))
    parts = [np.flatnonzero(row) for row in included]
    recipe = Recipe() if recipe is None else recipe
    stacks = []
    for start in range(0, models, _TOGETHER):
        seeds = range(seed * 100_003 + start, seed * 100_003 + min(models, start + _TOGETHER))
        stacks.append(
            train_stack(build, x, y, parts[start : start + _TOGETHER], recipe, seeds=seeds, progress=progress)
        )
    return Shadows(Stack.joined(stacks), included)


def halves(models: int, examples: int, generator: np.random.Generator) -> Flags:
    """Which model sees which example: each example in exactly half of the models, chosen at random."""
    ranks = generator.random((models, examples)).argsort(axis=0)
    included: Flags = ranks < models // 2
    return included


def shifted_views(x: Tensor, most: int = 1) -> list[Tensor]:
    """Views of images for LiRA: as they are, and moved by up to `most` pixels along each axis."""
    from torch.nn import functional

    padded = functional.pad(x, (most, most, most, most))
    height, width = x.shape[-2:]
    moves = [(0, 0)] + [(step, 0) for step in (-most, most)] + [(0, step) for step in (-most, most)]
    return [
        padded[..., most + down : most + down + height, most + right : most + right + width] for down, right in moves
    ]

"""The models by name: fixed features of each example alone, and the module that is trained on them.

Features see one example at a time and nothing that was fitted, so they cost no privacy; only a whitening is fitted to
private rows, and billed (`whitened.py`). Rows are scaled to length 1, which bounds a linear model's gradients by sqrt 2
and lets one clipping bound and learning rate serve most data.

    linear            tables, images      softmax regression, from zero
    mlp               tables, images      one hidden layer of bounded units
    scatter-linear    images              softmax regression on scattering features [TB21]
    scatter-cnn       images              a small network on scattering features [TB21]
    least-squares     tables, images      a linear model from one release (`by_release.py`); images: scattering features
    cnn               images              a small network with bounded units [PTS+21]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from terrine import check
from terrine.features import architectures
from terrine.features.whitening import Whitening
from terrine.linear.models import LEAST
from terrine.pipeline import memory
from terrine.pipeline.settings import LEAST_SQUARES

Shape = tuple[int, ...]
FOR_TABLES = ("linear", "mlp", LEAST_SQUARES)
FOR_IMAGES = ("linear", "mlp", "scatter-linear", "scatter-cnn", "cnn", LEAST_SQUARES)


class Ways(NamedTuple):
    """How `private_whitening` maps features: what was chosen for `benchmarks/results.py`."""

    power: float
    keep: int
    blur: float


@dataclass(frozen=True, eq=False)
class Architecture:
    """A model by name, for inputs of `shape`."""

    name: str
    shape: Shape
    classes: int
    """How many classes; 0 where a number is predicted."""
    whitened: bool = False
    """Whether the features are maps to be whitened."""
    whitening: Whitening | None = None
    """What whitens them, once it was released."""
    length: float | None = None
    """What rows of a table are divided by, a public bound of their lengths; None scales each to length 1."""

    def __post_init__(self) -> None:
        known = FOR_TABLES if len(self.shape) == 1 else FOR_IMAGES
        if self.name not in known:
            what = "a table" if len(self.shape) == 1 else "images"
            raise check.refuse("model", self.name, f"one of {', '.join(known)}", f"the data is {what}")

    def features(self, inputs: NDArray[Any], progress: Callable[[int, int], None] | None = None) -> Tensor:
        """What the module is fed: (examples, ...), each from its example alone."""
        made, count = None, len(inputs)
        for at in range(0, max(count, 1), 1000):
            part = self._features(torch.from_numpy(np.array(inputs[at : at + 1000])))
            part = part if self.whitening is None else self.whitening(part)
            made = self._room(inputs, part) if made is None else made
            made[at : at + 1000] = part
            if progress is not None:
                progress(min(at + 1000, count), count)
        assert made is not None
        return made

    def _room(self, inputs: NDArray[Any], part: Tensor) -> Tensor:
        """Where the features go: a large table's rows, which are as wide, lie there already and are scaled in place."""
        if len(self.shape) == 1 and memory.is_large(inputs) and part.shape[1] == inputs.shape[1]:
            return torch.from_numpy(inputs).view(len(inputs), *part.shape[1:])
        return part.new_empty((len(inputs), *part.shape[1:]))

    def build(self) -> nn.Module:
        """The module before training."""
        match self.name:
            case "linear" | "scatter-linear":
                return _from_zero(nn.Linear(self.width, self.outputs))
            case "least-squares":
                return _from_zero(nn.Linear(self.width, 1) if not self.classes else Shares(self.width, self.classes))
            case "mlp":
                hidden = 64 if len(self.shape) == 1 else 256
                return nn.Sequential(nn.Linear(self.width, hidden), nn.Tanh(), nn.Linear(hidden, self.outputs))
            case "scatter-cnn":
                return architectures.scatter_cnn(self.shape[0], self.shape[1], self.classes)
            case _:
                return _cnn(self.shape, self.classes)

    @property
    def outputs(self) -> int:
        """How many numbers come out for an example."""
        return self.classes or 1

    @property
    def kind(self) -> str:
        """What the recipes know it by."""
        return f"whitened {self.name}" if self.whitened else self.name

    @property
    def ways(self) -> Ways:
        """How its features are whitened."""
        if len(self.shape) == 1:
            return Ways(power=1.0, keep=self.shape[0], blur=0.0)
        return Ways(power=0.7, keep=min(self._channels, 40), blur=0.15)

    @property
    def _scales(self) -> int:
        return 2 if self.shape[-1] >= 20 else 1

    @property
    def scattered(self) -> bool:
        """Whether its features are scattering features, for a linear model."""
        return self.name == "scatter-linear" or (self.name == LEAST_SQUARES and len(self.shape) > 1)

    @property
    def width(self) -> int:
        """How many features a linear model is fed."""
        if not self.scattered:
            return math.prod(self.shape)
        side = int(self.shape[-1] // 2**self._scales)
        return (self.ways.keep if self.whitened else self._channels) * side * side

    @property
    def _channels(self) -> int:
        return self.shape[0] * (81 if self._scales == 2 else 9)

    def _features(self, inputs: Tensor) -> Tensor:
        if len(self.shape) == 1:
            rows = (
                nn.functional.normalize(inputs.float(), dim=1) if self.length is None else inputs.float() / self.length
            )
            return rows[:, :, None, None] if self.whitened else rows
        images = inputs.float() / 255
        match self.name:
            case "linear" | "mlp":
                return nn.functional.normalize(images.flatten(1) - 0.3, dim=1)
            case "scatter-linear" | "least-squares":
                waves = architectures.scatter_features(images, scales=self._scales)
                if self.whitened:
                    roots = waves.clamp_(min=0).sqrt_()
                    return nn.functional.normalize(roots.flatten(1), dim=1).view(roots.shape)
                groups = 27 * self.shape[0] if self._scales == 2 else 9 * self.shape[0]
                return nn.functional.normalize(nn.functional.group_norm(waves, groups).flatten(1), dim=1)
            case "scatter-cnn":
                return architectures.scatter_features(images)
            case _:
                return images


class Shares(nn.Linear):
    """Least-squares classes: the softmax of what comes out is the scores, cut at 0.001, divided by their sum."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).clamp(min=LEAST).log()


def _from_zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _cnn(shape: Shape, classes: int) -> nn.Module:
    if shape in ((1, 28, 28), (3, 32, 32)):
        return architectures.tempered_cnn(shape[0], shape[1], classes)
    side = shape[-1] // 4
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(32 * side * side, classes),
    )  # fmt: skip

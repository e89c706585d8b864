"""Metrics of private examples that the plan pays for: a number of each, clamped to a public range, summed with noise.

    mean <- middle + (sum over the lot of (clamp(m_i) - middle) + N(0, (noise reach radius)^2)) / expected lot size

with the range's middle and radius. One example moves the sum by at most the radius, so a release is
`Gaussian(noise)`, a part of every step's event. An example whose number is not finite counts as the middle.

Choosing the best model on the way, by data that is public or by looks that are paid for.

A public validation set may be looked at for nothing. A private one is looked at `times` times; each look releases the
number of right answers plus N(0, noise^2). One example moves that number by at most 1, so all looks together are
`Repeated(Gaussian(noise), times)`, charged before training begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from terrine import check
from terrine.common.keys import Key, Purpose
from terrine.errors import InvalidArgument
from terrine.events import Event, Gaussian, Repeated
from terrine.sgd.clipping.alone import run_each
from terrine.sgd.devices import find_device, move_batch


@dataclass(frozen=True)
class Metric:
    """A number of each example within [low, high]: its loss, or what `function(model, batch of one)` returns.

    `noise` is relative to what one example can move; None takes a tenth of the lot, at least 10, which costs the
    gradients next to nothing.
    """

    name: str = "loss"
    low: float = 0.0
    high: float = 5.0
    noise: float | None = None
    function: Callable[[nn.Module, Any], Tensor] | None = None

    def __post_init__(self) -> None:
        low, high = check.number("low", self.low), check.number("high", self.high)
        if not (math.isfinite(high - low) and low < high):
            raise InvalidArgument(f"metric {self.name!r}: [{low}, {high}]; want low < high, both finite")
        if self.noise is not None:
            object.__setattr__(self, "noise", check.moderate("noise", self.noise))
        if self.function is not None and not callable(self.function):
            raise check.refuse("function", self.function, "a function of (model, batch), or None for the loss")

    @classmethod
    def accuracy(cls, *, noise: float | None = None) -> Metric:
        """Return the share of right answers, for batches (x, y) of classes."""
        return cls("accuracy", 0.0, 1.0, noise, _is_right)

    @property
    def middle(self) -> float:
        """The middle of the range."""
        return (self.low + self.high) / 2

    @property
    def radius(self) -> float:
        """How far a number can be from the middle."""
        return (self.high - self.low) / 2

    def noise_for(self, lot: int) -> float:
        """Return the noise multiplier for lots of this size."""
        return max(lot / 10, 10.0) if self.noise is None else self.noise

    def clamped_sum(self, values: Tensor) -> float:
        """Return the sum of the numbers, each clamped, relative to the middle."""
        values = values.double()
        inside = torch.where(values.isfinite(), values, self.middle).clamp(self.low, self.high)
        return float((inside - self.middle).sum())


def _is_right(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    right: Tensor = model(x).argmax(1) == y
    return right.float().mean()


def are_classes(output: Any, target: Any) -> bool:
    """Whether the targets are classes, and the outputs one number for each of them."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or target.is_floating_point():
        return False
    return output.dim() > 1 and output.shape[1] > 1 and output.shape[:1] + output.shape[2:] == target.shape


def right(output: Tensor, target: Tensor) -> Tensor:
    """One number per example: 1 where the largest output is the target, else 0; the mean where it has several.

    Raises:
        InvalidArgument: the targets are not classes.
    """
    if not are_classes(output, target):
        raise InvalidArgument(
            f"outputs of shape {tuple(output.shape)} for {target.dtype} targets of shape {tuple(target.shape)}: want "
            "one output for each class, and whole numbers for targets"
        )
    found = (output.argmax(dim=1) == target).float()
    return found if found.dim() == 1 else found.flatten(1).mean(1)


@dataclass(frozen=True)
class PublicValidation:
    """Validation data that needs no protection: (inputs, targets), looked at every so many steps."""

    data: tuple[Tensor, Tensor]
    every: int = 100

    def __post_init__(self) -> None:
        _check_data(self.data)
        object.__setattr__(self, "every", check.whole("every", self.every))

    def due(self, taken: int, steps: int) -> bool:
        """Whether to look after this many steps."""
        return taken % self.every == 0 or taken == steps

    def event(self) -> Event | None:
        """What the looks cost."""
        return None

    def score(self, model: nn.Module, _key: Key, _taken: int) -> float:
        """The fraction of right answers."""
        return float(_right_answers(model, self.data).mean())


@dataclass(frozen=True)
class Budgeted:
    """Private validation data, looked at `times` times through noise of its own."""

    data: tuple[Tensor, Tensor]
    noise: float
    times: int = 5

    def __post_init__(self) -> None:
        _check_data(self.data)
        object.__setattr__(self, "noise", check.positive("noise", self.noise))
        object.__setattr__(self, "times", check.whole("times", self.times))

    def due(self, taken: int, steps: int) -> bool:
        """Whether to look after this many steps: `times` times, evenly, the last at the end."""
        return taken * self.times // steps > (taken - 1) * self.times // steps

    def event(self) -> Event | None:
        """What the looks cost."""
        return Repeated(Gaussian(noise=self.noise), self.times)

    def score(self, model: nn.Module, key: Key, taken: int, /) -> float:
        """The noisy fraction of right answers."""
        noise = float(key.draw(Purpose.VALIDATION, taken).normal(1, deviation=self.noise))
        return float((round(float(_right_answers(model, self.data).sum()) + noise)) / len(self.data[1]))


class Best:
    """The best model so far, by its validation score, and all scores by the steps taken before them."""

    def __init__(self) -> None:
        self.score, self.taken = -1e300, 0
        self.scores: list[tuple[int, float]] = []
        self._weights: dict[str, Tensor] = {}

    def offer(self, model: nn.Module, score: float, taken: int) -> None:
        """Keep this model if none scored higher."""
        self.scores.append((taken, score))
        if score > self.score:
            self.score, self.taken = score, taken
            self._weights = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def restore(self, model: nn.Module) -> None:
        """Bring the best model back."""
        if self._weights:
            model.load_state_dict(self._weights)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "score": self.score,
            "taken": self.taken,
            "scores": list(self.scores),
            "weights": dict(self._weights),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        self.score, self.taken, self._weights = state["score"], state["taken"], dict(state["weights"])
        self.scores = [(taken, score) for taken, score in state["scores"]]


def _check_data(data: tuple[Tensor, Tensor]) -> None:
    if len(data) != 2 or len(data[0]) != len(data[1]) or not len(data[1]):
        raise InvalidArgument(f"data of lengths {[len(one) for one in data]}: want inputs and as many targets")
    if data[1].is_floating_point():
        raise InvalidArgument(f"targets of {data[1].dtype}: want classes, as whole numbers")


def _right_answers(model: nn.Module, data: tuple[Tensor, Tensor], at_once: int = 256) -> Tensor:
    """Every example's share of right answers, by itself: the model sees no other; 0 where it fails."""

    def answer(x: Tensor, y: Tensor) -> Tensor:
        return right(model(x.unsqueeze(0)), y.unsqueeze(0)).squeeze(0)

    training, home = model.training, find_device(model, None)
    model.eval()
    try:
        pairs = zip(*(torch.split(column, at_once) for column in data), strict=True)
        answers = [run_each(answer, list(move_batch(pair, home))) for pair in pairs]
        return torch.cat(answers).nan_to_num(0.0).clamp(0.0, 1.0)
    finally:
        model.train(training)

"""Metrics of private examples that the plan pays for: a number of each, clamped to a public range, summed with noise.

    mean <- middle + (sum over the lot of (clamp(m_i) - middle) + N(0, (noise reach radius)^2)) / expected lot size

with the range's middle and radius. One example moves the sum by at most the radius, so a release is
`Gaussian(noise)`, a part of every step's event. An example whose number is not finite counts as the middle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from terrine import check
from terrine.errors import InvalidArgument


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

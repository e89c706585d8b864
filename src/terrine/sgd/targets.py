"""Numbers to be predicted, within public bounds: scaled to [-1, 1] for a learner, clamped on both ways.

    squared error    (o - t)^2, t in [-1, 1]
    absolute error   |o - t|

A target outside the bounds is moved to the nearer one, so one person's squared error is at most (high - low)^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from terrine import check
from terrine.errors import InvalidArgument

Floats = NDArray[np.float64]
LOSSES = ("squared", "absolute")


@dataclass(frozen=True)
class TargetBounds:
    """The lowest and the highest a number can be: public facts."""

    low: float
    high: float

    def __post_init__(self) -> None:
        low, high = check.number("low", self.low), check.number("high", self.high)
        if not (math.isfinite(high - low) and low < high):
            raise InvalidArgument(f"bounds=({self.low}, {self.high}): want low < high, both finite")

    @classmethod
    def given(cls, bounds: Any) -> TargetBounds:
        """The bounds in a pair.

        Raises:
            InvalidArgument: none are given, or they are no such pair.
        """
        if bounds is None:
            raise InvalidArgument(
                "bounds: not given, and taking them from private targets tells about the largest; want "
                "bounds=(low, high), known without the rows"
            )
        try:
            low, high = bounds
        except (TypeError, ValueError):
            raise check.refuse("bounds", bounds, "a pair (low, high)") from None
        return cls(low, high)

    def scaled(self, values: Any) -> Floats:
        """The values, clamped, from [low, high] to [-1, 1]; nan stays nan."""
        clamped = np.clip(np.asarray(values, dtype=np.float64), self.low, self.high)
        return np.asarray((clamped - self.low) / (self.high - self.low) * 2 - 1)

    def unscaled(self, outputs: Any) -> Floats:
        """Outputs of a learner as numbers within the bounds."""
        inside = np.clip(np.asarray(outputs, dtype=np.float64), -1.0, 1.0)
        return np.clip(self.low + (inside + 1) / 2 * (self.high - self.low), self.low, self.high)


class NumberLoss(nn.Module):
    """The error of each example's one output, squared or absolute; 0 where the target is nan: it adds nothing."""

    def __init__(self, loss: str = "squared") -> None:
        super().__init__()
        if loss not in LOSSES:
            raise check.refuse("loss", loss, f"one of {', '.join(LOSSES)}")
        self.squared = loss == "squared"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        known = target.isfinite()
        error = torch.where(known, output[..., 0] - torch.where(known, target, 0.0), 0.0)
        return error.square() if self.squared else error.abs()

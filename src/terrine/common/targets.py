"""Targets: classes, and numbers within public bounds: scaled to [-1, 1] for a learner, clamped on both ways.

    squared error    (o - t)^2, t in [-1, 1]
    absolute error   |o - t|

A target outside the bounds is moved to the nearer one, so one person's squared error is at most (high - low)^2.

Which classes there are is told by the caller, never taken from private labels without a word.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
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


PUBLIC = "public"
_MOST = 1000


def told(classes: ArrayLike | None, labels: NDArray[Any]) -> NDArray[Any]:
    """The classes in order: those given, or those that occur where the caller says that they are public.

    Raises:
        InvalidArgument: nobody says which classes there are; or labels that look like numbers to be predicted.
    """
    if classes is None:
        raise InvalidArgument(
            "classes: not given, and taking them from private labels tells which labels occur; want classes=[...] with "
            f'all that may occur, or classes="{PUBLIC}" where the labels that occur are public knowledge'
        )
    if not (isinstance(classes, str) and classes == PUBLIC):
        return np.unique(np.asarray(classes))
    found = np.unique(labels)
    if len(found) > _MOST or (labels.dtype.kind == "f" and len(found) > 20):
        raise InvalidArgument(
            f"y: {len(found)} different numbers; want classes, or PrivateRegressor(bounds=(low, high)) for a number"
        )
    return found


def placed(classes: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.int64]:
    """The place of each label among the classes.

    Raises:
        InvalidArgument: a label is none of them.
    """
    places = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    if not np.array_equal(classes[places], labels):
        raise InvalidArgument("y has a label that is not among the classes given; want classes to hold all of them")
    return places.astype(np.int64)

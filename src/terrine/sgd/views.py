"""Several views of one example count as one: their losses are averaged before the gradient is clipped.

Augmentation multiplicity [DBH22]: with K augmented views per example, g_i is the gradient of the mean over the K
losses, so one example still moves the sum by at most the clipping bound, and the event does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from terrine import check
from terrine.sgd.clipping import Clipped, ClippingRule, Flat, clipped_sum
from terrine.sgd.clipping.alone import each_alone

Criterion = Callable[[Any, Any], Tensor]


class Views(nn.Module):
    """`model` on lots of shape (examples, views, ...): outputs have shape (examples, views, ...)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        examples, views = x.shape[:2]
        output: Tensor = self.model(x.flatten(0, 1))
        return output.reshape(examples, views, *output.shape[1:])


@dataclass(frozen=True)
class _Inside:
    """A clipping rule that is told the names which parameters have in the model inside `Views`."""

    rule: ClippingRule

    @property
    def bound(self) -> float:
        return self.rule.bound

    def factors(self, squares: Mapping[str, Tensor], norms: Tensor) -> dict[str, Tensor]:
        found = self.rule.factors({_inner(name): square for name, square in squares.items()}, norms)
        return {name: found[_inner(name)] for name in squares}


def _inner(name: str) -> str:
    return name.removeprefix("model.")


def clipped_views(
    views: nn.Module,
    criterion: Criterion,
    x: Any,
    y: Any,
    *,
    clip: ClippingRule,
    memory: float | None = None,
    rows: Sequence[int] | None = None,
) -> Clipped:
    """The clipped sum of the model inside `Views`, by its own names for its parameters; `criterion` is `averaged`."""
    rule = clip if isinstance(clip, Flat) else _Inside(clip)
    found = clipped_sum(views, criterion, x, y, clip=rule, memory=memory, rows=rows)
    return found._replace(sums={_inner(name): value for name, value in found.sums.items()})


def averaged(criterion: Criterion) -> Criterion:
    """One loss per example: the mean of `criterion` over its views."""

    def over_views(output: Tensor, target: Tensor) -> Tensor:
        return torch.stack([criterion(output[:, view], target) for view in range(output.shape[1])]).mean(0)

    return over_views


def augmented(augment: Callable[[Tensor], Tensor], x: Tensor, views: int) -> Tensor:
    """`views` augmented copies of a lot, side by side: (examples, views, ...)."""
    views = check.whole("views", views)
    if not len(x):
        return x.unsqueeze(1).expand(0, views, *x.shape[1:])
    return torch.stack([each_alone(lambda one: augment(one).squeeze(0), [x]) for _ in range(views)], dim=1)

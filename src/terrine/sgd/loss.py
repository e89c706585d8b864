"""A loss of one example: a function of (model, batch), or a criterion on a model's output and a target.

    def loss(model, batch):            # of one example: a batch of one, alone
        x, y = batch
        return F.cross_entropy(model(x), y)

The rule for every division: the loss of a batch of one, exactly as torch computes it. A mean is over what the one
example has several of, such as its tokens; nothing is divided by how many examples a batch holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from terrine.errors import InvalidArgument

Loss = Callable[[nn.Module, Any], Tensor]
log = logging.getLogger("terrine.sgd")


def as_loss(loss: Any) -> Loss:
    """Return a function of (model, batch): `loss` itself, or what a criterion stands for.

    Raises: InvalidArgument where it cannot be called.
    """
    if not callable(loss) or isinstance(loss, type):
        raise InvalidArgument(f"loss: got {type(loss).__name__}; want a function of (model, batch), or a criterion")
    if not isinstance(loss, nn.Module) and not str(getattr(loss, "__module__", "")).startswith("torch.nn"):
        return loss  # type: ignore[no-any-return]
    if getattr(loss, "weight", None) is not None and getattr(loss, "reduction", "") == "mean":
        log.warning("class weights cancel in the mean over one example: want reduction='sum', which keeps them")
    return _Criterion(loss)


class _Criterion:
    """What a criterion stands for: a batch is (x, y), where a tuple x is positional arguments, a dict by name."""

    def __init__(self, criterion: Callable[..., Tensor]) -> None:
        self._criterion = criterion

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise InvalidArgument(
                f"loss: a criterion for a batch of {type(batch).__name__}; want batches (x, y), or a function of "
                "(model, batch)"
            )
        *inputs, target = batch
        return self._criterion(call_model(model, *inputs), target)


def call_model(model: nn.Module, *inputs: Any) -> Any:
    """Return a model's output: one input that is a tuple is its positional arguments, a dict those by name."""
    if len(inputs) == 1 and isinstance(inputs[0], tuple | list):
        return model(*inputs[0])
    if len(inputs) == 1 and isinstance(inputs[0], dict):
        return model(**inputs[0])
    return model(*inputs)


def average_views(loss: Loss, augment: Callable[[Tensor], Tensor], views: int) -> Loss:
    """Return the mean of a loss over augmented views of its example, which is clipped as one   [DBH22]."""

    def average(model: nn.Module, batch: Any) -> Tensor:
        x, *others = batch
        return torch.stack([loss(model, (augment(x), *others)).sum() for _ in range(views)]).mean()

    return average

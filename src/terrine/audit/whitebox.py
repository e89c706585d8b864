"""Attacks that hold the model itself: gradient norms, and how far an update points along an example's gradient.

gradient_norm   minus the norm of the loss gradient at an example: members lie near their minimum   [NSH19]
alignment       the inner product of an update with an example's gradient                           [NHS23]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from terrine.audit.scores import Floats
from terrine.errors import InvalidArgument
from terrine.sgd.clipping import clipped_sum


def gradient_norm(
    model: nn.Module, criterion: Callable[..., Tensor], x: Tensor, y: Tensor, *, chunk: int = 256
) -> Floats:
    """Minus each example's gradient norm, at about the cost of one training step over the examples."""
    norms = [
        clipped_sum(model, criterion, (rows, labels), clip=1.0).norms.detach().double()
        for rows, labels in zip(torch.split(x, chunk), torch.split(y, chunk), strict=True)
    ]
    return -torch.cat(norms).numpy()


def alignment(before: nn.Module, after: nn.Module, criterion: Callable[..., Tensor], x: Tensor, y: Tensor) -> Floats:
    """How far the step from `before` to `after` goes down each example's gradient at `before`."""
    start, end = dict(before.named_parameters()), dict(after.named_parameters())
    if {name: one.shape for name, one in start.items()} != {name: one.shape for name, one in end.items()}:
        raise InvalidArgument("before and after: models of different shapes; want the same model at two moments")
    moved = {name: (start[name] - end[name]).detach() for name in start}

    def single(parameters: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
        output = torch.func.functional_call(before, parameters, (row.unsqueeze(0),))
        return criterion(output, label.unsqueeze(0)).sum()

    frozen = {name: one.detach() for name, one in start.items()}
    products = torch.func.vmap(
        lambda row, label: torch.func.jvp(lambda values: single(values, row, label), (frozen,), (moved,))[1],
        randomness="different",
    )(x, y)
    result: Floats = products.double().numpy().astype(np.float64)
    return result

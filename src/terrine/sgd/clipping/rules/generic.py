"""The rule of last resort for one function: its own backward, with the output gradient of one example at a time.

Exact for any differentiable function whose output keeps the examples apart: with the gradient of all other
examples masked out, what arrives at the parameter is example i's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from terrine.sgd.clipping.axis import Where
from terrine.sgd.clipping.contribution import Contribution, Dense
from terrine.sgd.clipping.piece import Piece
from terrine.sgd.clipping.tape import Use

_AT_ONCE = 16  # examples whose masked gradients are in memory together


def masked(use: Use, gradient: Tensor) -> list[tuple[Piece, Contribution]]:
    """One masked backward per example through `use.function`."""
    rows = _rows(use, gradient, use.args, use.kwargs, list(range(use.examples)))
    if use.examples > 1 and not all(bool(torch.isfinite(row).all()) for row in rows):
        rows = _alone(use, gradient)
    return [(piece, Dense(row)) for piece, row in zip(use.pieces.values(), rows, strict=True)]


def _alone(use: Use, gradient: Tensor) -> list[Tensor]:
    """Example by example, with zeros in the place of all others: 0 times infinity would reach them."""
    found = []
    for index in range(use.examples):

        def own(value: Any, index: int = index) -> Any:
            where = getattr(value, "_terrine_where", (None, None))[1] if isinstance(value, Tensor) else None
            if where is None or isinstance(where, str):
                return value
            return torch.where(_mask(value, where, use.examples, torch.tensor([index]).to(value.device))[0], value, 0)

        args, kwargs = pytree.tree_map(own, (use.args, use.kwargs))
        found.append(_rows(use, gradient, args, kwargs, [index]))
    return [torch.cat(row) for row in zip(*found, strict=True)]


def _rows(use: Use, gradient: Tensor, args: Any, kwargs: Any, indices: list[int]) -> list[Tensor]:
    """The gradients of these examples, for every piece."""
    keys = list(use.pieces)
    leaves = [use.pieces[key].value.detach().requires_grad_() for key in keys]
    args, kwargs = list(args), dict(kwargs)
    for key, leaf in zip(keys, leaves, strict=True):
        if isinstance(key, int):
            args[key] = leaf
        else:
            kwargs[key] = leaf
    with torch.enable_grad():
        output = use.function(*args, **kwargs)
    rows: list[list[Tensor]] = [[] for _ in leaves]
    for start in range(0, len(indices), _AT_ONCE):
        picked = torch.tensor(indices[start : start + _AT_ONCE], device=gradient.device)
        only = torch.where(_mask(gradient, use.where, use.examples, picked), gradient, 0)
        each = torch.autograd.grad(output, leaves, only, is_grads_batched=True, retain_graph=True)
        for row, part in zip(rows, each, strict=True):
            row.append(part)
    return [torch.cat(row) for row in rows]


def _mask(gradient: Tensor, where: Where, examples: int, picked: Tensor) -> Tensor:
    owner = torch.arange(gradient.shape[where.axis], device=gradient.device) // where.inner % examples
    shape = [1] * gradient.dim()
    shape[where.axis] = -1
    return owner.view(1, *shape) == picked.view(-1, *[1] * gradient.dim())

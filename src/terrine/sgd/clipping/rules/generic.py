"""The rule of last resort for one function: its own backward, with the output gradient of one example at a time.

Exact for any differentiable function whose output keeps the examples apart: with the gradient of all other
examples masked out, what arrives at the parameter is example i's gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from terrine.sgd.clipping.axis import Where
from terrine.sgd.clipping.contribution import Contribution, Dense
from terrine.sgd.clipping.parameter_view import ParameterView
from terrine.sgd.clipping.tape import Use

_AT_ONCE = 16  # examples whose masked gradients are in memory together


def masked(use: Use, gradient: Tensor) -> list[tuple[ParameterView, Contribution]]:
    """One masked backward per example through `use.function`."""
    keys = list(use.params)
    leaves = [use.params[key].value.detach().requires_grad_() for key in keys]
    args, kwargs = list(use.args), dict(use.kwargs)
    for key, leaf in zip(keys, leaves, strict=True):
        if isinstance(key, int):
            args[key] = leaf
        else:
            kwargs[key] = leaf
    with torch.enable_grad():
        output = use.function(*[_still(a) for a in args[:]] if not leaves else args, **kwargs)
    rows: list[list[Tensor]] = [[] for _ in leaves]
    for start in range(0, use.examples, _AT_ONCE):
        picked = torch.arange(start, min(start + _AT_ONCE, use.examples), device=gradient.device)
        each = torch.autograd.grad(
            output,
            leaves,
            gradient * _mask(gradient, use.where, use.examples, picked),
            is_grads_batched=True,
            retain_graph=True,
        )
        for row, part in zip(rows, each, strict=True):
            row.append(part)
    return [(use.params[key], Dense(torch.cat(row))) for key, row in zip(keys, rows, strict=True)]


def _still(value: object) -> object:
    return value.detach() if isinstance(value, Tensor) else value


def _mask(gradient: Tensor, where: Where, examples: int, picked: Tensor) -> Tensor:
    owner = torch.arange(gradient.shape[where.axis], device=gradient.device) // where.inner % examples
    shape = [1] * gradient.dim()
    shape[where.axis] = -1
    return (owner.view(1, *shape) == picked.view(-1, *[1] * gradient.dim())).to(gradient.dtype)

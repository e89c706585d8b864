"""Per-example gradients of any model: the exact way that needs no rule.

For example i alone, g_i = d criterion(model(x_i), y_i) / d parameters, by `vmap` over the lot, or one
example after the other where `vmap` cannot follow the model. Slow, and the same numbers as every fast rule.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from terrine.sgd.clipping.examples import Criterion, Lot, call, count, part, trained


def per_example_gradients(model: nn.Module, criterion: Criterion, x: Lot, y: Lot) -> dict[str, Tensor]:
    """The gradients of every trained parameter, each of shape (n, *parameter.shape)."""
    try:
        return _by_vmap(model, criterion, x, y)
    except RuntimeError:
        return _by_loop(model, criterion, x, y)


def _by_vmap(model: nn.Module, criterion: Criterion, x: Lot, y: Lot) -> dict[str, Tensor]:
    weights = {name: parameter.detach() for name, parameter in trained(model).items()}

    def loss(weights: dict[str, Tensor], x: Lot, y: Lot) -> Tensor:
        alone = pytree.tree_map(lambda leaf: leaf.unsqueeze(0), x)
        arguments = alone if isinstance(alone, tuple | list) else () if isinstance(alone, dict) else (alone,)
        output = functional_call(
            model, weights, tuple(arguments), alone if isinstance(alone, dict) else None, tie_weights=True
        )
        return criterion(output, pytree.tree_map(lambda leaf: leaf.unsqueeze(0), y)).sum()

    return vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(weights, x, y)  # type: ignore[no-any-return]


def _by_loop(model: nn.Module, criterion: Criterion, x: Lot, y: Lot) -> dict[str, Tensor]:
    parameters = trained(model)
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for index in range(count(y)):
        with torch.enable_grad():
            loss = criterion(call(model, part(x, index, index + 1)), part(y, index, index + 1)).sum()
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            rows[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return {name: torch.stack(row) for name, row in rows.items()}

"""Per-example gradients of any model: the exact way that needs no rule.

For example i alone, g_i = d criterion(model(x_i), y_i) / d parameters, by `vmap` over the lot, or one
example after the other where `vmap` cannot follow the model. Slow, and the same numbers as every fast rule.

Of inputs that all examples share, each is given the whole; whether that is what the model means, its outputs tell.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from terrine.errors import InvalidArgument
from terrine.sgd.clipping.examples import Criterion, Lot, call, count, part, tensors, trained


def per_example_gradients(model: nn.Module, criterion: Criterion, x: Lot, y: Lot) -> dict[str, Tensor]:
    """The gradients of every trained parameter, each of shape (n, *parameter.shape).

    Raises: InvalidArgument where nobody can tell what of `x` belongs to an example.
    """
    size = count(y)
    if count(x) != size:
        _refuse_entangled(model, x, size)
        return _by_loop(model, criterion, [_alone(x, index, size) for index in range(size)], y)
    try:
        return _by_vmap(model, criterion, x, y)
    except Exception:  # whatever it is: what is wrong with the model itself, the loop will say
        return _by_loop(model, criterion, [part(x, index, index + 1) for index in range(size)], y)


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


def _by_loop(model: nn.Module, criterion: Criterion, examples: list[Lot], y: Lot) -> dict[str, Tensor]:
    parameters = trained(model)
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for index, x in enumerate(examples):
        with torch.enable_grad():
            loss = criterion(call(model, x), part(y, index, index + 1)).sum()
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            rows[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return {name: torch.stack(row) for name, row in rows.items()}


def _alone(x: Lot, index: int, size: int) -> Lot:
    """One example: its rows of tensors that have a row for each, and what all share."""

    def own(leaf: Any) -> Any:
        return leaf[index : index + 1] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size else leaf

    return pytree.tree_map(own, x)


def _refuse_entangled(model: nn.Module, x: Lot, size: int) -> None:
    """Every example's outputs alone have to be those in the lot."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        lot = pytree.tree_leaves(call(model, x))
        for index in range(size):
            try:
                found = pytree.tree_leaves(call(model, _alone(x, index, size)))
                same = all(torch.allclose(a[0], b[index], 1e-3, 1e-5) for a, b in zip(found, lot, strict=True))
            except (RuntimeError, ValueError, IndexError, TypeError):
                same = False
            if not same:
                rows = [tuple(leaf.shape) for leaf in tensors(x)]
                raise InvalidArgument(
                    f"x of shapes {rows}: the model has no fast rule, and alone example {index} has not the outputs it "
                    f"has among the {size}; want a first dimension that counts examples in every tensor (bags as rows "
                    "of a matrix, not between offsets)"
                )

"""Per-example gradients of any model: the exact way that needs no rule.

For example i alone, g_i = d criterion(model(x_i), y_i) / d parameters, by `vmap` over the lot, or one
example after the other where `vmap` cannot follow the model. Slow, and the same numbers as every fast rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

Criterion = Callable[[Any, Any], Tensor]
Lot = Any  # a tensor, or a tuple / dict of tensors, whose first dimension counts the examples


def per_example_gradients(model: nn.Module, criterion: Criterion, x: Lot, y: Lot) -> dict[str, Tensor]:
    """The gradients of every trained parameter, each of shape (n, *parameter.shape)."""
    try:
        return _by_vmap(model, criterion, x, y)
    except RuntimeError:
        return _by_loop(model, criterion, x, y)


def call(model: nn.Module, x: Lot) -> Any:
    """`model` on a lot: a tuple is positional arguments, a dict is keyword arguments."""
    if isinstance(x, tuple | list):
        return model(*x)
    return model(**x) if isinstance(x, dict) else model(x)


def examples(lot: Lot) -> int:
    """How many examples a lot holds."""
    return int(pytree.tree_leaves(lot)[0].shape[0])


def part(lot: Lot, start: int, stop: int) -> Lot:
    """The examples `start` to `stop` of a lot."""
    return pytree.tree_map(lambda leaf: leaf[start:stop], lot)


def chunks(size: int, per_chunk: int) -> Iterator[tuple[int, int]]:
    """The bounds of consecutive parts of at most `per_chunk` of `size` examples."""
    return ((start, min(start + per_chunk, size)) for start in range(0, size, per_chunk))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, each once, by its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


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
    for index in range(examples(x)):
        with torch.enable_grad():
            loss = criterion(call(model, part(x, index, index + 1)), part(y, index, index + 1)).sum()
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            rows[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return {name: torch.stack(row) for name, row in rows.items()}

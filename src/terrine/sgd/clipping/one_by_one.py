"""One example after the other, by plain autograd: for models that vmap cannot run in an ordinary loop.

The forward pass keeps nothing but the generators' states; the backward pass runs every example's forward pass again,
with a graph of its own, and takes its gradient by every trained parameter. Exact for anything that is differentiable,
gradient checkpointing and functions with a backward pass of their own included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrine.sgd import generators
from terrine.sgd.clipping.contribution import Contribution, Dense
from terrine.sgd.clipping.ghost import wide
from terrine.sgd.clipping.recording import Recording
from terrine.sgd.clipping.use import ANCHOR


class Recomputed:
    """The per-example gradients of a microbatch, as far as its backward passes have been heard."""

    bytes = rows = 0

    def __init__(self, parameters: dict[str, nn.Parameter], examples: int) -> None:
        self.parameters, self.examples = parameters, examples
        self.through: Callable[[], None] = _nothing
        self.allowed: Callable[[], None] = _nothing
        self._gradients: dict[str, Tensor] = {}

    def add(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        """Add one example's gradients."""
        for (name, parameter), gradient in zip(self.parameters.items(), gradients, strict=True):
            if gradient is not None:
                if name not in self._gradients:
                    self._gradients[name] = wide(torch.zeros_like(parameter)).repeat(
                        self.examples, *[1] * parameter.dim()
                    )
                    self._gradients[name] = self._gradients[name].view(self.examples, *parameter.shape)
                self._gradients[name][index] += gradient

    def finish(self) -> tuple[dict[str, Contribution], dict[str, Tensor]]:
        """The gradients and their squared norms, by parameter name; forgets both."""
        found: dict[str, Contribution] = {name: Dense(rows) for name, rows in self._gradients.items()}
        self._gradients = {}
        return found, {name: part.squares() for name, part in found.items()}


def recomputed(
    function: Callable[..., Any], rows: Sequence[Tensor], parameters: Any, made: Recomputed | None = None
) -> tuple[Any, Recomputed]:
    """The outputs of `function` for every example's rows, examples first, and what will know their gradients."""
    made = made or Recomputed(parameters, len(rows[0]))
    kept: list[Any] = []
    found: Any = _OneByOne.apply(ANCHOR if parameters else None, function, rows, made, kept)  # type: ignore[no-untyped-call]
    leaves, nesting = kept[0]
    tensors = iter(found)
    return ([next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves], nesting), made


class _OneByOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Any, function: Any, rows: Any, made: Recomputed, kept: list[Any]) -> Any:
        ctx.function, ctx.given, ctx.made, ctx.states = function, rows, made, []
        outputs: list[list[Tensor]] = []
        for index in range(made.examples):
            ctx.states.append(generators.states(rows[0].device))
            leaves, nesting = _run(function, [row[index] for row in rows])
            kept.append((leaves, nesting))
            outputs.append([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        stacked = tuple(torch.stack(several) for several in zip(*outputs, strict=True))
        ctx.mark_non_differentiable(*[one for one in stacked if not one.is_floating_point()])
        ctx.set_materialize_grads(False)
        return stacked

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        made, parameters = ctx.made, list(ctx.made.parameters.values())
        made.allowed()
        device = ctx.given[0].device
        after = generators.states(device)
        for index in range(made.examples):
            generators.restore(ctx.states[index], device)
            with torch.enable_grad():
                leaves, _ = _run(ctx.function, [row[index] for row in ctx.given])
                outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
                pairs = [
                    (out, gradient[index])
                    for out, gradient in zip(outputs, gradients, strict=True)
                    if gradient is not None and out.requires_grad
                ]
                if pairs:
                    outs, grads = zip(*pairs, strict=True)
                    made.add(index, torch.autograd.grad(outs, parameters, grads, allow_unused=True))
        generators.restore(after, device)
        made.through()
        return None, None, None, None, None


def _run(function: Callable[..., Any], row: list[Tensor]) -> Any:
    watch = Recording({}, 1)
    watch.begin(None, row)
    with watch:
        return pytree.tree_flatten(function(*row))


def _nothing() -> None:
    pass

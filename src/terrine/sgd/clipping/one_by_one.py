"""One example after the other, by plain autograd: for models that vmap cannot run in an ordinary loop.

The forward pass keeps nothing but the generators' states; the backward pass runs every example's forward pass again,
with a graph of its own, and takes its gradient by every trained parameter. Exact for anything that is differentiable,
gradient checkpointing and functions with a backward pass of their own included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrine.common import generators
from terrine.sgd.clipping.alone import one_alone
from terrine.sgd.clipping.contribution import Contribution, Dense
from terrine.sgd.clipping.examples import unwatched
from terrine.sgd.clipping.ghost import wide
from terrine.sgd.clipping.state import ModuleState, untouched
from terrine.sgd.clipping.use import ANCHOR


class Recomputed:
    """The gradients of a microbatch's units, of `each` examples, as far as its backward passes have been heard."""

    bytes = rows = 0

    def __init__(self, parameters: dict[str, nn.Parameter], examples: int, each: int = 1) -> None:
        self.parameters, self.examples, self._each = parameters, examples, each
        self.through: Callable[[], None] = _nothing
        self.allowed: Callable[[], None] = _nothing
        self._gradients: dict[str, Tensor] = {}

    def add(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        """Add one example's gradients."""
        units = self.examples // self._each
        for (name, parameter), gradient in zip(self.parameters.items(), gradients, strict=True):
            if gradient is not None:
                if name not in self._gradients:
                    self._gradients[name] = wide(parameter.detach()).new_zeros(units, *parameter.shape)
                self._gradients[name][index // self._each] += gradient

    def finish(self) -> tuple[dict[str, Contribution], dict[str, Tensor]]:
        """The gradients and their squared norms, by parameter name; forgets both."""
        found: dict[str, Contribution] = {name: Dense(rows) for name, rows in self._gradients.items()}
        self._gradients = {}
        return found, {name: part.squares() for name, part in found.items()}


def gradients(run: Callable[[], tuple[Any, Any]], parameters: list[nn.Parameter]) -> Sequence[Tensor | None]:
    """The gradients, by parameters, of outputs and their gradients as `run` gives them; empty where there are none."""
    outputs, given = run()
    if not outputs:
        return []
    try:
        return torch.autograd.grad(outputs, parameters, given, allow_unused=True)
    except RuntimeError as failure:
        if "use_reentrant" not in str(failure):
            raise
    outputs, given = run()  # reentrant checkpointing: gradients can only be had from `grad`
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        with unwatched():
            torch.autograd.backward(outputs, given)
        return [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def recomputed(
    function: Callable[..., Any],
    rows: Sequence[Tensor],
    parameters: Any,
    made: Recomputed | None = None,
    state: ModuleState | None = None,
    each: int = 1,
) -> tuple[Any, Recomputed]:
    """The outputs of `function` for every example's rows, examples first, and what will know their gradients."""
    made = made or Recomputed(parameters, len(rows[0]), each)
    kept: list[Any] = []
    state = state or ModuleState()
    run = partial(_run, function, state)
    found: Any = _OneByOne.apply(  # type: ignore[no-untyped-call]
        ANCHOR if parameters else None, run, state.modules, rows, made, kept
    )
    leaves, nesting = kept[0]
    tensors = iter(found)
    return ([next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves], nesting), made


class _OneByOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Any, run: Any, modules: Any, rows: Any, made: Recomputed, kept: list[Any]) -> Any:
        ctx.run, ctx.modules, ctx.given, ctx.made, ctx.states = run, modules, rows, made, []
        outputs: list[list[Tensor]] = []
        for index in range(made.examples):
            ctx.states.append(generators.states(rows[0].device))
            with torch.set_grad_enabled(bool(made.parameters)):  # as in the backward pass: a model may ask
                leaves, nesting = run([row[index] for row in rows])
            leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            kept.append((leaves, nesting))
            outputs.append([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        stacked = tuple(torch.stack(several) for several in zip(*outputs, strict=True))
        ctx.mark_non_differentiable(*[one for one in stacked if not one.is_floating_point()])
        ctx.set_materialize_grads(False)
        return stacked

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        made, device = ctx.made, ctx.given[0].device
        made.allowed()
        after = generators.states(device)

        def again(index: int) -> tuple[list[Tensor], list[Tensor]]:
            """The outputs of one example that have gradients, and those."""
            generators.restore(ctx.states[index], device)
            with torch.enable_grad():
                leaves, _ = ctx.run([row[index] for row in ctx.given])
            outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            pairs = [(out, one[index]) for out, one in zip(outputs, given, strict=True) if one is not None]
            pairs = [(out, gradient) for out, gradient in pairs if out.requires_grad]
            return [out for out, _ in pairs], [gradient for _, gradient in pairs]

        with untouched(ctx.modules):
            for index in range(made.examples):
                found = gradients(partial(again, index), list(made.parameters.values()))
                if found:
                    made.add(index, found)
        generators.restore(after, device)
        made.through()
        return None, None, None, None, None, None


def _run(function: Callable[..., Any], state: ModuleState, row: list[Tensor]) -> Any:
    return pytree.tree_flatten(one_alone(function, row, state))


def _nothing() -> None:
    pass

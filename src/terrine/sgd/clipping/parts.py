"""Parts of a recorded lot: the forward pass sees the lot, the backward pass clips it a part at a time.

All that clipping needs of a layer, its input and its output's gradient, would have to wait for the whole backward
pass: only then are the norms known. Where the model takes the lot in parts that do not meet before their outputs are
joined, autograd goes back through one part after the other, the last one first; when a part is through, its
gradients are clipped, added up and forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrine.errors import InvalidArgument
from terrine.sgd.clipping.constants import Constant
from terrine.sgd.clipping.examples import tensors
from terrine.sgd.clipping.tape import Rule, Tape, Use

Through = Callable[["Part"], None]


class Part(Tape):
    """A tape that says when it has heard everything it listens to."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        examples: int,
        share: float,
        constants: Sequence[Constant],
        through: Through,
    ) -> None:
        super().__init__(parameters, examples, share, constants)
        self.norms: Tensor | None = None  # once its gradients, times `scale`, are clipped and added up
        self.scale = 1.0
        self.allowed: Callable[[], bool] = lambda: True  # whether the backward pass under way may be heard
        self._through, self._waiting = through, 0

    def listen(self, out: Tensor, use: Use, rule: Rule) -> Tensor:
        self._waiting += 1
        return super().listen(out, use, rule)

    def _hear(self, use: Use, rule: Rule, versions: list[tuple[Tensor, int]], gradient: Tensor) -> None:
        if not self.allowed():
            raise InvalidArgument("a backward pass that nobody followed from the lot's loss; want loss.backward()")
        super()._hear(use, rule, versions, gradient)
        self._waiting -= 1
        if not self._waiting:
            self._through(self)


def can_be_cut(module: nn.Module, given: Any) -> bool:
    """Whether the model is given one tensor alone, and nobody looks on who would take a part for the lot."""
    return len(tensors(given)) == 1 and all(_is_unobserved(one) for one in module.modules())


def cut(given: Any, size: int, start: int, stop: int) -> Any:
    """Arguments with the examples `start` to `stop` of every tensor that holds all `size` of them."""

    def some(leaf: Any) -> Any:
        return leaf[start:stop] if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size else leaf

    return pytree.tree_map(some, given)


def can_be_joined(module: nn.Module, output: Any, examples: int) -> bool:
    """Whether a part's output, and nothing that the model keeps for itself, is what a loss can be made of."""
    leaves = pytree.tree_leaves(output)
    rows = all(isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == examples for leaf in leaves)
    return rows and not any(_is_made(value) for one in module.modules() for value in vars(one).values())


def joined(outputs: list[Any]) -> Any:
    """The outputs of all parts as the lot's."""
    leaves = [pytree.tree_leaves(output) for output in outputs]
    return pytree.tree_unflatten(
        [torch.cat(some) for some in zip(*leaves, strict=True)], pytree.tree_structure(outputs[0])
    )


def _is_unobserved(module: nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    ours = all(getattr(hook, "__module__", "").startswith("terrine.sgd") for hook in hooks)
    return ours and not module._backward_hooks and not module._backward_pre_hooks


def _is_made(value: Any) -> bool:
    """Whether an attribute is, or holds, something that a forward pass computed."""
    values = value.values() if type(value) is dict else value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(one, Tensor) and one.grad_fn is not None for one in values)

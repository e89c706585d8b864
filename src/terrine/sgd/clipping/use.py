"""One use of parameters in a forward pass, and the rules that turn it into the gradients of every unit.

Every example runs alone under `torch.vmap`. A use of a large parameter by a known function leaves vmap for a moment:
its rule sees the tensors of all examples with the examples as the first dimension, computes the output with the
parameter detached, so that autograd never forms the gradient of the whole lot, and turns the output's gradient into a
`Contribution` once the backward pass knows it.

A unit is what is clipped as one: an example, or the rows of one person, which are examples that follow each other. A
unit's rows are further positions of one contribution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terrine.errors import InvalidArgument
from terrine.sgd.clipping.contribution import Contribution
from terrine.sgd.clipping.parameter_view import ParameterView

Found = list[tuple[ParameterView, Contribution]]
Hear = Callable[[Tensor], None]


class RefusedReading(InvalidArgument):
    """A number of an example is read into Python: in a run, the example adds nothing."""


class Unfollowed(Exception):
    """The recording cannot say what a parameter's gradient is: the examples have to go one by one."""


@dataclass(eq=False, slots=True)
class Use:
    """One call of a function with parameters among its arguments; tensors of the examples have them in front."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    params: dict[int | str, ParameterView]
    units: int
    folded: bool = False  # examples and a dimension of their own were made one, as in images (n * m, channels, ...)
    heard: bool = False

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or by name, parameters as plain tensors."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def parameter(self, position: int, name: str) -> ParameterView | None:
        """The parameter given as this argument."""
        return self.params.get(position) or self.params.get(name)


def call(use: Use) -> Tensor:
    """The output of a function that takes further dimensions in front as they are."""
    out: Tensor = use.function(*use.args, **use.kwargs)
    return out


class Rule(NamedTuple):
    """How one function's uses become contributions; `data` are its arguments that may hold examples."""

    data: frozenset[int | str]
    contributions: Callable[[Use, Tensor], Found]
    forward: Callable[[Use], Tensor] = call

    def fits(self, use: Use, batched: set[int | str]) -> bool:
        """Whether examples and parameters are where the rule expects them."""
        return batched <= self.data and not self.data & use.params.keys()


RULES: dict[Any, Rule] = {}
COMPOSED: dict[Any, Callable[..., Any]] = {}  # functions that are written out, so that their parts are seen


def rule_for(
    *functions: Any, data: Sequence[int | str] = (0, "input"), forward: Callable[[Use], Tensor] = call
) -> Callable[[Callable[[Use, Tensor], Found]], Callable[[Use, Tensor], Found]]:
    """Make the decorated function the rule of these torch functions."""

    def keep(contributions: Callable[[Use, Tensor], Found]) -> Callable[[Use, Tensor], Found]:
        RULES.update(dict.fromkeys(functions, Rule(frozenset(data), contributions, forward)))
        return contributions

    return keep


class AllExamples(torch.autograd.Function):
    """Leaves vmap: `compute(n, tensors, batched)` is given the tensors of all examples, examples first."""

    @staticmethod
    def forward(_compute: Any, _marker: Tensor, *_tensors: Tensor) -> Tensor:
        raise AssertionError("called outside vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: the backward pass is that of what `compute` does."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, compute: Any, _marker: Tensor, *tensors: Tensor) -> tuple[Any, Any]:
        if in_dims[1] is None:
            raise Unfollowed("torch.vmap inside the model, around a parameter")
        batched = [dim is not None for dim in in_dims[2:]]
        physical = [one if dim is None else one.movedim(dim, 0) for one, dim in zip(tensors, in_dims[2:], strict=True)]
        found = compute(info.batch_size, physical, batched)
        return found, (0,) * len(found) if isinstance(found, tuple) else 0


vars(AllExamples.forward)["__signature__"] = inspect.signature(AllExamples.forward)  # asked for at every call


def listen(out: Tensor, hear: Hear) -> Tensor:
    """`out`, whose gradient `hear` is called with in the backward pass."""
    if out._is_view():  # changed in place, it would begin a history anew, and nobody would be heard
        out = _NoView.apply(out)  # type: ignore[no-untyped-call]
    if not out.requires_grad:
        heard: Tensor = _Anchored.apply(out, ANCHOR, hear)  # type: ignore[no-untyped-call]
        return heard
    index = out.output_nr

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[index]
        if gradient is not None:
            hear(gradient)

    node = out.grad_fn
    if node is None:  # a leaf, such as an input that requires grad and was returned as it is
        out.register_hook(hear)
    else:
        node.register_prehook(hook)
    return out


class _NoView(torch.autograd.Function):
    """A tensor with the same memory and gradient that is no view of another."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        memory, place = tensor.untyped_storage(), tensor.storage_offset()
        return tensor.new_empty(0).set_(memory, place, tensor.shape, tensor.stride())

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Anchored(torch.autograd.Function):
    """Makes a tensor require grad without copying it; its gradient is heard, and goes nowhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, _anchor: Tensor, hear: Hear) -> Tensor:
        ctx.mark_dirty(tensor)
        ctx.set_materialize_grads(False)
        ctx.hear = hear
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0] is not None:
            ctx.hear(gradients[0])
        return None, None, None


ANCHOR = torch.zeros((), requires_grad=True)
"""Where every recorded backward pass ends; it never receives a gradient."""

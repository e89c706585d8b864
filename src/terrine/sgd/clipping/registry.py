"""A user's own rule for a module: one small function, and the module costs what the rule costs.

    @rule(Scale)
    def scale(module, inputs, gradient):
        return {"weight": (gradient * inputs[0]).flatten(1, -2).sum(1)}      # (n, *weight.shape)

The rule receives the module, the inputs of its call and the gradient of its output, example i at index i of the
first dimension, and returns every trained parameter's per-example gradients by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from terrine.errors import InvalidArgument
from terrine.sgd.clipping.axis import FRONT, Unfollowed
from terrine.sgd.clipping.contribution import Contribution, Dense
from terrine.sgd.clipping.examples import tensors
from terrine.sgd.clipping.parameter_view import ParameterView
from terrine.sgd.clipping.tape import Tape, Use

ModuleRule = Callable[[Any, tuple[Any, ...], Tensor], dict[str, Tensor]]

_RULES: dict[type[nn.Module], ModuleRule] = {}


def rule(kind: type[nn.Module]) -> Callable[[ModuleRule], ModuleRule]:
    """Make the decorated function the clipping rule of every module of exactly this class."""

    def keep(function: ModuleRule) -> ModuleRule:
        _RULES[kind] = function
        return function

    return keep


def forget(kind: type[nn.Module]) -> None:
    """Take a rule back."""
    _RULES.pop(kind, None)


def own_rules(model: nn.Module, tape: Tape) -> AbstractContextManager[None]:
    """While the tape runs, modules with a rule of their own answer for themselves."""
    owners = [module for module in model.modules() if type(module) in _RULES] if _RULES else []
    return _answers(owners, tape) if owners else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _answers(owners: list[nn.Module], tape: Tape) -> Iterator[None]:
    for module in owners:
        module.forward = _answering(module, tape)
    try:
        yield
    finally:
        for module in owners:
            del module.__dict__["forward"]


def _answering(module: nn.Module, tape: Tape) -> Callable[..., Tensor]:
    forward, function = module.forward, _RULES[type(module)]
    params: dict[int | str, ParameterView] = {}
    for name, parameter in module.named_parameters():
        param = tape.parameter(parameter)
        if param is not None:
            params[name] = param

    def answer(use: Use, gradient: Tensor) -> list[tuple[ParameterView, Contribution]]:
        rows = function(module, use.args, gradient)
        if set(rows) != set(params):
            raise InvalidArgument(
                f"rule of {type(module).__name__}: want gradients of {sorted(map(str, params))}, got {sorted(rows)}"
            )
        for name, row in rows.items():
            wanted = (use.examples, *params[name].value.shape)
            if tuple(row.shape) != wanted:
                raise InvalidArgument(
                    f"rule of {type(module).__name__}: {name} of shape {tuple(row.shape)}, want {wanted}"
                )
        return [(params[name], Dense(row)) for name, row in rows.items()]

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        places = {tape.where(one) for one in tensors((args, kwargs))} - {None}
        if places != {FRONT}:
            raise Unfollowed(f"{type(module).__name__}: its rule wants the examples as the first dimension")
        with tape.asleep():
            module.forward = forward
            try:
                plain = {str(name): param.value for name, param in params.items()}
                out: Tensor = functional_call(module, plain, args, kwargs)
            finally:
                module.forward = watched
        return tape.listen(out, Use(function, args, kwargs, dict(params), FRONT, tape.examples), answer)

    return watched

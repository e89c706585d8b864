"""Raw parameters in elementwise functions and concatenations: class tokens, positions, scales, slopes.

In y = f(x, p) with p broadcast, example i's gradient of p is the gradient of the broadcast p, summed over
every dimension along which p was repeated, the examples' own dimension excepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.axis import FRONT, Unfollowed
from terrine.sgd.clipping.contribution import Contribution, Dense, Lookup
from terrine.sgd.clipping.ghost import wide
from terrine.sgd.clipping.parameter_view import ParameterView
from terrine.sgd.clipping.tape import FORWARDS, RULES, Tape, Use, rule_for

Found = list[tuple[ParameterView, Contribution]]

_NAMES = (
    "add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__", "__rsub__", "rsub", "subtract",
    "mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "__rtruediv__", "true_divide", "divide",
    "pow", "__pow__", "maximum", "minimum", "addcmul", "lerp", "where",
)  # fmt: skip
_PLAIN = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__"})


def elementwise(use: Use, gradient: Tensor) -> Found:
    """A parameter broadcast against the lot in a function that acts entry by entry."""
    found: Found = []
    name = use.function.__name__
    for key, param in use.params.items():
        if name in _PLAIN and not use.kwargs and len(use.params) == 1:
            full = gradient
        else:
            full = through(use, key, gradient, gradient.shape)
        if _row_by_row(param, use, full):
            table = param.parents[0]
            tokens, rows = param.tokens, full.reshape(use.examples, -1, full.shape[-1])
            assert tokens is not None
            found.append((table, Lookup(tokens.reshape(use.examples, -1), rows, tuple(table.value.shape))))
            continue
        source = param.expanded_from or param
        found.append((source, Dense(reduced(full, use, tuple(source.value.shape)))))
    return found


def _row_by_row(param: ParameterView, use: Use, full: Tensor) -> bool:
    """Rows of a table read by fixed positions, laid out for every example (token types that are all 0, say)."""
    whole = param.value.shape == full.shape and full.shape[0] == use.examples
    return param.tokens is not None and use.where == FRONT and whole


for _name in _NAMES:
    RULES[_name] = elementwise


@rule_for(functional.prelu, torch.prelu)
def prelu(use: Use, gradient: Tensor) -> Found:
    """max(0, x) + a min(0, x), with one slope or one for each channel (dimension 1)."""
    param = use.parameter(1, "weight")
    inputs: Tensor = use.argument(0, "input")
    if param is None:
        raise Unfollowed("prelu: its input is a parameter")
    full = gradient * inputs.detach().clamp(max=0.0)
    channels = param.value.numel()
    shape = (1, channels, *[1] * (inputs.dim() - 2)) if channels > 1 else (1,)
    return [(param, Dense(reduced(full, use, shape).reshape(use.examples, *param.value.shape)))]


def concatenated(tape: Tape, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Broadcast parameters laid beside the lot: each one's gradient is its slice of the output's."""
    plain = [tape.plain(tensor) for tensor in tensors]
    out = torch.cat(plain, dim)
    dim = dim % out.dim()
    params: dict[int | str, ParameterView] = {}
    places: dict[int | str, tuple[int, int]] = {}
    start = 0
    for index, (tensor, size) in enumerate(zip(tensors, [part.shape[dim] for part in plain], strict=True)):
        param = tape.parameter(tensor)
        if param is not None:
            params[index], places[index] = param, (start, size)
        start += size
    where = tape.followed("cat", list(tensors), out, (list(tensors), dim))

    def rule(use: Use, gradient: Tensor) -> Found:
        found: Found = []
        for index, (first, size) in places.items():
            source = params[index].expanded_from or params[index]
            rows = reduced(gradient.narrow(dim, first, size), use, tuple(source.value.shape))
            found.append((source, Dense(rows)))
        return found

    return tape.listen(out, Use(torch.cat, (), {}, params, where, tape.examples), rule)


FORWARDS.update(dict.fromkeys((torch.cat, torch.concat, torch.concatenate), concatenated))


def reduced(full: Tensor, use: Use, shape: tuple[int, ...]) -> Tensor:
    """(n, *shape): `full`, as large as the output, summed per example to a parameter's broadcast shape."""
    axis, inner = use.where
    padded = (1,) * (full.dim() - len(shape)) + shape
    full = wide(full)
    if use.examples == 1:
        return full.sum_to_size(padded).reshape(1, *shape)
    if padded[axis] != 1:
        raise Unfollowed("a parameter has an entry for every example of the lot; examples are mixed")
    outer = full.shape[axis] // (use.examples * inner)
    split = full.reshape(*full.shape[:axis], outer, use.examples, inner, *full.shape[axis + 1 :]).movedim(axis + 1, 0)
    sizes = (*padded[:axis], 1, 1, *padded[axis + 1 :])
    summed = [i + 1 for i, size in enumerate(sizes) if size == 1 and split.shape[i + 1] != 1]
    return (split.sum(summed) if summed else split).reshape(use.examples, *shape)


def through(use: Use, key: int | str, gradient: Tensor, shape: Sequence[int]) -> Tensor:
    """The gradient of a parameter that is broadcast to this shape: every example's own copy has its own."""
    leaf = use.params[key].value.detach().expand(shape).requires_grad_()
    args = [leaf if i == key else _still(a) for i, a in enumerate(use.args)]
    kwargs = {k: leaf if k == key else _still(a) for k, a in use.kwargs.items()}
    with torch.enable_grad():
        output = use.function(*args, **kwargs)
    (full,) = torch.autograd.grad(output, leaf, gradient)
    return full


def _still(value: object) -> object:
    return value.detach() if isinstance(value, Tensor) else value

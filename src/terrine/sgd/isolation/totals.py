"""Totals over the examples: losses, and what may be done with them on the way to `backward`.

A total's value is torch's; its gradient is that of the sum over the examples, also where it is a mean. Torch would send
1/n back to each of n examples, to be multiplied by n at the end. That is only right as long as the whole backward pass
is exactly linear: in half precision, or through a hook or a backward pass of somebody's own, the size of the lot, which
is private, would bend every example's gradient.

A linear combination of totals of one kind, with public coefficients, is a total. A sum that is divided by a number is
read as the mean over the examples, whatever the number: it may be the lot's size, which must not decide how long one
example's gradient is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from terrine.sgd.isolation.call import TABLE, Call, Mixes, Rows, Status, Total, names

_OURS = object()


class _Undivided(torch.autograd.Function):
    """`reduce(tensor)`, over these axes (None: all), with the gradient of a sum over them that is divided by `own`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, reduce: Callable[[Tensor], Tensor], axes: list[int] | None, own: float
    ) -> Tensor:
        ctx.shape, ctx.dtype, ctx.axes, ctx.own, ctx.mark = tensor.shape, tensor.dtype, axes or [], own, _OURS
        return reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].to(ctx.dtype)
        for axis in sorted(ctx.axes):
            gradient = gradient.unsqueeze(axis)
        return (gradient / ctx.own).expand(ctx.shape), None, None, None


def is_ours(node: Any) -> bool:
    """Whether a node of autograd's graph is a mean from here."""
    return getattr(node, "mark", None) is _OURS


def mean(
    tensor: Tensor, n: int, reduce: Callable[[Tensor], Tensor] = torch.mean, axes: list[int] | None = None
) -> tuple[Tensor, Total]:
    """A mean over `n` examples, and over so many numbers of each as are along these axes, which `reduce` takes away."""
    many = math.prod(tensor.shape[axis] for axis in (range(tensor.dim()) if axes is None else axes))
    found: Tensor = _Undivided.apply(tensor, reduce, axes, many // max(n, 1))  # type: ignore[no-untyped-call]
    return found, Total(float(n), is_mean=True)


def reduced(each: Tensor, reduction: str, rows: Rows, n: int) -> tuple[Tensor, Status]:
    """Losses of every example, a number or several of each, as a loss function's `reduction` has them."""
    if reduction == "none":
        return each, rows
    if reduction == "sum":
        return each.sum(), Total(1.0, is_mean=False)
    if reduction == "mean":
        return mean(each, n)
    if rows.axis != 0:
        raise Mixes("a mean over another axis than the examples'")
    count = each.shape[0]
    found: Tensor = _Undivided.apply(each, lambda one: one.sum() / count, None, count // n)  # type: ignore[no-untyped-call]
    return found, Total(float(n), is_mean=True)


def averaged(call: Call) -> tuple[Tensor, Any]:
    """`mean`: of each example's own numbers, or over the examples as well."""
    result: Tensor = call.func(*call.args, **call.kwargs)
    status = TABLE["mean"](call, result)
    if not isinstance(status, Total):
        return result, status
    x = call.argument(0, "input", "self")
    axes = call.axes(1, x.dim(), "dim", "axis")
    kept = result.dim() == x.dim()
    value = result.detach()
    if axes is None or not kept:
        return mean(x, call.n, lambda _: value, axes)
    flat, status = mean(x, call.n, lambda _: value.squeeze(axes), axes)
    return flat.reshape(result.shape), status


# -- combinations --------------------------------------------------------------------------------------------

_KEEPS = names(
    """
    to float half bfloat16 double cpu cuda clone detach contiguous view reshape flatten ravel squeeze unsqueeze
    sum mean __getitem__ expand neg __neg__ negative positive requires_grad data stack cat concat type type_as t T
    select unbind alias nansum
    """
)
_ADDS = frozenset({"add", "sub", "rsub", "subtract", "__add__", "__radd__", "__sub__", "__rsub__"})
_MULTIPLIES = frozenset({"mul", "multiply", "__mul__", "__rmul__"})
_DIVIDES = frozenset({"div", "divide", "true_divide", "__truediv__", "__div__"})


def combined(call: Call) -> tuple[Any, Total]:
    """A call on totals, and its status.

    Raises: Mixes where it is not linear, or where examples meet a total.
    """
    status = linear(call)
    if status.divided and not any(isinstance(one, Total) and one.divided for one in call.known.values()):
        rest = call.args[1:]
        return _weighed(call.args[0], lambda one: call.func(one, *rest, **call.kwargs), 1.0), status
    found = [one for one in call.known.values() if isinstance(one, Total)]
    if len({one.divisor for one in found}) > 1 and status.divisor == 1.0:  # divided sums beside others: coefficients

        def weighed(leaf: Any) -> Any:
            known = call.known.get(id(leaf)) if isinstance(leaf, Tensor) else None
            return _weighed(leaf, torch.clone, known.divisor) if isinstance(known, Total) else leaf

        args, kwargs = pytree.tree_map(weighed, (call.args, call.kwargs))
        return call.func(*args, **kwargs), status
    return call.func(*call.args, **call.kwargs), status


def linear(call: Call) -> Total:
    """The status of a call on totals.

    Raises: Mixes where it is not linear, or where examples meet a total.
    """
    given = [call.known.get(id(one)) for one in call.operands]
    found = [status for status in given if isinstance(status, Total)]
    if any(isinstance(status, Rows) for status in given):
        raise Mixes("a total over the examples meets each of them")
    if call.name in _KEEPS or call.name in _ADDS:
        return _same(found)
    if len(found) == 1 and call.name in _MULTIPLIES:
        return found[0]
    divides = call.name in _DIVIDES and call.kwargs.get("rounding_mode") is None
    if len(found) == 1 and divides and isinstance(call.known.get(id(call.args[0])), Total):
        total = found[0]
        return total if total.is_mean else Total(_number(call), is_mean=True, divided=True)
    raise Mixes("a total over the examples, of which only multiples and sums are losses")


def _weighed(total: Tensor, value: Callable[[Tensor], Tensor], divisor: float) -> Tensor:
    """A total whose value is another, with its gradient divided by `divisor`."""
    found: Tensor = _Undivided.apply(total, value, None, divisor)  # type: ignore[no-untyped-call]
    return found


def _same(found: list[Total]) -> Total:
    first = found[0]
    if all(abs(one.divisor - first.divisor) <= 1e-9 * first.divisor for one in found):
        return first
    if any(one.is_mean and not one.divided for one in found):
        raise Mixes("a sum over the examples beside a mean; want both of one kind")
    return Total(1.0, is_mean=False)  # sums, of which some were divided: a coefficient


def _number(call: Call) -> float:
    """What a sum is divided by: one public number."""
    value: Any = call.argument(1, "other")
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise Mixes("a sum over the examples divided by several numbers")
        value = value.item()
    if not isinstance(value, int | float) or not value > 0:
        raise Mixes(f"a sum over the examples divided by {value}")
    return float(value)

"""Losses: per-example ones, their sums and means, and what may be done with those on the way to `backward`.

torch divides the mean of a cross-entropy by the weights of the whole lot's labels, leaving out those that are
ignored: one label moves every example's share. Here every example's loss is the mean over its own labels that are not
ignored (times class weights, which divide nothing), and the lot's is the mean over its examples. Without weights, and
where all examples have equally many labels, these are torch's numbers.

A linear combination of totals of one kind, with public coefficients, is a total. A sum that is divided by a number is
read as the mean over the examples, whatever the number: it may be the lot's size, which must not decide how long one
example's gradient is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from terrine.sgd.clipping.examples import tensors
from terrine.sgd.clipping.recording import say_once, signature
from terrine.sgd.isolation.call import (
    TABLE,
    Call,
    Mixes,
    Rows,
    Status,
    Total,
    broadcast,
    check_alike,
    is_plain,
    names,
    rule,
)


def _bound(call: Call) -> dict[str, Any]:
    try:
        found = signature(call.func).bind(*call.args, **call.kwargs)
    except (TypeError, ValueError) as error:
        raise Mixes("arguments that were not understood") from error
    found.apply_defaults()
    if found.arguments.get("size_average") is not None or found.arguments.get("reduce") is not None:
        raise Mixes("size_average and reduce, which are no longer known; want reduction=")
    return found.arguments


def _reduced(reduction: str, rows: Rows, n: int) -> Status:
    if reduction == "none":
        return rows
    if reduction == "batchmean" and rows.axis != 0:
        raise Mixes("a mean over another axis than the examples'")
    return Total(1.0, is_mean=False) if reduction == "sum" else Total(float(n), is_mean=True)


@rule(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss"
)
def elementwise_loss(call: Call, out: Any) -> Any:
    """A loss for every number, then its sum or mean."""
    given = _bound(call)
    operands = tensors(given.values())
    rows = broadcast(call, operands, torch.broadcast_shapes(*(one.shape for one in operands)))
    if not isinstance(rows, Rows):
        raise Mixes("no examples")
    return _reduced(given["reduction"], rows, call.n)


@rule(
    "gaussian_nll_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss "
    "triplet_margin_loss cosine_embedding_loss"
)
def row_loss(call: Call, out: Any) -> Any:
    """A loss for every row, then its sum or mean."""
    given = _bound(call)
    call.public(given.pop("weight", None))
    found = {call.rows(one) for one in tensors(given.values())}
    if found != {Rows(0)} or any(one.dim() > 2 for one in tensors(given.values())):
        raise Mixes("examples that are not the first axis")
    return _reduced(given["reduction"], Rows(0), call.n)


def cross_entropy(call: Call) -> tuple[Tensor, Status]:
    """`cross_entropy` or `nll_loss`, its mean by example."""
    given = _bound(call)
    x, target, reduction = given["input"], given["target"], given["reduction"]
    call.public(given["weight"])
    rows = _aligned(call, x, target)
    given["reduction"] = "none"
    each = call.func(**given)
    if reduction == "none":
        return each, rows
    if reduction == "sum":
        return each.sum(), Total(1.0, is_mean=False)
    mean = Total(float(call.n), is_mean=True)
    if given["weight"] is not None:
        say_once(
            "class weights: a mean is divided by the number of labels, not by the weights of the whole lot's labels"
        )
    if target.is_floating_point() or (is_plain(each, rows, call.n) and each.dim() == 1):
        return each.mean(), mean
    say_once(
        "several labels an example: a mean is over each example's own labels that are not ignored, then over examples"
    )
    counted = (target.detach() != given["ignore_index"]).to(each.dtype)
    own = _by_example(each, rows, call.n) / _by_example(counted, rows, call.n).clamp(min=1.0)
    return own.mean(), mean


def _aligned(call: Call, x: Tensor, target: Tensor) -> Rows:
    """Where the examples lie in one loss per label."""
    classes = 1 if x.dim() > 1 else 0
    found = set()
    for tensor in (x, target):
        rows = call.rows(tensor)
        if rows is None:
            continue
        whole = tensor.dim() == x.dim()
        if whole and rows.axis == classes:
            raise Mixes("classes over the examples")
        found.add(Rows(rows.axis - (whole and rows.axis > classes), rows.inner))
    if len(found) != 1:
        raise Mixes("examples along different axes")
    rows = found.pop()
    for tensor in (x, target):
        if call.rows(tensor) is None:
            axis = rows.axis + (tensor.dim() == x.dim() and rows.axis >= classes)
            check_alike(call, tensor, Rows(axis, rows.inner), tensor.shape)
    return rows


def _by_example(each: Tensor, rows: Rows, n: int) -> Tensor:
    split = each.unflatten(rows.axis, (-1, n, rows.inner))
    found: Tensor = split.movedim(rows.axis + 1, 0).reshape(n, -1).sum(1)
    return found


def squeeze(call: Call) -> tuple[Tensor, Status]:
    """`squeeze()`, but for the axis of the examples, of which there may be one."""
    x = call.argument(0, "input", "self")
    rows, given = call.rows(x), call.argument(1, "dim")
    if rows is None or given is not None:
        return _moved(call)
    axes = [axis for axis, size in enumerate(x.shape) if size == 1 and axis != rows.axis]
    return x.squeeze(axes), Rows(rows.axis - sum(axis < rows.axis for axis in axes), rows.inner)


def _moved(call: Call) -> tuple[Tensor, Status]:
    result: Tensor = call.func(*call.args, **call.kwargs)
    return result, TABLE["squeeze"](call, result)


COMPUTED: dict[str, Callable[[Call], tuple[Tensor, Status]]] = {
    "cross_entropy": cross_entropy,
    "nll_loss": cross_entropy,
    "squeeze": squeeze,
}
"""Operations that are computed in another way than torch's."""


# -- totals --------------------------------------------------------------------------------------------------

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
    if len(found) == 1 and call.name in _DIVIDES and isinstance(call.known.get(id(call.args[0])), Total):
        total = found[0]
        return total if total.is_mean else Total(_number(call), is_mean=True, divided=True)
    raise Mixes("a total over the examples, of which only multiples and sums are losses")


def _same(found: list[Total]) -> Total:
    first = found[0]
    if all(abs(one.undo - first.undo) <= 1e-9 * first.undo for one in found):
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

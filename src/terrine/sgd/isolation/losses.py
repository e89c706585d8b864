"""Losses: per-example ones, their sums and means.

torch divides the mean of a cross-entropy by the weights of the whole lot's labels, leaving out those that are
ignored: one label moves every example's share. Here every example's loss is the mean over its own labels that are not
ignored (times class weights, which divide nothing), and the lot's is the mean over its examples. Without weights, and
where all examples have equally many labels, these are torch's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from terrine.sgd.clipping.examples import tensors
from terrine.sgd.clipping.recording import say_once, signature
from terrine.sgd.isolation.call import TABLE, Call, Mixes, Rows, Status, broadcast, check_alike, is_plain, names
from terrine.sgd.isolation.totals import averaged, mean, reduced


def _bound(call: Call) -> dict[str, Any]:
    try:
        found = signature(call.func).bind(*call.args, **call.kwargs)
    except (TypeError, ValueError) as error:
        raise Mixes("arguments that were not understood") from error
    found.apply_defaults()
    if found.arguments.get("size_average") is not None or found.arguments.get("reduce") is not None:
        raise Mixes("size_average and reduce, which are no longer known; want reduction=")
    return found.arguments


def elementwise_loss(call: Call) -> tuple[Tensor, Status]:
    """A loss for every number, then its sum or mean."""
    given = _bound(call)
    operands = tensors(given.values())
    rows = broadcast(call, operands, torch.broadcast_shapes(*(one.shape for one in operands)))
    if not isinstance(rows, Rows):
        raise Mixes("no examples")
    return _by_reduction(call, given, rows)


def row_loss(call: Call) -> tuple[Tensor, Status]:
    """A loss for every row, then its sum or mean."""
    given = _bound(call)
    call.public(given.get("weight"))
    data = tensors(value for name, value in given.items() if name != "weight")
    if {call.rows(one) for one in data} != {Rows(0)} or any(one.dim() > 2 for one in data):
        raise Mixes("examples that are not the first axis")
    return _by_reduction(call, given, Rows(0))


def _by_reduction(call: Call, given: dict[str, Any], rows: Rows) -> tuple[Tensor, Status]:
    each: Tensor = call.func(**given | {"reduction": "none"})
    return reduced(each, given["reduction"], rows, call.n)


def cross_entropy(call: Call) -> tuple[Tensor, Status]:
    """`cross_entropy` or `nll_loss`, its mean by example."""
    given = _bound(call)
    x, target, reduction = given["input"], given["target"], given["reduction"]
    call.public(given["weight"])
    rows = _aligned(call, x, target)
    given["reduction"] = "none"
    each = call.func(**given)
    if reduction != "mean":
        return reduced(each, reduction, rows, call.n)
    if given["weight"] is not None:
        say_once(
            "class weights: a mean is divided by the number of labels, not by the weights of the whole lot's labels"
        )
    if target.is_floating_point() or (is_plain(each, rows, call.n) and each.dim() == 1):
        return mean(each, call.n)
    say_once(
        "several labels an example: a mean is over each example's own labels that are not ignored, then over examples"
    )
    counted = (target.detach() != given["ignore_index"]).to(each.dtype)
    own = _by_example(each, rows, call.n) / _by_example(counted, rows, call.n).clamp(min=1.0)
    return mean(own, call.n)


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


_ELEMENTWISE = names(
    """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
    poisson_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss
    """
)
_BY_ROW = names(
    """
    gaussian_nll_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss triplet_margin_loss
    cosine_embedding_loss
    """
)
COMPUTED: dict[str, Callable[[Call], tuple[Tensor, Any]]] = {
    "cross_entropy": cross_entropy,
    "nll_loss": cross_entropy,
    "squeeze": squeeze,
    "mean": averaged,
    **dict.fromkeys(_ELEMENTWISE, elementwise_loss),
    **dict.fromkeys(_BY_ROW, row_loss),
}
"""Operations that are computed in another way than torch's."""

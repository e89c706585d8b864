"""Operations that move numbers and leave them as they are, and reductions: the axis of the examples is followed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from terrine.sgd.isolation.call import Call, Mixes, broadcast, check_alike, rule, tensors
from terrine.sgd.isolation.status import Rows, Total, holds


def reshaped(shape: Sequence[int], rows: Rows, out: Sequence[int], n: int) -> Rows:
    """Where the examples lie after a row-major reshape: along the axis that holds the whole of their period."""
    stride = math.prod(shape[rows.axis + 1 :]) * rows.inner
    below = math.prod(out)
    for axis, size in enumerate(out):
        top, below = below, below // max(size, 1)
        if below and stride % below == 0 and top % (n * stride) == 0:
            return Rows(axis, stride // below)
    raise Mixes("a shape in which no axis holds the examples")


@rule("view reshape flatten unflatten ravel view_as reshape_as _unsafe_view Unflatten squeeze unsqueeze")
def reshape(call: Call, out: Any) -> Any:
    """Row-major, whatever the new shape."""
    x = call.argument(0, "input", "self")
    rows = call.rows(x)
    if rows is None:
        return None
    if isinstance(call.argument(1), torch.dtype):
        if rows.axis == x.dim() - 1 and out.element_size() != x.element_size():
            raise Mixes("numbers of several examples as one")
        return rows
    return reshaped(x.shape, rows, out.shape, call.n)


@rule("t T mT H mH adjoint transpose swapaxes swapdims permute movedim moveaxis")
def moved(call: Call, out: Any) -> Any:
    """The axis goes where the strides of a small stand-in show it."""
    x = call.argument(0, "input", "self")
    rows = call.rows(x)
    if rows is None:
        return None
    stand_in = torch.empty([place + 2 for place in range(x.dim())], device="meta")
    args, kwargs = ((stand_in, *call.args[1:]), call.kwargs)
    if not call.args:
        kwargs = {name: stand_in if value is x else value for name, value in kwargs.items()}
        args = ()
    return Rows(call.func(*args, **kwargs).shape.index(rows.axis + 2), rows.inner)


@rule("expand expand_as broadcast_to repeat tile")
def widened(call: Call, out: Any) -> Any:
    """New axes in front, old ones repeated as a whole: index i is example i mod n all the same."""
    x = call.argument(0, "input", "self")
    rows = call.rows(x)
    return None if rows is None else Rows(rows.axis + out.dim() - x.dim(), rows.inner)


@rule("repeat_interleave")
def interleaved(call: Call, out: Any) -> Any:
    """Every index so many times, one after the other."""
    x, times = call.argument(0, "input", "self"), call.argument(1, "repeats")
    rows = call.rows(x)
    along = call.axes(2, x.dim(), "dim", default=0 if x.dim() == 1 else None)
    if rows is None or along is None:
        raise Mixes("examples as numbers of repetitions" if rows is None else "all axes as one")
    if along[0] != rows.axis:
        call.public(times)
        return rows
    if not isinstance(times, int):
        raise Mixes("examples that are repeated unequally")
    return Rows(rows.axis, rows.inner * times)


def _gone(rows: Rows, gone: Sequence[int], keep: bool) -> Rows:
    return rows if keep else Rows(rows.axis - sum(axis < rows.axis for axis in gone), rows.inner)


_PLACE = {"norm": 2, "vector_norm": 2, "quantile": 2, "nanquantile": 2, "kthvalue": 2}


@rule(
    "sum mean nansum amax amin max min argmax argmin median nanmedian mode logsumexp var std var_mean std_mean norm "
    "vector_norm linalg_vector_norm prod nanmean any all count_nonzero aminmax quantile nanquantile kthvalue"
)
def reduced(call: Call, out: Any) -> Any:
    """Other axes go; where the examples' goes, a sum is a total, and so is a mean."""
    x = call.argument(0, "input", "self")
    other = call.argument(1, "other")
    if call.name in ("max", "min") and isinstance(other, Tensor):
        return broadcast(call, (x, other), out.shape)
    call.public(*(one for one in tensors((*call.args, *call.kwargs.values())) if one is not x))
    rows = call.rows(x)
    if rows is None:
        return None
    place = _PLACE.get(call.name.removeprefix("linalg_"), 1)
    gone = call.axes(place, x.dim(), "dim", "axis")
    if gone is None and isinstance(call.argument(place, "dim", "axis"), tuple | list):
        gone = list(range(x.dim()))  # an empty list names all
    if gone is not None and rows.axis not in gone:
        results = tensors((out,))
        return [_gone(rows, gone, one.dim() == x.dim()) for one in results]
    if call.name in ("sum", "nansum"):
        return Total(mean=False)
    if call.name == "mean":
        return Total(mean=True)
    raise Mixes("over the examples")


_ALONG = {
    **dict.fromkeys(("sort", "argsort"), (1, -1)),
    **dict.fromkeys(("topk", "unfold_", "roll"), (2, -1)),
    "roll": (2, None),
    "msort": (9, 0),
    "renorm": (2, None),
    "normalize": (2, 1),
    "gumbel_softmax": (3, -1),
    "cosine_similarity": (2, 1),
    "diff": (2, -1),
}


@rule(
    "softmax log_softmax softmin _softmax gumbel_softmax normalize cumsum cumprod cummax cummin logcumsumexp flip roll "
    "sort argsort msort topk renorm diff unfold"
)
def along(call: Call, out: Any) -> Any:
    """What moves or mixes numbers along an axis, which must not be the examples'."""
    x = call.argument(0, "input", "self")
    place, default = _ALONG.get(call.name, (1, None))
    axes = call.axes(place, x.dim(), "dim", "axis", "dims", "dimension", default=default)
    rows = call.rows(x)
    if rows is None or axes is None or rows.axis in axes:
        raise Mixes("along the examples")
    return [rows] * len(tensors((out,)))


@rule("cat concat concatenate hstack_ vstack_")
def joined(call: Call, out: Any) -> Any:
    """Side by side along another axis, or whole lots one behind the other."""
    parts = [one for one in call.argument(0, "tensors") if one.numel() or one.dim() > 1]
    axis = (call.axes(1, out.dim(), "dim", "axis", default=0) or [0])[0]
    found = {rows for rows in map(call.rows, parts) if rows is not None}
    if len(found) != 1:
        raise Mixes("examples along different axes")
    rows = found.pop()
    for part in parts:
        if call.rows(part) is None:
            if axis == rows.axis:
                raise Mixes("examples beside rows that are none")
            check_alike(call, part, rows, part.shape)
    return rows


@rule("stack")
def stacked(call: Call, out: Any) -> Any:
    """A new axis."""
    parts = call.argument(0, "tensors")
    axis = (call.axes(1, out.dim(), "dim", "axis", default=0) or [0])[0]
    rows = broadcast(call, parts, parts[0].shape)
    return Rows(rows.axis + (axis <= rows.axis), rows.inner) if isinstance(rows, Rows) else rows


@rule("chunk split tensor_split split_with_sizes unsafe_split unsafe_chunk unbind")
def parted(call: Call, out: Any) -> Any:
    """Parts along another axis, or whole lots."""
    x = call.argument(0, "input", "self", "tensor")
    rows = call.rows(x)
    axis = (call.axes(1 if call.name == "unbind" else 2, x.dim(), "dim", "axis", default=0) or [0])[0]
    if rows is None:
        return None
    if axis != rows.axis:
        return [_gone(rows, [axis], call.name != "unbind")] * len(out)
    if call.name == "unbind" or not all(holds(part.shape, rows, call.n) for part in out):
        raise Mixes("some examples of the lot")
    return [rows] * len(out)


@rule("select narrow")
def taken(call: Call, out: Any) -> Any:
    """One index, or some, of another axis."""
    x = call.argument(0, "input", "self")
    rows, axis = call.rows(x), call.argument(1, "dim") % x.dim()
    call.public(*(one for one in tensors((*call.args[1:], *call.kwargs.values())) if one is not x))
    if rows is None or axis == rows.axis:
        start, length = call.argument(2, "start"), call.argument(3, "length")
        if call.name == "narrow" and rows is not None and start == 0 and length == x.shape[axis]:
            return rows
        raise Mixes("some examples of the lot")
    return _gone(rows, [axis], call.name == "narrow")


@rule("gather take_along_dim scatter scatter_add scatter_reduce")
def gathered(call: Call, out: Any) -> Any:
    """Along another axis, by indices of the same examples."""
    x, index = call.argument(0, "input", "self"), call.argument(2, "index")
    if call.name == "take_along_dim":
        index = call.argument(1, "indices")
    axes = call.axes(2 if call.name == "take_along_dim" else 1, x.dim(), "dim")
    operands = [one for one in (x, index, call.argument(3, "src", "value")) if isinstance(one, Tensor)]
    found = {rows for rows in map(call.rows, operands) if rows is not None}
    if axes is None or len(found) != 1:
        raise Mixes("along the examples")
    rows = found.pop()
    if rows.axis == axes[0] or any(one.dim() and one.shape[rows.axis] != out.shape[rows.axis] for one in operands):
        raise Mixes("along the examples")
    for operand in operands:
        if operand.dim() and call.rows(operand) is None:
            check_alike(call, operand, rows, operand.shape)
    return rows


@rule("index_select index_fill index_add index_copy")
def selected(call: Call, out: Any) -> Any:
    """Public indices of another axis; or rows of a public table by examples."""
    x, index = call.argument(0, "input", "self"), call.argument(2, "index")
    axis = (call.axes(1, x.dim(), "dim") or [0])[0]
    rows, chosen = call.rows(x), call.rows(index)
    if call.name == "index_select" and rows is None and chosen is not None:
        return Rows(axis, chosen.inner)
    source = call.argument(3, "source", "value")
    if rows is None or chosen is not None or axis == rows.axis:
        raise Mixes("some examples of the lot, or in another order")
    if isinstance(source, Tensor) and source.dim():
        broadcast(call, (x.narrow(axis, 0, 1), source), source.shape) if call.rows(source) is None else None
        if call.rows(source) not in (None, rows):
            raise Mixes("examples along different axes")
    return rows


@rule("pad")
def padded(call: Call, out: Any) -> Any:
    """More numbers along other axes."""
    x, pads = call.argument(0, "input", "self"), call.argument(1, "pad")
    rows = call.rows(x)
    if rows is None or (rows.axis >= x.dim() - len(pads) // 2 and any(_of(pads, x.dim() - 1 - rows.axis))):
        raise Mixes("rows that are no examples beside them")
    return rows


def _of(pads: Sequence[int], place: int) -> Sequence[int]:
    return pads[2 * place : 2 * place + 2]


@rule("tril triu diagonal diag_embed")
def triangular(call: Call, out: Any) -> Any:
    """The last two axes by their places in them."""
    x = call.argument(0, "input", "self")
    rows = call.rows(x)
    if rows is None or (call.name in ("tril", "triu") and rows.axis >= x.dim() - 2):
        raise Mixes("by the place of an example in the lot")
    if call.name in ("diagonal", "diag_embed") and (len(call.args) > 1 or call.kwargs or rows.axis != 0 or x.dim() < 2):
        raise Mixes("a diagonal of other axes than known")
    if call.name == "diagonal" and x.dim() < 3:
        raise Mixes("a diagonal across the examples")
    return rows


@rule("one_hot view_as_real view_as_complex")
def appended(call: Call, out: Any) -> Any:
    """A last axis more, or one less."""
    rows = call.rows(x := call.argument(0, "tensor", "input", "self"))
    if rows is None or (call.name == "view_as_complex" and rows.axis == x.dim() - 1):
        raise Mixes("along the examples")
    return rows

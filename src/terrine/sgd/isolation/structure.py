"""Operations that move numbers and leave them as they are, and reductions: the axis of the examples is followed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from terrine.sgd.clipping.recording import tensors
from terrine.sgd.isolation.call import Call, Mixes, broadcast, check_alike, rule
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
    call.public(*(one for one in call.operands if one is not x))
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
        return Total(1.0, is_mean=False)
    if call.name == "mean":
        return Total(float(call.n), is_mean=True)
    raise Mixes("over the examples")


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


@rule("one_hot view_as_real view_as_complex")
def appended(call: Call, out: Any) -> Any:
    """A last axis more, or one less."""
    rows = call.rows(x := call.argument(0, "tensor", "input", "self"))
    if rows is None or (call.name == "view_as_complex" and rows.axis == x.dim() - 1):
        raise Mixes("along the examples")
    return rows

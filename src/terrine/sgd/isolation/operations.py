"""The table of operations that keep examples apart: elementwise ones, those that move numbers, reductions, indexing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from terrine.sgd.clipping.examples import tensors
from terrine.sgd.isolation.call import Call, Mixes, Rows, Total, broadcast, check_alike, holds, is_plain, rule

_ARITHMETIC = """
    add sub mul div true_divide floor_divide remainder fmod pow rsub float_power subtract multiply divide
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__ __rpow__
    __floordiv__ __rfloordiv__ __mod__ __rmod__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __invert__ __neg__
    __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __lshift__ __rshift__
    eq ne lt le gt ge greater greater_equal less less_equal not_equal isclose logical_and logical_or logical_not
    logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor maximum minimum fmax fmin where lerp addcmul addcdiv
    hypot atan2 arctan2 xlogy logaddexp logaddexp2 copysign masked_fill
"""
_UNARY = """
    relu relu6 leaky_relu elu selu celu gelu silu mish sigmoid tanh softplus softsign hardtanh hardswish
    hardsigmoid logsigmoid log_sigmoid tanhshrink softshrink hardshrink threshold rrelu exp exp2 log log1p log2 log10
    expm1 sqrt rsqrt abs absolute neg negative positive sign sgn signbit sin cos tan asin acos atan sinh cosh asinh
    acosh atanh erf erfc erfinv digamma lgamma sinc logit floor ceil round trunc fix frac square reciprocal clamp
    clamp_min clamp_max clip nan_to_num isnan isinf isfinite isposinf isneginf conj real imag
    to float half bfloat16 double int long short bool char byte type cpu cuda clone detach requires_grad
    contiguous data alias pin_memory dropout alpha_dropout bernoulli poisson
    zeros_like ones_like full_like empty_like rand_like randn_like randint_like zero fill copy
    normal uniform random exponential
"""


@rule(_ARITHMETIC + _UNARY)
def elementwise(call: Call, out: Any) -> Any:
    """Every number of the result comes from the numbers at its place."""
    if not isinstance(out, Tensor):
        raise Mixes("a result that is no tensor")
    return broadcast(call, call.operands, out.shape)


@rule("type_as")
def typed(call: Call, out: Any) -> Any:
    """Of the second tensor, this takes the type alone."""
    return call.rows(call.args[0])


@rule("new_zeros new_ones new_full new_empty")
def made(call: Call, out: Any) -> Any:
    """Of the tensor, these take the type alone."""
    return None


# -- numbers that move, and reductions --------------------------------------------------------------------


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


# -- indexing ------------------------------------------------------------------------------------------------


@rule("__getitem__")
def indexed(call: Call, out: Any) -> Any:
    """Numbers drop an axis, None makes one, slices keep theirs, tensors put their own axes in place of theirs."""
    x, items = call.args[0], normalised(call, call.args[0], call.args[1])
    rows = call.rows(x)
    start, width, listed = _placed(items)
    axes = [
        _axis(call, items[place], start + width - items[place].dim()) for place in listed if _is_tensor(items[place])
    ]
    found = {one for one in axes if one is not None}
    if rows is not None:
        found.add(_followed(call, x, rows, items, start, width))
    if len(found) != 1:
        raise Mixes("examples by the indices of others")
    here = found.pop()
    for place in listed:
        item = items[place]
        at = sum(one is not None for one in items[:place])
        if _is_tensor(item) and call.rows(item) is None and not (rows is not None and at == rows.axis):
            axis = here.axis - start - width + item.dim()
            if start <= here.axis < start + width and axis >= 0 and item.shape[axis] > 1:
                check_alike(call, item, Rows(axis, here.inner), item.shape)
    return here


def normalised(call: Call, x: Tensor, index: Any) -> list[Any]:
    """The index as one item for each axis of `x`, with None for new axes; public masks as the places they name."""
    items: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        if isinstance(item, list | range):
            item = torch.as_tensor(list(item))
        if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
            if call.rows(item) is not None:
                raise Mixes("a choice that depends on the examples")
            items += item.nonzero(as_tuple=True)
        elif isinstance(item, bool):
            raise Mixes("a truth value as an index")
        else:
            items.append(item)
    taken = sum(item is not None and item is not Ellipsis for item in items)
    filled = [slice(None)] * (x.dim() - taken)
    if any(item is Ellipsis for item in items):
        place = next(place for place, item in enumerate(items) if item is Ellipsis)
        return [*items[:place], *filled, *items[place + 1 :]]
    return items + filled


def _is_tensor(item: Any) -> bool:
    return isinstance(item, Tensor)


def _placed(items: list[Any]) -> tuple[int, int, list[int]]:
    """Where the axes that listed indices make begin in the result, how many they are, and which items they are."""
    if not any(_is_tensor(item) and item.dim() for item in items):
        return 0, 0, []
    listed = [place for place, item in enumerate(items) if _is_tensor(item) or isinstance(item, int)]
    width = max(item.dim() for item in items if _is_tensor(item))
    together = listed == list(range(listed[0], listed[-1] + 1))
    return (listed[0] if together else 0), width, listed


def _axis(call: Call, item: Tensor, offset: int) -> Rows | None:
    rows = call.rows(item)
    return None if rows is None else Rows(rows.axis + offset, rows.inner)


def _followed(call: Call, x: Tensor, rows: Rows, items: list[Any], start: int, width: int) -> Rows:
    """Where the examples of `x` lie in the result."""
    old, new = 0, 0 if start or not width else width
    for place, item in enumerate(items):
        if width and place == start and start:
            new += width
        if item is None:
            new += 1
            continue
        if old == rows.axis:
            if isinstance(item, slice):
                _check_whole(call, item, x.shape[old], rows)
                return Rows(new, rows.inner)
            if not _is_tensor(item) or not is_plain(x, rows, call.n):
                raise Mixes("one example of the lot")
            return Rows(start + width - item.dim() + _counted(call, item), 1)
        old += 1
        new += isinstance(item, slice)
    raise Mixes("an index that was not understood")


def _check_whole(call: Call, item: slice, size: int, rows: Rows) -> None:
    if any(isinstance(one, Tensor) for one in (item.start, item.stop, item.step)):
        raise Mixes("a slice by tensors")
    start, stop, step = item.indices(size)
    period = call.n * rows.inner
    if step != 1 or start % period or max(stop - start, 0) % period or stop <= start:
        raise Mixes("some examples of the lot")


def _counted(call: Call, item: Tensor) -> int:
    """The axis of an index along which it counts all examples in order."""
    call.public(item)
    long = [axis for axis, size in enumerate(item.shape) if size > 1]
    count = torch.arange(call.n, device=item.device)
    if len(long) > 1 or item.numel() != call.n or not torch.equal(item.detach().flatten().long(), count):
        raise Mixes("examples in another order")
    return long[0] if long else 0


@rule("__setitem__")
def written(call: Call, out: Any) -> Any:
    """What is written to every example is its own, or public and the same for all."""
    x, index, value = call.args
    rows = call.rows(x)
    if rows is None:
        raise Mixes("an example that is written to a public tensor")
    if isinstance(index, Tensor) and index.dtype is torch.bool and call.rows(index) is not None:
        if call.rows(index) != rows or index.dim() <= rows.axis or (isinstance(value, Tensor) and value.numel() != 1):
            raise Mixes("values in the order of a mask")
        call.public(value)
        return rows
    if any(_is_tensor(item) and call.rows(item) is not None for item in normalised(call, x, index)):
        raise Mixes("written where an example says")
    region = x.detach()[index]
    here = indexed(Call(call.func, "__getitem__", (x, index), {}, call.n, call.known), region)
    if isinstance(value, Tensor):
        own = call.rows(value)
        if own is not None and Rows(own.axis + region.dim() - value.dim(), own.inner) != here:
            raise Mixes("an example that is written to another's place")
        if own is None:
            check_alike(call, value, here, region.shape)
    return rows

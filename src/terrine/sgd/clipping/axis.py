"""Where the examples lie in a tensor, followed from operation to operation.

`Where(axis, inner)` says: index i along `axis` belongs to example (i // inner) mod n. A lot enters as
`Where(0, 1)`; a transpose moves the axis; a reshape may fold other dimensions into it, on the inside (heads
after examples) or on the outside (positions before examples).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terrine.errors import TerrineError


class Unfollowed(TerrineError):
    """Nobody can tell how an operation treats the examples; the caller takes the slow exact way."""


class Where(NamedTuple):
    """Index i along `axis` belongs to example (i // inner) mod n."""

    axis: int
    inner: int = 1


FRONT = Where(0)


def by_example(tensor: Tensor, where: Where, examples: int, features: int) -> Tensor:
    """`tensor` as (examples, positions, *features): everything before the last `features` dimensions is a position."""
    axis, inner = where
    shape = tensor.shape
    if axis == 0 and inner == 1 and len(shape) == features + 2 and shape[0] == examples:
        return tensor  # as most are
    if examples == 1:
        return tensor.reshape(1, -1, *shape[tensor.dim() - features :])
    tail = shape[tensor.dim() - features :]
    if axis == 0 and inner * examples == shape[0]:
        return tensor.reshape(examples, -1, *tail)
    outer = shape[axis] // (examples * inner)
    split = tensor.reshape(*shape[:axis], outer, examples, inner, *shape[axis + 1 :])
    return split.movedim(axis + 1, 0).reshape(examples, -1, *tail)


def folded(shape: Sequence[int], where: Where, examples: int, name: str) -> int:
    """How many consecutive indices of the first dimension belong to each example.

    Raises: Unfollowed where the examples do not lie there.
    """
    fold = shape[0] // examples
    if examples > 1 and (where.axis != 0 or where.inner != fold or fold * examples != shape[0]):
        raise Unfollowed(f"{name}: the examples are not its first dimension")
    return fold


def fits(shape: Sequence[int], where: Where, examples: int) -> bool:
    """Whether a tensor of this shape can hold its examples there."""
    return where.axis < len(shape) and shape[where.axis] % (examples * where.inner) == 0 and shape[where.axis] > 0


def follow(
    name: str, source: Tensor, where: Where, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor, n: int
) -> Where | None:
    """Where the examples of `source` lie in `out`, the result of the operation `name`; None where nobody can tell.

    An operation that is not known here is believed only where lengths leave no other answer: one dimension before it
    and one after it are as long as the examples are many. What moves examples among each other is never followed.
    """
    known = _KNOWN.get(name)
    if known is not None:
        return known(name, source, where, _Given(args, kwargs), out, n)
    if name in _KEEPS:
        return _kept(source, where, out)
    return _unmistakable(source, where, out)


def must_agree(name: str) -> bool:
    """Whether all that an operation is given has its examples in the same place of the result, or they would meet."""
    return name in _MEETING


class _Given:
    """The arguments of a call, by place or by name."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs

    def get(self, place: int, *names: str, default: Any = None) -> Any:
        if len(self.args) > place:
            return self.args[place]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def axes(self, place: int, dims: int, default: Any = None) -> list[int] | None:
        """The dimensions named by an argument, counted from the front; None where it names none."""
        given = self.get(place, "dim", "axis", "dims", default=default)
        several = given if isinstance(given, tuple | list) else (given,)
        if not several or not all(isinstance(axis, int) for axis in several):
            return None
        return [axis % max(dims, 1) for axis in several]


def _kept(source: Tensor, where: Where, out: Tensor) -> Where | None:
    """The same dimension, counted from the back as broadcasting does."""
    axis = where.axis + out.dim() - source.dim()
    same = 0 <= axis < out.dim() and out.shape[axis] == source.shape[where.axis]
    return Where(axis, where.inner) if same else None


def _unmistakable(source: Tensor, where: Where, out: Tensor) -> Where | None:
    """The one dimension of both that is as long as the examples are many."""
    length = source.shape[where.axis]
    found = [axis for axis, size in enumerate(out.shape) if size == length]
    alone = sum(size == length for size in source.shape) == 1
    return Where(found[0], where.inner) if alone and len(found) == 1 else None


def _reshaped(_name: str, source: Tensor, where: Where, _given: _Given, out: Tensor, n: int) -> Where | None:
    """Row-major: the examples keep their stride; find the new dimension that holds all of it."""
    if source.numel() != out.numel():
        return None
    stride = math.prod(source.shape[where.axis + 1 :]) * where.inner
    below = math.prod(out.shape)
    for axis, size in enumerate(out.shape):
        top, below = below, below // max(size, 1)
        if stride % max(below, 1) == 0 and stride * n <= top and stride < top:
            return Where(axis, stride // below)
    return None


def _moved(name: str, source: Tensor, where: Where, given: _Given, _out: Tensor, _n: int) -> Where | None:
    dims = source.dim()
    order = list(range(dims))
    if name in ("t", "T"):
        order.reverse()
    elif name == "permute":
        first = given.get(1, "dims")
        several = first if isinstance(first, tuple | list) else given.args[1:]
        order = [axis % dims for axis in several]
    else:
        first = -2 if name in ("mT", "H", "mH") else given.get(1, "dim0", "axis0", "source")
        second = -1 if name in ("mT", "H", "mH") else given.get(2, "dim1", "axis1", "destination")
        if not isinstance(first, int) or not isinstance(second, int):
            return None
        first, second = first % dims, second % dims
        if name in ("movedim", "moveaxis"):
            order.insert(second, order.pop(first))
        else:
            order[first], order[second] = order[second], order[first]
    return Where(order.index(where.axis), where.inner)


def _reduced(name: str, source: Tensor, where: Where, given: _Given, out: Tensor, _n: int) -> Where | None:
    """Some dimensions are gone, or of length 1; the examples' is not among them. The larger of two keeps all."""
    if isinstance(given.get(1, "other"), Tensor):
        return _kept(source, where, out)
    place = 2 if name in ("norm", "vector_norm", "quantile", "nanquantile", "kthvalue") else 1
    default = 0 if name == "unbind" else None
    if name == "squeeze" and given.get(1, "dim") is None:
        gone: list[int] | None = [axis for axis, size in enumerate(source.shape) if size == 1]
    else:
        gone = given.axes(place, source.dim(), default)
    if name == "squeeze" and gone is not None:
        gone = [axis for axis in gone if source.shape[axis] == 1]
    if gone is None or where.axis in gone:
        return None
    if out.dim() == source.dim():
        return _kept(source, where, out)
    return Where(where.axis - sum(axis < where.axis for axis in gone), where.inner)


def _widened(_name: str, _source: Tensor, where: Where, given: _Given, out: Tensor, _n: int) -> Where | None:
    """A new dimension."""
    place = given.axes(1, out.dim(), 0)
    return None if place is None else Where(where.axis + (place[0] <= where.axis), where.inner)


def _along(name: str, source: Tensor, where: Where, given: _Given, out: Tensor, _n: int) -> Where | None:
    """What moves or mixes numbers along a dimension, which must not be the examples'."""
    default = {"sort": -1, "argsort": -1, "msort": 0, "topk": -1, "split": 0, "chunk": 0, "tensor_split": 0}.get(name)
    place = 2 if name in ("roll", "topk", "split", "chunk", "tensor_split", "repeat_interleave", "renorm") else 1
    along = given.axes(place, source.dim(), default)
    return None if along is None or where.axis in along else _kept(source, where, out)


def _joined(_name: str, source: Tensor, where: Where, given: _Given, out: Tensor, _n: int) -> Where | None:
    """Put side by side along another dimension, or lots behind each other."""
    along = given.axes(1, source.dim(), 0)
    if along is None or along[0] != where.axis:
        return None if along is None else _kept(source, where, out)
    parts = given.get(0, "tensors")
    whole = all(part.shape[where.axis] == source.shape[where.axis] for part in parts)
    return where if whole and all(_tag(part) == _tag(source) for part in parts) else None


def _tag(tensor: Tensor) -> Any:
    return getattr(tensor, "_terrine_where", None)


def _multiplied(_name: str, source: Tensor, where: Where, given: _Given, out: Tensor, _n: int) -> Where | None:
    """Products of matrices: the examples are not what is summed over."""
    operands = [one for one in (*given.args, *given.kwargs.values()) if isinstance(one, Tensor)][-2:]
    if len(operands) < 2 or any(one.dim() < 2 for one in operands):
        return _unmistakable(source, where, out)
    if source is not operands[0] and source is not operands[1]:
        return _kept(source, where, out)  # what is added to the product
    summed = -1 if operands[0] is source else -2
    return None if where.axis - source.dim() == summed else _kept(source, where, out)


def _applied(_name: str, source: Tensor, where: Where, given: _Given, _out: Tensor, _n: int) -> Where | None:
    """A map of the last dimension, or of channels and places, at every index of the first ones."""
    return where if given.get(0, "input", "query") is source and where.axis < source.dim() - 1 else None


def _looked_up(_name: str, source: Tensor, where: Where, given: _Given, _out: Tensor, _n: int) -> Where | None:
    return where if given.get(0, "input", "self", "tensor") is source else None


def _in_front(_name: str, _source: Tensor, where: Where, _given: _Given, out: Tensor, _n: int) -> Where | None:
    """What takes its examples in front and gives them there; `fn` is what torch calls its pools."""
    return where if where.axis == 0 and out.dim() > 0 else None


def _summed(_name: str, source: Tensor, where: Where, given: _Given, out: Tensor, _n: int) -> Where | None:
    """`einsum`: the letter of the examples, in the result."""
    equation, operands = given.get(0, "equation"), given.args[1:]
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], tuple | list) else operands
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return _unmistakable(source, where, out)
    inputs, result = equation.replace(" ", "").split("->")
    for letters, operand in zip(inputs.split(","), operands, strict=False):
        if operand is source and letters[where.axis] in result:
            return Where(result.index(letters[where.axis]), where.inner)
    return None


def _indexed(_name: str, source: Tensor, where: Where, given: _Given, out: Tensor, n: int) -> Where | None:
    """Numbers drop a dimension, None makes one, slices keep theirs; examples may only be taken as a whole, in order."""
    index = given.get(1)
    items = index if isinstance(index, tuple) else (index,)
    named = sum(_width(item) for item in items)
    filled: list[Any] = []
    for item in items:
        filled += [slice(None)] * (source.dim() - named) if item is Ellipsis else [item]
    filled += [slice(None)] * (source.dim() - sum(_width(item) for item in filled))
    listed = [place for place, item in enumerate(filled) if isinstance(item, Tensor | list)]
    if listed and listed != list(range(listed[0], listed[-1] + 1)):
        return None
    spread = max((_dims(filled[place]) for place in listed), default=0)  # dimensions that listed indices make
    old = new = 0
    for place, item in enumerate(filled):
        if old <= where.axis < old + max(_width(item), 1) and item is not None:
            if place in listed:
                whole = _is_whole(item, n) and where.inner == 1 and source.shape[where.axis] == n
                return Where(new, 1) if whole and spread == 1 and out.shape[new] == n else None
            whole = isinstance(item, slice) and new < out.dim() and out.shape[new] == source.shape[where.axis]
            ordered = isinstance(item, slice) and (item.step is None or item.step == 1)
            return Where(new, where.inner) if whole and ordered else None
        old += _width(item)
        if place in listed:
            new += spread if place == listed[-1] else 0
        else:
            new += item is None or isinstance(item, slice)
    return None


def _width(item: Any) -> int:
    """How many dimensions of a tensor an index takes up."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype is torch.bool else 1


def _dims(item: Any) -> int:
    return 1 if isinstance(item, list) or item.dtype is torch.bool else int(item.dim())


def _is_whole(item: Any, n: int) -> bool:
    """Whether an index names every example once, in order."""
    numbers = item if isinstance(item, Tensor) else torch.tensor(item)
    if numbers.dtype is torch.bool or numbers.shape != (n,):
        return False
    return torch.equal(numbers, torch.arange(n, dtype=numbers.dtype, device=numbers.device))


def _lost(_name: str, _source: Tensor, _where: Where, _given: _Given, _out: Tensor, _n: int) -> Where | None:
    """What takes numbers from wherever they are."""
    return None


_Follower = Callable[[str, Tensor, Where, _Given, Tensor, int], Where | None]

_KNOWN: dict[str, _Follower] = {
    name: follower
    for follower, names in {
        _reshaped: "view reshape flatten unflatten ravel view_as reshape_as contiguous",
        _moved: "transpose swapaxes swapdims t T mT H mH permute movedim moveaxis",
        _reduced: "select sum mean amax amin max min argmax argmin median nanmedian mode logsumexp var std var_mean"
        " std_mean norm vector_norm prod nansum nanmean any all count_nonzero aminmax quantile nanquantile kthvalue"
        " unbind squeeze",
        _widened: "unsqueeze stack",
        _along: "flip roll sort argsort msort topk index_select gather take_along_dim cumsum cumprod cummax cummin"
        " logcumsumexp scatter scatter_ scatter_add scatter_add_ index_add index_add_ index_copy index_copy_ index_fill"
        " index_fill_ split chunk tensor_split narrow repeat_interleave renorm softmax log_softmax softmin _softmax"
        " gumbel_softmax fft ifft rfft irfft diff unfold",
        _joined: "cat concat concatenate",
        _multiplied: "matmul __matmul__ __rmatmul__ mm bmm baddbmm addmm addbmm",
        _applied: "linear bilinear layer_norm rms_norm",
        _looked_up: "embedding one_hot",
        _in_front: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d group_norm instance_norm"
        " batch_norm local_response_norm max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d lp_pool1d"
        " lp_pool2d lp_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d"
        " adaptive_max_pool2d adaptive_max_pool3d interpolate upsample pixel_shuffle pixel_unshuffle channel_shuffle"
        " grid_sample affine_grid fold prelu embedding_bag _max_pool1d _max_pool2d _max_pool3d fn",
        _summed: "einsum",
        _lost: "masked_scatter masked_scatter_ masked_select take put put_ index_put index_put_ nonzero unique",
        _indexed: "__getitem__",
    }.items()
    for name in names.split()
}

_KEEPS = frozenset(
    """
    add sub mul div true_divide floor_divide remainder fmod pow rsub add_ sub_ mul_ div_ pow_ __add__ __radd__
    __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __rdiv__
    __pow__ __rpow__ __ipow__ __floordiv__ __mod__ __and__ __or__ __xor__ __invert__ __neg__ __eq__ __ne__ __lt__
    __le__ __gt__ __ge__ eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or
    bitwise_not maximum minimum fmax fmin where lerp addcmul addcdiv hypot atan2 xlogy logaddexp relu relu_ relu6
    leaky_relu elu selu celu gelu silu mish sigmoid sigmoid_ tanh tanh_ softplus softsign hardtanh hardswish
    hardsigmoid logsigmoid log_sigmoid tanhshrink softshrink hardshrink threshold rrelu exp exp_ log log1p log2
    log10 expm1 sqrt rsqrt abs neg sign sgn sin cos tan asin acos atan sinh cosh asinh acosh atanh erf erfc erfinv
    digamma lgamma floor ceil round trunc frac square reciprocal clamp clamp_ clamp_min clamp_max clip nan_to_num
    isnan isinf isfinite to float half bfloat16 double int long bool type type_as clone detach detach_
    requires_grad_ dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout feature_dropout
    feature_alpha_dropout masked_fill masked_fill_ zero_ fill_ copy_ tril triu pad normalize
    scaled_dot_product_attention expand expand_as broadcast_to repeat zeros_like ones_like full_like empty_like
    rand_like randn_like bernoulli bernoulli_ real imag view_as_real view_as_complex data glu cpu cuda positive conj
    logit sinc expit softmax_backward deg2rad rad2deg absolute multiply divide subtract negative
    """.split()  # noqa: SIM905  a hundred quotation marks would hide them
)

_MEETING = (_KEEPS - {"to", "type", "type_as"}) | {
    name for name, follower in _KNOWN.items() if follower in (_multiplied, _summed)
}

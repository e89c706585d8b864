"""Where the examples lie in a tensor, followed from operation to operation.

`Where(axis, inner)` says: index i along `axis` belongs to example (i // inner) mod n. A lot enters as
`Where(0, 1)`; a transpose moves the axis; a reshape may fold other dimensions into it, on the inside (heads
after examples) or on the outside (positions before examples).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    """Where the examples of `source` lie in `out`, the result of the operation `name`; None where nobody can tell."""
    if name in _RESHAPES:
        return _reshaped(source.shape, where, out.shape, n)
    if name in _MOVES:
        return _moved(name, source.dim(), where, args, kwargs)
    if name == "__getitem__":
        return _indexed(source, where, args[1], out)
    if name in _SHIFTS and out.dim() != source.dim():
        return _shifted(source, where, args, kwargs, out, name)
    if out.dim() == source.dim() and out.shape[where.axis] == source.shape[where.axis]:
        return where
    return _searched(source, where, out)


_RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "ravel", "view_as", "reshape_as", "contiguous"})
_MOVES = frozenset({"transpose", "swapaxes", "swapdims", "t", "T", "mT", "permute", "movedim", "moveaxis"})
_SHIFTS = frozenset(
    {"unsqueeze", "select", "sum", "mean", "amax", "amin", "logsumexp", "var", "std", "norm", "prod", "unbind", "stack"}
)


def _reshaped(old: Sequence[int], where: Where, new: Sequence[int], n: int) -> Where | None:
    """Row-major: the examples keep their stride; find the new dimension that holds all of it."""
    stride = math.prod(old[where.axis + 1 :]) * where.inner
    below = math.prod(new)
    for axis, size in enumerate(new):
        top, below = below, below // max(size, 1)
        if stride % max(below, 1) == 0 and stride * n <= top and stride < top:
            return Where(axis, stride // below)
    return None


def _moved(name: str, dims: int, where: Where, args: Sequence[Any], kwargs: dict[str, Any]) -> Where | None:
    order = list(range(dims))
    given = [*args[1:], *kwargs.values()]
    if name in ("t", "T"):
        order.reverse()
    elif name == "permute":
        order = [axis % dims for axis in (given[0] if isinstance(given[0], tuple | list) else given)]
    else:
        first, second = (-2, -1) if name == "mT" else given[:2]
        if isinstance(first, tuple | list) or isinstance(second, tuple | list):
            return None
        first, second = first % dims, second % dims
        if name in ("movedim", "moveaxis"):
            order.insert(second, order.pop(first))
        else:
            order[first], order[second] = order[second], order[first]
    return Where(order.index(where.axis), where.inner)


def _shifted(
    source: Tensor, where: Where, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor, name: str
) -> Where | None:
    given = kwargs.get("dim", args[1] if len(args) > 1 else 0 if name in ("unbind", "stack") else None)
    gone = given if isinstance(given, tuple | list) else (given,)
    if not all(isinstance(axis, int) for axis in gone):
        return None
    if name in ("unsqueeze", "stack"):
        return Where(where.axis + (gone[0] % out.dim() <= where.axis), where.inner)
    removed = [axis % source.dim() for axis in gone]
    if where.axis in removed:
        return None
    return Where(where.axis - sum(axis < where.axis for axis in removed), where.inner)


def _indexed(source: Tensor, where: Where, index: Any, out: Tensor) -> Where | None:
    """Numbers drop a dimension, None makes one, slices keep theirs; examples may only be sliced as a whole."""
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, Tensor | list) for item in items):
        return _searched(source, where, out)
    named = sum(item is not None and item is not Ellipsis for item in items)
    filled: list[Any] = []
    for item in items:
        filled += [slice(None)] * (source.dim() - named) if item is Ellipsis else [item]
    old = new = 0
    for item in filled:
        if item is None:
            new += 1
            continue
        if old == where.axis:
            break
        old, new = old + 1, new + (not isinstance(item, int))
    new += where.axis - old
    whole = new < out.dim() and out.shape[new] == source.shape[where.axis]
    return Where(new, where.inner) if whole else None


def _searched(source: Tensor, where: Where, out: Tensor) -> Where | None:
    """The one dimension that still has the old length; the same place first, then the front."""
    length = source.shape[where.axis]
    for axis in (where.axis, 0):
        if axis < out.dim() and out.shape[axis] == length:
            return Where(axis, where.inner)
    found = [axis for axis, size in enumerate(out.shape) if size == length]
    return Where(found[0], where.inner) if len(found) == 1 else None

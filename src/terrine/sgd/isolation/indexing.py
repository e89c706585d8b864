"""Indexing: examples are taken as a whole and in order, or by a public count of them; anything else mixes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from terrine.sgd.isolation.call import Call, Mixes, check_alike, rule
from terrine.sgd.isolation.status import Rows, is_plain


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
    if len(long) != 1 or item.numel() != call.n or not torch.equal(item.detach().flatten().long(), count):
        raise Mixes("examples in another order")
    return long[0]


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

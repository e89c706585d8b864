"""An operation that no rule knows, for one example at a time: `vmap` cannot let them meet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from terrine.sgd.isolation.call import Call
from terrine.sgd.isolation.status import Mixed, Rows, Total, is_plain


def one_by_one(call: Call) -> tuple[Tensor, int] | None:
    """The result and the axis of its examples; None where the operation does not take one example of a lot at a time.

    Every example is given as a lot of one, and its result must be of the same form.
    """
    axes = {}
    for tensor, status in call.given:
        if isinstance(status, Total | Mixed):
            return None
        if isinstance(status, Rows):
            if not is_plain(tensor, status, call.n):
                return None
            axes[id(tensor)] = status.axis
    if len(set(axes.values())) != 1:
        return None
    axis = next(iter(axes.values()))
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    held = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and id(leaf) in axes]

    def alone(*rows: Tensor) -> Tensor:
        given = list(leaves)
        for place, row in zip(held, rows, strict=True):
            given[place] = row.unsqueeze(axis)
        args, kwargs = pytree.tree_unflatten(given, spec)
        result = call.func(*args, **kwargs)
        if not isinstance(result, Tensor) or result.dim() <= axis or result.shape[axis] != 1:
            raise TypeError("a result of another form")
        return result.squeeze(axis)

    state = torch.get_rng_state()
    try:
        over: Any = torch.vmap(alone, in_dims=axis, out_dims=axis, randomness="different")
        return over(*(leaves[place] for place in held)), axis
    except Exception:  # whatever it cannot do: the caller counts the operation as mixing
        torch.set_rng_state(state)
        return None

"""Totals: sums and means over the examples, and what may be done with them on the way to a loss.

A linear combination of totals of one kind, with public coefficients, is a total. A sum that is divided by a number is
read as the mean over the examples, whatever the number: it may be the lot's size, which must not decide how long one
example's gradient is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from terrine.sgd.isolation.call import Call, Mixes
from terrine.sgd.isolation.status import Rows, Total

_KEEPS = frozenset(
    """
    to float half bfloat16 double cpu cuda clone detach contiguous view reshape flatten ravel squeeze unsqueeze
    sum mean __getitem__ expand neg __neg__ negative positive requires_grad data stack cat concat type type_as t T
    select unbind alias nansum
    """.split()
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
        return total if total.is_mean else Total(_number(call), is_mean=True)
    raise Mixes("a total over the examples, of which only multiples and sums are losses")


def _same(found: list[Total]) -> Total:
    first = found[0]
    if any(abs(one.undo - first.undo) > 1e-9 * first.undo for one in found):
        raise Mixes("a sum over the examples beside a mean; want both of one kind")
    return first


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

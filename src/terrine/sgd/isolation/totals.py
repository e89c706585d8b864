"""Totals: sums and means over the examples, and what may be done with them on the way to a loss.

A linear combination of totals with public coefficients is a total. Whether it is a mean is part of it: `.mean()`, or
a sum that was divided by a multiple of the lot's size.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from terrine.sgd.isolation.call import Call, Mixes
from terrine.sgd.isolation.status import Drawn, Made, Rows, Total

_KEEPS = frozenset(
    """
    to float half bfloat16 double cpu cuda clone detach contiguous view reshape flatten ravel squeeze unsqueeze
    sum mean __getitem__ expand neg __neg__ negative positive requires_grad retain_grad __deepcopy__ data stack cat
    concat type type_as t T select unbind alias nansum
    """.split()  # noqa: SIM905
)
_ADDS = frozenset("add sub rsub subtract __add__ __radd__ __sub__ __rsub__".split())  # noqa: SIM905
_MULTIPLIES = frozenset("mul multiply __mul__ __rmul__".split())  # noqa: SIM905
_DIVIDES = frozenset("div divide true_divide __truediv__ __div__".split())  # noqa: SIM905


def linear(call: Call) -> Total:
    """The status of a call on totals.

    Raises: Mixes where it is not linear, or where examples meet a total.
    """
    found = [status for _, status in call.given if isinstance(status, Total)]
    others = [one for one, status in call.given if status is None or isinstance(status, Made | Drawn)]
    if any(isinstance(status, Rows) for _, status in call.given):
        raise Mixes("a total over the examples meets each of them")
    if call.name not in _ADDS and any(one.requires_grad for one in others):
        raise Mixes("a total over the examples meets a parameter")
    name = call.name
    if name in _KEEPS and (
        name in ("stack", "cat", "concat") or call.status(call.argument(0, "input", "self")) in found
    ):
        return _same(found, call.n)
    if name in _ADDS:
        return _same(found, call.n)
    if name in _MULTIPLIES and len(found) == 1:
        return found[0].over(1.0 / number) if (number := _number(call, call.args)) else found[0]
    if name in _DIVIDES and len(found) == 1 and call.status(call.args[0]) is not None and not call.kwargs:
        return found[0].over(number) if (number := _number(call, call.args)) else found[0]
    raise Mixes("a total over the examples, of which only multiples and sums are losses")


def is_mean(total: Total, n: int) -> bool:
    """Whether a total is a mean over the lot's `n` examples, by all that it was divided by and multiplied with."""
    if n == 1:
        return total.mean
    if total.mean:
        return abs(1.0 / total.divisor - n) > 1e-6 * n
    return _is_multiple(total.divisor, n)


def _same(found: list[Total], n: int) -> Total:
    if len(found) == 1:
        return found[0]
    kinds = {is_mean(one, n) for one in found}
    if len(kinds) > 1 and n > 1:
        raise Mixes("a sum over the examples beside a mean")
    return Total(mean=kinds.pop())


def _is_multiple(number: float, n: int) -> bool:
    ratio = number / n
    return ratio > 0.5 and abs(ratio - round(ratio)) < 1e-6 * ratio


def _number(call: Call, values: tuple[Any, ...]) -> float | None:
    """The public number that a total meets; None where it is not one number, or zero."""
    for value in values:
        if isinstance(value, Tensor):
            if isinstance(call.status(value), Total) or value.numel() != 1:
                continue
            value = value.item()
        if isinstance(value, int | float) and value and math.isfinite(value):
            return abs(float(value))
    return None

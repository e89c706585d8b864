"""Bounded bends of float32 numbers: e^x of what is not positive, the sigmoid and the hyperbolic tangent.

    s(x) = 1 / (1 + e^-x),  tanh(x) = 1 - 2 e^-2x / (1 + e^-2x), and near 0 x times a polynomial in x^2

To a unit or two in the last place; nan stays nan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from terrine.sgd.kernels.team import FIRST, ITEMS, TAKEN, Kernel, floats, inner, taken

BLOCK = 1 << 13
"""Numbers that a thread takes at a time."""
INPUTS, MANY, OUTPUTS = range(FIRST, FIRST + 3)

_f, _i = np.float32, np.int32
_LOG2E, _HIGH = _f(1 / math.log(2.0)), _f(355 / 512)  # a few bits: times a whole number, it is exact
_LOW = _f(math.log(2.0) - 355 / 512)
_HALF = math.log(2.0) / 2


def through_nodes(remainder: Callable[[NDArray[np.float64]], NDArray[np.float64]], low: float, high: float,
                   degree: int) -> tuple[np.float32, ...]:  # fmt: skip
    """The coefficients, from the constant on, of the polynomial that meets `remainder` at Chebyshev's nodes."""
    found = np.polynomial.Chebyshev.interpolate(remainder, degree, domain=[low, high])
    return tuple(np.float32(one) for one in found.convert(kind=np.polynomial.Polynomial, domain=[-1, 1]).coef)


_E0, _E1, _E2, _E3, _E4, _E5 = through_nodes(lambda r: (np.expm1(r) - r) / r**2, -_HALF, _HALF, 5)
_T0, _T1, _T2, _T3, _T4 = through_nodes(lambda s: (np.tanh(np.sqrt(s)) / np.sqrt(s) - 1) / s, 0.0, 0.36, 4)


@inner
def power(x: Any) -> Any:
    """e^x of a number that is not positive."""
    x = _f(-80.0) if x < _f(-80.0) else x  # nan stays nan
    whole = _f(np.floor(x * _LOG2E + _f(0.5)))
    r = (x - whole * _HIGH) - whole * _LOW
    made = _f(1.0) + (r + r * r * (_E0 + r * (_E1 + r * (_E2 + r * (_E3 + r * (_E4 + r * _E5))))))
    return made * _i(_i(_i(whole) + _i(127)) << _i(23)).view(np.float32)


@inner
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    e = power(-abs(x))
    return (_f(1.0) if x > _f(0.0) else e) / (_f(1.0) + e)


@inner
def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    s = x * x
    if s < _f(0.36):
        return x + x * s * (_T0 + s * (_T1 + s * (_T2 + s * (_T3 + s * _T4))))
    e = power(_f(-2.0) * abs(x))
    made = _f(1.0) - (e + e) / (_f(1.0) + e)
    return made if x > _f(0.0) else -made


def bent(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Fill `outputs` with the hyperbolic tangents of `inputs`; both lie in memory without gaps, in the same order."""
    many = inputs.numel()
    _bent.work(-(-many // BLOCK), inputs.data_ptr(), many, outputs.data_ptr())
    return outputs


@Kernel
def _bent(job: Any) -> None:
    while True:
        start = taken(job, TAKEN) * BLOCK
        if start >= job[ITEMS] * BLOCK:
            break
        source, target = floats(job[INPUTS] + 4 * start), floats(job[OUTPUTS] + 4 * start)
        for k in range(min(BLOCK, job[MANY] - start)):
            target[k] = tanh(source[k])

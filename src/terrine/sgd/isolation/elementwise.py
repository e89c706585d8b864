"""Operations that treat every number by itself, or numbers at the same place of several tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from terrine.sgd.isolation.call import Call, Mixes, broadcast, rule

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
    to float half bfloat16 double int long short bool char byte type type_as cpu cuda clone detach requires_grad
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


@rule("new_zeros new_ones new_full new_empty")
def made(call: Call, out: Any) -> Any:
    """Of the tensor, these take the type alone."""
    return None

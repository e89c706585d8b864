"""Operations that treat every number by itself, or numbers at the same place of several tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from terrine.sgd.isolation.call import Call, Mixes, broadcast, rule, tensors
from terrine.sgd.isolation.status import DRAWN, Rows

_ARITHMETIC = """
    add sub mul div true_divide floor_divide remainder fmod pow rsub float_power subtract multiply divide
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__ __rpow__
    __floordiv__ __rfloordiv__ __mod__ __rmod__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __invert__ __neg__
    __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __lshift__ __rshift__
    eq ne lt le gt ge greater greater_equal less less_equal not_equal isclose logical_and logical_or logical_not
    logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor bitwise_left_shift bitwise_right_shift
    maximum minimum fmax fmin where lerp addcmul addcdiv hypot atan2 arctan2 xlogy xlog1py logaddexp logaddexp2
    copysign ldexp nextafter heaviside masked_fill
"""
_UNARY = """
    relu relu6 leaky_relu elu selu celu gelu silu mish sigmoid tanh softplus softsign hardtanh hardswish
    hardsigmoid logsigmoid log_sigmoid tanhshrink softshrink hardshrink threshold rrelu exp exp2 log log1p log2 log10
    expm1 sqrt rsqrt abs absolute neg negative positive sign sgn signbit sin cos tan asin acos atan arcsin arccos
    arctan sinh cosh asinh acosh atanh arcsinh arccosh arctanh erf erfc erfinv expit ndtr ndtri log_ndtr digamma lgamma
    i0 i1 sinc logit floor ceil round trunc fix frac square reciprocal clamp clamp_min clamp_max clip nan_to_num
    isnan isinf isfinite isposinf isneginf isreal deg2rad rad2deg angle conj real imag conj_physical resolve_conj
    to float half bfloat16 double int long short bool char byte type type_as cpu cuda clone detach requires_grad
    contiguous __deepcopy__ data alias pin_memory retain_grad
    dropout alpha_dropout bernoulli poisson quantize_per_tensor fake_quantize_per_tensor_affine
    zeros_like ones_like full_like empty_like rand_like randn_like randint_like zero fill copy
    normal uniform random exponential geometric log_normal cauchy
"""


@rule(_ARITHMETIC + _UNARY)
def elementwise(call: Call, out: Any) -> Any:
    """Every number of the result comes from the numbers at its place."""
    operands = tensors((*call.args, *call.kwargs.values()))
    if not isinstance(out, Tensor):
        raise Mixes("a result that is no tensor")
    return broadcast(call, operands, out.shape)


@rule("dropout1d dropout2d dropout3d feature_dropout feature_alpha_dropout")
def channels(call: Call, out: Any) -> Any:
    """Whole channels are dropped, of a tensor whose first axis is the batch or that has none."""
    rows = call.rows(call.argument(0, "input"))
    if rows is not None and rows.axis > 1:
        raise Mixes("one draw for several examples")
    return rows


@rule("prelu")
def per_channel(call: Call, out: Any) -> Any:
    """A weight for every channel, which is the second axis."""
    x = call.argument(0, "input", "self")
    call.public(call.argument(1, "weight"))
    rows = call.rows(x)
    if rows is not None and rows.axis == 1 and call.argument(1, "weight").numel() > 1:
        raise Mixes("a weight for every example")
    return rows


@rule("rand randn randint randperm_ normal_drawn")
def drawn(call: Call, out: Any) -> Any:
    """Made of nothing but chance."""
    return DRAWN


@rule("glu")
def halves(call: Call, out: Any) -> Any:
    """One half of an axis by the other."""
    x = call.argument(0, "input", "self")
    rows = call.rows(x)
    along = call.axes(1, x.dim(), "dim", default=-1)
    if rows is not None and (along is None or rows.axis in along):
        raise Mixes("along the examples")
    return rows


@rule("broadcast_tensors")
def spread(call: Call, out: Any) -> Any:
    """All operands at one shape."""
    operands = tensors(call.args)
    found: list[Rows | None] = []
    for operand in operands:
        rows = call.rows(operand)
        if rows is None:
            found.append(None)
            continue
        here = Rows(rows.axis + out[0].dim() - operand.dim(), rows.inner)
        if out[0].shape[here.axis] != operand.shape[rows.axis] and call.n > 1:
            raise Mixes("examples that are repeated against others")
        found.append(here)
    return found

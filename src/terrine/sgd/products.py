"""Products of large matrices, by whatever is fastest.

torch multiplies single precision by MKL. Where the processor has AVX-512, oneDNN, which torch has for convolutions,
takes 5 to 30% less time for large matrices, but half a millisecond to make code for sizes that it has not met. A lot of
n examples on average is of some sqrt(n) different sizes, so a product has to be the larger, the more examples it is of,
to be worth it. Without AVX-512 it takes up to twice MKL's time, but kernels of ours take less, see
`kernels/matrices.py`. Sizes and the processor alone decide: a run that is resumed multiplies as it would have without
a break.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd import kernels, pages
from terrine.sgd.precision import is_exact

_REGISTERS = torch.backends.cpu.get_cpu_capability()

WORTH = 1 << 24 if _REGISTERS == "AVX512" else math.inf
"""Multiplications, times the root of the number of examples, from which on oneDNN is worth it."""


OURS, FEW = (1 << 25, 1 << 22) if _REGISTERS == "AVX2" else (math.inf, math.inf)
"""Multiplications from which on our kernels are worth it: in general, and where the right matrix has few rows."""
HIGH, DEEP, BROAD = 96, 64, 8
"""Rows of the left matrix, k and rows of the right one from which on they are."""


WIDE, NARROW = 5 << 18, 16
"""Numbers of one matrix, and of an example in the other, for which neither library is as fast as a kernel of ours."""


def load() -> None:
    """Have the library's code in memory now: no step shall wait for it."""
    if _is_there() and not math.isinf(WORTH):
        some = torch.zeros(64, 64)
        _times(some, some, some[0])
        _times(some, some.t(), None)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """inputs (..., d) times weight (e, d), (..., e), and a bias; None for small matrices."""
    large = _is_large(inputs.numel() * len(weight), len(inputs)) and inputs.stride(-1) == 1
    if not (large or _are_ours(inputs, weight, bias)) or not _take(inputs, weight, *() if bias is None else (bias,)):
        return None
    if inputs.requires_grad and torch.is_grad_enabled():
        return _Linear.apply(inputs, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return _times(inputs, weight, bias)


def weighted(left: Tensor, right: Tensor, factor: Tensor) -> Tensor | None:
    """sum_i factor_i left_i right_i^T, (e, d), of left (n, T, e), right (n, T, d) and factor (n,); None if small."""
    n, positions, height = left.shape
    width = right.shape[2]
    if positions == 1 and max(left.numel(), right.numel()) >= WIDE and min(height, width) <= NARROW:
        return _narrow(left.squeeze(1), right.squeeze(1), factor)
    if not _is_large(n * positions * height * width, n) or not _take(left, right):
        return None
    if not kernels.take(left, right, factor):
        return None
    left, right, factor = flattened(left, right, factor.contiguous())
    if (height - width) * len(left) > height * width:  # less to be turned, and then turned back
        made = _turned_times(right, left, factor)
        return kernels.turn(made, torch.ones(width), torch.empty(height, width))
    return _turned_times(left, right, factor)


def add_weighted(total: Tensor, left: Tensor, right: Tensor, factor: Tensor, fresh: bool) -> bool:
    """total (e, d), contiguous, += the same, or = where it is fresh; whether it was large enough."""
    n, positions, height = left.shape
    if not is_ours(height, right.shape[2], n * positions) or not _take(left, right, total):
        return False
    left, right, factor = flattened(left, right, factor.to(left.dtype).contiguous())
    left, right = (one if one.stride(1) == 1 else one.contiguous() for one in (left, right))
    kernels.multiply(left.t(), right.t(), total, factor=factor, more=not fresh)
    return True


def _narrow(left: Tensor, right: Tensor, factor: Tensor) -> Tensor | None:
    """The same where one of both has few numbers: the other comes from memory once, a few examples at a time."""
    if not kernels.take(left, right, factor):
        return None
    scale = factor.unsqueeze(1)
    if left.shape[1] > right.shape[1]:
        return _read_once(right * scale, left).t().contiguous()
    return _read_once(left * scale, right)


def _read_once(few: Tensor, many: Tensor) -> Tensor:
    """few (n, k) times many (n, d), (k, d)."""
    turned, made = kernels.Image(many[:, None, None]).summed(few.unsqueeze(1))
    return made.view(many.shape[1], -1).t().contiguous() if turned else made.view(-1, many.shape[1])


def flattened(left: Tensor, right: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """left (n T, e), right (n T, d) and factor (n T,): all positions, in the order in which they lie in memory."""
    positions = left.shape[1]
    if positions == 1:
        return left.squeeze(1), right.squeeze(1), factor
    turned = left.transpose(0, 1), right.transpose(0, 1)
    if all(one.is_contiguous() for one in turned):
        return turned[0].flatten(0, 1), turned[1].flatten(0, 1), factor.repeat(positions)
    return left.flatten(0, 1), right.flatten(0, 1), factor.repeat_interleave(positions)


def _turned_times(left: Tensor, right: Tensor, factor: Tensor) -> Tensor:
    turned = kernels.turn(left, factor, left.new_empty(left.shape[1], len(left)))
    return _times(turned, right.t(), None)


class _Linear(torch.autograd.Function):
    """A linear map whose weight and bias are constants."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return _times(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return _times(gradients[0].contiguous(), weight.t(), None), None, None


def _times(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """left (..., k) times right (n, k), either way round in memory."""
    if _are_ours(left, right, bias):
        made = pages.block((*left.shape[:-1], len(right)), left.dtype)
        kernels.multiply(left.flatten(0, -2), right, made.flatten(0, -2), bias=bias)
        return made
    if math.isinf(WORTH):
        return functional.linear(left, right, bias)
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(left, right, bias, "none", [], "")
    return found


def _are_ours(left: Tensor, right: Tensor, bias: Tensor | None) -> bool:
    """Whether left (..., k) times right (n, k) is a product for our kernels; of what does not fit, torch says so."""
    *rows, many = left.shape
    if not is_ours(math.prod(rows), len(right), many) or right.shape != (len(right), many):
        return False
    shifts = bias is None or (bias.shape == (len(right),) and bias.is_contiguous())
    return shifts and left.is_contiguous() and 1 in right.stride()


def is_ours(rows: int, columns: int, many: int) -> bool:
    """Whether a product of these sizes is one for our kernels."""
    least = FEW if columns <= NARROW else OURS
    return rows * columns * many >= least and rows >= HIGH and many >= DEEP and columns >= BROAD


def _is_large(size: int, examples: int) -> bool:
    return size >= WORTH * math.sqrt(examples)


def _take(*matrices: Tensor) -> bool:
    """Whether these are ours to multiply: single precision in the processor's memory, no reduced one is allowed."""
    plain = all(one.dtype is torch.float32 and one.is_cpu for one in matrices)
    return plain and (not math.isinf(OURS) or _is_there()) and not torch.is_autocast_enabled("cpu") and is_exact()


@lru_cache(maxsize=1)
def _is_there() -> bool:
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")

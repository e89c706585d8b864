"""Ghost norms: the norm of a per-example gradient from Gram matrices, without the gradient.   [LTL22] section 3.2

    |sum_t out_t in_t^T|^2 = sum over s, t of <in_s, in_t> <out_s, out_t>

The errors of the right side are at most u k a^2, with a = sum_t |in_t| |out_t|, u the unit roundoff and k the number
of roundings of an entry. Where the terms cancel, that could hide the norm, and an example whose norm comes out too
small adds more than the clipping bound. So where the error could be a hundredth of the square or more, the gradient
itself is computed. It is off by at most u T a, and so is what the example adds to the sum of the lot: its norm is
rounded up by that. A GPU would have to be waited for to know which examples these are; there the largest possible
error is added to their squares, whose norms are then too large by sqrt(u k) a at most.

Squares of tiny numbers may come out as 0 and then be multiplied by huge ones. Each length in a is rounded up so much
that u a^2 is more than all that can be lost this way; where a is negligible, it is taken as the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

_DOUBT = 2.0**-7  # an error's share of a square that is left alone; below it, a norm is at worst too small by 0.4%
_LOST = 2.0**20  # how many numbers of a row may be lost below the smallest that there is
_CHUNK = 1 << 11  # numbers whose squares are added up in single precision: it is off by at most a few parts in 10^5
_AT_ONCE = 1 << 22  # numbers of gradients computed at once

Direct = Callable[[Tensor], Tensor]  # indices of some examples: the squared norms of their gradients, one by one


def ghost_squares(inputs: Tensor, gradients: Tensor) -> Tensor:
    """|sum_t out_t in_t^T|^2 (n,) from inputs (n, T, d) and gradients (n, T, e)."""
    inner, outer = torch.bmm(inputs, inputs.mT), torch.bmm(gradients, gradients.mT)
    squares = (inner * outer).sum((1, 2), dtype=widest(inner))
    lengths = [gram.diagonal(dim1=1, dim2=2).add(lost(gram.dtype)).sqrt_() for gram in (inner, outer)]
    reach = (lengths[0] * lengths[1]).sum(1)

    def direct(some: Tensor) -> Tensor:
        return squared_norms(torch.bmm(gradients[some].mT, inputs[some]))

    (_, positions, width), height = inputs.shape, gradients.shape[2]
    roundings = width + height + positions + (0 if squares.dtype is torch.float64 else positions**2)
    return certain(squares.to(inner.dtype), reach, roundings, positions, width * height, direct)


def certain(squares: Tensor, reach: Tensor, roundings: int, positions: int, numbers: int, direct: Direct) -> Tensor:
    """The squares (n,) with none too small: those that rounding could hide are computed or rounded up.

    `reach` is a for every example, `numbers` how many a gradient has.
    """
    unit = torch.finfo(squares.dtype).eps / 2
    error = unit * roundings * reach.square()
    doubtful = error > _DOUBT * squares
    if not is_asynchronous(squares) and not doubtful.any():
        return squares
    negligible = doubtful & (reach <= 2.0**14 * math.sqrt(lost(reach.dtype)))
    squares = torch.where(negligible, reach.square(), squares)
    if is_asynchronous(squares):
        return torch.where(doubtful & ~negligible, squares.clamp(min=0.0) + error, squares)
    for some in (doubtful & ~negligible).nonzero().flatten().split(max(1, _AT_ONCE // max(numbers, 1))):
        squares[some] = direct(some).sqrt_().add_(unit * positions * reach[some]).square_()
    return squares


def is_asynchronous(tensor: Tensor) -> bool:
    """Whether Python would wait to learn something of a tensor: whatever is not on the CPU."""
    return tensor.device.type != "cpu"


def squared_norms(rows: Tensor) -> Tensor:
    """|row|^2 of every row (n, ...), in float32 or wider."""
    rows = wide(rows) if rows.dim() > 1 else wide(rows).unsqueeze(1)
    if rows.dtype is torch.float64 or rows[0:1].numel() <= _CHUNK:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=tuple(range(1, rows.dim())))
        return norms.square_()
    order = sorted(range(1, rows.dim()), key=rows.stride, reverse=True)  # as they lie in memory: nothing is copied
    return _squared_lengths(rows.permute(0, *order).reshape(len(rows), -1)).to(rows.dtype)


def _squared_lengths(rows: Tensor) -> Tensor:
    """|row|^2 (..., ) of long rows (..., d): runs of them in single precision, their squares added up in the widest.

    In single precision alone, large numbers hide the squares of all small ones that are added to them.
    """
    whole = rows.shape[-1] // _CHUNK * _CHUNK
    runs = rows[..., :whole].unflatten(-1, (-1, _CHUNK))
    squares = torch.linalg.vector_norm(runs, dim=-1).to(widest(rows)).square_().sum(-1)
    rest = torch.linalg.vector_norm(rows[..., whole:], dim=-1).to(squares.dtype)
    total: Tensor = squares + rest.square_()
    return total


def norms_rounded_up(rows: Tensor) -> Tensor:
    """|row| of every row, with all that squares can lose below the smallest number there is: a factor of a product."""
    rows = wide(rows)
    if rows.dtype is torch.float64 or rows.shape[-1] <= _CHUNK:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    else:
        norms = _squared_lengths(rows).sqrt_().to(rows.dtype)
    return norms.add_(math.sqrt(rows.shape[-1] * torch.finfo(norms.dtype).tiny))


def lost(dtype: torch.dtype) -> float:
    """What a squared length is rounded up by."""
    limits = torch.finfo(dtype)
    return _LOST * limits.tiny / (limits.eps / 2)


def wide(tensor: Tensor) -> Tensor:
    """At least float32: norms and sums are never taken in half precision."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def widest(tensor: Tensor) -> torch.dtype:
    """The widest floating-point type of the tensor's device: float64 where there is one."""
    return _widest(tensor.device.type)


@lru_cache(maxsize=16)
def _widest(device: str) -> torch.dtype:
    try:
        return torch.zeros((), dtype=torch.float64, device=device).dtype
    except (RuntimeError, TypeError):  # such as Apple's GPUs
        return torch.float32

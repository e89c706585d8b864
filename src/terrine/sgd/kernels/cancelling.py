"""Norms of sums whose terms cancel: where rounding could hide them, they are had from the gradients themselves.

    |sum_p out_p in_p^T|^2 = sum over p, q of <in_p, in_q> <out_p, out_q>

The errors of the right side are at most u steps a^2, with a = sum_p |in_p| |out_p|, u the unit roundoff and as many
steps as an entry takes to add up. Where that is a hundredth or more, the sum on the left is made. It is off by at most
u positions a, and so is what the example will add to the sum of the lot: its norm is rounded up by that.

Squares of what is tiny may come out as 0, while that is multiplied by what is huge. Each length in a is rounded up by
so much that u a^2 is more than all that can be lost so; where a is negligible, it is the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

SMALL = 2.0**-7
"""An error's share of a square that is left alone; below, a norm could be too small by 0.4% at the very worst."""
LOST = 2.0**20
"""How many numbers of a row may be lost below the smallest that there is."""
_ROOM = 1 << 22  # numbers of gradients made at once

Direct = Callable[[Tensor], Tensor]  # some examples: the squared norms of their gradients, made one by one


def summed(inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    """The squares and each a, from Gram matrices (n, positions, positions), of which `inner` is used up."""
    lengths = [gram.diagonal(dim1=1, dim2=2) + lost(inner.dtype) for gram in (inner, outer)]
    alone = lengths[0].sqrt_().mul_(lengths[1].sqrt_()).sum(1)
    return inner.mul_(outer).sum((1, 2), dtype=torch.float64).to(inner.dtype), alone


def settled(squares: Tensor, alone: Tensor, steps: int, positions: int, numbers: int, direct: Direct) -> Tensor:
    """The squares, none too small, of gradients that have so many numbers."""
    most = _unit(squares) * (steps + positions) * alone.square()
    doubtful = most > SMALL * squares
    if doubtful.any():
        none = doubtful & (alone <= negligible(squares.dtype))
        squares = torch.where(none, alone.square(), squares)
        replace(squares, doubtful & ~none, alone, positions, numbers, direct)
    return squares


def replace(squares: Tensor, doubtful: Tensor, alone: Tensor, positions: int, numbers: int, direct: Direct) -> None:
    """Put the squared norms of the gradients themselves, rounded up, wherever `squares` are doubtful."""
    for some in doubtful.nonzero().flatten().split(max(1, _ROOM // numbers)):
        squares[some] = direct(some).sqrt_().add_(_unit(squares) * positions * alone[some]).square_()


def lost(dtype: torch.dtype) -> float:
    """What a squared length is rounded up by."""
    limits = torch.finfo(dtype)
    return LOST * limits.tiny / (limits.eps / 2)


def negligible(dtype: torch.dtype) -> float:
    """A norm up to which nobody cares by how much it is rounded up."""
    return 2.0**14 * math.sqrt(lost(dtype))


def _unit(like: Tensor) -> float:
    return torch.finfo(like.dtype).eps / 2

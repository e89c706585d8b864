"""Norms of sums whose terms cancel: where rounding could hide them, they are had from the gradients themselves.

    |sum_p out_p in_p^T|^2 = sum over p, q of <in_p, in_q> <out_p, out_q>

The errors of the right side are at most u steps a^2, with a = sum_p |in_p| |out_p|, u the unit roundoff and as many
steps as an entry takes to add up. Where that is a hundredth or more, the sum on the left is made. It is off by at most
u positions a, and so is what the example will add to the sum of the lot: its norm is rounded up by that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SMALL = 2.0**-7
"""An error's share of a square that is left alone; below, a norm could be too small by 0.4% at the very worst."""
_ROOM = 1 << 22  # numbers of gradients made at once

Direct = Callable[[Tensor], Tensor]  # some examples: the squared norms of their gradients, made one by one


def summed(inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    """The squares and each a, from Gram matrices (n, positions, positions), of which `inner` is used up."""
    lengths = inner.diagonal(dim1=1, dim2=2) * outer.diagonal(dim1=1, dim2=2)
    alone = lengths.sqrt_().sum(1)
    return inner.mul_(outer).sum((1, 2), dtype=torch.float64).to(inner.dtype), alone


def settled(squares: Tensor, alone: Tensor, steps: int, positions: int, numbers: int, direct: Direct) -> Tensor:
    """The squares, none too small, of gradients that have so many numbers."""
    most = _unit(squares) * (steps + positions) * alone.square()
    doubtful = (most <= SMALL * squares).logical_not_().logical_and_(alone > 0.0)
    if doubtful.any():
        replace(squares, doubtful, alone, positions, numbers, direct)
    return squares


def replace(squares: Tensor, doubtful: Tensor, alone: Tensor, positions: int, numbers: int, direct: Direct) -> None:
    """Put the squared norms of the gradients themselves, rounded up, wherever `squares` are doubtful."""
    for some in doubtful.nonzero().flatten().split(max(1, _ROOM // numbers)):
        squares[some] = direct(some).sqrt_().add_(_unit(squares) * positions * alone[some]).square_()


def _unit(like: Tensor) -> float:
    return torch.finfo(like.dtype).eps / 2

"""Compiled kernels: per-example norms and gradients, without a matrix that only they would need.

    image.py       where patches lie on an image, and what can be asked of them
    gram.py        norms by Gram matrices of which nothing is kept
    panels.py      how those of many rows are made
    cancelling.py  norms that rounding could hide
    outer.py       the gradients themselves, with their norms
    slices.py      the same, and weighted sums, of numbers laid out for it before
    tiles.py       what both are made of
    weighted.py    their weighted sum
    matrices.py    products of matrices
    turning.py     a matrix turned
    groups.py      group normalisation
    pooling.py     the largest of every window
    bends.py       hyperbolic tangents
    lstm.py        the steps of an LSTM
    gathered.py    rows added up by token
    features.py    a weight with few outputs on wide features, with their norms
    dots.py        inner products, many at once
    vectors.py     what loops are made of
    team.py        the threads that run them, torch's own

The compiler behind them is loaded when the first of them is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terrine.sgd.kernels.image import Image

Floats = NDArray[np.float32]
FLOATS = torch.empty(0)
"""What kernels' own memory is like."""

__all__ = [
    "FLOATS",
    "Floats",
    "Image",
    "add_gathered",
    "add_weighted",
    "applied",
    "bending",
    "clip",
    "grouping",
    "in_order",
    "linear_squares",
    "load",
    "multiply",
    "prefers_direct",
    "squared_counts",
    "stepping",
    "steps",
    "take",
    "turn",
    "windows",
]

_CACHED, _FAR = 60.0, 110.0  # multiply-adds in the time a gradient's number takes to be kept, in cache and in memory
_SMALL = 1 << 15  # numbers of a gradient of which a lot's stay in cache until they are needed again
_TILE = 64.0  # multiply-adds in the time it takes to add up the parts of one entry of a Gram matrix


def load() -> None:
    """Have all that this processor can run compiled, or loaded, now: no step shall wait for it."""
    from terrine.sgd.kernels import (  # noqa: F401  each adds its own
        bends,
        features,
        gathered,
        gram,
        groups,
        lengths,
        matrices,
        outer,
        pooling,
        slices,
        team,
        tokens,
        turning,
        weighted,
    )

    for kernel in team.Kernel.all:
        _ = kernel.compiled


def take(*tensors: Tensor) -> bool:
    """Whether kernels work on these: float32 in the processor's memory, the last dimension's numbers side by side."""
    for one in tensors:
        if one.dtype is not torch.float32 or not one.is_cpu or not (one.stride(-1) == 1 or one.shape[-1] == 1):
            return False
    return True


def add_weighted(total: Tensor, rows: Tensor, factor: Tensor, fresh: bool) -> None:
    """total += sum_i factor_i rows_i of rows (n, numbers), or = where it is fresh; all of them contiguous."""
    from terrine.sgd.kernels.weighted import add_weighted

    add_weighted(total, rows, factor, fresh)


def add_gathered(total: Tensor, rows: Tensor, index: Tensor, weights: Tensor, ends: Tensor, fresh: bool) -> bool:
    """total_t += sum of weights_j rows_(index_j) over the j of token t, which end before ends_t; whether they could.

    Where total is fresh, = instead. Every index is a row, and as many as there are weights.
    """
    if not take(total, rows, weights) or not (total.is_contiguous() and rows.is_contiguous()):
        return False
    from terrine.sgd.kernels.gathered import add_gathered

    add_gathered(total, rows, index.long().contiguous(), weights.contiguous(), ends.long().contiguous(), fresh)
    return True


def in_order(tokens: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """The places of tokens below `many`, int64, in the order of the tokens, and where each token's places end."""
    from terrine.sgd.kernels.tokens import in_order

    return in_order(tokens, many)


def squared_counts(tokens: Tensor, order: Tensor, bags: Tensor, examples: int) -> Tensor:
    """For each bag, the squares of how often it has each of its tokens, added up."""
    from terrine.sgd.kernels.tokens import squared_counts

    return squared_counts(tokens, order, bags, examples)


def applied(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """inputs (n, d) times weight (e, d), (n, e), and the squared norms of the inputs, (n,)."""
    from terrine.sgd.kernels.features import applied

    return applied(inputs, weight)


def linear_squares(inputs: Tensor, outs: Tensor) -> tuple[Tensor, Tensor]:
    """(|out_i| |in_i|)^2 and |out_i|^2 of inputs (n, d) and outs (n, e), (n,) both."""
    from terrine.sgd.kernels.lengths import squares

    return squares(inputs, outs)


def clip(squares: Sequence[Tensor], scale: float, bound: float) -> tuple[Tensor, Tensor, bool]:
    """Norms, `scale` times the roots of the sums of squares (n,), the factors that clip them, and if all are finite."""
    from terrine.sgd.kernels.lengths import clip

    return clip(squares, scale, bound)


def multiply(left: Tensor, right: Tensor, target: Tensor, **given: Any) -> Tensor:
    """Fill target (m, n) with left (m, k) times right (n, k), transposed, see `matrices.py`."""
    from terrine.sgd.kernels.matrices import multiply

    return multiply(left, right, target, **given)


def turn(rows: Tensor, factor: Tensor, target: Tensor) -> Tensor:
    """Fill target (d, n), contiguous, with rows (n, d), each times its factor."""
    from terrine.sgd.kernels.turning import turn

    return turn(rows, factor, target)


def grouping() -> Any:
    """The kernels of group normalisation, see `groups.py`."""
    from terrine.sgd.kernels import groups

    return groups


def windows() -> Any:
    """The kernels of the largest of every window, see `pooling.py`."""
    from terrine.sgd.kernels import pooling

    return pooling


def bending() -> Any:
    """The kernel of hyperbolic tangents, see `bends.py`."""
    from terrine.sgd.kernels import bends

    return bends


def stepping() -> Any:
    """The kernels of an LSTM's steps, see `lstm.py`."""
    from terrine.sgd.kernels import lstm

    return lstm


def steps(width: int, height: int) -> int:
    """As many roundings as kernels need at most for an entry of both Gram matrices, see `gram.py`."""
    from terrine.sgd.kernels.panels import roundings

    return int(roundings.py_func(1, width) + roundings.py_func(1, height) + 24)


def prefers_direct(positions: int, width: int, height: int) -> bool:
    """Whether the gradients themselves, of width * height numbers, are cheaper than norms by Gram matrices.

    Either way they are multiplied once, by position; direct keeps all of them, ghost makes half of two Gram matrices.
    """
    size = width * height
    kept = _CACHED if size <= _SMALL else _FAR
    return kept * size <= positions**2 * (width + height + _TILE)

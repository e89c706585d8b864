"""A linear map that every example uses once: g_i = out_i in_i^T, and g_i = out_i for its bias.

    |g_i|^2 = |out_i|^2 |in_i|^2          sum_i f_i g_i = (f out)^T in

What `Outer` and `Dense` do as well, with fewer operations: for small layers their number is all that counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from terrine.sgd import products
from terrine.sgd.clipping.contribution import CACHED, Contribution, Dense, squared_rows, wide, without
from terrine.sgd.clipping.piece import Piece

SMALL = 1 << 18
"""Numbers of a weight up to which there is one way to multiply; `Outer` knows the others."""


class Single:
    """g_i = out_i in_i^T: `inputs` (n, d), `gradients` (n, e), and the squared norms."""

    __slots__ = ("_squares", "gradients", "inputs")

    def __init__(self, inputs: Tensor, gradients: Tensor, squares: Tensor) -> None:
        self.inputs, self.gradients, self._squares = inputs, gradients, squares

    def squares(self) -> Tensor:
        return self._squares

    def made(self, factor: Tensor) -> Tensor | None:
        """The weighted sum in memory of its own, where that is faster."""
        if self.inputs.numel() >= products.WIDE or self.gradients.numel() >= products.WIDE:
            made = products.weighted(self.gradients.unsqueeze(1), self.inputs.unsqueeze(1), factor)
            if made is not None:
                return made
        if products.is_ours(self.gradients.shape[1], self.inputs.shape[1], len(self.inputs)):
            return None
        left, right = self._factors(factor)
        return torch.mm(left, right)

    def add_to(self, total: Tensor, factor: Tensor, fresh: bool = False) -> None:
        if products.add_weighted(total, self.gradients.unsqueeze(1), self.inputs.unsqueeze(1), factor, fresh):
            return
        left, right = self._factors(factor)
        total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=float(not fresh))

    def dense(self) -> Tensor:
        return self.gradients.unsqueeze(2) * self.inputs.unsqueeze(1)

    def drop(self, examples: Tensor) -> Single:
        inputs, gradients = without(self.inputs, examples), without(self.gradients, examples)
        return Single(inputs, gradients, self._squares.masked_fill(examples, 0.0))

    def _factors(self, factor: Tensor) -> tuple[Tensor, Tensor]:
        """What is to be multiplied; the narrower side is scaled."""
        inputs, gradients = self.inputs, self.gradients
        scale = _of_type(factor, inputs).unsqueeze(1)
        if inputs.shape[1] < gradients.shape[1]:
            return gradients.t(), inputs * scale
        return (gradients * scale).t(), inputs


def vector(piece: Piece, rows: Tensor, squares: Tensor | None = None) -> Contribution:
    """The gradients (n, ...) of a piece as they are, in the form with the fewest operations."""
    few = rows.dim() == 2 and rows.numel() < CACHED
    return Vector(rows, squares) if few and rows.shape[1:] == piece.value.shape else Dense(rows, squares)


class Vector:
    """g_i as it is, a vector: `rows` (n, d), and the squared norms where they are known."""

    __slots__ = ("_squares", "rows")

    def __init__(self, rows: Tensor, squares: Tensor | None = None) -> None:
        self.rows, self._squares = wide(rows), squares

    def squares(self) -> Tensor:
        if self._squares is None:
            self._squares = squared_rows(self.rows)
        return self._squares

    def made(self, factor: Tensor) -> Tensor:
        """The weighted sum in memory of its own."""
        return torch.mv(self.rows.t(), _of_type(factor, self.rows))

    def add_to(self, total: Tensor, factor: Tensor, fresh: bool = False) -> None:
        total.addmv_(self.rows.t().to(total.dtype), factor.to(total.dtype), beta=float(not fresh))

    def dense(self) -> Tensor:
        return self.rows

    def drop(self, examples: Tensor) -> Vector:
        return Vector(without(self.rows, examples))


def _of_type(factor: Tensor, rows: Tensor) -> Tensor:
    return factor if factor.dtype is rows.dtype else factor.to(rows.dtype)

"""What a tensor that descends from a lot holds of its examples.

    Rows     index i along one axis depends on example (i // inner) mod n alone
    Total    a sum, or a mean, over the examples of what each gives alone, with public coefficients: a loss
    Mixed    anything else; it remembers the operation and the line of code that mixed the examples first
    None     nothing: public
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor


class Rows(NamedTuple):
    """Index i along `axis` depends on example (i // inner) mod n alone."""

    axis: int
    inner: int = 1


@dataclass(frozen=True)
class Total:
    """A linear combination over the examples: gradients times `undo` are those of every example's own loss.

    `undo` is the number of examples of a mean, 1 of a sum, and of a sum that was divided by a number, that number: the
    size of a lot must not decide how long one example's gradient is. Other coefficients are part of the loss.
    """

    undo: float
    is_mean: bool


@dataclass(frozen=True)
class Mixed:
    """Several examples meet, in a way that no clipping of one of them bounds."""

    operation: str
    place: str
    why: str

    def __str__(self) -> str:
        return f"{self.operation} ({self.why}) at {self.place}"


Status: TypeAlias = Rows | Total | Mixed | None


def holds(shape: Sequence[int], rows: Rows, n: int) -> bool:
    """Whether a tensor of this shape can hold `n` examples so."""
    return 0 <= rows.axis < len(shape) and (shape[rows.axis] % (n * rows.inner) == 0 if n else not shape[rows.axis])


def is_plain(tensor: Tensor, rows: Rows, n: int) -> bool:
    """Whether every index along the axis is one example's, in order."""
    return rows.inner == 1 and tensor.shape[rows.axis] == n


def is_constant(tensor: Tensor, axis: int) -> bool:
    """Whether a public tensor is the same at every index along `axis`: its numbers may be looked at."""
    if tensor.shape[axis] == 1 or tensor.stride(axis) == 0 or tensor.numel() == 0:
        return True
    return bool((tensor.detach() == tensor.detach().narrow(axis, 0, 1)).all())

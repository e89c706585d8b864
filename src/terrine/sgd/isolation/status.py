"""What a tensor that descends from a lot holds of its examples.

no status     public: nothing of the lot, or nothing but random draws
Rows          index i along one axis depends on example (i // inner) mod n alone
Total         a sum, or a mean, over the examples of what each gives alone, with public weights: a loss
Mixed         anything else; it remembers the operation and the line of code that mixed the examples first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from torch import Tensor


class Rows(NamedTuple):
    """Index i along `axis` depends on example (i // inner) mod n alone."""

    axis: int
    inner: int = 1


@dataclass(frozen=True)
class Total:
    """A sum over the examples (a mean if `mean`), divided by public numbers whose product is `divisor`."""

    mean: bool
    divisor: float = 1.0

    def over(self, number: float) -> Total:
        """The same divided by a public number."""
        return replace(self, divisor=self.divisor * number)


@dataclass(frozen=True)
class Mixed:
    """Several examples meet, in a way that no clipping of one of them bounds."""

    operation: str
    place: str
    why: str = ""
    known: bool = True  # an operation that does mix, not one of which nobody can tell

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{self.operation}{why} at {self.place}"


@dataclass(frozen=True)
class Drawn:
    """Independent draws of one distribution: public, and no row differs from another but by chance."""


@dataclass(frozen=True)
class Made:
    """Public, and made while the lot was out: it may be written to."""


@dataclass(frozen=True)
class Packed:
    """All examples' numbers one behind the other, each as many as offsets say."""


Status: TypeAlias = Rows | Total | Mixed | Drawn | Made | Packed
DRAWN, MADE, PACKED = Drawn(), Made(), Packed()


def holds(shape: Sequence[int], rows: Rows, n: int) -> bool:
    """Whether a tensor of this shape can hold `n` examples so."""
    return 0 <= rows.axis < len(shape) and shape[rows.axis] % (n * rows.inner) == 0 and shape[rows.axis] > 0


def is_plain(tensor: Tensor, rows: Rows, n: int) -> bool:
    """Whether every index along the axis is one example's, in order."""
    return rows.inner == 1 and tensor.shape[rows.axis] == n


def is_constant(tensor: Tensor, axis: int) -> bool:
    """Whether a public tensor is the same at every index along `axis`: its numbers may be looked at."""
    if tensor.shape[axis] == 1 or tensor.stride(axis) == 0 or tensor.numel() == 0:
        return True
    first = tensor.detach().narrow(axis, 0, 1)
    return bool((tensor.detach() == first).all())

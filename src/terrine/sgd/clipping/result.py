"""What clipping gives: the clipped sum, and the norms before clipping."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Clipped(NamedTuple):
    """The sum of clipped gradients by parameter name, and each example's norm before clipping.

    Guarantee: adding or removing one example moves `sums`, as one long vector, by at most the rule's bound.
    The norms are private: nothing bounds what they say about an example.
    """

    sums: dict[str, Tensor]
    norms: Tensor

"""Normal values from uniform random words, by the method of Box and Muller.

    radius = sqrt(-2 ln u),  pair = radius (cos a, sin a),   u uniform on (0, 1], a uniform on a full turn

u has 63 random bits. Rounded to float32 it keeps 24 significant ones however small it is, so the tail is that of a
normal distribution up to 9.4 standard deviations, beyond which a true one would go once in 2^64 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 1 << 16
"""Most values made at once: few enough to stay in a processor's cache."""


def add_normal(
    target: Tensor, words: Callable[[int], Tensor], deviation: float, grid: float = 0.0, over: float = 1.0
) -> None:
    """Add independent N(0, deviation^2) values in place; with a grid, round to its multiples, then divide by `over`.

    `words(count)` returns the next uniform 32-bit words as int32, on the device of `target`.
    """
    flat = target.detach().reshape(-1)
    for part in flat.split(BLOCK):
        sums = part.to(torch.promote_types(part.dtype, torch.float32))  # `part` itself unless that is 16 bits
        sums.add_(normal(words, part.numel()), alpha=deviation)
        if grid:
            sums.mul_(1 / grid).round_().mul_(grid).div_(over)
        if sums is not part:
            part.copy_(sums)
    if not target.is_contiguous():
        target.detach().copy_(flat.view(target.shape))


def normal(words: Callable[[int], Tensor], count: int) -> Tensor:
    """`count` independent N(0, 1) values in float32."""
    pairs = (count + 1) // 2
    drawn = words(3 * pairs)
    return box_muller(drawn[: 2 * pairs].view(torch.int64), drawn[2 * pairs :]).flatten()[:count]


def box_muller(radii: Tensor, turns: Tensor) -> Tensor:
    """Pairs of independent N(0, 1) values, (2, n) in float32, from random words (n,) of 64 and of 32 bits."""
    uniform = radii.bitwise_and(2**63 - 1).float().mul_(2.0**-63).clamp_(min=2.0**-64)
    radius = uniform.log_().mul_(-2.0).sqrt_()
    angle = turns.float().mul_(math.pi * 2.0**-31)
    return torch.stack([angle.cos().mul_(radius), angle.sin_().mul_(radius)])

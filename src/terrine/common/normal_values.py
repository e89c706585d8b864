"""Normal values from uniform random words, by the method of Box and Muller.

    radius = sqrt(-2 ln u),  pair = radius (cos a, sin a),   u uniform on (0, 1], a uniform on a full turn

u is the absolute value of a random 64-bit word. Rounded to float32 it keeps 24 significant bits however small it is,
so the tail is that of a normal distribution up to 9.4 standard deviations, beyond which a true one would go once in
2^64 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Words = Callable[[int], Tensor]
"""Returns the next so many uniform 32-bit words, as int32, on the device of what they are for."""
BLOCK, LARGE = 1 << 16, 1 << 22
"""Most values made at once: few enough to stay in a processor's cache; on other devices, where calls are dear, more."""


def add_normal(targets: Sequence[Tensor], words: Words, deviation: float, grid: float = 0.0, over: float = 1.0) -> None:
    """Add independent N(0, deviation^2) values in place; with a grid, round to its multiples, then divide by `over`."""
    block = BLOCK if all(target.device.type == "cpu" for target in targets) else LARGE
    for run in _runs([target.detach() for target in targets], block):
        sums = [target.to(torch.promote_types(target.dtype, torch.float32)).reshape(-1) for target in run]
        whole = sums[0] if len(run) == 1 else torch.cat(sums)
        for part in whole.split(block):
            noise = normal(words, part.numel())
            if grid:  # a power of two: scaling by it is exact
                part.mul_(1 / grid).add_(noise, alpha=deviation / grid).round_().mul_(grid / over)
            else:
                part.add_(noise, alpha=deviation)
        for target, made in zip(run, whole.split([target.numel() for target in run]), strict=True):
            if len(run) > 1 or not _is_plain(target):  # else it has been changed in place
                target.copy_(made.view(target.shape))


def _runs(targets: Sequence[Tensor], block: int) -> Iterator[list[Tensor]]:
    """The targets in order; small ones, for which every operation is dear, several at a time."""
    run: list[Tensor] = []
    for target in targets:
        if run and sum(one.numel() for one in run) + target.numel() > block:
            yield run
            run = []
        run.append(target)
    if run:
        yield run


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.float64)


def normal(words: Words, count: int) -> Tensor:
    """`count` independent N(0, 1) values in float32."""
    pairs = (count + 1) // 2
    drawn = words(3 * pairs)
    return box_muller(drawn[: 2 * pairs].view(torch.int64), drawn[2 * pairs :]).flatten()[:count]


def box_muller(radii: Tensor, turns: Tensor) -> Tensor:
    """Pairs of independent N(0, 1) values, (2, n) in float32, from random words (n,) of 64 and of 32 bits."""
    uniform = radii.float().abs_().mul_(2.0**-63).clamp_(min=2.0**-64)
    radius = uniform.log_().mul_(-2.0).sqrt_()
    angle = turns.float().mul_(math.pi * 2.0**-31)
    pairs = radius.new_empty(2, len(radius))
    torch.mul(radius, angle.cos(), out=pairs[0])
    torch.mul(radius, angle.sin(), out=pairs[1])
    return pairs

"""How many examples at a time: enough to be worth a pass, few enough for memory.

A microbatch costs a fixed amount, the recording and one pass over the sums, so larger is better until its activations,
and the per-example gradients that some layers keep, take more memory than the plain step would. What one example takes
is tried on a few of a model's first lot and remembered: how a lot is cut depends on the model and on the lot's size,
not on lots before it, so that a run that is resumed cuts its lots as it would have without a break.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

FIRST = 4  # examples that are tried
LEAST, MOST = 64 << 20, 320 << 20  # bytes of one microbatch
KEPT = 48 << 20  # bytes of one whose kept gradients are many
SHARE = 0.85  # of what the plain step would keep
RECORDED, PASSES = 40 << 20, 8  # bytes that are worth a microbatch of a loop, alone and for each byte of parameters
WAITING = 0.36  # of what the whole lot of a loop takes
SLACK = 1.1  # a lot that is only a little larger than one microbatch is not cut

Cost = tuple[float, float]
"""Bytes of one example's activations, and of its gradients that are kept."""


def cut(size: int, cost: Cost, parameters: Mapping[str, nn.Parameter], memory: float = math.inf) -> list[int]:
    """The sizes of a lot's microbatches, each of which goes forward and backward before the next."""
    activations, gradients = cost
    least = LEAST if gradients <= 0.3 * activations else KEPT
    target = min(max(least, SHARE * activations * size), MOST) + 2 * _bytes(parameters)
    return _evenly(size, min(target, memory) / max(activations + gradients, 1.0))


def cut_loop(size: int, cost: Cost, parameters: Mapping[str, nn.Parameter]) -> list[int]:
    """The same where all microbatches go forward before any goes backward: all activations wait anyhow."""
    activations = max(cost[0], 1.0)
    return _evenly(size, max(RECORDED + PASSES * _bytes(parameters), WAITING * activations * size) / activations)


def _evenly(size: int, most: float) -> list[int]:
    """`size` examples in parts of about at most `most`, about equally large."""
    if size <= SLACK * most:
        return [size]
    parts = math.ceil(size / max(most, 1.0))
    return [size * (place + 1) // parts - size * place // parts for place in range(parts)]


def _bytes(parameters: Mapping[str, nn.Parameter]) -> int:
    return sum([one.numel() * one.element_size() for one in parameters.values()])

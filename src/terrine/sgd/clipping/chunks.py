"""How many examples at a time: enough to be worth a pass, few enough for memory and caches.

A part costs a fixed amount, the tape and one pass over the sums, so larger is better until its activations, and
the per-example gradients that some layers keep, take more memory than the plain step would. What one example takes
is tried on a few of a model's first lot and remembered.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from torch import nn

from terrine.sgd.clipping.examples import Lot, chunks, tensors

FIRST = 4  # examples that are tried
LEAST, MOST = 24 << 20, 320 << 20  # bytes of one part
MODEST, FEW = 64 << 20, 0.3  # bytes of a part whose kept gradients take at most so much of its activations
SHARE = 0.85  # of what the plain step would keep
RECORDED, PASSES = 40 << 20, 8  # bytes of a recorded microbatch that are worth it, alone and for each byte of parameters
HALF = 68 << 20  # the same for half of a lot, where a part would be of few examples
WAITING = 0.36  # of what the whole lot takes: a recorded part that is not too large
FALL = 0.25  # by how much the first of several recorded parts is larger than their mean, and the last one smaller
MANY = 64  # examples of a part that are worth it although the lot is modest
SLACK = 1.1  # a lot that is only a little larger than one part is not cut

_seen: weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[float, float]]] = weakref.WeakKeyDictionary()


def stops(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    x: Lot,
    size: int,
    chunk: int | None,
    tried: Callable[[], tuple[float, float]],
    memory: float = math.inf,
) -> Iterator[int]:
    """Where each part of the lot ends; `tried()` tells what one example's activations and kept gradients take.

    How a lot is cut depends on the model and on the lot's size, not on lots before it: a run that is resumed cuts its
    lots as it would have without a break.
    """
    if chunk is None:
        known = _seen.setdefault(model, {})
        key = tuple([tuple(leaf.shape[1:]) for leaf in tensors(x)])
        if key not in known and size > FIRST:
            known[key] = tried()
        chunk = _best(bytes_of(parameters), size, known[key], memory) if size > FIRST else size
    start = 0
    for part in evenly(size, chunk):
        start += part
        yield start


def bytes_of(parameters: Mapping[str, nn.Parameter]) -> int:
    """What they take in memory."""
    return sum([one.numel() * one.element_size() for one in parameters.values()])


def _best(parameters: int, size: int, example: tuple[float, float], memory: float) -> int:
    most = min(fitting(*example, size, parameters), within(memory, *example))
    return most if size > SLACK * most else size


def evenly(size: int, most: int) -> list[int]:
    """`size` examples as parts of at most `most`, about equally large."""
    parts = max(-(-size // most), 1)
    return [stop - start for start, stop in chunks(size, max(-(-size // parts), 1))]


def falling(size: int, parts: int) -> list[int]:
    """`size` examples as so many parts, each smaller than the one before: from FALL more than the mean to FALL less."""
    shares = [1 + FALL * (parts - 1 - 2 * i) / max(parts - 1, 1) for i in range(parts)]
    stops = [round(size * sum(shares[: i + 1]) / parts) for i in range(parts)]
    return [stop - start for start, stop in pairwise([0, *stops]) if stop > start]


def fitting(activations: float, gradients: float, size: int, parameters: int) -> int:
    """How many examples make one part of a lot: what the plain step would keep, for activations and kept gradients."""
    least = MODEST if gradients <= FEW * activations else LEAST
    target = min(max(least, SHARE * activations * size), MOST) + 2 * parameters
    return max(1, int(target / max(activations + gradients, 1.0)))


def within(memory: float, activations: float, gradients: float) -> int:
    """How many examples' activations and kept gradients take at most `memory` bytes, about; one always may."""
    return max(1, int(min(memory / max(activations + gradients, 1.0), 1 << 62)))


def recorded(activations: float, size: int, parameters: int) -> list[int]:
    """The parts of a lot whose activations all wait for its backward pass, to which each part adds what it needs.

    The last one, which goes back first, finds the activations of all others in memory, and is the smallest. None is so
    small that its passes over the weights and the sums are dear.
    """
    total = activations * size
    most = max(RECORDED + PASSES * parameters, WAITING * total)
    if most < MANY * activations:
        most = max(most, min(HALF, 0.5 * total))
    part = int(most / max(activations, 1.0))
    whole = SLACK * most >= total or (total <= MODEST and part < MANY)
    return [size] if whole else falling(size, len(evenly(size, max(1, part))))

"""How a lot is drawn, and the event that this way of drawing stands for: one value makes both.

    Poisson     each example falls into a lot independently with probability lot/examples; add/remove neighbours
    FixedSize   exactly `lot` examples without replacement; replace-one neighbours
    Shuffled    a fresh random order each epoch, cut into lots; replace-one (or zero-out) neighbours

What one example can move in the clipped sum is the clipping bound C where it comes or goes, and 2C where it is
replaced by another (its own gradient leaves, a stranger's arrives). `reach` is that factor: noise is stated in
events relative to reach x C, so the standard deviation on the sum is noise x reach x C.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from terrine.common.keys import Key, Purpose
from terrine.errors import InvalidArgument
from terrine.events import (
    Composed,
    Event,
    FixedSizeSampled,
    Neighbours,
    PoissonSampled,
    Repeated,
    ShuffledEpoch,
)

Indices = NDArray[np.int64]
Stage = tuple[Event, float, int]
"""What a step releases, its gradient noise, and for how many steps in a row."""


class Sampling(Protocol):
    """A way of drawing lots together with its event."""

    @property
    def reach(self) -> float:
        """How far one example can move the clipped sum, in clipping bounds."""
        ...

    def steps(self, epochs: float, *, examples: int, lot: int) -> int:
        """How many steps `epochs` passes over the data take."""
        ...

    def event(self, stages: Sequence[Stage], *, examples: int, lot: int) -> Event:
        """What all steps together did to the data."""
        ...

    def draw(self, key: Key, step: int, *, examples: int, lot: int) -> Indices:
        """The examples of the lot at `step`."""
        ...


@dataclass(frozen=True)
class Poisson:
    """Each example falls into each lot independently with probability lot/examples.

    Guarantee: subsampling amplifies privacy; neighbours differ by the presence of one example.
    """

    @property
    def reach(self) -> float:
        return 1.0

    def steps(self, epochs: float, *, examples: int, lot: int) -> int:
        return max(1, round(epochs * examples / lot))

    def event(self, stages: Sequence[Stage], *, examples: int, lot: int) -> Event:
        return composed([Repeated(PoissonSampled(release, rate=lot / examples), times) for release, _, times in stages])

    def draw(self, key: Key, step: int, *, examples: int, lot: int) -> Indices:
        return key.draw(Purpose.LOT, step).chosen(examples, lot / examples)


@dataclass(frozen=True)
class FixedSize:
    """Exactly `lot` examples without replacement in every lot.

    Guarantee: neighbours differ in the value of one example; the number of examples is public.
    """

    @property
    def reach(self) -> float:
        return 2.0

    def steps(self, epochs: float, *, examples: int, lot: int) -> int:
        return max(1, round(epochs * examples / lot))

    def event(self, stages: Sequence[Stage], *, examples: int, lot: int) -> Event:
        return composed(
            [Repeated(FixedSizeSampled(release, size=lot, population=examples), times) for release, _, times in stages]
        )

    def draw(self, key: Key, step: int, *, examples: int, lot: int) -> Indices:
        return key.draw(Purpose.LOT, step).subset(examples, lot)


@dataclass(frozen=True)
class Shuffled:
    """A fresh random order each epoch, cut into lots; every example is in exactly one lot of an epoch.

    Guarantee: each epoch costs one look at each example. No amplification is claimed for the shuffle, so this is
    the dearest of the three: it is for loaders that cannot sample, not for the best epsilon.
    """

    neighbours: Neighbours = Neighbours.REPLACE_ONE

    def __post_init__(self) -> None:
        if self.neighbours is Neighbours.ADD_REMOVE:
            raise InvalidArgument("Shuffled(add-remove): want replace-one or zero-out; sgd.Poisson fits add-remove")

    @property
    def reach(self) -> float:
        return 2.0 if self.neighbours is Neighbours.REPLACE_ONE else 1.0

    def steps(self, epochs: float, *, examples: int, lot: int) -> int:
        if epochs != int(epochs):
            raise InvalidArgument(f"epochs={epochs}: want a whole number where lots are a shuffled epoch")
        return int(epochs) * math.ceil(examples / lot)

    def event(self, stages: Sequence[Stage], *, examples: int, lot: int) -> Event:
        """The quietest step of an epoch is the one that may have held the example."""
        length = math.ceil(examples / lot)
        epochs = quietest(stages, length)
        return composed([Repeated(ShuffledEpoch(one, length, self.neighbours), times) for one, times in epochs])

    def draw(self, key: Key, step: int, *, examples: int, lot: int) -> Indices:
        epoch, place = divmod(step, math.ceil(examples / lot))
        return order(key.secret, epoch, examples)[place * lot : (place + 1) * lot]


@functools.lru_cache(maxsize=2)
def order(secret: bytes, epoch: int, examples: int) -> Indices:
    """The random order of an epoch."""
    return Key(secret).draw(Purpose.LOT, epoch).permutation(examples)


def quietest(stages: Sequence[Stage], length: int) -> list[tuple[Event, int]]:
    """What the step with the least noise releases in each `length` steps, equal ones in a row counted."""
    releases = [(release, noise) for release, noise, times in stages for _ in range(times)]
    found = [min(releases[at : at + length], key=lambda one: one[1])[0] for at in range(0, len(releases), length)]
    return [(release, len(list(equal))) for release, equal in itertools.groupby(found)]


def composed(parts: list[Event]) -> Event:
    """All of `parts` as one event."""
    return parts[0] if len(parts) == 1 else Composed(parts)

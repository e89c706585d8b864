"""How a lot is drawn, and the event that this way of drawing stands for: one value makes both.

    Poisson     each example falls into a lot independently with probability lot/examples; add/remove neighbours
    FixedSize   exactly `lot` examples without replacement; replace-one neighbours
    Shuffled    a fresh random order each epoch, cut into lots; replace-one (or zero-out) neighbours

    CyclicPoisson   examples are split once into g groups; step t draws from group t mod g; add/remove neighbours
    FixedOrder      one random order for all epochs, cut into lots; replace-one (or zero-out) neighbours

The last two keep the turns of one example apart, as correlated noise needs. Every example is put into a uniformly
random group, independently of all others, of its own values and of the order the data come in. So a data set with one
example more has the same distribution of everybody else's groups: given them and its own group j, the example can only
be in the lots of steps j, j + g, j + 2g, ..., in each independently with probability g lot / examples; and a mixture
over j costs no more than its dearest part. Groups cut from positions (index mod g) would not do under add/remove:
whoever leaves moves all that follow to other groups. The size of a group is random, and as secret as the key.

What one example can move in the clipped sum is the clipping bound C where it comes or goes, and 2C where it is
replaced by another (its own gradient leaves, a stranger's arrives). `reach` is that factor: noise is stated in
events relative to reach x C, so the standard deviation on the sum is noise x reach x C.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from terrine import check
from terrine.common.keys import Key, Purpose
from terrine.errors import InvalidArgument
from terrine.events import (
    Composed,
    Event,
    FixedSizeSampled,
    Gaussian,
    Neighbours,
    PoissonSampled,
    Repeated,
    ShuffledEpoch,
)

Indices = NDArray[np.int64]
Stage = tuple[Event, float, int]
"""What a step releases, its gradient noise, and for how many steps in a row."""


class Sampling(Protocol):
    """A way of drawing lots together with its event.

    One that draws every lot by itself may say `remembers = False`: a run that goes on then draws with a fresh key.
    """

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

    remembers: ClassVar[bool] = False

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

    remembers: ClassVar[bool] = False

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


@dataclass(frozen=True)
class CyclicPoisson:
    """Step t draws each example of group t mod `groups` independently with probability groups x lot / examples.

    Guarantee: an example has one turn in `groups` steps. With noise of at most as many bands, independent noise
    included, a run of T steps costs ceil(T / groups) Poisson samples   [CGM23].
    """

    groups: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", check.whole("groups", self.groups))

    @property
    def reach(self) -> float:
        return 1.0

    def steps(self, epochs: float, *, examples: int, lot: int) -> int:
        return Poisson().steps(epochs, examples=examples, lot=lot)

    def event(self, stages: Sequence[Stage], *, examples: int, lot: int) -> Event:
        """One sample a cycle, of its quietest step: that may be the turn of the example's group."""
        rate = self.rate(examples, lot)
        cycles = quietest(stages, self.groups)
        return composed([Repeated(PoissonSampled(release, rate=rate), times) for release, times in cycles])

    def draw(self, key: Key, step: int, *, examples: int, lot: int) -> Indices:
        members = _members(key.secret, self.groups, examples)[step % self.groups]
        return members[key.draw(Purpose.LOT, step).chosen(len(members), self.rate(examples, lot))]

    def rate(self, examples: int, lot: int) -> float:
        """The probability of an example in its group's turn: what is drawn with and what is charged.

        Raises:
            InvalidArgument: a group is smaller than a lot.
        """
        if self.groups * lot > examples:
            wanted = f"at most examples / lot = {examples // lot}"
            raise check.refuse(
                "groups", self.groups, wanted, "lots are drawn from one group: fewer bands, smaller lots"
            )
        return self.groups * lot / examples


@dataclass(frozen=True)
class FixedOrder:
    """One random order, the same in every epoch, cut into lots: an example has the same place in each.

    Guarantee: k epochs, with independent noise or with noise of at most as many bands as an epoch has steps, are one
    Gaussian of noise / sqrt(k). No amplification is claimed.
    """

    neighbours: Neighbours = Neighbours.REPLACE_ONE

    def __post_init__(self) -> None:
        if self.neighbours is Neighbours.ADD_REMOVE:
            raise InvalidArgument("FixedOrder(add-remove): want replace-one or zero-out; sgd.CyclicPoisson fits it")

    @property
    def reach(self) -> float:
        return Shuffled(self.neighbours).reach

    def steps(self, epochs: float, *, examples: int, lot: int) -> int:
        return Shuffled(self.neighbours).steps(epochs, examples=examples, lot=lot)

    def event(self, stages: Sequence[Stage], *, examples: int, lot: int) -> Event:
        length = math.ceil(examples / lot)
        epochs = quietest(stages, length)
        release, times = epochs[0]
        if len(epochs) > 1 or not isinstance(release, Gaussian):
            return composed([Repeated(ShuffledEpoch(one, length, self.neighbours), count) for one, count in epochs])
        noise = release.noise if times == 1 else math.nextafter(release.noise / math.sqrt(times) * (1 - 2**-51), 0.0)
        return replace(release, noise=noise, neighbours=self.neighbours)

    def draw(self, key: Key, step: int, *, examples: int, lot: int) -> Indices:
        place = step % math.ceil(examples / lot)
        return order(key.secret, 0, examples)[place * lot : (place + 1) * lot]


def separated(sampling: Sampling, bands: int, *, examples: int, lot: int) -> Sampling:
    """`sampling` with the turns of an example at least `bands` steps apart.

    Raises:
        InvalidArgument: it cannot have them so.
    """
    if isinstance(sampling, CyclicPoisson):
        sampling.rate(examples, lot)  # refuses groups smaller than a lot
    if bands == 1:
        return sampling
    if isinstance(sampling, Poisson):
        if bands * lot > examples:
            wanted = f"at most examples / lot = {examples // lot}"
            raise check.refuse("bands", bands, wanted, "lots are drawn from one of as many groups of examples")
        sampling = CyclicPoisson(bands)
    elif isinstance(sampling, Shuffled):
        sampling = FixedOrder(sampling.neighbours)
    if not isinstance(sampling, CyclicPoisson | FixedOrder):
        hint = "another sampler may draw an example in two steps closer than the bands are wide"
        raise check.refuse("sampling", sampling, f"sgd.Poisson() or sgd.Shuffled() beside {bands} bands", hint)
    apart = sampling.groups if isinstance(sampling, CyclicPoisson) else math.ceil(examples / lot)
    if apart < bands:
        hint = f"{type(sampling).__name__} lets an example take part again after {apart} steps"
        raise check.refuse("bands", bands, f"at most {apart}", hint)
    return sampling


@functools.lru_cache(maxsize=2)
def _members(secret: bytes, groups: int, examples: int) -> tuple[Indices, ...]:
    """The examples of each group, in order."""
    group = Key(secret).draw(Purpose.GROUP, 0).below(groups, examples)
    return tuple(np.flatnonzero(group == one) for one in range(groups))

"""The best of a random number of runs: how settings may be tuned on private data [PS22].

    draw K;  run the same mechanism K times, each time with fresh randomness (and settings drawn at random);
    show the run with the best score, and neither the others nor K.

With K fixed, the best of K runs can cost K times one run. With K random and unknown it costs about two to three times
one run, whatever K turns out to be. K follows one of

    negative binomial, 0 cut off    P(K = k)  proportional to  (1 - gamma)^k  prod_{l < k} (l + shape) / (l + 1)
                                    shape 1: geometric; shape 0: logarithmic, proportional to (1 - gamma)^k / k
    Poisson                         P(K = k)  =  e^-mean mean^k / k!          with K = 0, something fixed is shown
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrine import check
from terrine.events.relation import Neighbours, Unit

if TYPE_CHECKING:
    from terrine.events.compose import Event


@dataclass(frozen=True, kw_only=True)
class NegativeBinomialCount:
    """How often to run: at least once; `gamma` near 0 is often. The smaller `shape`, the cheaper, and the heavier the
    tail."""

    shape: float
    gamma: float

    def __post_init__(self) -> None:
        shape = check.number("shape", self.shape, "shape > -1")
        if not -1 < shape <= 1000:
            raise check.refuse("shape", self.shape, "-1 < shape <= 1000", "1 is geometric, 0 logarithmic")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "gamma", check.open_unit("gamma", self.gamma))

    @property
    def mean(self) -> float:
        """The expected number of runs: shape (1 - gamma) / (gamma (1 - gamma^shape))."""
        log = math.log(self.gamma)
        cut = -math.expm1(self.shape * log) / self.shape if self.shape else -log
        return (1 - self.gamma) / (self.gamma * cut)

    @classmethod
    def of_mean(cls, mean: float, *, shape: float) -> NegativeBinomialCount:
        """The count of that shape whose mean is `mean` or hardly more."""
        mean = check.number("mean", mean, "mean > 1")
        if not 1 < mean <= 1e6:
            raise check.refuse("mean", mean, "1 < mean <= 1e6")
        low, high = 1e-15, 1 - 1e-15
        while high - low > 1e-12 * low:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if cls(shape=shape, gamma=middle).mean >= mean else (low, middle)
        return cls(shape=shape, gamma=low)


@dataclass(frozen=True, kw_only=True)
class PoissonCount:
    """How often to run: about `mean` times; not at all with probability e^-mean."""

    mean: float

    def __post_init__(self) -> None:
        mean = check.number("mean", self.mean, "mean >= 1")
        if not 1 <= mean <= 1e6:
            raise check.refuse("mean", self.mean, "1 <= mean <= 1e6")
        object.__setattr__(self, "mean", mean)


Count = NegativeBinomialCount | PoissonCount


@dataclass(frozen=True)
class RandomStopping:
    """The best of a secret, random number of runs of `event`, by a score that each run releases as part of `event`."""

    event: Event
    count: Count

    def __post_init__(self) -> None:
        if not isinstance(self.count, NegativeBinomialCount | PoissonCount):
            raise check.refuse("count", self.count, "NegativeBinomialCount(...) or PoissonCount(...)")

    @property
    def neighbours(self) -> Neighbours | None:
        return self.event.neighbours

    @property
    def unit(self) -> Unit | None:
        return self.event.unit

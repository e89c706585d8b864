"""Additive noise and plain guarantees: events that look at all of the data once.

`noise` is always scale / sensitivity, with the sensitivity taken under the event's neighbour relation.
A relation of None means: the one that the surrounding event, or in the end add/remove, settles.
"""

from __future__ import annotations

from dataclasses import dataclass

from terrine import check
from terrine.events.relation import Neighbours, Unit

_NOISE_HINT = "terrine.accounting.calibrate chooses it"


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """What every event that holds no other event carries."""

    neighbours: Neighbours | None = None
    unit: Unit | None = None

    def __post_init__(self) -> None:
        for name, kind in (("neighbours", Neighbours), ("unit", Unit)):
            if not isinstance(value := getattr(self, name), kind | None):
                raise check.refuse(name, value, f"None or one of {', '.join(str(one) for one in kind)}")


@dataclass(frozen=True, kw_only=True)
class _Noise(Leaf):
    noise: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "noise", check.positive("noise", self.noise, _NOISE_HINT))


@dataclass(frozen=True, kw_only=True)
class Laplace(_Noise):
    """Laplace noise of scale `noise` x the l1 sensitivity: (1/noise, 0)-DP."""


@dataclass(frozen=True, kw_only=True)
class Gaussian(_Noise):
    """Gaussian noise of standard deviation `noise` x the l2 sensitivity."""


@dataclass(frozen=True, kw_only=True)
class _GridNoise(_Noise):
    sensitivity: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sensitivity", check.whole("sensitivity", self.sensitivity))


@dataclass(frozen=True, kw_only=True)
class DiscreteLaplace(_GridNoise):
    """Integer noise with mass proportional to exp(-|k| / scale); `sensitivity` is in grid steps."""


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussian(_GridNoise):
    """Integer noise with mass proportional to exp(-k^2 / 2 scale^2); `sensitivity` is in grid steps.

    With `scalar` false the sensitivity is the l2 norm of a whole vector of such noises.
    """

    scalar: bool = True


@dataclass(frozen=True, kw_only=True)
class _VectorNoise(_Noise):
    sensitivity: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sensitivity", check.positive("sensitivity", self.sensitivity, "in l2, grid steps"))


@dataclass(frozen=True, kw_only=True)
class Skellam(_VectorNoise):
    """A vector of whole numbers plus, in every entry, the difference of two Poisson variables of equal mean.

    One unit moves the vector by whole numbers, at most `sensitivity` in l2, in grid steps; the noise has the standard
    deviation `noise` x `sensitivity`, however many people each added a share of it.
    """


@dataclass(frozen=True, kw_only=True)
class SummedDiscreteGaussian(_VectorNoise):
    """A vector of whole numbers plus, in every entry, the sum of `shares` discrete Gaussians.

    One unit moves the vector by whole numbers, at most `sensitivity` in l2, in grid steps. Each of the shares has the
    scale `noise` x `sensitivity` / sqrt(`shares`): the sum is nearly, not exactly, a discrete Gaussian.
    """

    shares: int

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "shares", check.whole("shares", self.shares))


@dataclass(frozen=True, kw_only=True)
class _Pure(Leaf):
    epsilon: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "epsilon", check.not_negative("epsilon", self.epsilon))


@dataclass(frozen=True, kw_only=True)
class RandomizedResponse(_Pure):
    """Each unit reports its own value through a coin whose likelihoods differ by at most e^epsilon."""


@dataclass(frozen=True, kw_only=True)
class PureDP(_Pure):
    """Any mechanism that is (epsilon, 0)-DP and of which nothing more is known."""


@dataclass(frozen=True, kw_only=True)
class Selection(_Pure):
    """A choice among candidates by noisy score (exponential mechanism, noisy max): (epsilon, 0)-DP.

    `monotone` records that one unit moves all scores in one direction, so that the noise was halved for it.
    """

    monotone: bool = False


@dataclass(frozen=True, kw_only=True)
class ApproximateDP(_Pure):
    """Any mechanism that is (epsilon, delta)-DP and of which nothing more is known."""

    delta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "delta", check.half_open_unit("delta", self.delta))


@dataclass(frozen=True, kw_only=True)
class NonPrivate(Leaf):
    """Something left the private path: no finite epsilon covers it."""

"""What may change during a run, fixed in advance by the plan or steered by a billed release.

Stages      factors for equal, successive parts of the run; for the noise or for the clipping bound
Adaptive    the bound follows a quantile of the gradient norms: C <- C exp(-learning_rate (b - quantile)), where b is
            the fraction of examples with norm <= C, released with Gaussian noise              [ATMR21] Algorithm 1
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from terrine import check


@dataclass(frozen=True)
class Stages:
    """`factors[k]` holds during the k-th of equal, successive parts of the run."""

    factors: tuple[float, ...]

    def __init__(self, *factors: float) -> None:
        if not factors:
            raise check.refuse("factors", factors, "at least one")
        object.__setattr__(self, "factors", tuple(check.positive("factor", one) for one in factors))

    @classmethod
    def between(cls, first: float, last: float, *, parts: int = 10) -> Stages:
        """A geometric way from `first` to `last` in `parts` stages."""
        parts = check.whole("parts", parts, at_least=2)
        first, last = check.positive("first", first), check.positive("last", last)
        return cls(*(first * (last / first) ** (k / (parts - 1)) for k in range(parts)))

    def at(self, step: int, steps: int) -> float:
        """The factor at `step` of a run of `steps`."""
        return self.factors[min(step * len(self.factors) // steps, len(self.factors) - 1)]


CONSTANT = Stages(1.0)


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """A flat clipping bound that follows the `quantile` of the norms, by a count released at every step.

    `noise` is the count's own noise, relative to what one example moves it; None takes a tenth of the lot, at
    least 10, which costs the gradients next to nothing. The count is part of the plan's event.
    """

    initial: float = 1.0
    quantile: float = 0.5
    learning_rate: float = 0.2
    noise: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "initial", check.moderate("initial", self.initial))
        object.__setattr__(self, "quantile", check.open_unit("quantile", self.quantile))
        object.__setattr__(self, "learning_rate", check.positive("learning_rate", self.learning_rate))
        if self.noise is not None:
            object.__setattr__(self, "noise", check.moderate("noise", self.noise))

    def count_noise(self, lot: int) -> float:
        """The noise multiplier of the count for lots of this size."""
        return max(lot / 10, 10.0) if self.noise is None else self.noise

    def following(self, bound: float, fraction: float) -> float:
        """The next bound, after a noisy `fraction` of the examples was within the present one."""
        exponent = -self.learning_rate * (min(max(fraction, 0.0), 1.0) - self.quantile)
        least, most = check.MODERATE
        return min(max(bound * math.exp(exponent), least), most)

"""A claim beside its evidence: consistent, or VIOLATED with a confidence.

Consistent does not mean proven: an attack that found nothing may have been a weak attack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from terrine.accounting import Profile, profile
from terrine.audit.tester import Finding
from terrine.errors import InvalidArgument
from terrine.events import Budget, Event


class Evidence(Protocol):
    """What an attack proved: a lower bound on epsilon at every delta, all of them with one `confidence`."""

    @property
    def confidence(self) -> float:
        """The probability that all bounds are true."""

    def bound(self, delta: float) -> float:
        """A lower bound on epsilon at `delta`."""


@dataclass(frozen=True)
class Verdict:
    """Whether the evidence refutes the claim, at which point of it, and how surely."""

    violated: bool
    claimed: float
    """The claimed epsilon where the evidence comes closest to it, or passes it furthest."""
    bound: float
    """The lower bound on epsilon there."""
    delta: float
    confidence: float

    def __str__(self) -> str:
        if self.violated:
            return (
                f"VIOLATED: epsilon is at least {self.bound:.4g} at delta {self.delta:g}, above the claimed "
                f"{self.claimed:.4g}, with confidence {100 * self.confidence:.6g}%"
            )
        return (
            f"consistent: the attack proves epsilon at least {self.bound:.4g} at delta {self.delta:g}, within the "
            f"claimed {self.claimed:.4g} (confidence {100 * self.confidence:.6g}%)"
        )


def verdict(claim: Budget | Profile | Event, evidence: Evidence | Finding) -> Verdict:
    """Compare a claim with what an attack proved.

    A `Budget` claims one (epsilon, delta); an event or its `accounting.profile` claims a whole curve, of which every
    point must stand.

    Raises:
        InvalidArgument: the evidence says nothing about the claim's delta.
        UnsupportedEvent: no accountant can bound the claimed event.
    """
    points = _points(claim)
    found = [(epsilon, _bound(evidence, delta), delta) for epsilon, delta in points]
    claimed, bound, delta = max(found, key=lambda one: one[1] - one[0])
    return Verdict(bound > claimed, claimed, bound, delta, evidence.confidence)


def _points(claim: Budget | Profile | Event) -> list[tuple[float, float]]:
    if isinstance(claim, Budget):
        return [(claim.epsilon, claim.delta)]
    curve = claim if isinstance(claim, Profile) else profile(claim)
    return [(float(epsilon), float(delta)) for epsilon, delta in zip(curve.epsilon, curve.delta, strict=True)]


def _bound(evidence: Evidence | Finding, delta: float) -> float:
    if not isinstance(evidence, Finding):
        return evidence.bound(delta)
    if delta > evidence.delta:  # epsilon falls as delta grows: a bound at a smaller delta says nothing here
        raise InvalidArgument(
            f"delta={delta:g} is claimed, evidence is at {evidence.delta:g}: want it tested at {delta:g}"
        )
    return evidence.epsilon

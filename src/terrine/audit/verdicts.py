"""A claim beside its evidence: consistent, or VIOLATED with a confidence.

Consistent does not mean proven: an attack that found nothing may have been a weak attack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from terrine.accounting import Profile, profile
from terrine.audit.one_run import OneRun
from terrine.audit.tester import LowerBound
from terrine.errors import InvalidArgument
from terrine.events import Budget, Event


class Evidence(Protocol):
    """What an attack proved: a lower bound on epsilon at every delta, all of them with one `confidence`."""

    @property
    def confidence(self) -> float:
        """The probability that all bounds are true."""

    def epsilon_at(self, delta: float) -> float:
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
    whole_curve: bool = False
    """Whether only the claimed curve as a whole is refuted, and none of its points alone."""

    def __str__(self) -> str:
        if self.whole_curve:
            return (
                "VIOLATED: the attack guesses more than the claimed trade-off curve allows, with confidence "
                f"{100 * self.confidence:.6g}%; no single point of it is refuted (epsilon at least {self.bound:.4g} at "
                f"delta {self.delta:g}, claimed {self.claimed:.4g})"
            )
        if self.violated:
            return (
                f"VIOLATED: epsilon is at least {self.bound:.4g} at delta {self.delta:g}, above the claimed "
                f"{self.claimed:.4g}, with confidence {100 * self.confidence:.6g}%"
            )
        return (
            f"consistent: the attack proves epsilon at least {self.bound:.4g} at delta {self.delta:g}, within the "
            f"claimed {self.claimed:.4g} (confidence {100 * self.confidence:.6g}%)"
        )


def verdict(claim: Budget | Profile | Event, evidence: Evidence | LowerBound) -> Verdict:
    """Compare a claim with what an attack proved.

    A `Budget` claims one (epsilon, delta); an event or its `accounting.profile` claims a whole curve, of which every
    point must stand. Against one run's guesses the curve must stand as a whole, too. No verdict rests on a guess at the
    family that the mechanism belongs to.

    Raises:
        InvalidArgument: the evidence says nothing about the claim's delta.
        UnsupportedEvent: no accountant can bound the claimed event.
    """
    curve = claim if isinstance(claim, Budget | Profile) else profile(claim)
    found = [(epsilon, _bound(evidence, delta), delta) for epsilon, delta in _points(curve)]
    claimed, bound, delta = max(found, key=lambda one: one[1] - one[0])
    refuted = isinstance(evidence, OneRun) and isinstance(curve, Profile) and evidence.refutes(curve)
    return Verdict(
        bound > claimed or refuted, claimed, bound, delta, evidence.confidence, refuted and not bound > claimed
    )


def _points(claim: Budget | Profile) -> list[tuple[float, float]]:
    if isinstance(claim, Budget):
        return [(claim.epsilon, claim.delta)]
    points = [(float(epsilon), float(delta)) for epsilon, delta in zip(claim.epsilon, claim.delta, strict=True)]
    return [(epsilon, delta) for epsilon, delta in points if delta < 1]  # at delta 1 nothing is claimed


def _bound(evidence: Evidence | LowerBound, delta: float) -> float:
    if not isinstance(evidence, LowerBound):
        return evidence.epsilon_at(delta)
    if delta > evidence.delta:  # epsilon falls as delta grows: a bound at a smaller delta says nothing here
        raise InvalidArgument(
            f"delta={delta:g} is claimed, evidence is at {evidence.delta:g}: want it tested at {delta:g}"
        )
    return evidence.epsilon

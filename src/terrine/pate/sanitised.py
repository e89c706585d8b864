"""Releasing the vote-dependent cost with noise: planned from public numbers, then drawn.

    shown = cost of the votes at one Renyi order + S (shift + spread N(0, 1)),    S its smooth sensitivity

Order, smoothness and noise follow from how many answers were planned, not from how many were given: what the release
costs is known, and can be charged, before a vote is cast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine import check
from terrine.accounting import pate as costs
from terrine.accounting import renyi
from terrine.accounting.pate import release
from terrine.events import ApproximateDP, Event, Neighbours, Unit
from terrine.mechanisms.lattice import Shape
from terrine.mechanisms.lattice import noise as lattice_noise
from terrine.pate.aggregators import SLACK, ConfidentGaussianMax, GaussianMax, InteractiveGaussianMax, LaplaceMax
from terrine.pate.answering import Aggregator
from terrine.pate.votes import Votes
from terrine.rng import Source

Floats = NDArray[np.float64]
Priced = LaplaceMax | GaussianMax | ConfidentGaussianMax | InteractiveGaussianMax

_STEP = 2.0**-10
"""The grid that a sanitised number is rounded up to."""
_FINE = 2**44
"""Steps of the normal draw to one deviation: rounding shows with probability below 2^-33."""
_UNSEEN = 2.0**-33
"""What of delta that rounding takes."""
_SHARE = 0.1
"""The part of delta that the release is charged at."""


@dataclass(frozen=True)
class PlannedRelease:
    """How the vote-dependent cost will be released, and what that costs."""

    event: Event
    delta: float
    order: float
    beta: float
    cost: float
    """Its own Renyi cost at `order`."""
    shift: float
    spread: float
    """Its deviation, as the shift in smooth sensitivities."""
    ceiling: float
    """A public bound on what the votes can cost at `order`."""

    def draw(self, votes: Votes, asked: Any, answered: Any, rule: Priced, rng: Source) -> float:
        """The sanitised epsilon, the release's own cost included."""
        value, local = _at_order(votes, asked, answered, rule, self.order)
        smooth = max(costs.smooth(local, beta=self.beta), 1e-12 * self.ceiling, 1e-300)
        normal = Fraction(int(lattice_noise(Shape.GAUSSIAN, float(_FINE), rounded=True).draw(rng)), _FINE)
        raw = Fraction(value) + Fraction(smooth) * (Fraction(self.shift) + Fraction(self.spread) * normal)
        shown = math.ceil(raw / Fraction(_STEP)) * _STEP
        total = np.array([max(shown, 0.0) + self.cost])
        converted = renyi.canonne_kamath_steinke(np.array([self.order]), total, self.delta - _UNSEEN)
        return max(0.0, float(converted[0]) * (1 + 1e-12))


def planned_release(
    rule: Aggregator,
    *,
    queries: int,
    answers: int | None = None,
    classes: int,
    delta: float,
    order: float | None = None,
    failure: float = 1e-3,
    unit: Unit = Unit.EXAMPLE,
    sanitise: bool = True,
) -> PlannedRelease | None:
    """The release of what `queries` queries and at most `answers` answers cost; None where only the plan has a cost.

    Stability-based answers have no vote-dependent analysis. Without `sanitise` it is only planned, never drawn.

    Raises:
        InvalidArgument: at this delta or order nothing could be drawn.
    """
    if not isinstance(rule, Priced):
        return None
    if sanitise and delta <= _UNSEEN:
        raise check.refuse("delta", delta, f"above {_UNSEEN:.4g}, which rounding takes", "or no sanitised number")
    answers = queries if answers is None else answers
    labels = rule.event(queries, answers, unit=unit)
    order = _public_order(labels, delta) if order is None else check.positive("order", order)
    if order <= 1:
        raise check.refuse("order", order, "above 1", "left out, a public one is chosen")
    ceiling = _ceiling(rule, queries, answers, order, classes)
    beta, noise = release.best_release(order, failure=failure, sensitivity_guess=max(1e-6, 0.3 * ceiling))
    cost, shift, spread = release.cost_of_shifted(order, beta=beta, noise=noise, failure=failure)
    own = float(renyi.canonne_kamath_steinke(np.array([order]), np.array([cost]), _SHARE * delta)[0])
    event = ApproximateDP(
        epsilon=max(own, 0.0), delta=_SHARE * delta, neighbours=Neighbours.REPLACE_ONE, unit=unit
    )  # fmt: skip
    return PlannedRelease(event, delta, order, beta, cost, shift, spread, ceiling)


def by_noise(noise: Any, queries: Any) -> list[tuple[float, Any]]:
    """Each noise with the rows of the answered queries that it served."""
    if not len(queries):
        return []
    if isinstance(noise, float | int):
        return [(float(noise), np.arange(len(queries)))]
    scales = np.asarray(noise)[np.asarray(queries)]
    return [(float(one), np.flatnonzero(scales == one)) for one in np.unique(scales)]


def _ceiling(rule: Priced, queries: int, answers: int, order: float, classes: int) -> float:
    """What the planned answers can cost at `order` at most, about."""
    counted = queries if isinstance(rule, InteractiveGaussianMax) else answers
    total = 0.0
    for one, rows in by_noise(rule.noise, np.arange(counted)):
        if isinstance(rule, LaplaceMax):
            total += len(rows) * min(2 * order / one**2, 2 / one) / 4
        else:
            total += len(rows) * costs.profile_of(one, order, classes).plateau
    return total


def _at_order(votes: Votes, asked: Any, answered: Any, rule: Priced, order: float) -> tuple[float, Floats]:
    """The cost at one order as its sensitivity analysis has it, and that sensitivity."""
    told, tested = votes.counts[answered], votes.counts[asked]
    value, local = 0.0, np.zeros((1, votes.teachers))
    for one, rows in by_noise(rule.noise, answered):
        if isinstance(rule, LaplaceMax):
            value += float(costs.laplace_max_rdp(told[rows], noise=one, orders=order, slack=SLACK).sum())
            part = costs.laplace_max_sensitivity(told[rows], noise=one, order=order, slack=SLACK)
        else:
            value += float(costs.sanitisable_rdp(told[rows], noise=one, order=order, slack=SLACK).sum())
            part = costs.gaussian_max_local_sensitivity(told[rows], noise=one, order=order, slack=SLACK)
        local = local + part.sum(axis=0)
    match rule:
        case ConfidentGaussianMax(threshold=threshold, test_noise=test):
            options: dict[str, float] = {"threshold": threshold, "noise": test, "slack": SLACK}
            value += float(costs.threshold_rdp(tested, orders=order, **options).sum())
            local = local + costs.threshold_local_sensitivity(tested, order=order, **options).sum(axis=0)
        case InteractiveGaussianMax(test_noise=test):
            value += len(tested) * order / (2 * test**2)
    return value, local


def _public_order(event: Event, delta: float) -> float:
    """An order that suits a cost of about half the plan's worst case; from public numbers only."""
    slope = float(renyi.curve(event, np.array([2.0]))[0]) / 2
    return 1 + math.sqrt(2 * math.log(1 / delta) / slope) if slope > 0 else 2.0

"""The bill: what a run of answers cost, in a number that may be printed and one that may not.

    data-independent   the certified cost of the plan, whatever the votes; safe to print
    sanitised          the vote-dependent cost, released with noise scaled to its smooth sensitivity, shifted so that it
                       is below the truth with probability at most `failure`; safe to print
    sealed             the vote-dependent cost itself: it tells about the votes. It goes into a ledger's sealed field
                       or nowhere

The sanitised cost includes the cost of its own release. Its order, smoothness and noise are chosen from public numbers.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from terrine import accounting, check
from terrine.accounting import pate as costs
from terrine.accounting import renyi
from terrine.accounting.pate import release
from terrine.errors import InvalidArgument
from terrine.events import ApproximateDP, Event, Neighbours, Reproducible, is_reproducible
from terrine.events.codec import to_dict
from terrine.mechanisms.lattice import Shape
from terrine.mechanisms.lattice import noise as lattice_noise
from terrine.pate.aggregators import SLACK, ConfidentGaussianMax, GaussianMax, InteractiveGaussianMax, LaplaceMax
from terrine.pate.answering import Account, Aggregator, Answers
from terrine.pate.votes import Votes
from terrine.rng import SYSTEM, Source

Floats = NDArray[np.float64]
Priced = LaplaceMax | GaussianMax | ConfidentGaussianMax | InteractiveGaussianMax

_STEP = 2.0**-10
"""The grid that a sanitised number is rounded up to."""
_FINE = 2**44
"""Steps of the normal draw to one deviation: rounding shows with probability below 2^-33."""


class Sealed:
    """A number that depends on the votes. It has no text form, no JSON, and does not compare or compute."""

    def __init__(self, value: float) -> None:
        self.__value = value

    def unsafe_open(self) -> float:
        """The number itself: for the data owner, or for research on public data. Never print or log it."""
        return self.__value

    def for_ledger(self) -> str:
        """The text for a ledger's sealed field."""
        return json.dumps({"pate-data-dependent-epsilon": self.__value})

    def __repr__(self) -> str:
        return "Sealed(...)"

    __str__ = __repr__

    def __format__(self, _: str) -> str:
        return repr(self)

    def __reduce__(self) -> NoReturn:
        raise InvalidArgument("a sealed number is not copied out: want the ledger's sealed field for it")


@dataclass(frozen=True)
class Bill:
    """The cost of a run at one delta."""

    delta: float
    asked: int
    answered: int
    event: Event = field(repr=False)
    data_independent: float
    sanitised: float | None
    failure: float
    order: float
    sealed: Sealed = field(repr=False)

    @property
    def epsilon(self) -> float:
        """The least of the numbers that may be printed."""
        return self.data_independent if self.sanitised is None else min(self.data_independent, self.sanitised)

    def as_json(self) -> dict[str, Any]:
        """What may be shown. The sealed number is not in it."""
        return {
            "delta": self.delta,
            "asked": self.asked,
            "answered": self.answered,
            "neighbours": (self.event.neighbours or Neighbours.REPLACE_ONE).value,
            "unit": self.event.unit.value if self.event.unit else "example",
            "epsilon_data_independent": self.data_independent,
            "epsilon_sanitised": self.sanitised,
            "sanitised_too_low_with_probability_at_most": self.failure if self.sanitised is not None else None,
            "reproducible_noise_for_tests_only": is_reproducible(self.event),
            "event": to_dict(self.event),
        }

    def __str__(self) -> str:
        lines = [
            f"{self.answered} answers to {self.asked} queries, delta {self.delta:g}",
            f"  data-independent  epsilon {_up(self.data_independent)}   whatever the votes were",
        ]
        if self.sanitised is not None:
            lines.append(
                f"  sanitised         epsilon {_up(self.sanitised)}   from the votes, released with noise;"
                f" too low with probability <= {self.failure:g}"
            )
        if is_reproducible(self.event):
            lines.append("  the noise came from a seed: for tests only, not private")
        return "\n".join(lines)


def bill(
    votes: Votes,
    answers: Answers,
    aggregator: Aggregator,
    *,
    delta: float,
    sanitise: bool = True,
    order: float | None = None,
    failure: float = 1e-3,
    rng: Source = SYSTEM,
    account: Account | None = None,
    purpose: str = "pate: sanitised bill",
) -> Bill:
    """Price `answers`, given by `aggregator` on `votes`.

    With an `account`, the release of the sanitised number is charged first, with the sealed number in the ledger's
    sealed field if the ledger has a key. Stability-based answers have no vote-dependent analysis: the plan's cost is
    their bill.

    Raises:
        InvalidArgument: the teachers share data, or the answers are not of these votes.
    """
    aggregator.require(votes)
    delta = check.open_unit("delta", delta)
    if len(answers.labels) != len(votes):
        raise InvalidArgument(f"{len(answers.labels)} answers for {len(votes)} queries: want the votes they came from")
    certain = accounting.epsilon(answers.event, delta=delta)
    if not isinstance(aggregator, Priced):
        given = len(answers.answered)
        return Bill(delta, answers.asked, given, answers.event, certain, None, failure, 2.0, Sealed(certain))
    asked, answered = np.arange(answers.asked), answers.answered
    if isinstance(aggregator, InteractiveGaussianMax):
        answered = asked  # which answers came from the teachers is theirs to know: all are priced
    exact = Sealed(min(certain, _dependent(votes, asked, answered, aggregator, delta)))
    chosen = check.positive("order", order) if order is not None else _public_order(answers.event, delta)
    found = None
    if sanitise:
        found = _sanitised(votes, asked, answered, aggregator, chosen, delta, failure, rng, account, purpose, exact)
    return Bill(delta, answers.asked, len(answers.answered), answers.event, certain, found, failure, chosen, exact)


def _dependent(votes: Votes, asked: Any, answered: Any, aggregator: Priced, delta: float) -> float:
    orders = renyi.ORDERS
    total = _curves(votes, asked, answered, aggregator, orders)
    return float(np.min(renyi.canonne_kamath_steinke(orders, total, delta)))


def _curves(votes: Votes, asked: Any, answered: Any, aggregator: Priced, orders: Floats) -> Floats:
    """The vote-dependent Renyi bill at each order, summed over queries."""
    told, tested = votes.counts[answered], votes.counts[asked]
    total = np.zeros(orders.size)
    match aggregator:
        case LaplaceMax(noise=noise):
            for one, rows in _by_noise(noise, answered):
                total += costs.laplace_max_rdp(told[rows], noise=one, orders=orders, slack=SLACK).sum(axis=0)
        case GaussianMax(noise=noise):
            for one, rows in _by_noise(noise, answered):
                total += costs.gaussian_max_rdp(told[rows], noise=one, orders=orders, slack=SLACK).sum(axis=0)
        case ConfidentGaussianMax(threshold=threshold, test_noise=test, noise=noise):
            total += costs.gaussian_max_rdp(told, noise=noise, orders=orders, slack=SLACK).sum(axis=0)
            tests = costs.threshold_rdp(tested, threshold=threshold, noise=test, orders=orders, slack=SLACK)
            total += tests.sum(axis=0)
        case InteractiveGaussianMax(test_noise=test, noise=noise):
            total += costs.gaussian_max_rdp(told, noise=noise, orders=orders, slack=SLACK).sum(axis=0)
            total += len(tested) * orders / (2 * test**2)  # the worst case: it depends on the student too
    return total


def _sanitised(
    votes: Votes,
    asked: Any,
    answered: Any,
    aggregator: Priced,
    order: float,
    delta: float,
    failure: float,
    rng: Source,
    account: Account | None,
    purpose: str,
    exact: Sealed,
) -> float:
    value, local, ceiling = _at_order(votes, asked, answered, aggregator, order)
    guess = max(1e-6, 0.3 * ceiling)
    beta, noise = release.best_release(order, failure=failure, sensitivity_guess=guess)
    cost, moved, spread = release.cost_of_shifted(order, beta=beta, noise=noise, failure=failure)
    smooth = max(costs.smooth(local, beta=beta), 1e-12 * ceiling, 1e-300)
    charged_delta = delta / 10
    own = float(renyi.canonne_kamath_steinke(np.array([order]), np.array([cost]), charged_delta)[0])
    if account is not None:
        event: Event = ApproximateDP(
            epsilon=max(own, 0.0), delta=charged_delta, neighbours=Neighbours.REPLACE_ONE, unit=votes.unit
        )
        event = Reproducible(event) if rng.reproducible else event
        _charge(account, event, purpose, exact)
    normal = Fraction(int(lattice_noise(Shape.GAUSSIAN, float(_FINE), rounded=True).draw(rng)), _FINE)
    raw = Fraction(value) + Fraction(smooth) * (Fraction(moved) + Fraction(spread) * normal)
    shown = math.ceil(raw / Fraction(_STEP)) * _STEP
    total = np.array([max(shown, 0.0) + cost])
    converted = renyi.canonne_kamath_steinke(np.array([order]), total, delta - 2.0**-33)
    return max(0.0, float(converted[0]) * (1 + 1e-12))


def _charge(account: Any, event: Event, purpose: str, exact: Sealed) -> None:
    """Charge, with the sealed number beside it where the account has a key to seal it with."""
    try:
        account.charge(event, purpose=purpose, by="pate.bill", sealed=exact.for_ledger())
    except InvalidArgument as refusal:
        if "key" not in str(refusal):
            raise
        account.charge(event, purpose=purpose, by="pate.bill")


def _at_order(votes: Votes, asked: Any, answered: Any, aggregator: Priced, order: float) -> tuple[float, Floats, float]:
    """The bill at one order as its sensitivity analysis has it, that sensitivity, and a public ceiling on it."""
    told, tested = votes.counts[answered], votes.counts[asked]
    value, local, ceiling = 0.0, np.zeros((1, votes.teachers)), 0.0
    match aggregator:
        case LaplaceMax(noise=noise):
            for one, rows in _by_noise(noise, answered):
                value += float(costs.laplace_max_rdp(told[rows], noise=one, orders=order, slack=SLACK).sum())
                local = local + costs.laplace_max_sensitivity(told[rows], noise=one, order=order, slack=SLACK).sum(
                    axis=0
                )
                ceiling += len(rows) * min(2 * order / one**2, 2 / one) / 4
        case GaussianMax() | ConfidentGaussianMax() | InteractiveGaussianMax():
            for one, rows in _by_noise(aggregator.noise, answered):
                value += float(costs.sanitisable_rdp(told[rows], noise=one, order=order, slack=SLACK).sum())
                part = costs.gaussian_max_local_sensitivity(told[rows], noise=one, order=order, slack=SLACK)
                local = local + part.sum(axis=0)
                ceiling += len(rows) * costs.profile_of(one, order, votes.classes).plateau
    match aggregator:
        case ConfidentGaussianMax(threshold=threshold, test_noise=test):
            options: dict[str, float] = {"threshold": threshold, "noise": test, "slack": SLACK}
            value += float(costs.threshold_rdp(tested, orders=order, **options).sum())
            part = costs.threshold_local_sensitivity(tested, order=order, **options)
            local = local + part.sum(axis=0)
        case InteractiveGaussianMax(test_noise=test):
            value += len(tested) * order / (2 * test**2)
    return value, local, ceiling


def _by_noise(noise: Any, queries: Any) -> list[tuple[float, Any]]:
    """Each noise with the rows of the answered queries that it served."""
    if not len(queries):
        return []
    if isinstance(noise, float | int):
        return [(float(noise), np.arange(len(queries)))]
    scales = np.asarray(noise)[np.asarray(queries)]
    return [(float(one), np.flatnonzero(scales == one)) for one in np.unique(scales)]


def _public_order(event: Event, delta: float) -> float:
    """An order that suits a bill of about half the plan's worst case; from public numbers only."""
    slope = float(renyi.curve(event, np.array([2.0]))[0]) / 2
    return 1 + math.sqrt(2 * math.log(1 / delta) / slope) if slope > 0 else 2.0


def _up(value: float) -> str:
    """Four decimals, never below the value."""
    return f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}" if math.isfinite(value) else "inf"

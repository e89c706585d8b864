"""The bill: what a run of answers cost, in a number that may be printed and one that may not.

    data-independent   the certified cost of the plan, whatever the votes; safe to print
    sanitised          the vote-dependent cost, released with noise scaled to its smooth sensitivity, shifted so that it
                       is below the truth with probability at most `failure`; safe to print
    sealed             the vote-dependent cost itself: it tells about the votes. It goes into a ledger's sealed field
                       or nowhere

Releasing the sanitised number costs as well: both printed numbers then pay for the answers and that release together.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from terrine import accounting, check
from terrine.accounting import pate as costs
from terrine.accounting import renyi
from terrine.errors import InvalidArgument, WeakGuarantee
from terrine.events import Composed, Event, Neighbours, Reproducible, is_reproducible
from terrine.events.codec import to_dict
from terrine.pate.aggregators import SLACK, ConfidentGaussianMax, GaussianMax, InteractiveGaussianMax, LaplaceMax
from terrine.pate.answering import Aggregator, Answers
from terrine.pate.sanitised import Priced, by_noise, planned_release
from terrine.pate.votes import Votes
from terrine.receipts import Charged, Receipt
from terrine.rng import SYSTEM, Source
from terrine.rounding import up

Floats = NDArray[np.float64]


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
    """All that is paid for: the answers, and the release of the sanitised number where there is one."""
    data_independent: float
    """The certified cost of `event`, whatever the votes."""
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
            f"  data-independent  epsilon {up(self.data_independent)}   whatever the votes were"
            + ("; the release below is in it" if self.sanitised is not None else ""),
        ]
        if self.sanitised is not None:
            lines.append(
                f"  sanitised         epsilon {up(self.sanitised)}   from the votes, released with noise;"
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
    account: Charged | None = None,
    receipt: Receipt | None = None,
    purpose: str = "pate: sanitised bill",
    by: str = "pate.bill",
) -> Bill:
    """Price `answers`, given by `aggregator` on `votes`.

    With an `account`, the release of the sanitised number is charged first, with the sealed number in the ledger's
    sealed field if the ledger has a key; with a `receipt` it was charged before. Stability-based answers have no
    vote-dependent analysis: the plan's cost is their bill.

    Raises:
        InvalidArgument: the teachers share data, or the answers are not of these votes.
        OutOfOrder: the receipt is not for this release.
    """
    aggregator.require(votes.deal)
    delta = check.open_unit("delta", delta)
    if len(answers.labels) != len(votes):
        raise InvalidArgument(f"{len(answers.labels)} answers for {len(votes)} queries: want the votes they came from")
    plan = answers.plan
    release = planned_release(
        aggregator, queries=plan.queries, answers=plan.answers, classes=votes.classes, delta=delta, order=order,
        failure=failure, unit=votes.unit, sanitise=sanitise,
    )  # fmt: skip
    given, event = len(answers.answered), answers.event
    certain = accounting.epsilon(event, delta=delta)
    if release is None or not isinstance(aggregator, Priced):
        return Bill(delta, answers.asked, given, event, certain, None, failure, 2.0, Sealed(certain))
    asked, answered = np.arange(answers.asked), answers.answered
    if isinstance(aggregator, InteractiveGaussianMax):
        answered = asked  # which answers came from the teachers is theirs to know: all are priced
    exact = Sealed(min(certain, _dependent(votes, asked, answered, aggregator, delta)))
    found = None
    if sanitise:
        own = Reproducible(release.event) if rng.reproducible else release.event
        if receipt is not None:
            receipt.covers(own)
        elif account is not None:
            _charge(account, own, purpose, by, exact)
        found = release.draw(votes, asked, answered, aggregator, rng)
        event = Composed([event, own])
        certain = accounting.epsilon(event, delta=delta)
    if words := check.weakness(certain if found is None else min(certain, found), delta, units=None):
        warnings.warn(f"a weak guarantee: {words}", WeakGuarantee, stacklevel=2)
    return Bill(delta, answers.asked, given, event, certain, found, failure, release.order, exact)


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
            for one, rows in by_noise(noise, answered):
                total += costs.laplace_max_rdp(told[rows], noise=one, orders=orders, slack=SLACK).sum(axis=0)
        case GaussianMax(noise=noise):
            for one, rows in by_noise(noise, answered):
                total += costs.gaussian_max_rdp(told[rows], noise=one, orders=orders, slack=SLACK).sum(axis=0)
        case ConfidentGaussianMax(threshold=threshold, test_noise=test, noise=noise):
            total += costs.gaussian_max_rdp(told, noise=noise, orders=orders, slack=SLACK).sum(axis=0)
            tests = costs.threshold_rdp(tested, threshold=threshold, noise=test, orders=orders, slack=SLACK)
            total += tests.sum(axis=0)
        case InteractiveGaussianMax(test_noise=test, noise=noise):
            total += costs.gaussian_max_rdp(told, noise=noise, orders=orders, slack=SLACK).sum(axis=0)
            total += len(tested) * orders / (2 * test**2)  # the worst case: it depends on the student too
    return total


def _charge(account: Any, event: Event, purpose: str, by: str, exact: Sealed) -> None:
    """Charge, with the sealed number beside it where the account has a key to seal it with."""
    try:
        account.charge(event, purpose=purpose, by=by, sealed=exact.for_ledger())
    except InvalidArgument as refusal:
        if "key" not in str(refusal):
            raise
        account.charge(event, purpose=purpose, by=by)

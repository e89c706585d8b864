"""Filters and odometers: budgets for events that are chosen after earlier answers were seen.

A fixed-composition accountant may not price such events: which event comes next is itself an answer. Here every
event adds a cost vector to a running sum, and a rule that was fixed before the first event says when to stop.

    rule        what adds up                limit                            proved in
    basic       epsilon                     the budget's epsilon             [RRUV16]: basic composition is a filter
    Gaussian    mu^2                        mu(epsilon, delta_G)^2           [ST22]: GDP composes fully adaptively
    Renyi       D_a at ONE order a          epsilon - c(a, delta_R)          [FZ21], [Lec21]: RDP does, at a fixed order

An event is accepted while at least one rule still holds. That is (epsilon, delta)-DP when the rules share delta out:
let A_k be the transcripts on which rule k holds to the end, and M_k the interaction that rule k alone would stop.
On A_k both have one law, under either neighbour, and the A_k cover all transcripts, so for every set S

    P(S) - e^epsilon Q(S) <= sum_k sup_{S' in A_k} P(S') - e^epsilon Q(S') <= sum_k delta_k.

A part with a delta of its own is a pure part that fails with that probability [KOV15];
failures add up to at most the share of delta set aside for them, whatever rule holds. The first event is chosen
before any answer exists, so the rules may depend on it: one that only the certified accountant can fit into the
whole budget is taken as a plan, and the budget is then closed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from terrine import check
from terrine.accounting import gaussian, renyi
from terrine.accounting.calibration import NOISE, Search, calibrate
from terrine.accounting.costs import Cost, float_up, price, shown, written
from terrine.errors import BudgetExceeded, InvalidArgument, UnsupportedEvent
from terrine.events import (
    Budget,
    Composed,
    Event,
    Gaussian,
    Neighbours,
    NonPrivate,
    PoissonSampled,
    PureDP,
    Repeated,
    Unit,
    settled_neighbours,
    settled_unit,
)

Protected = tuple[Neighbours, Unit]

_ROUNDING = 1e-12
_PRECISION = 1e-6


@dataclass(frozen=True)
class DeltaShares:
    """How a filter's delta is shared out, before the first event; the shares add up to at most 1."""

    failures: float = 0.25
    gaussian: float = 0.25
    renyi: float = 0.5

    def __post_init__(self) -> None:
        for name in ("failures", "gaussian", "renyi"):
            object.__setattr__(self, name, check.not_negative(name, getattr(self, name)))
        if (total := sum(written(share) for share in (self.failures, self.gaussian, self.renyi))) > 1:
            raise InvalidArgument(f"DeltaShares: shares of delta add up to {float(total):g}; want at most 1")


@dataclass(frozen=True)
class Terms:
    """The limits of every rule for one budget: all that a filter must fix in advance. `orders[0]` is the Renyi rule's.

    The other orders only serve `spent`, which holds at any stopping time.
    """

    budget: Budget
    mu_squared: float
    renyi: float
    orders: tuple[float, ...]
    split: DeltaShares = field(default_factory=DeltaShares)

    @classmethod
    def of(cls, budget: Budget, split: DeltaShares | None = None) -> Terms:
        """The limits that `budget` gives to each rule."""
        split = split or DeltaShares()
        order, limit = _best_order(budget.epsilon, budget.delta * split.renyi)
        return cls(
            budget=budget,
            mu_squared=_largest_mu_squared(budget.epsilon, budget.delta * split.gaussian),
            renyi=limit,
            orders=tuple(1 + (order - 1) * 2.0**power for power in (0, -1, 1, 2, 3, 4, 5, 6)),
            split=split,
        )

    @functools.cached_property
    def _failures(self) -> Fraction:
        return written(self.budget.delta) * written(self.split.failures)

    @functools.cached_property
    def _epsilon(self) -> Fraction:
        return written(self.budget.epsilon)

    @functools.cached_property
    def _mu_squared(self) -> Fraction:
        return Fraction(self.mu_squared)

    @property
    def nothing(self) -> Cost:
        """The cost of no event at all."""
        return Cost.nothing(self.orders)

    def used(self, spent: Cost) -> float:
        """The share of the budget that the most generous rule has used: at most 1 while one of them holds."""
        if spent.planned:
            return 1.0
        if spent.delta > self._failures:
            return math.inf
        return min(
            _share(spent.epsilon, self._epsilon),
            _share(spent.mu_squared, self._mu_squared),
            _share(None if math.isinf(spent.renyi[0]) else spent.renyi[0], self.renyi),
        )

    def hold(self, spent: Cost) -> bool:
        """Whether at least one rule still holds: `used(spent)` is at most 1."""
        if spent.planned or (spent.delta and spent.delta > self._failures):
            return spent.planned
        return (  # the cheapest look first: any one of them will do; a rule without a share of delta holds for nothing
            (self.renyi > 0 and spent.renyi[0] <= self.renyi)
            or (spent.epsilon is not None and spent.epsilon <= self._epsilon)
            or (self.mu_squared > 0 and spent.mu_squared is not None and spent.mu_squared <= self._mu_squared)
        )

    def check(self) -> None:
        """Prove the limits again from the budget.

        Raises:
            InvalidArgument: a limit is larger than its share of the budget allows.
        """
        epsilon, delta = self.budget.epsilon, self.budget.delta
        kept = True
        if self.mu_squared > 0:
            kept &= gaussian.delta(math.sqrt(self.mu_squared), epsilon) <= delta * self.split.gaussian
        if self.renyi > 0:
            kept &= self.renyi <= _renyi_limit(np.array(self.orders[:1]), epsilon, delta * self.split.renyi)[0]
        if not kept:
            raise InvalidArgument(
                f"terms={self}: a rule's limit is above its share of the budget; want Terms.of(budget)"
            )


@dataclass(frozen=True)
class Quote:
    """What one more event would do: `share` of the whole budget it uses, and whether it `fits`."""

    share: float
    fits: bool


@dataclass(frozen=True)
class Remaining:
    """What is left: the `share` of the budget, and the largest `epsilon` of one more pure event that fits."""

    share: float
    epsilon: float


class Filter:
    """Accepts adaptively chosen events until the budget is used up.

    Guarantee: all accepted events together are (budget.epsilon, budget.delta)-DP, however each was chosen.
    """

    def __init__(self, budget: Budget, split: DeltaShares | None = None) -> None:
        self.terms = Terms.of(budget, split)
        self._spent = self.terms.nothing
        self._plan: Event | None = None
        self._protected: Protected | None = None

    @property
    def state(self) -> Cost:
        """The running sum."""
        return self._spent

    def would_cost(self, event: Event) -> Quote:
        """What charging `event` would do; nothing is charged."""
        _agreed(self._protected, event)
        return quote(self.terms, self._spent, event)

    def charge(self, event: Event) -> None:
        """Add `event` to what was spent.

        Raises:
            BudgetExceeded: it does not fit; nothing has changed.
            UnsupportedEvent: no rule can bound it; nothing has changed.
            InvalidArgument: it protects another unit, or under another relation, than the events before it.
        """
        protected = _agreed(self._protected, event)
        after = accept(self.terms, self._spent, event)
        if after is None:
            raise refusal(self.terms, self._spent, event)
        self._spent, self._plan, self._protected = after, event if after.planned else None, protected

    def spent(self, delta: float | None = None) -> float:
        """An epsilon that holds at `delta` for everything so far, at whatever moment one stops."""
        return spent(self.terms, self._spent, delta=delta, plan=self._plan)

    def remaining(self) -> Remaining:
        """What is left."""
        return remaining(self.terms, self._spent)

    def calibrate(self, family: Callable[[float], Event], *, over: Search = NOISE) -> float:
        """The least private parameter of `family` that still fits: the closed loop over what is left.

        Raises:
            BudgetExceeded: not even the most private end fits.
        """
        return least_private(lambda value: accept(self.terms, self._spent, family(value)) is not None, over)


class Odometer:
    """A running epsilon with no limit, for adaptively chosen events.

    Guarantee: with probability at least 1 - delta the privacy loss is at most `spent()` at all times at once, so also
    at any stopping time. At a fixed order a, exp((a-1)(loss - sum D_a)) is a supermartingale that starts at 1, and so
    is any mixture of such; Ville's inequality bounds the chance that it ever reaches 1/delta. [WRRW23].
    Where an event has a delta of its own, the loss is that of a transcript of which the answers are a post-processing.
    """

    def __init__(self, delta: float, *, failures: float = 0.25) -> None:
        self.delta = check.open_unit("delta", delta)
        self.failures = check.half_open_unit("failures", failures)
        self._orders = tuple(1 + 2.0**power for power in range(-2, 12))
        self._spent = Cost.nothing(self._orders)
        self._protected: Protected | None = None

    def charge(self, event: Event) -> None:
        """Add `event` to what was spent.

        Raises:
            UnsupportedEvent: nothing can bound it; nothing has changed.
            InvalidArgument: it protects another unit, or under another relation, than the events before it.
        """
        protected = _agreed(self._protected, event)
        cost = price(event, self._orders)
        if cost.unknown and not isinstance(event, NonPrivate):
            raise UnsupportedEvent(event, by="the odometer")
        self._spent, self._protected = self._spent + cost, protected

    def spent(self) -> float:
        """The running bound; inf once an event without any bound was charged."""
        return _at_all_times(self._orders, self._spent, self.delta, self.failures)


def remaining_noise(spent: Event, budget: Budget, *, steps: int, rate: float = 1.0, over: Search = NOISE) -> float:
    """The smallest noise for `steps` further Gaussian steps after `spent`, where no answer influences the schedule.

    Both halves are then one plan, which the certified accountant prices; `Filter.calibrate` serves the adaptive case.
    """

    def whole(noise: float) -> Event:
        step: Event = Gaussian(noise=noise)
        if rate != 1.0:
            step = PoissonSampled(step, rate=rate)
        return Composed([spent, Repeated(step, times=steps)])

    return calibrate(whole, budget, over=over)


def accept(terms: Terms, spent: Cost, event: Event) -> Cost | None:
    """What is spent after `event`, or None where it does not fit."""
    if spent.planned:
        return None
    cost = price(event, terms.orders)
    after = spent + cost
    if terms.hold(after):
        return after
    if spent.events == 0 and _planned(terms.budget, event):
        return replace(cost, planned=True)
    return None


def quote(terms: Terms, spent: Cost, event: Event) -> Quote:
    """How far `event` would move the filter from `spent`."""
    after = accept(terms, spent, event)
    moved = terms.used(after or spent + price(event, terms.orders)) - terms.used(spent)
    return Quote(share=max(0.0, moved), fits=after is not None)


def refusal(terms: Terms, spent: Cost, event: Event) -> BudgetExceeded | UnsupportedEvent:
    """The error for an event that `accept` refused."""
    cost, kind = price(event, terms.orders), type(event).__name__
    budget = f"epsilon={terms.budget.epsilon:g}, delta={terms.budget.delta:g}"
    if spent.planned:
        return BudgetExceeded(f"{kind}: a plan holds the whole budget ({budget}); nothing was charged; open another")
    if cost.unknown and not isinstance(event, NonPrivate):
        return UnsupportedEvent(event, by="the filter")
    if cost.delta and spent.delta + cost.delta > terms._failures:
        share = f"{shown(terms._failures - spent.delta):.3g} is left of the {shown(terms._failures):.3g}"
        told = f"has a delta of its own, {shown(cost.delta):.3g}, and {share} that {budget} sets aside for such"
        return BudgetExceeded(f"{kind}: {told}; nothing was charged")
    wanted = quote(terms, spent, event).share
    amount = f"{100 * wanted:.3g}%" if math.isfinite(wanted) else "more than all"
    left = 100 * max(0.0, 1 - terms.used(spent))
    return BudgetExceeded(f"{kind}: wants {amount} of {budget} and {left:.3g}% is left; nothing was charged")


def spent(terms: Terms, state: Cost, *, delta: float | None = None, plan: Event | None = None) -> float:
    """An epsilon that holds at `delta` (the budget's, if None) for everything in `state`; inf where none is proven."""
    wanted = terms.budget.delta if delta is None else check.half_open_unit("delta", delta)
    if state.events == 0:
        return 0.0
    capped = terms.budget.epsilon if wanted >= terms.budget.delta and terms.used(state) <= 1 else math.inf
    if plan is not None and wanted > 0:
        from terrine.accounting import epsilon

        return min(capped, epsilon(plan, delta=wanted))  # one plan, fixed before any answer
    return min(capped, _at_all_times(terms.orders, state, wanted, terms.split.failures))


def remaining(terms: Terms, state: Cost) -> Remaining:
    """What `state` leaves of the budget."""
    share = min(1.0, max(0.0, 1 - terms.used(state)))

    def fits(epsilon: float) -> bool:
        return terms.used(state + price(PureDP(epsilon=epsilon), terms.orders)) <= 1

    if share == 0:
        return Remaining(0.0, 0.0)
    if state.epsilon is not None and fits(basic := float(written(terms.budget.epsilon) - state.epsilon)):
        return Remaining(share, basic)
    low, high = 0.0, terms.budget.epsilon
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Remaining(share, low)


def least_private(fits: Callable[[float], bool], over: Search) -> float:
    """The value of `over` nearest to its risky end at which `fits` still holds: a bracket around its start, halved."""
    safe_end, risky_end = (over.high, over.low) if over.private_end_is_high else (over.low, over.high)
    safe = risky = over.start
    factor = 4.0 if over.private_end_is_high else 0.25
    while not fits(safe):
        if safe == safe_end:
            raise BudgetExceeded(f"even {safe:g} does not fit into what is left; nothing was charged")
        safe, risky = _within(over, safe * factor), safe
    while risky != risky_end and fits(risky):
        safe, risky = risky, _within(over, risky / factor)
    if risky == risky_end and fits(risky):
        return risky
    while abs(safe - risky) > (1 if over.whole else _PRECISION * safe):
        middle = math.sqrt(safe) * math.sqrt(risky)
        if over.whole:
            middle = min(max(float(math.floor(middle)), min(safe, risky) + 1), max(safe, risky) - 1)
        safe, risky = (middle, risky) if fits(middle) else (safe, middle)
    return safe


def _agreed(before: Protected | None, event: Event) -> Protected:
    now = (settled_neighbours(event), settled_unit(event))
    if before is not None and before != now:
        kind, told = type(event).__name__, [f"one {unit.value}, {relation.value}" for relation, unit in (now, before)]
        raise InvalidArgument(f"{kind}: protects {told[0]}; the events before it protect {told[1]}; want one for all")
    return now


def _within(over: Search, value: float) -> float:
    value = min(over.high, max(over.low, value))
    return float(math.floor(value)) if over.whole else value


def _planned(budget: Budget, event: Event) -> bool:
    from terrine.accounting import delta, epsilon

    if budget.delta == 0 or isinstance(event, NonPrivate):
        return False
    try:  # two proofs of one claim, rounded outward each in its own way: either will do
        return (
            delta(event, epsilon=budget.epsilon) <= budget.delta or epsilon(event, delta=budget.delta) <= budget.epsilon
        )
    except (UnsupportedEvent, InvalidArgument):
        return False


def _at_all_times(orders: tuple[float, ...], state: Cost, delta: float, failures: float) -> float:
    # Ville for the mixture with equal weights: at every time, each order's line holds at delta / number of orders.
    if state.delta > written(delta) * written(failures):
        return math.inf
    found = math.inf if state.epsilon is None else shown(state.epsilon)
    share = delta * (1 - failures) / len(orders)
    if share > 0:
        lines = [one + math.log(1 / share) / (order - 1) for order, one in zip(orders, state.renyi, strict=True)]
        found = min(found, min(lines) * (1 + _ROUNDING))
    return found


def _best_order(epsilon: float, delta: float) -> tuple[float, float]:
    """The order at which a Gaussian-like curve, growing in proportion to the order, may go on longest."""
    if delta <= 0:
        return 2.0, 0.0
    orders = 1 + np.geomspace(1e-2, 1e6, 4001)
    order = float(f"{orders[np.argmax(_renyi_limit(orders, epsilon, delta) / orders)]:.6g}")
    return order, max(0.0, float(_renyi_limit(np.array([order]), epsilon, delta)[0]))


def _renyi_limit(orders: renyi.Floats, epsilon: float, delta: float) -> renyi.Floats:
    slack = renyi.canonne_kamath_steinke(orders, np.zeros_like(orders), delta)
    limit: renyi.Floats = epsilon - slack - _ROUNDING * (epsilon + np.abs(slack))
    return limit


def _largest_mu_squared(epsilon: float, delta: float) -> float:
    if delta <= 0:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian.delta(high, epsilon) <= delta:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian.delta(middle, epsilon) <= delta else (low, middle)
    return low * low * (1 - _ROUNDING)


def _share(amount: Fraction | float | None, limit: Fraction | float) -> float:
    """How much of `limit` is used: infinitely much where there is no limit to use."""
    if amount is None or amount == math.inf or not limit:
        return math.inf
    if amount <= limit:
        return min(1.0, float(amount / limit))
    return max(float_up(Fraction(amount) / Fraction(limit)), math.nextafter(1.0, 2.0))

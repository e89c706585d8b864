"""A question and a budget in, a plan out: what is measured, with which noise, for which event. Looks at no row.

One plan makes all three: the expressions that bound contributions, the noise, and the event that is charged.

Private keys. Each person counts once in each of at most g groups; a group is shown if its number of people with noise
at least T, where T is the smallest number with  g P(1 + noise >= T) <= delta. For keys that both neighbours have this
is a reading of noisy counts; of keys that one person alone has (at most g, each with count 1), one is shown with
probability at most delta. So the event is the noise's, and (0, delta).   [KKMN09; Desfontaines et al. 2022]
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import ndtri_exp

from terrine import accounting, check, events
from terrine.accounting import composition
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.events import Event, Neighbours, Unit
from terrine.mechanisms.lattice import Shape
from terrine.queries import groups
from terrine.queries.declared import MOST_ROWS
from terrine.queries.groups import GroupKey
from terrine.queries.measurements import Measurement, measured
from terrine.queries.noise import NoiseKind, shared
from terrine.queries.question import NEEDS_BOUNDS, Aggregate, Kind, Question, names_in
from terrine.queries.rows import checked_bounds, condition, joined, number
from terrine.queries.scope import Column, Scope, Sort

MOST_CELLS = 100_000
MOST_NUMBERS = 20_000_000
_MIXED = 1 - 5e-5
"""Of epsilon, what Gaussian noise beside private keys is given: the accountant encloses such a mix within 2e-5."""


@dataclass(frozen=True)
class AskedColumn:
    """An aggregate with its column and bounds resolved."""

    aggregate: Aggregate
    column: Column | None
    bounds: tuple[float, float]


@dataclass(frozen=True)
class KeySelection:
    """How group keys are selected: a group is shown if its noisy number of people is at least `threshold`."""

    groups: int
    threshold: int
    delta: float


@dataclass(frozen=True)
class QueryPlan:
    """All that is public about one answer; nothing in it comes from rows."""

    question: Question
    scope: Scope
    keys: tuple[GroupKey, ...]
    asked: tuple[AskedColumn, ...]
    measurements: tuple[Measurement, ...]
    noise: NoiseKind
    selection: KeySelection | None
    min_group: int | None
    rows: int
    groups: int
    event: Event
    epsilon: float
    delta: float
    compared: bool
    """Whether Gaussian noise could have been chosen, too."""

    def cells(self) -> list[tuple[Any, ...]]:
        """Every public combination of keys; one empty one without GROUP BY."""
        return list(itertools.product(*(key.values or () for key in self.keys)))

    def touched(self, cells: int) -> int:
        """In how many of `cells` groups one person counts at most."""
        return min(self.groups, cells)


@dataclass(frozen=True)
class Options:
    """What comes with a question, as the caller gave it."""

    epsilon: float
    delta: float | None = None
    bounds: Mapping[str, Any] | None = None
    keys: Mapping[str, Any] | str | None = None
    bins: Mapping[str, Any] | None = None
    min_group: int | None = None


def planned(question: Question, scope: Scope, options: Options, *, usual_delta: float) -> QueryPlan:
    """The plan that answers `question` within the budget, with the smaller error of Laplace and Gaussian noise.

    Raises:
        InvalidArgument: something in the question or its options is refused; the error says what to do.
    """
    budget = _Budget.of(options, usual_delta)
    asked = tuple(_asked(one, scope, options.bounds or {}) for one in question.aggregates)
    _no_strangers("bounds", options.bounds or {}, [str(one.column) for one in asked if one.column], question)
    keys = groups.grouped(question, scope, options.keys, options.bins)
    hidden = any(key.values is None for key in keys)
    people = options.min_group is not None and not hidden
    found = [(one.aggregate.kind, one.column, one.bounds) for one in asked]
    measurements = tuple(measured(found, people=people))
    plan = QueryPlan(
        question=question,
        scope=scope,
        keys=keys,
        asked=asked,
        measurements=measurements,
        noise=NoiseKind(Shape.LAPLACE, 1.0),
        selection=None,
        min_group=None if options.min_group is None else check.whole("min_group", options.min_group),
        rows=scope.rows,
        groups=min(scope.groups, MOST_ROWS) if keys else 1,
        event=events.Composed(),
        epsilon=budget.epsilon,
        delta=0.0,
        compared=budget.delta > 0,
    )
    _fits(plan)
    _compiles(plan)
    return _priced(plan, budget)


@dataclass(frozen=True)
class _Budget:
    epsilon: float
    delta: float
    """0 where none was given."""
    usual: float
    """What private keys may fail by, where no delta was given."""

    @classmethod
    def of(cls, options: Options, usual: float) -> _Budget:
        epsilon = check.positive("epsilon", options.epsilon)
        if epsilon > 1e6 or epsilon < 1e-6:
            raise check.refuse("epsilon", options.epsilon, "between 1e-6 and 1e6")
        delta = 0.0 if options.delta is None else check.half_open_unit("delta", options.delta)
        if 0 < delta < 1e-30:
            raise check.refuse("delta", delta, "0, or at least 1e-30")
        return cls(epsilon, delta, usual)


def _asked(aggregate: Aggregate, scope: Scope, bounds: Mapping[str, Any]) -> AskedColumn:
    if aggregate.kind is Kind.PEOPLE:
        assert aggregate.column is not None
        if not scope.is_person(aggregate.column):
            raise InvalidArgument(
                f"COUNT(DISTINCT {aggregate.column}): distinct values of other columns are not answered; "
                f"want COUNT(DISTINCT {scope.person.name})"
            )
        scope.counts_everybody(aggregate.column)
        return AskedColumn(aggregate, None, (0.0, 1.0))
    if aggregate.column is None:
        return AskedColumn(aggregate, None, (0.0, 1.0))
    column = scope.column(aggregate.column, wanted=f" in {aggregate.kind.value}")
    given = _bounds_of(column, aggregate, bounds)
    if given is None:
        if aggregate.kind in NEEDS_BOUNDS:
            raise InvalidArgument(
                f"{aggregate.kind.value}({column}): no bounds; want bounds={{{column.name!r}: (lower, upper)}}, "
                "known without a look at the data"
            )
        return AskedColumn(aggregate, column, (0.0, 1.0))
    if column.sort is Sort.TEXT:
        column = dataclasses.replace(column, sort=Sort.NUMBER)
    return AskedColumn(aggregate, column, checked_bounds(column.name, given))


def _bounds_of(column: Column, aggregate: Aggregate, bounds: Mapping[str, Any]) -> Any:
    wanted = {column.name.casefold(), aggregate.alias.casefold(), str(aggregate.column).casefold()}
    fitting = [value for name, value in bounds.items() if str(name).casefold() in wanted]
    if len(fitting) > 1 and any(tuple(one) != tuple(fitting[0]) for one in fitting[1:]):
        raise InvalidArgument(f"bounds of {column}: given twice, differently; want one pair")
    return fitting[0] if fitting else None


def _no_strangers(what: str, given: Mapping[str, Any], known: Sequence[str], question: Question) -> None:
    words = {one.casefold() for one in known}
    words |= {text.casefold() for one in question.aggregates for text in (one.alias, str(one.column))}
    if strange := [name for name in given if str(name).casefold() not in words]:
        raise InvalidArgument(f"{what}[{check.shown(strange[0])}]: no aggregate uses it; want its column's name")


def _fits(plan: QueryPlan) -> None:
    if any(key.values is None for key in plan.keys):
        return
    cells = math.prod(len(key.values or ()) for key in plan.keys)
    if cells > MOST_CELLS:
        raise InvalidArgument(f"keys: {cells:,} combinations; want at most {MOST_CELLS:,}")
    numbers = cells * max(one.parts for one in plan.measurements)
    if numbers > MOST_NUMBERS:
        raise InvalidArgument(f"quantiles in {cells:,} groups: {numbers:,} numbers; want fewer groups")


def _compiles(plan: QueryPlan) -> None:
    """Build every row expression once, on empty tables: what cannot be built is refused before anything is charged."""
    import ibis

    if plan.question.where is not None:
        for name in names_in(plan.question.where):
            plan.scope.column(name, wanted=" in WHERE")
    empty = [ibis.table(dict(source.columns), name=f"t{i}") for i, source in enumerate(plan.scope.sources)]
    rows = joined(plan.scope, empty)
    if plan.question.where is not None:
        try:
            condition(rows, plan.question.where, plan.scope)
        except InvalidArgument:
            raise
        except Exception as error:  # of the expressions' own checks, on types alone: no row was looked at
            raise InvalidArgument(f"WHERE: {check.shown(' '.join(str(error).split()), 150, written=str)}") from None
    for one in plan.asked:
        if one.column is not None and one.aggregate.kind in NEEDS_BOUNDS:
            number(rows, one.column)
        if one.column is not None and one.column.sort is Sort.OTHER:
            raise InvalidArgument(f"column {one.column}: holds {one.column.kind}; want a plain type: cast it in a view")


def _priced(plan: QueryPlan, budget: _Budget) -> QueryPlan:
    hidden = any(key.values is None for key in plan.keys)
    delta = budget.delta or (budget.usual if hidden else 0.0)
    if hidden and not delta:
        raise InvalidArgument('keys="private": need a delta; want delta=..., such as 1e-7')
    shares = [one.share for one in plan.measurements] + [1.0] * hidden
    laplace = shared(Shape.LAPLACE, sum(shares), budget.epsilon, 0.0)
    chosen, failing = laplace, delta if hidden else 0.0
    if budget.delta:
        share, most = (delta / 2, budget.epsilon * _MIXED) if hidden else (delta, budget.epsilon)
        gaussian = _confirmed(shared(Shape.GAUSSIAN, sum(shares), most, share), shares, share, most)
        if _error(plan, gaussian) < _error(plan, laplace):
            chosen, failing = gaussian, delta / 2 if hidden else 0.0
    spent = delta if failing or chosen.shape is Shape.GAUSSIAN else 0.0
    selection = _selection(plan, chosen, failing) if hidden else None
    event = _event(chosen, shares, failing)
    if certified(event, spent) > budget.epsilon:
        raise OutOfOrder(f"the plan would cost more than epsilon={budget.epsilon:g}; nothing was charged: report this")
    return dataclasses.replace(plan, noise=chosen, selection=selection, event=event, delta=spent)


def _confirmed(noise: NoiseKind, shares: Sequence[float], delta: float, epsilon: float) -> NoiseKind:
    """`noise`, made larger by billionths until the accountant, too, finds all parts within epsilon at delta."""
    step = 1e-9
    while certified(_event(noise, shares, 0.0), delta) > epsilon:
        noise, step = NoiseKind(noise.shape, noise.multiplier * (1 + step)), 4 * step
    return noise


def _error(plan: QueryPlan, noise: NoiseKind) -> float:
    """The sum of the logarithms of every measurement's half-width: which noise is smaller for the whole question."""
    cells = 1 if not plan.keys else math.prod(len(key.values or (0,)) for key in plan.keys)
    groups = plan.groups if any(key.values is None for key in plan.keys) else plan.touched(cells)
    scales = (
        one.sensitivity(noise.shape, plan.rows, groups) * noise.of_share(one.share).multiplier
        for one in plan.measurements
    )
    return sum(math.log(noise.reach(scale)) for scale in scales)


def _selection(plan: QueryPlan, noise: NoiseKind, delta: float) -> KeySelection:
    votes = plan.scope.votes
    scale = selection_noise(noise, votes).scale
    share = delta / votes
    if noise.shape is Shape.LAPLACE:
        distance = scale * math.log(1 / (2 * share)) if share < 0.5 else 0.0
    else:
        distance = -float(ndtri_exp(math.log(share))) * scale
    threshold = 1 + max(1, math.ceil((0.5 + distance) * (1 + 1e-9)))
    return KeySelection(votes, max(threshold, plan.min_group or 0), delta)


def selection_noise(noise: NoiseKind, most: int) -> Any:
    """The noise on numbers of people, of whom each is in at most `most` groups; the number of groups has no part."""
    sensitivity = most if noise.shape is Shape.LAPLACE else math.nextafter(math.sqrt(most), math.inf)
    return noise.plan(sensitivity, 2, step=1.0)


def _event(noise: NoiseKind, shares: Sequence[float], failing: float) -> Event:
    each: list[Event] = []
    for share, times in collections.Counter(shares).items():
        one = noise.of_share(share).event
        each.append(one if times == 1 else events.Repeated(one, times=times))
    if failing:
        where: dict[str, Any] = {"unit": Unit.PERSON, "neighbours": Neighbours.ADD_REMOVE}
        each.append(events.ApproximateDP(epsilon=0.0, delta=failing, **where))
    return each[0] if len(each) == 1 else events.Composed(each)


@functools.lru_cache(maxsize=256)
def certified(event: Event, delta: float) -> float:
    """The proven epsilon of a question's event at `delta`: what fails with its own delta is taken off first."""
    parts = event.parts if isinstance(event, events.Composed) else (event,)
    noises = [part for part in parts if not isinstance(part, events.ApproximateDP)]
    failing = sum(part.delta for part in parts if isinstance(part, events.ApproximateDP))
    noise = noises[0] if len(noises) == 1 else events.Composed(noises)
    if all(isinstance(leaf, events.Laplace) for leaf, _ in events.leaves(noise)):
        return composition.pure(noise)
    return accounting.epsilon(noise, delta=delta - failing)

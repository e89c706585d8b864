"""The front door: the tightest bound that two witnesses agree on.

The certified accountant answers first. Where it cannot (numbers beyond floating point, an event it has no pair for),
the smallest of Renyi DP, basic and advanced composition does. Before an epsilon leaves,

- delta is evaluated at it, by a routine that knows nothing of the search: where that is above the delta asked for,
  the epsilon is moved outward until both agree;
- `witness`, which shares no code with any of them, computes a lower bound of its own. An upper bound below a lower
  bound is false: it is dropped, with a line in the log, and the smallest that is left, or at last the witness's own
  upper bound, is the answer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from terrine import check
from terrine.accounting import certified, composition, renyi, witness
from terrine.accounting.certified import Bounds
from terrine.accounting.reach import check_nesting
from terrine.errors import InvalidArgument, UnsupportedEvent
from terrine.events import Event

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_Method = tuple[str, Callable[[], float]]

_OUTWARD = 1e-9
"""The first step outward where epsilon and delta do not agree."""
_STEPS, _FAR = 12, 0.1
"""Past so many steps, or one so long, the method that found the epsilon is not believed."""
_LESS = 0.99
"""What others evaluate depends a little on the delta they were made for: they must prove slightly less."""


def epsilon(event: Event, *, delta: float) -> float:
    """The tightest proven upper bound on epsilon at `delta`.

    Raises:
        UnsupportedEvent: no accountant can bound some part of the event.
    """
    return epsilons(event, deltas=[delta])[0]


def epsilons(event: Event, *, deltas: Sequence[float]) -> list[float]:
    """The same for several deltas at once, which spares the witness most of its time.

    Raises:
        UnsupportedEvent: no accountant can bound some part of the event.
    """
    deltas = [check.delta("delta", delta) for delta in deltas]
    check_nesting(event, by="accounting")
    least = _witnessed(lambda: witness.least_epsilons(event, deltas=deltas), [0.0] * len(deltas))
    return [_epsilon(event, delta, one) for delta, one in zip(deltas, least, strict=True)]


def delta(event: Event, *, epsilon: float) -> float:
    """The tightest proven upper bound on delta at `epsilon`.

    Raises:
        UnsupportedEvent: no accountant can bound some part of the event.
    """
    epsilon = check.not_negative("epsilon", epsilon)
    check_nesting(event, by="accounting")
    return _delta(event, epsilon, _witnessed(lambda: witness.least_delta(event, epsilon=epsilon), 0.0))


def bounds(event: Event, *, delta: float, witness: bool = False) -> Bounds:
    """A proven enclosure of the smallest epsilon at `delta`, over the worst mechanism that the event describes.

    With `witness` the slow and obvious accountant, `accounting.witness`, is asked at its full precision, too.

    Raises:
        UnsupportedEvent: no accountant can bound some part of the event.
    """
    delta = check.delta("delta", delta)
    check_nesting(event, by="accounting")
    seen = _second_opinion(event, delta, full=witness)
    upper = _epsilon(event, delta, seen.lower)
    try:
        lower = certified.least_epsilon(event, delta=delta, near=upper)
    except (UnsupportedEvent, InvalidArgument):
        lower = 0.0
    if lower > min(upper, seen.upper):
        log.error("a lower bound of %.17g lies above an upper one of %.17g: dropped", lower, min(upper, seen.upper))
        lower = 0.0
    return Bounds(min(max(lower, seen.lower), upper), min(upper, seen.upper))


def _second_opinion(event: Event, delta: float, *, full: bool) -> Bounds:
    if full:
        return _witnessed(lambda: Bounds(*witness.bounds(event, delta=delta)), Bounds(0.0, math.inf))
    return Bounds(_witnessed(lambda: witness.least_epsilon(event, delta=delta), 0.0), math.inf)


def _witnessed(ask: Callable[[], _Answer], nothing: _Answer) -> _Answer:
    """What the witness says; `nothing`, which refutes nobody, where its own numbers leave floating point."""
    try:
        with np.errstate(all="ignore"):
            return ask()
    except (ArithmeticError, ValueError, MemoryError, RecursionError) as error:
        log.warning("the witness has no answer: %s", error)
        return nothing


def _epsilon(event: Event, delta: float, least: float) -> float:
    def stated() -> float:
        return composition.stated(event, delta=delta)

    first: list[_Method] = [("certified", lambda: _least_of(certified.epsilon(event, delta=delta), stated))]
    others: list[_Method] = [
        ("renyi", lambda: renyi.epsilon(event, delta=delta)),
        ("composition", lambda: composition.advanced(event, delta=delta)),
        ("witness", lambda: _second_opinion(event, delta, full=True).upper),
        ("what the parts state", stated),
    ]
    return _smallest(event, (first, others), least, lambda found: _agreed(event, delta, found))


def _delta(event: Event, epsilon: float, least: float) -> float:
    found = _smallest(event, _delta_methods(event, epsilon), least, lambda found: found)
    return min(1.0, found if found > 0 or _is_pure(event, epsilon) else 5e-324)  # 0 is proven there alone


def _is_pure(event: Event, epsilon: float) -> bool:
    try:
        return composition.pure(event) <= epsilon
    except (UnsupportedEvent, InvalidArgument):
        return False


def _delta_methods(event: Event, epsilon: float, near: float | None = None) -> tuple[list[_Method], list[_Method]]:
    """Those that are asked first and those that are asked otherwise; the witness is faster where delta is `near`."""

    def by_witness() -> float:
        if near is not None:
            return witness.most_delta(event, epsilon=epsilon, near=near)
        return witness.delta_bounds(event, epsilon=epsilon).upper

    def stated() -> float:
        return composition.stated_delta(event, epsilon=epsilon)

    return [("certified", lambda: _least_of(certified.delta(event, epsilon=epsilon), stated))], [
        ("what the parts state", stated),
        ("renyi", lambda: renyi.delta(event, epsilon=epsilon)),
        ("composition", lambda: composition.advanced_delta(event, epsilon=epsilon)),
        ("witness", lambda: _witnessed(by_witness, 1.0)),
    ]


def _least_of(found: float, stated: Callable[[], float]) -> float:
    """What was found, or what the parts state of themselves where that is less."""
    try:
        return min(found, stated())
    except (UnsupportedEvent, InvalidArgument):
        return found


def _agreed(event: Event, delta: float, found: float) -> float:
    """`found`, moved outward by secants until delta evaluated there is at most `delta`; infinite where that is far."""
    if math.isinf(found):
        return found
    value, step = found, max(_OUTWARD * found, 1e-300)
    excess = _log_excess(event, value, delta)
    for _ in range(_STEPS):
        if excess <= 0:
            return value
        value, before = value + step, excess
        excess = _log_excess(event, value, delta)
        step = 1.1 * excess * step / (before - excess) if 0 < excess < before else 16 * step
        if step > _FAR * value:
            break
    log.info("epsilon %.17g at delta %g, but delta evaluated there is larger: dropped", found, delta)
    return math.inf


def _log_excess(event: Event, epsilon: float, delta: float) -> float:
    """log of delta evaluated at `epsilon` over the one asked for; the first method that proves enough will do."""
    first, others = _delta_methods(event, epsilon, near=delta)
    smallest = math.inf
    for methods, target in ((first, delta), (others, delta * _LESS)):
        for value in _answers(methods, 0.0, []):
            smallest = min(smallest, value)
            if smallest <= target:
                break
        if smallest < math.inf:
            break
    return math.log(min(1.0, max(smallest, 1e-320)) / target)


def _smallest(
    event: Event, choices: Iterable[list[_Method]], least: float, confirmed: Callable[[float], float]
) -> float:
    """The smallest finite answer that is not below `least` and is confirmed, of the first methods that have one.

    Raises:
        UnsupportedEvent: no method has a finite answer.
    """
    refusals: list[Exception] = []
    for methods in choices:
        for found in sorted(_answers(methods, least, refusals)):
            if math.isfinite(value := confirmed(found)):
                return value
    if refusals:
        raise refusals[0]
    raise UnsupportedEvent(event, by="accounting", hint="no method finds a finite bound")


def _answers(methods: list[_Method], least: float, refusals: list[Exception]) -> Iterator[float]:
    for name, method in methods:
        try:
            value = method()
        except (UnsupportedEvent, InvalidArgument) as refusal:
            refusals.append(refusal)
            continue
        if value >= least:
            yield value
        else:
            log.error("%s: %.17g, but the truth is at least %.17g: dropped", name, value, least)

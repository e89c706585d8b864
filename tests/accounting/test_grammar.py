"""Every accountant on random events of the whole grammar, however extreme: nothing below the truth, nothing raw.

TERRINE_EXAMPLES says how many times as many events each test tries, and makes them other ones every time.
"""

import math
import time
import warnings

import pytest
from hypothesis import HealthCheck, given, settings

from terrine import accounting
from terrine.accounting import composition, moments, renyi
from terrine.accounting.filters import Filter, Odometer
from terrine.errors import TerrineError
from terrine.events import Budget, Composed, OneOf, Repeated, Reproducible, leaves
from tests.accounting.grammar import deltas, epsilons, events
from tests.thorough import MORE, examples

thoroughly = settings(
    max_examples=examples(30), derandomize=MORE == 1, deadline=None, suppress_health_check=list(HealthCheck)
)
SECONDS = 10.0  # of a processor that others use, too; 5 on one that nobody else does
OTHERS = {
    "renyi": renyi.epsilon,
    "moments": moments.epsilon,
    "basic": composition.basic,
    "advanced": composition.advanced,
}


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def priced(event, delta):
    """The enclosure, or None where we say that it is out of reach; never anything else, never for long."""
    start = time.process_time()
    try:
        found = accounting.bounds(event, delta=delta)
    except TerrineError:
        found = None
    assert time.process_time() - start < SECONDS
    if found is not None:
        assert 0 <= found.lower <= found.upper < math.inf
    return found


def parts_of(event):
    match event:
        case Composed(parts=parts) | OneOf(parts=parts):
            return list(parts)
        case Repeated(event=inner) | Reproducible(event=inner):
            return [inner]
        case _:
            return [leaf for leaf, _ in leaves(event) if leaf != event]


@thoroughly
@given(events, deltas)
def test_a_whole_costs_at_least_each_of_its_parts(event, delta):
    if (whole := priced(event, delta)) is None:
        return
    for part in parts_of(event):
        if (own := priced(part, delta)) is not None:
            assert whole.upper >= own.lower


@thoroughly
@given(events, deltas)
def test_delta_at_the_certified_epsilon_is_at_most_delta(event, delta):
    if (found := priced(event, delta)) is not None:
        assert accounting.delta(event, epsilon=found.upper) <= delta * (1 + 1e-9)


@thoroughly
@given(events, deltas)
def test_no_other_method_claims_less_than_is_possible(event, delta):
    if (found := priced(event, delta)) is None:
        return
    for name, method in OTHERS.items():
        try:
            claimed = method(event, delta=delta)
        except TerrineError:
            continue
        assert claimed >= found.lower, name


@thoroughly
@given(events, deltas, epsilons)
def test_filter_and_odometer_never_fall_below_what_they_accepted(event, delta, epsilon):
    found = priced(event, delta)
    budget, odometer = Filter(Budget(epsilon, delta)), Odometer(delta)
    try:
        budget.charge(event)
    except TerrineError:
        pass
    else:
        assert found is None or found.lower <= epsilon
        assert found is None or budget.spent(delta) >= found.lower
    try:
        odometer.charge(event)
    except TerrineError:
        return
    assert found is None or odometer.spent() >= found.lower


@thoroughly
@given(events, deltas)
def test_the_slow_witness_agrees(event, delta):
    if (found := priced(event, delta)) is None:
        return
    slow = accounting.witness.bounds(event, delta=delta)
    assert slow.lower <= found.upper
    assert found.lower <= slow.upper

"""The witness against exact answers: closed forms, 40-digit enumeration, published values; and against extremes."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrine.accounting import witness
from terrine.accounting.witness_measure import Measure, Side, add, delta_at
from terrine.errors import InvalidArgument
from terrine.events import (
    ApproximateDP,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    NegativeBinomialCount,
    Neighbours,
    NonPrivate,
    OneOf,
    PoissonCount,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    RandomStopping,
    Repeated,
    Reproducible,
    Selection,
    ShuffledEpoch,
    leaves,
)
from tests.thorough import examples

mpmath.mp.dps = 40
REPLACE = Neighbours.REPLACE_ONE
Pair = list[tuple[mpmath.mpf, mpmath.mpf]]


@pytest.fixture(autouse=True)
def _loud() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def gaussian_delta(noise: float, epsilon: object) -> mpmath.mpf:
    """[BW18] Theorem 8."""
    s, e = 1 / mpmath.mpf(noise), mpmath.mpf(epsilon)
    return mpmath.ncdf(s / 2 - e / s) - mpmath.exp(e) * mpmath.ncdf(-s / 2 - e / s)


def root(delta_of: Callable[[mpmath.mpf], mpmath.mpf], delta: float, high: float) -> float:
    low, high = mpmath.mpf(0), mpmath.mpf(high)
    if delta_of(low) <= delta:
        return 0.0
    for _ in range(110):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return float(high)


def encloses(event: Event, delta: float, truth: float, *, tight: float, cells: int = 2048) -> None:
    lower, upper = witness.bounds(event, delta=delta, cells=cells)
    assert lower <= truth * (1 + 1e-12)
    assert truth * (1 - 1e-12) <= upper
    assert upper - lower <= tight * truth + 1e-300
    assert witness.least_epsilon(event, delta=delta) <= truth * (1 + 1e-12)


@pytest.mark.parametrize("noise", [0.05, 0.5, 1.0, 30.0, 1e6])
@pytest.mark.parametrize("delta", [1e-300, 1e-30, 1e-5, 0.3])
def test_gaussian_noise_is_the_analytic_formula(noise: float, delta: float) -> None:
    truth = root(lambda e: gaussian_delta(noise, e), delta, 1000 / noise**2 + 100 / noise)
    encloses(Gaussian(noise=noise), delta, truth, tight=1e-3)
    encloses(Composed([Gaussian(noise=2 * noise), Repeated(Gaussian(noise=2 * noise), 3)]), delta, truth, tight=1e-3)


@pytest.mark.parametrize(("noise", "delta"), [(1.0, 1e-5), (0.01, 1e-9), (1e9, 1e-12), (3.0, 1e-250), (1.0, 0.0)])
def test_laplace_noise_has_a_closed_form(noise: float, delta: float) -> None:
    truth = float(1 / mpmath.mpf(noise) + 2 * mpmath.log1p(-mpmath.mpf(delta)))
    encloses(Laplace(noise=noise), delta, truth, tight=1e-6)
    encloses(DiscreteLaplace(noise=noise, sensitivity=10**9), delta, truth, tight=1e-4)


@pytest.mark.parametrize(("epsilon", "times"), [(1.0, 2), (0.3, 37), (0.05, 400), (1e-4, 999), (17.8, 327), (1e-12, 5)])
@pytest.mark.parametrize("delta", [1e-13, 1e-5, 0.1])
def test_repeated_randomized_response_is_a_binomial_sum(epsilon: float, times: int, delta: float) -> None:
    e = mpmath.mpf(epsilon)
    yes = 1 / (1 + mpmath.exp(-e))
    chances = [mpmath.binomial(times, k) * yes**k * (1 - yes) ** (times - k) for k in range(times + 1)]
    losses = [(2 * k - times) * e for k in range(times + 1)]

    def delta_of(x: mpmath.mpf) -> mpmath.mpf:
        return mpmath.fsum(-p * mpmath.expm1(x - loss) for p, loss in zip(chances, losses, strict=True) if loss > x)

    truth = root(delta_of, delta, epsilon * times)
    encloses(Repeated(RandomizedResponse(epsilon=epsilon), times), delta, truth, tight=2e-2)
    if truth:
        found = witness.delta_bounds(Repeated(PureDP(epsilon=epsilon), times), epsilon=truth)
        assert found.lower <= delta * (1 + 1e-6)
        assert found.upper >= delta * (1 - 1e-6)


def test_a_billion_billion_tiny_responses_are_one_gaussian() -> None:
    truth = root(lambda e: gaussian_delta(1.0, e), 1e-5, 100)
    encloses(Repeated(PureDP(epsilon=1e-9), 10**18), 1e-5, truth, tight=4e-2)
    assert witness.least_epsilon(Repeated(PureDP(epsilon=1e-9), 10**20), delta=1e-6) > 80  # the truth is 96.6


@pytest.mark.parametrize("rate", [1e-9, 0.01, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("noise", [0.05, 0.7, 20.0])
def test_one_sampled_gaussian_step_has_a_closed_form(rate: float, noise: float) -> None:
    r = mpmath.mpf(rate)

    def delta_of(e: mpmath.mpf) -> mpmath.mpf:
        removed = r * gaussian_delta(noise, mpmath.log1p(mpmath.expm1(e) / r))
        kept = 1 - mpmath.exp(e) * (1 - r)
        added = kept * gaussian_delta(noise, mpmath.log(r * mpmath.exp(e) / kept)) if kept > 0 else 0
        return max(removed, added)

    for delta in (1e-12, 1e-5, 0.1):
        truth = root(delta_of, delta, 2000)
        encloses(PoissonSampled(Gaussian(noise=noise), rate=rate), delta, truth, tight=1e-4)


KNOWN = [
    (0.01, 4.0, 10_000, 1e-5, 0.946867, 1e-3),
    (256 / 60_000, 1.1, 14_062, 1e-5, 2.381597, 1e-2),
    (0.001, 0.6, 100_000, 1e-5, 6.112825, 6e-2),
    (1.0, 50.0, 1000, 1e-5, 2.594383, 1e-3),
    (1e-5, 0.4, 10**6, 1e-5, 3.074806, 1e-1),
    (0.01, 4.0, 10_000, 1e-15, 1.956053, 1e-3),
    (0.01, 0.5, 10_000, 1e-5, 43.36649, 1e-2),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "truth", "tight"), KNOWN)
def test_dp_sgd_at_known_settings(
    rate: float, noise: float, steps: int, delta: float, truth: float, tight: float
) -> None:
    event = Repeated(PoissonSampled(Gaussian(noise=noise), rate=rate), steps)
    lower, upper = witness.bounds(event, delta=delta)
    assert lower <= truth * (1 + 1e-6)
    assert truth * (1 - 1e-6) <= upper <= lower * (1 + tight)
    assert 0.7 * truth < witness.least_epsilon(event, delta=delta) <= truth * (1 + 1e-6)


def test_replacing_a_unit_at_rate_one_doubles_the_shift() -> None:
    truth = root(lambda e: gaussian_delta(0.25, e), 1e-5, 1000)
    encloses(PoissonSampled(Gaussian(noise=0.5), rate=1.0, neighbours=REPLACE), 1e-5, truth, tight=1e-4)


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 3.0])
def test_replacing_a_sampled_unit_is_a_threshold_test(epsilon: float) -> None:
    rate, s = mpmath.mpf(0.2), 1 / mpmath.mpf(0.8)

    def beyond(z: mpmath.mpf, centre: mpmath.mpf) -> mpmath.mpf:
        return (1 - rate) * mpmath.ncdf(-z) + rate * mpmath.ncdf(centre - z)

    def loss(z: mpmath.mpf) -> mpmath.mpf:
        odds = [(1 - rate) + rate * mpmath.exp(sign * s * z - s * s / 2) for sign in (1, -1)]
        return mpmath.log(odds[0] / odds[1])

    z = mpmath.findroot(lambda z: loss(z) - epsilon, 1.0)
    truth = beyond(z, s) - mpmath.exp(epsilon) * beyond(z, -s)
    event = PoissonSampled(Gaussian(noise=0.8), rate=0.2, neighbours=REPLACE)
    lower, upper = witness.delta_bounds(event, epsilon=epsilon)
    assert lower * (1 - 1e-12) <= truth <= upper * (1 + 1e-12)
    assert upper < lower * 1.001


def test_a_step_that_missed_the_unit_still_happened() -> None:
    """With hardly any noise a draw shows the unit, and either of two draws is enough: 1 - 0.5^2."""
    event = Repeated(PoissonSampled(Gaussian(noise=0.02), rate=0.5), 2)
    lower, upper = witness.delta_bounds(event, epsilon=50.0)
    assert lower <= 0.75 <= upper <= lower * (1 + 1e-4)


def discrete_gaussian_pair(scale: float, steps: int) -> Pair:
    weight = {k: mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * mpmath.mpf(scale) ** 2)) for k in range(-200, 201)}
    total = mpmath.fsum(weight.values())
    return [(weight[k - steps] / total, weight[k] / total) for k in range(-200 + steps, 201)]


def exact_delta(pair: Pair, epsilon: mpmath.mpf) -> mpmath.mpf:
    return mpmath.fsum(max(p - mpmath.exp(epsilon) * q, 0) for p, q in pair)


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (0.7, 3), (4.0, 2), (0.5, 10)])
def test_discrete_gaussian_noise_by_enumeration(noise: float, steps: int) -> None:
    pair = discrete_gaussian_pair(noise * steps, steps)
    truth = root(lambda e: exact_delta(pair, e), 1e-6, 1000)
    encloses(DiscreteGaussian(noise=noise, sensitivity=steps), 1e-6, truth, tight=1e-5)
    assert witness.bounds(DiscreteGaussian(noise=noise, sensitivity=steps, scalar=False), delta=1e-6).upper > truth


def test_discrete_gaussian_noise_on_a_fine_grid_is_gaussian() -> None:
    truth = root(lambda e: gaussian_delta(1.0, e), 1e-6, 100)
    encloses(DiscreteGaussian(noise=1.0, sensitivity=2**30), 1e-6, truth, tight=1e-3)


# Enumeration of small discrete mechanisms: a pair is a list of (p, q), one for each outcome


def pair_of(event: Event, reverse: bool) -> Pair:
    """What the event's worst mechanism shows with the unit (first) and without (second), or reversed."""
    pair: Pair = [(mpmath.mpf(1), mpmath.mpf(1))]
    for part, times in leaves(event):
        for _ in range(times):
            pair = [(p * a, q * b) for p, q in pair for a, b in single(part, reverse)]
            merged: dict[str, tuple[mpmath.mpf, mpmath.mpf]] = {}
            for p, q in pair:
                key = mpmath.nstr(p / q, 25) if q else "inf"
                merged[key] = (merged[key][0] + p, merged[key][1] + q) if key in merged else (p, q)
            pair = list(merged.values())
    return pair


def single(event: Event, reverse: bool) -> Pair:
    match event:
        case PureDP(epsilon=e) | RandomizedResponse(epsilon=e) | Selection(epsilon=e):
            yes, no = (1 / (1 + mpmath.exp(sign * mpmath.mpf(e))) for sign in (-1, 1))
            return [(yes, no), (no, yes)]
        case ApproximateDP(epsilon=e, delta=d):
            fails = [(mpmath.mpf(d), mpmath.mpf(0)), (mpmath.mpf(0), mpmath.mpf(d))]
            return fails + [
                ((1 - mpmath.mpf(d)) * p, (1 - mpmath.mpf(d)) * q) for p, q in single(PureDP(epsilon=e), False)
            ]
        case DiscreteLaplace(noise=noise, sensitivity=s):
            r = mpmath.exp(-1 / (mpmath.mpf(noise) * s))
            inner = [(r ** (s - k) * (1 - r) / (1 + r), r**k * (1 - r) / (1 + r)) for k in range(1, s)]
            return [(r**s / (1 + r), 1 / (1 + r)), *inner, (1 / (1 + r), r**s / (1 + r))]
        case PoissonSampled(event=inner, rate=rate) | FixedSizeSampled(event=inner, rate=rate):
            r, pair = mpmath.mpf(rate), pair_of(inner, reverse)
            if reverse:
                return [(p, (1 - r) * p + r * q) for p, q in pair]
            return [(r * p + (1 - r) * q, q) for p, q in pair]
        case RandomStopping(event=inner):
            return pair_of(inner, reverse)
    raise AssertionError(event)


def pure_events() -> st.SearchStrategy[Event]:
    epsilon = st.sampled_from([1e-12, 1e-3, 0.1, 0.5, 1.0, 3.0, 40.0, 400.0])
    return st.one_of(
        epsilon.map(lambda e: PureDP(epsilon=e)),
        epsilon.map(lambda e: RandomizedResponse(epsilon=e)),
        st.builds(lambda e, d: ApproximateDP(epsilon=e, delta=d), epsilon, st.sampled_from([1e-20, 1e-7, 1e-3])),
        st.builds(
            lambda n, s: DiscreteLaplace(noise=n, sensitivity=s), st.sampled_from([0.05, 0.8, 1e3]), st.integers(1, 4)
        ),
    )


def small_events(depth: int = 2) -> st.SearchStrategy[Event]:
    if not depth:
        return pure_events()
    inner = small_events(depth - 1)
    rate = st.sampled_from([1e-9, 1e-3, 0.1, 0.5, 0.99, 1.0])
    return st.one_of(
        inner,
        st.builds(Repeated, inner, st.integers(1, 3)),
        st.lists(inner, min_size=2, max_size=2).map(Composed),
        st.builds(lambda e, r: PoissonSampled(e, rate=r), inner, rate),
    )


@settings(max_examples=50, deadline=None)
@given(small_events(), st.sampled_from([1e-200, 1e-30, 1e-9, 1e-5, 1e-2, 0.4]))
def test_nested_events_by_enumeration(event: Event, delta: float) -> None:
    pairs = [pair_of(event, reverse) for reverse in (False, True)]
    if max(len(pair) for pair in pairs) > 2000:
        return

    def delta_of(epsilon: mpmath.mpf) -> mpmath.mpf:
        return max(exact_delta(pair, epsilon) for pair in pairs)

    finite = [mpmath.log(p / q) for pair in pairs for p, q in pair if p and q]
    highest = max([mpmath.mpf(0), *finite]) + 1
    truth = math.inf if delta_of(highest) > delta else root(delta_of, delta, highest)
    lower, upper = witness.bounds(event, delta=delta, cells=512)
    assert lower <= truth * (1 + 1e-10) + 1e-300
    assert truth * (1 - 1e-10) <= upper


@settings(max_examples=30, deadline=None)
@given(pure_events(), st.sampled_from([(1, 10), (1, 2), (99, 100)]), st.integers(1, 3))
def test_samples_of_fixed_size_by_enumeration(inner: Event, share: tuple[int, int], times: int) -> None:
    event = FixedSizeSampled(inner, size=share[0], population=share[1])
    pairs = [pair_of(Repeated(event, times), reverse) for reverse in (False, True)]
    truth = max(exact_delta(pair, mpmath.mpf(0.3)) for pair in pairs)
    lower, upper = witness.delta_bounds(Repeated(event, times), epsilon=0.3, cells=512)
    assert lower <= truth * (1 + 1e-9) + 1e-280
    assert truth * (1 - 1e-9) <= upper
    if times == 1:
        assert upper <= truth * 1.001 + 1e-200


def test_steps_of_fixed_size_are_bounded_for_values_that_all_differ() -> None:
    """Three values at distance 1 of each other cost more than one value against none (6.19): the upper bound knows."""
    event = Repeated(FixedSizeSampled(Gaussian(noise=1.0), size=10, population=1000), 10_000)
    assert witness.bounds(event, delta=1e-5).upper > 6.68


# Sums of losses, one at a time


def exact_sum(a: Measure, b: Measure, epsilon: float) -> mpmath.mpf:
    """delta of the summed losses, term by term."""
    total = mpmath.mpf(a.top) * (mpmath.fsum(b.p) + b.top) + mpmath.fsum(a.p) * b.top
    for p, loss in zip(a.p, a.loss, strict=True):
        for p_b, loss_b in zip(b.p, b.loss, strict=True):
            gap = mpmath.mpf(epsilon) - mpmath.mpf(loss) - mpmath.mpf(loss_b)
            total += max(-mpmath.mpf(p) * p_b * mpmath.expm1(gap), 0)
    return total


@st.composite
def measures(draw: st.DrawFn, upper: bool) -> Measure:
    """A few masses, some next to nothing; of the total nothing but a bound is known."""
    weights = draw(st.lists(st.sampled_from([1e-200, 1e-12, 3e-8, 9e-8, 1e-6, 0.1, 0.5, 1.0]), min_size=1, max_size=6))
    scale = draw(st.sampled_from([1e-9, 0.01, 1.0, 60.0]))
    spots = draw(st.lists(st.integers(-999, 999), min_size=len(weights), max_size=len(weights), unique=True))
    top = draw(st.sampled_from([0.0, 1e-9, 0.3]))
    p = np.array(weights) / sum(weights) * (1 - top)
    unknown = draw(st.sampled_from([0.0, 1e-12, 2e-8, 1e-3]))
    excess = math.fsum([*p.tolist(), top, -1.0]) + (unknown if upper else -unknown)
    return Measure(p, scale / 999 * np.sort(np.array(spots)), 0.0, top, excess)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans(), st.sampled_from([16, 64]), st.sampled_from([0.0, 1e-12, 1e-6]))
def test_a_sum_errs_to_its_side_at_every_epsilon(data: st.DataObject, upper: bool, cells: int, cut: float) -> None:
    side = Side(upper, False, cells, 1e-5)
    a, b = data.draw(measures(upper)), data.draw(measures(upper))
    found = add(side, a, b, cut)
    span = float(a.loss[-1] + b.loss[-1] - a.loss[0] - b.loss[0]) or 1.0
    for part in (-0.1, 0.0, 0.3, 0.5, 0.7, 0.9, 0.999):
        epsilon = float(a.loss[0] + b.loss[0]) + part * span
        truth, value = exact_sum(a, b, epsilon), delta_at(side, found, epsilon)
        assert (min(truth, 1) <= value) if upper else (value <= truth), (float(truth), value)


# The whole grammar

EXTREMES: list[tuple[Event, float]] = [
    (Gaussian(noise=1e160), 1e-5),
    (Gaussian(noise=1e-200), 1e-5),
    (Gaussian(noise=1e-3), 1e-300),
    (DiscreteGaussian(noise=0.01), 1e-5),
    (DiscreteGaussian(noise=1e-200, scalar=False), 1e-5),
    (Laplace(noise=1e300), 1e-320),
    (Laplace(noise=1e-300), 0.5),
    (Repeated(PureDP(epsilon=400.0), 3), 1e-9),
    (Repeated(RandomizedResponse(epsilon=19.6), 438_464), 1e-9),
    (Repeated(PureDP(epsilon=1e-9), 10**400), 1e-6),
    (Repeated(Gaussian(noise=1.0), 10**400), 1e-6),
    (Repeated(PoissonSampled(Gaussian(noise=1.0), rate=1e-9), 10**18), 1e-5),
    (Repeated(FixedSizeSampled(Gaussian(noise=0.03), size=10, population=100), 2), 1e-5),
    (PoissonSampled(ApproximateDP(epsilon=1.0, delta=1e-6), rate=0.1), 1e-320),
    (PoissonSampled(NonPrivate(), rate=1e-300), 1e-5),
    (Repeated(PoissonSampled(NonPrivate(), rate=1e-9), 1000), 1e-5),
    (PoissonSampled(PureDP(epsilon=1e300), rate=1 - 1e-16), 1e-5),
    (Repeated(PoissonSampled(Laplace(noise=1e-3), rate=0.1, neighbours=REPLACE), 10), 1e-5),
    (PoissonSampled(Gaussian(noise=0.04), rate=0.1, neighbours=REPLACE), 1e-300),
    (PoissonSampled(Repeated(Gaussian(noise=1e-5), 10), rate=0.1, neighbours=REPLACE), 1e-5),
    (RandomStopping(Gaussian(noise=1.0), PoissonCount(mean=3.0)), 1e-5),
    (RandomStopping(PureDP(epsilon=0.1), NegativeBinomialCount(shape=1.0, gamma=0.1)), 1e-5),
    (Repeated(OneOf([NonPrivate(), PureDP(epsilon=0.0)]), 7), 0.0),
    (Reproducible(ShuffledEpoch(Composed(), steps=3)), 0.0),
    (Composed([Repeated(PoissonSampled(Gaussian(noise=1 + i / 99), rate=0.01), 99) for i in range(20)]), 1e-5),
]


@pytest.mark.parametrize(("event", "delta"), EXTREMES)
def test_extremes_answer_in_time_without_a_warning(event: Event, delta: float) -> None:
    started = time.process_time()
    lower, upper = witness.bounds(event, delta=delta)
    assert 0 <= lower <= upper
    assert 0 <= witness.least_epsilon(event, delta=delta) <= upper
    assert time.process_time() - started < 5


def any_noise() -> st.SearchStrategy[Event]:
    noise = st.floats(-3, 6).map(lambda x: 10**x)
    epsilon = st.floats(-12, 3).map(lambda x: 10**x)
    steps = st.sampled_from([1, 2, 1000, 2**30])
    return st.one_of(
        noise.map(lambda n: Gaussian(noise=n)),
        noise.map(lambda n: Laplace(noise=n)),
        st.builds(lambda n, s: DiscreteLaplace(noise=n, sensitivity=s), noise, steps),
        st.builds(lambda n, s, v: DiscreteGaussian(noise=n, sensitivity=s, scalar=v), noise, steps, st.booleans()),
        epsilon.map(lambda e: PureDP(epsilon=e)),
        epsilon.map(lambda e: Selection(epsilon=e)),
        st.builds(lambda e, d: ApproximateDP(epsilon=e, delta=10**d), epsilon, st.floats(-300, -1)),
        st.just(NonPrivate()),
    )


def any_event(depth: int, relation: Neighbours) -> st.SearchStrategy[Event]:
    if not depth:
        return any_noise()
    same = any_event(depth - 1, relation)
    times = st.floats(0, 18).map(lambda x: int(10**x))
    rate = st.floats(-9, 0).map(lambda x: 10**x)
    count = st.sampled_from([PoissonCount(mean=2.0), NegativeBinomialCount(shape=0.5, gamma=0.1)])
    choices = [
        any_noise(),
        st.builds(Repeated, same, times),
        st.lists(same, max_size=3).map(Composed),
        st.lists(same, min_size=1, max_size=3).map(OneOf),
        st.builds(RandomStopping, same, count),
    ]
    inside = any_event(depth - 1, Neighbours.ADD_REMOVE)
    if relation is Neighbours.ADD_REMOVE:
        choices.append(st.builds(PoissonSampled, inside, rate))
    else:
        choices.append(st.builds(lambda e, r: PoissonSampled(e, rate=r, neighbours=REPLACE), any_noise(), rate))
        choices.append(st.builds(lambda e, n: FixedSizeSampled(e, size=1, population=n), same, st.integers(1, 10**9)))
    return st.one_of(choices)


@settings(max_examples=examples(30), deadline=None)
@given(st.data(), st.floats(-300, -0.4).map(lambda x: 10**x))
def test_the_whole_grammar_is_enclosed(data: st.DataObject, delta: float) -> None:
    try:
        event = data.draw(st.one_of(any_event(2, Neighbours.ADD_REMOVE), any_event(2, REPLACE)))
    except InvalidArgument:
        return  # parts under different relations
    started = time.process_time()
    lower, upper = witness.bounds(event, delta=delta, cells=256)
    assert 0 <= lower <= upper
    for part, _ in leaves(event):
        assert witness.least_epsilon(part, delta=delta) <= upper
    assert time.process_time() - started < 10


@pytest.mark.parametrize("delta", [1e-300, 1e-5, 0.3])
def test_masses_that_leave_floating_point_are_out_of_reach(delta: float) -> None:
    """Of losses of half a million each, ten million times over, the upper mass overflowed, with a warning and a nan."""
    event = Repeated(DiscreteGaussian(noise=1.0, sensitivity=1000, scalar=True), times=10_000_000)
    lower, upper = witness.bounds(event, delta=delta, cells=256)
    assert 1e6 < lower <= 5.1e6 <= upper


def test_delta_of_a_thousandth_and_of_next_to_nothing() -> None:
    for epsilon in (0.0, 1.0, 6.0, 30.0):
        truth = gaussian_delta(1.0, epsilon)
        lower, upper = witness.delta_bounds(Gaussian(noise=1.0), epsilon=epsilon)
        assert lower <= truth * (1 + mpmath.mpf(1e-10)) <= upper * (1 + 1e-9)
        assert upper <= 1.01 * lower


def test_bad_arguments_are_refused() -> None:
    for bad in (-0.1, 1.0, math.nan, "x"):
        with pytest.raises(InvalidArgument):
            witness.bounds(Composed(), delta=bad)
    with pytest.raises(InvalidArgument):
        witness.delta_bounds(Composed(), epsilon=-1.0)
    with pytest.raises(InvalidArgument):
        witness.least_epsilon(Composed(), delta=0.1, cells=3)

"""What every mechanism promises, found by registry so that a new one cannot be forgotten."""

import dataclasses
import inspect
import math
from typing import Any

import numpy as np
import pytest

from terrine import accounting, events, mechanisms
from terrine.errors import InvalidArgument
from terrine.mechanisms import (
    AboveThreshold,
    BoundedMean,
    BoundedSum,
    Counts,
    Exponential,
    Gaussian,
    Histogram,
    Laplace,
    MostCommonValue,
    Noise,
    NoisyMax,
    PermuteAndFlip,
    Quantile,
    RandomizedResponse,
    SmoothMedian,
    SmoothNoise,
    SparseVector,
    StableRelease,
    UnaryEncoding,
)
from terrine.rng import Seeded

REPLACE = events.Neighbours.REPLACE_ONE


@dataclasses.dataclass(frozen=True)
class Case:
    """A mechanism, an input it takes, and what it must do with hard ones. `takes` names what the input is."""

    mechanism: Any
    value: Any
    takes: str  # "numbers", "number", "counts", "scores", "records", "answers", "stream", "values"
    delta: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()

    def release(self, value: Any, seed: int | None = 0) -> Any:
        rng = {} if seed is None else {"rng": Seeded(seed)}
        return self.mechanism.release(value, **dict(self.options), **rng)


CASES = {
    "Laplace": Case(Laplace(sensitivity=1, epsilon=1), 3.5, "numbers"),
    "Laplace vector": Case(Laplace(sensitivity=2.5, epsilon=0.1), [1.5, -2.0, 7.25], "numbers"),
    "Gaussian": Case(Gaussian(sensitivity=1, epsilon=1, delta=1e-5), 3.5, "numbers", 1e-5),
    "Gaussian vector": Case(Gaussian(sensitivity=0.3, epsilon=3, delta=1e-6), np.ones((2, 3)), "numbers", 1e-6),
    "Counts": Case(Counts(epsilon=1), 12, "counts"),
    "Counts list": Case(Counts(epsilon=1, queries=3), [3, 0, 9], "counts"),
    "Counts Gaussian": Case(Counts(epsilon=1, queries=3, delta=1e-5), [3, 0, 9], "counts", 1e-5),
    "Histogram": Case(Histogram(epsilon=1, bins=3), [3, 0, 9], "counts"),
    "Histogram replace": Case(Histogram(epsilon=1, bins=3, neighbours=REPLACE), [3, 0, 9], "counts"),
    "Histogram Gaussian": Case(Histogram(epsilon=1, bins=3, delta=1e-5, neighbours=REPLACE), [3, 0, 9], "counts", 1e-5),
    "BoundedSum": Case(BoundedSum(lower=0, upper=5, epsilon=1), [1.0, 4.5], "records"),
    "BoundedSum Gaussian": Case(BoundedSum(lower=-1, upper=5, epsilon=1, delta=1e-5), [1.0, 4.5], "records", 1e-5),
    "BoundedMean": Case(BoundedMean(lower=0, upper=5, epsilon=1), [1.0, 4.5], "records"),
    "BoundedMean Gaussian": Case(BoundedMean(lower=0, upper=5, epsilon=1, delta=1e-5), [1.0, 4.5], "records", 1e-5),
    "BoundedMean replace": Case(BoundedMean(lower=0, upper=5, epsilon=1, neighbours=REPLACE), [1.0, 4.5], "records"),
    "Quantile": Case(Quantile(q=0.5, lower=0, upper=9, epsilon=1), [1.0, 4.5, 3.0], "records"),
    "Quantile replace": Case(Quantile(q=0.9, lower=0, upper=9, epsilon=1, neighbours=REPLACE), [1.0, 4.5], "records"),
    "SmoothMedian": Case(SmoothMedian(lower=0, upper=9, epsilon=1), [1.0, 4.5, 3.0], "records"),
    "SmoothMedian Laplace": Case(SmoothMedian(lower=0, upper=9, epsilon=1, delta=1e-6), [1.0, 4.5], "records", 1e-6),
    "SmoothNoise": Case(SmoothNoise(epsilon=1, grid=2**-20), 3.5, "number", 0.0, (("smooth", 0.3),)),
    "MostCommonValue": Case(MostCommonValue(categories=("a", "b"), epsilon=1), ["a", "b", "a"], "values"),
    "Exponential": Case(Exponential(sensitivity=1, epsilon=1), [1.0, 4.0, 2.5], "scores"),
    "Exponential monotone": Case(Exponential(sensitivity=1, epsilon=1, monotone=True), [1, 4, 2], "scores"),
    "PermuteAndFlip": Case(PermuteAndFlip(sensitivity=1, epsilon=1), [1.0, 4.0, 2.5], "scores"),
    "NoisyMax": Case(NoisyMax(sensitivity=1, epsilon=1), [1.0, 4.0, 2.5], "scores"),
    "NoisyMax Laplace": Case(NoisyMax(sensitivity=1, epsilon=1, noise=Noise.LAPLACE, monotone=True), [1, 4], "scores"),
    "NoisyMax Gaussian": Case(
        NoisyMax(sensitivity=1, epsilon=1, noise=Noise.GAUSSIAN, delta=1e-5), [1, 4], "scores", 1e-5
    ),
    "NoisyMax Gaussian l2": Case(
        NoisyMax(sensitivity=1, epsilon=1, noise=Noise.GAUSSIAN, delta=1e-5, l2=1.5), [1, 4], "scores", 1e-5
    ),
    "RandomizedResponse": Case(RandomizedResponse(truth=0.5), [0, 1, 1], "answers"),
    "RandomizedResponse many": Case(RandomizedResponse(epsilon=2.0, answers=7), [0, 5, 6], "answers"),
    "UnaryEncoding": Case(UnaryEncoding(epsilon=1, answers=9), [0, 8], "answers"),
    "AboveThreshold": Case(AboveThreshold(threshold=5, epsilon=1), [1, 2.5, 90], "stream"),
    "SparseVector": Case(SparseVector(threshold=5, epsilon=1, answers=2), [1, 2.5, 90, 91], "stream"),
    "SparseVector delta": Case(
        SparseVector(threshold=5, epsilon=1, answers=200, delta=1e-6), [1, 2.5, 90, 91], "stream", 1e-6
    ),
    "StableRelease": Case(StableRelease(epsilon=1, delta=1e-6), "answer", "anything", 1e-6, (("distance", 50),)),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def of(*takes):
    found = {name: case for name, case in CASES.items() if case.takes in takes}
    assert found
    return pytest.mark.parametrize("case", found.values(), ids=found.keys())


def test_every_mechanism_is_here():
    public = {name for name in mechanisms.__all__ if hasattr(getattr(mechanisms, name), "release")}
    assert public == {type(case.mechanism).__name__ for case in CASES.values()}


@EACH
def test_the_release_carries_the_event_the_mechanism_announced(case):
    assert case.release(case.value, seed=None).event == case.mechanism.event
    assert case.release(case.value).event == events.Reproducible(case.mechanism.event)


@EACH
def test_the_event_is_priced_at_no_more_than_the_claim(case):
    claim, event = case.mechanism.epsilon, case.mechanism.event
    if isinstance(event, events.ApproximateDP):
        assert (event.epsilon, event.delta) == (claim, case.delta)
        return
    assert accounting.delta(event, epsilon=claim * (1 + 1e-12)) <= case.delta * (1 + 1e-9) + 1e-15
    assert events.from_json(events.to_json(event)) == event


@EACH
def test_a_mechanism_is_a_frozen_value(case):
    again = type(case.mechanism)(**given(case.mechanism))
    assert again == case.mechanism
    assert hash(again) == hash(case.mechanism)
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.mechanism.epsilon = 2.0


@EACH
def test_a_seed_repeats_the_release_and_another_draws_another(case):
    def shown(seed):
        return [np.asarray(case.release(case.value, seed).value, dtype=object).tolist() for _ in range(1)]

    assert shown(7) == shown(7)
    if case.takes != "anything":
        assert len({str(shown(seed)) for seed in range(60)}) > 1


@EACH
@pytest.mark.parametrize("epsilon", [0, -1, math.nan, math.inf, "1", None])
def test_an_epsilon_that_is_not_positive_is_refused(case, epsilon):
    changes = {"truth": None} if isinstance(case.mechanism, RandomizedResponse) else {}
    with pytest.raises(InvalidArgument, match=r"epsilon|truth"):
        dataclasses.replace(case.mechanism, epsilon=epsilon, **changes)


WITH_SENSITIVITY = {
    name: case for name, case in CASES.items() if "sensitivity" in {f.name for f in dataclasses.fields(case.mechanism)}
}


@pytest.mark.parametrize("case", WITH_SENSITIVITY.values(), ids=WITH_SENSITIVITY.keys())
@pytest.mark.parametrize("sensitivity", [0, -1, math.nan, math.inf, "1", None])
def test_a_sensitivity_that_is_not_positive_is_refused(case, sensitivity):
    with pytest.raises(InvalidArgument, match="sensitivity"):
        dataclasses.replace(case.mechanism, sensitivity=sensitivity)


@pytest.mark.parametrize("delta", [0, 1, -0.1, math.nan, 2])
def test_a_delta_that_is_no_probability_is_refused(delta):
    for case in CASES.values():
        if case.delta:
            with pytest.raises(InvalidArgument, match="delta"):
                dataclasses.replace(case.mechanism, delta=delta)


def given(mechanism):
    """The arguments that make it; randomized response takes one of two that it then both knows."""
    fields = {field.name: getattr(mechanism, field.name) for field in dataclasses.fields(mechanism)}
    if isinstance(mechanism, RandomizedResponse):
        del fields["truth" if mechanism.answers == 7 else "epsilon"]
    return fields


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    assert len(text) > 15
    return text


@of("numbers", "number", "scores", "stream", "records", "counts", "answers")
def test_nan_is_refused_wherever_it_stands(case):
    single = np.ndim(case.value) == 0
    bad = math.nan if single else [math.nan, *list(np.ravel(case.value))[1:]]
    with pytest.raises(InvalidArgument) as error:
        case.release(bad)
    one_line(error)


@of("numbers", "number", "scores", "counts", "answers", "stream")
@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
def test_infinity_is_refused(case, infinite):
    bad = infinite if np.ndim(case.value) == 0 else [infinite, *list(np.ravel(case.value))[1:]]
    with pytest.raises(InvalidArgument) as error:
        case.release(bad)
    one_line(error)


@of("records")
def test_infinity_and_huge_records_are_clamped_to_the_bounds(case):
    low, high = case.mechanism.lower, case.mechanism.upper
    for seed in range(5):
        wild = case.release([math.inf, -math.inf, 1e308, -1e308], seed).value
        tame = case.release([high, low, high, low], seed).value
        assert wild == tame
        assert math.isfinite(wild)


@of("numbers", "scores", "counts", "answers")
def test_nothing_is_refused(case):
    with pytest.raises(InvalidArgument, match=r"empty|shape"):
        case.release([])


@of("records")
def test_no_records_give_a_defined_answer_or_a_refusal_where_their_number_is_public(case):
    public = case.mechanism.event.neighbours is REPLACE and not isinstance(case.mechanism, Quantile)
    if public and not isinstance(case.mechanism, BoundedSum):
        with pytest.raises(InvalidArgument, match="empty"):
            case.release([])
    else:
        assert math.isfinite(case.release([]).value)


@of("scores", "records", "counts")
def test_a_wrong_shape_is_refused(case):
    with pytest.raises(InvalidArgument, match="shape"):
        case.release(np.ones((2, 2), dtype=np.int64))


@of("numbers", "number", "scores", "records", "counts", "answers", "stream")
@pytest.mark.parametrize("bad", ["text", ["a", "b", "c"], [None, 1, 2], [1j, 2j, 3j], {"a": 1}])
def test_what_is_no_number_is_refused(case, bad):
    with pytest.raises(InvalidArgument) as error:
        case.release(bad)
    one_line(error)


@of("numbers", "number")
@pytest.mark.parametrize("huge", [1.7e308, -1.7e308, 2**1000, -(2**1000), 10**400, 5e-324])
def test_huge_and_tiny_numbers_stay_finite(case, huge):
    value = case.release(huge if np.ndim(case.value) == 0 else [huge, 1]).value
    assert np.isfinite(value).all()


@of("scores")
@pytest.mark.parametrize("huge", [1.7e308, 2**1000, 10**400])
def test_the_one_huge_score_wins(case, huge):
    assert case.release([-huge, huge]).value == 1


@of("counts")
def test_counts_beyond_64_bits_are_clamped(case):
    shape = np.shape(case.value)
    for seed in range(3):
        wild = case.release(10**30 if not shape else [10**30, -(10**30), 5], seed).value
        tame = case.release(2**61 if not shape else [2**61, -(2**61), 5], seed).value
        assert np.array_equal(wild, tame)


def test_integers_beyond_2_to_the_53_are_added_without_rounding_first():
    # As floats 2^53 + 1 and 2^53 are the same number. With an even grid step the difference must survive.
    noisy = Laplace(sensitivity=1, epsilon=2.0, grid=1.0)
    for base in (2**53, 2**60, 2**62):
        for shift in (1, 3):
            alone = [noisy.release(base + shift, rng=Seeded(s)).value for s in range(20)]
            exact = [float(base + shift + int(noisy.release(0, rng=Seeded(s)).value)) for s in range(20)]
            assert alone == exact
            listed = [noisy.release(np.array([base + shift]), rng=Seeded(s)).value[0] for s in range(20)]
            listed_exact = [
                float(base + shift + int(noisy.release(np.array([0]), rng=Seeded(s)).value[0])) for s in range(20)
            ]
            assert listed == listed_exact
    with pytest.raises(InvalidArgument, match="2\\^53"):
        noisy.release([2**53 + 1, 0.5])


@EACH
def test_more_epsilon_never_costs_less(case):
    if isinstance(case.mechanism, RandomizedResponse):
        return
    twice = dataclasses.replace(case.mechanism, epsilon=2 * case.mechanism.epsilon)
    assert accounting.epsilon(twice.event, delta=1e-4) >= accounting.epsilon(case.mechanism.event, delta=1e-4)
    assert accounting.epsilon(case.mechanism.event, delta=1e-4) > 0


@EACH
def test_the_accuracy_theorem_holds_where_there_is_one(case):
    """Over 400 seeded runs, at 90%: at most 75 misses (40 expected at worst; false-alarm rate below 1e-6)."""
    mechanism = case.mechanism
    if not hasattr(mechanism, "error") or case.takes not in ("numbers", "counts"):
        return
    takes_size = "size" in inspect.signature(mechanism.error).parameters
    size = np.size(case.value)
    bound = mechanism.error(confidence=0.9, **({"size": size} if takes_size else {}))
    misses = sum(
        np.abs(np.asarray(case.release(case.value, seed).value) - np.asarray(case.value)).max() > bound
        for seed in range(400)
    )
    assert misses <= 75
    assert mechanism.error(confidence=0.99, **({"size": size} if takes_size else {})) > bound

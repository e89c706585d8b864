"""A plan settles noise, steps and event once, and refuses what contradicts itself."""

import dataclasses
import math

import pytest

from terrine import accounting, sgd
from terrine.errors import BudgetExceeded, InvalidArgument
from terrine.events import (
    Budget,
    Composed,
    FixedSizeSampled,
    Gaussian,
    Neighbours,
    NonPrivate,
    PoissonSampled,
    Repeated,
    Reproducible,
    ShuffledEpoch,
)

BASE = {"examples": 60_000, "lot": 600, "clip": 1.0, "noise": 1.1, "delta": 1e-5, "steps": 2000}


def plan(**changes):
    given = {**BASE, **changes}
    return sgd.Plan(**{name: value for name, value in given.items() if value is not None})


def test_the_noise_is_the_least_that_keeps_the_budget():
    budget = Budget(epsilon=2.0, delta=1e-5)
    made = sgd.Plan(examples=60_000, lot=600, epochs=20, clip=1.0, budget=budget)
    assert made.steps == 2000
    assert made.event == Repeated(PoissonSampled(Gaussian(noise=made.noise), rate=0.01), times=2000)
    assert 1.99 < made.epsilon <= 2.0
    quieter = Repeated(PoissonSampled(Gaussian(noise=made.noise * 0.999), rate=0.01), times=2000)
    assert accounting.epsilon(quieter, delta=1e-5) > 2.0


def test_a_plan_is_frozen_and_can_be_varied():
    made = plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.noise = 0.1
    assert dataclasses.replace(made, lot=300).rate == 0.005


def test_every_sampler_has_its_own_event():
    assert plan(sampling=sgd.FixedSize()).event == Repeated(
        FixedSizeSampled(Gaussian(noise=1.1), size=600, population=60_000), times=2000
    )
    assert plan(sampling=sgd.Shuffled()).event == Repeated(ShuffledEpoch(Gaussian(noise=1.1), steps=100), times=20)
    zero_out = sgd.Shuffled(Neighbours.ZERO_OUT)
    assert plan(sampling=zero_out).event == Repeated(
        ShuffledEpoch(Gaussian(noise=1.1), 100, Neighbours.ZERO_OUT), times=20
    )


def test_replacing_an_example_reaches_twice_as_far():
    """One gradient leaves and another arrives: the sum moves by 2C, and the noise is stated relative to that."""
    assert plan().deviation_at(0, 3.0) == pytest.approx(1.1 * 3.0)
    assert plan(sampling=sgd.FixedSize()).deviation_at(0, 3.0) == pytest.approx(1.1 * 6.0)
    assert plan(sampling=sgd.Shuffled()).deviation_at(0, 3.0) == pytest.approx(1.1 * 6.0)
    assert plan(sampling=sgd.Shuffled(Neighbours.ZERO_OUT)).deviation_at(0, 3.0) == pytest.approx(1.1 * 3.0)


def test_an_unfinished_shuffled_epoch_is_billed_whole():
    assert plan(sampling=sgd.Shuffled(), steps=101).event.times == 2


def test_noise_stages_are_in_the_event_step_by_step():
    made = plan(steps=10, noise_stages=sgd.Stages(1.0, 0.5, 2.0))
    by_step = [made.noise_at(step) for step in range(10)]
    by_event = [part.event.event.noise for part in made.event.parts for _ in range(part.times)]
    assert by_event == by_step
    assert sorted(set(by_step)) == [0.55, 1.1, 2.2]


def test_noise_stages_of_an_epoch_are_billed_at_the_quietest():
    made = sgd.Plan(
        examples=10, lot=5, steps=4, clip=1.0, noise=1.0, delta=1e-5,
        sampling=sgd.Shuffled(), noise_stages=sgd.Stages(4.0, 1.0, 3.0, 2.0),
    )  # fmt: skip
    assert [part.event.event.noise for part in made.event.parts] == [1.0, 2.0]


def test_a_running_epsilon_grows_to_the_whole():
    made = plan()
    running = [made.epsilon_after(step) for step in (1, 500, 1999, 2000)]
    assert running == sorted(running)
    assert running[-1] == made.epsilon


def test_the_adaptive_count_is_part_of_the_event():
    made = plan(clip=sgd.Adaptive(noise=20.0))
    assert made.event.event.event == Composed([Gaussian(noise=1.1), Gaussian(noise=20.0)])
    assert made.epsilon > plan().epsilon


def test_what_prepared_the_run_is_billed_and_calibrated_for():
    budget = Budget(epsilon=2.0, delta=1e-5)
    shared = {"examples": 60_000, "lot": 600, "epochs": 20, "clip": 1.0, "budget": budget}
    prepared = sgd.Plan(**shared, preparation=(Gaussian(noise=8.0),))
    assert prepared.event.parts[0] == Gaussian(noise=8.0)
    assert prepared.noise > sgd.Plan(**shared).noise
    assert prepared.epsilon <= 2.0


def test_a_seed_is_stamped():
    assert isinstance(plan(seed=1).event, Reproducible)
    assert plan(seed=1).event.event == plan().event


def test_a_plan_without_noise_says_that_it_is_not_private():
    made = plan(noise=0.0, clip=math.inf)
    assert isinstance(made.event, NonPrivate)
    assert made.epsilon == math.inf
    assert not made.private


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lot": 60_001}, "at most examples=60000"),
        ({"lot": 0}, "lot=0"),
        ({"examples": 0}, "examples=0"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"clip": -1.0}, "clip=-1.0"),
        ({"clip": math.nan}, "clip=nan"),
        ({"clip": "flat"}, "clip='flat'"),
        ({"clip": math.inf}, "clip=inf"),
        ({"noise": -1.0}, "noise=-1.0"),
        ({"noise": math.nan}, "noise=nan"),
        ({"noise": None}, "want budget="),
        ({"delta": None}, "want budget="),
        ({"delta": 1.0}, "delta=1.0"),
        ({"steps": None}, "want epochs= or steps="),
        ({"steps": 2.5}, "steps=2.5"),
        ({"epochs": 3}, "want one of them"),
        ({"steps": None, "epochs": -1}, "epochs=-1"),
        ({"steps": None, "epochs": 1.5, "sampling": sgd.Shuffled()}, "whole number"),
        ({"budget": Budget(epsilon=1.0, delta=1e-6)}, "want one of them"),
        ({"clip": sgd.Automatic(1.0), "clip_stages": sgd.Stages(1.0, 2.0)}, "clip_stages"),
    ],
)
def test_a_contradiction_is_refused_in_one_line(changes, why):
    with pytest.raises(InvalidArgument, match=why) as refusal:
        plan(**changes)
    assert "\n" not in str(refusal.value)


def test_a_noise_that_does_not_keep_the_budget_is_refused():
    with pytest.raises(BudgetExceeded, match="leave noise out"):
        plan(budget=Budget(epsilon=0.1, delta=1e-5))
    with pytest.raises(InvalidArgument, match="delta"):
        plan(noise=None, delta=None, budget=Budget(epsilon=1.0, delta=0.0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sampling", "poisson"),
        ("sampling", sgd.FixedSize),
        ("noise_stages", (1, 2)),
        ("clip_stages", [1.0, 2.0]),
        ("budget", (2, 1e-5)),
        ("preparation", Gaussian(noise=1.0)),
        ("preparation", ("x",)),
        ("preparation", None),
    ],
    ids=str,
)
def test_a_field_of_another_kind_is_refused_by_name(name, value):
    given = {"examples": 100, "lot": 10, "steps": 5, "clip": 1.0, "noise": 1.0, "delta": 1e-5}
    with pytest.raises(InvalidArgument, match=f"{name}=.*: want"):
        sgd.Plan(**{**given, name: value})

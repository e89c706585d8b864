"""Events of a few lines that took minutes, or all memory: an answer or a refusal in one line, soon."""

import time
import tracemalloc
from contextlib import suppress

import pytest
from typer.testing import CliRunner

from terrine import accounting
from terrine.accounting import composition, moments, renyi
from terrine.accounting.filters import Filter
from terrine.cli import app as command
from terrine.errors import TerrineError, UnsupportedEvent
from terrine.events import (
    Budget,
    Composed,
    DiscreteGaussian,
    Event,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    NegativeBinomialCount,
    Neighbours,
    OneOf,
    PoissonSampled,
    RandomStopping,
    Repeated,
    to_json,
)

REPLACED = Neighbours.REPLACE_ONE
OFTEN = NegativeBinomialCount(shape=1, gamma=0.1)
SEVEN = {"size": 3, "population": 7}
WRAPS = {
    "sampled": lambda e: PoissonSampled(OneOf([e, Laplace(noise=3)]), rate=0.5),
    "stopped": lambda e: RandomStopping(OneOf([e, Laplace(noise=3)]), OFTEN),
    "one of two": lambda e: OneOf([e, Repeated(e, 2)]),
    "of a fixed size": lambda e: FixedSizeSampled(OneOf([e, Repeated(e, 2)]), **SEVEN),
    "composed": lambda e: FixedSizeSampled(Composed([e, Laplace(noise=3, neighbours=REPLACED)]), **SEVEN),
}
QUESTIONS = {
    "epsilon": lambda e: accounting.epsilon(e, delta=1e-6),
    "bounds": lambda e: accounting.bounds(e, delta=1e-6, witness=True).upper,
    "delta": lambda e: accounting.delta(e, epsilon=1.0),
    "filter": lambda e: Filter(Budget(1.0, 1e-6)).would_cost(e).share,
    "renyi": lambda e: renyi.epsilon(e, delta=1e-6),
    "composition": lambda e: composition.advanced(e, delta=1e-6),
    "moments": lambda e: moments.epsilon(e, delta=1e-6),
}


def nested(wrap: str, depth: int) -> Event:
    event: Event = Gaussian(noise=2, neighbours=REPLACED if wrap in ("of a fixed size", "composed") else None)
    for _ in range(depth):
        event = WRAPS[wrap](event)
    return event


def seconds(ask) -> float:
    start = time.perf_counter()
    with suppress(TerrineError):
        ask()
    return time.perf_counter() - start


@pytest.mark.parametrize("wrap", WRAPS)
def test_events_nested_deeply_are_answered_or_refused_soon(wrap):
    for depth in (6, 14):
        event = nested(wrap, depth)
        for question, ask in QUESTIONS.items():
            assert seconds(lambda ask=ask, event=event: ask(event)) < 2, (depth, question)


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_is_nested_too_deeply_is_refused_in_one_line(question):
    with pytest.raises(UnsupportedEvent, match="nested"):
        QUESTIONS[question](nested("sampled", 20))


def test_a_choice_is_priced_as_before_however_it_is_nested():
    once, twice = nested("one of two", 1), nested("one of two", 2)
    dearest = accounting.epsilon(Repeated(Gaussian(noise=2), 4), delta=1e-6)
    assert accounting.epsilon(once, delta=1e-6) < accounting.epsilon(twice, delta=1e-6)
    assert accounting.bounds(twice, delta=1e-6, witness=True).lower == pytest.approx(dearest, rel=0.01)


def test_the_command_line_refuses_them_too(tmp_path):
    (tmp_path / "events.json").write_text(to_json(nested("sampled", 20)))
    done = CliRunner().invoke(command.app, ["epsilon", "--events", str(tmp_path / "events.json"), "--delta", "1e-6"])
    assert isinstance(done.exception, UnsupportedEvent | SystemExit)


@pytest.mark.parametrize("steps", [10**8, 4 * 10**8, 10**12])
def test_a_discrete_gaussian_on_a_fine_grid_does_not_take_all_memory(steps):
    event = DiscreteGaussian(noise=29 / steps, sensitivity=steps)
    tracemalloc.start()
    try:
        assert seconds(lambda: accounting.epsilon(event, delta=1e-6)) < 2
        assert accounting.epsilon(event, delta=1e-6) >= 0.5 / event.noise**2
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("noise", [1e15, 1e30, 1e120, 1e308])
def test_the_curve_of_what_costs_nothing_takes_no_time(noise):
    event = Repeated(PoissonSampled(Gaussian(noise=noise), rate=0.5), 10)
    assert seconds(lambda: accounting.claimed_profile(event, delta=1e-5)) < 2
    assert seconds(lambda: accounting.bounds(event, delta=1e-5)) < 2


def test_a_delta_of_0_is_only_given_where_it_is_proven():
    assert accounting.delta(Gaussian(noise=1.0), epsilon=1e5) > 0
    assert accounting.delta(Repeated(PoissonSampled(Gaussian(noise=1e120), rate=0.5), 10), epsilon=1.0) > 0
    assert accounting.delta(Laplace(noise=2.0), epsilon=0.5) == 0

"""Careless programs are refused in a sentence, or one example moves what they release by no more than the bound."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from terrine import sgd
from terrine.errors import TerrineError
from tests.sgd.programs import helpers
from tests.sgd.programs.careless import CARELESS, Careless
from tests.sgd.programs.helpers import CLIP, HOSTILE, SLACK, Trace

CASES = [(name, door) for name, program in CARELESS.items() for door in program.doors]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


@dataclass
class Outcome:
    """What became of a program: refused, bounded, fails (in the user's own code, alone as well), leaks or raw."""

    kind: str
    why: str = ""


def judge(program: Careless, door: str, variants: Sequence[str] = ()) -> Outcome:
    """All hostile examples, one after the other; the first refusal or leak decides."""
    without: dict[int, Trace] = {}  # by place: one run for all hostile examples, mostly
    for place, variant in zip((0, 7, 0, 16, 0, 7), variants or HOSTILE[program.data], strict=False):
        if door == "private_steps" and variant in ("huge", "inf", "tiny"):
            continue  # the same engine, slower
        try:
            why = compare(program, door, variant, place, without)
        except TerrineError as error:
            return Outcome("refused", str(error))
        except Exception as error:
            if fails_alone(program, error):
                return Outcome("fails", repr(error))
            return Outcome("raw", f"{variant}: {error!r}")
        if why:
            return Outcome("leaks", f"{variant}: {why}")
    return Outcome("bounded")


def compare(program: Careless, door: str, variant: str, place: int, without: dict[int, Trace]) -> str:
    """How one hostile example shows, beyond its bound."""
    first, *later = helpers.lots(program.data)

    def run(lot: Any) -> Trace:
        if door == "private_steps":
            return helpers.steps_of_run(program.build, lot)
        return helpers.sums_of_lots(program.build, [lot, *later])

    substitute = helpers.build(program.build, first).random  # then both runs draw the same numbers
    key = place if substitute else -1
    if key not in without:
        benign = helpers.insert(first, helpers.example(first, 3), place)
        without[key] = run(benign if substitute else first)
    one, other = without[key], run(helpers.insert(first, helpers.hostile(program.data, variant), place))
    bound = CLIP * SLACK * (2 if substitute else 1)
    if door == "clipped_sum":
        return difference(one, other, bound, later=1e-9)
    return difference(one, other, bound, later=bound) or inexact(one) or inexact(other)


def difference(one: Trace, other: Trace, bound: float, later: float) -> str:
    for number, (mine, theirs) in enumerate(zip(one.sums, other.sums, strict=True)):
        if number and (one.moved or other.moved):
            break
        moved = float((mine - theirs).norm()) if mine.shape == theirs.shape else float("inf")
        if not moved <= (later if number else bound):
            return f"sum {number + 1} moves by {moved / CLIP:.3g} C"
    if not one.moved:
        if set(one.state) != set(other.state):
            return f"left behind: {sorted(set(one.state) ^ set(other.state))}"
        if changed := [name for name in one.state if not helpers.same(one.state[name], other.state[name])]:
            return f"left behind: {', '.join(changed[:3])}"
    if one.kept or other.kept:
        return f"{len(other.kept)} values of examples can be read afterwards"
    return ""


def inexact(trace: Trace) -> str:
    for number, expected in enumerate(trace.expected):
        if not torch.allclose(trace.sums[number], expected, rtol=1e-5, atol=1e-6):
            off = float((trace.sums[number] - expected).norm())
            return f"step {number + 1} releases another sum than the reference, by {off / CLIP:.3g} C"
    return ""


def fails_alone(program: Careless, error: Exception) -> bool:
    """Whether the user's own code raises the same for one ordinary example."""
    lot = helpers.lots(program.data)[0]
    parts = helpers.build(program.build, lot)
    try:
        with parts.around():
            value = helpers.call(parts.loss, parts.model, helpers.example(lot, 0))
            torch.autograd.grad(value.sum(), list(helpers.trained(parts.model).values()), allow_unused=True)
    except Exception as alone:
        return type(alone) is type(error)
    return False


@pytest.mark.parametrize(("name", "door"), CASES)
def test_it_is_refused_or_bounded(name: str, door: str) -> None:
    program = CARELESS[name]
    outcome = judge(program, door)
    if program.documented is not None:
        assert outcome.kind != "raw", outcome.why
        return
    assert outcome.kind not in ("leaks", "raw"), outcome.why
    if outcome.kind == "refused":
        assert helpers.is_one_line(outcome.why), f"not one line: {outcome.why}"
        wanted = rf"{program.names or '.'}|\w+\.py:\d+"
        assert helpers.names_the_thing(outcome.why, wanted), f"names neither {wanted}: {outcome.why}"
    assert outcome.kind == "refused" or not program.must_be_refused, "want it refused: it is not what it looks like"


def slow_clipped_sum(model: Any, loss: Any, batch: Any, *, clip: float, **_: Any) -> Any:
    sums, norms = helpers.reference(model, loss, batch, clip)

    class Clipped:
        pass

    found = Clipped()
    found.sums, found.norms = sums, norms
    return found


def test_the_programs_are_as_careless_as_they_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that runs examples one after the other and guards nothing leaks in most of them."""
    monkeypatch.setattr(sgd, "clipped_sum", slow_clipped_sum)
    named = [program for program in CARELESS.values() if "clipped_sum" in program.doors]
    first = {kind: variants[:1] for kind, variants in HOSTILE.items()}
    leaking = [program.name for program in named if judge(program, "clipped_sum", first[program.data]).kind == "leaks"]
    assert len(leaking) >= 60, leaking


def released(loss: Callable[..., Any], seed: int) -> list[torch.Tensor]:
    batch = helpers.lots("table")[0]
    helpers.seed_all()
    model = helpers.perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(seed)
    plan = sgd.Plan(examples=16, lot=4, steps=3, clip=CLIP, noise=1.0, delta=1e-5)
    dataset = torch.utils.data.TensorDataset(*batch)
    return [
        torch.cat([value.grad.flatten().clone() for value in model.parameters()])
        for _ in sgd.private_steps(model, optimizer, dataset, plan, loss=loss)
    ]


def test_a_seed_set_inside_the_loss_never_fixes_the_noise() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return 0 * helpers.cross_entropy(model, batch)

    try:
        one, other = released(loss, 1), released(loss, 1)
    except TerrineError as error:
        if not helpers.is_one_line(str(error)):
            pytest.fail(f"not one line: {error}")
        return
    noises = [*one, *other]
    assert all(not torch.equal(mine, theirs) for i, mine in enumerate(noises) for theirs in noises[:i])
    assert all(noise.norm() > 0 for noise in noises)

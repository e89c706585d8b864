"""Known privacy bugs, built on purpose into Terrine's own learners, and the audits that must find them.

Two audits of DP-SGD, both of the whole training and not of its parts:

    canaries    a linear model and orthogonal examples with huge gradients, each in the data by a coin; the trained
                weights are the guesses (one run)
    lot size    the same training with and without one example whose gradient is zero, many times: nothing but the
                noise is left to tell them apart (black-box tester)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from terrine import accounting, audit, pate, sgd
from terrine.audit import one_run
from terrine.common import keys
from terrine.events import Budget
from terrine.pate import aggregators, votes
from terrine.rng import Seeded
from terrine.sgd import plan
from terrine.sgd.clipping import Clipped
from terrine.sgd.release import StepRelease

CONFIDENCE = 0.999
BUDGET = Budget(1.0, 1e-5)


@dataclass(frozen=True)
class Without(sgd.Poisson):
    """Poisson lots of a data set that lacks the `absent` examples, all else being equal."""

    absent: frozenset[int] = frozenset()

    def draw(self, key: keys.Key, step: int, *, examples: int, lot: int) -> np.ndarray:
        drawn = super().draw(key, step, examples=examples, lot=lot)
        return drawn[[index not in self.absent for index in drawn.tolist()]]


def trained(x: torch.Tensor, planned: sgd.Plan) -> np.ndarray:
    """The weights of a linear model trained to raise its output on `x`."""
    model = nn.Linear(x.shape[1], 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in sgd.private_steps(model, optimizer, (x,), planned, loss=lambda model, batch: -model(batch[0]).mean()):
        optimizer.step()
    return model.weight.detach().double().numpy().ravel()


def canaries(seed: int, *, count: int = 400, steps: int = 20) -> audit.Verdict:
    """One training, many canaries."""
    included = np.random.default_rng([seed, 7]).random(count) < 0.5
    planned = sgd.Plan(
        examples=count,
        lot=count // 4,
        clip=1.0,
        steps=steps,
        noise=_calibrated(0.25, steps),
        delta=BUDGET.delta,
        sampling=Without(frozenset(np.flatnonzero(~included).tolist())),
        seed=seed,
    )
    weights = trained(1000.0 * torch.eye(count), planned)
    return audit.verdict(BUDGET, one_run.guess(weights, included, confidence=CONFIDENCE))


def lot_size(seed: int, *, examples: int = 4, width: int = 400, trials: int = 200) -> audit.Verdict:
    """Many trainings of one step with and without an example that says nothing."""
    x = torch.zeros(examples, width)

    def mechanism(absent: frozenset[int], runs: int) -> np.ndarray:
        return np.array(
            [
                np.linalg.norm(trained(x, _one_step(examples, absent, 2 * (seed * runs + run) + len(absent))))
                for run in range(runs)
            ]
        )

    found = audit.lower_bound(
        mechanism, frozenset({0}), frozenset(), trials=trials, delta=BUDGET.delta, confidence=CONFIDENCE, bins=32
    )
    return audit.verdict(BUDGET, found)


def teachers(seed: int, *, trials: int = 2000) -> audit.Verdict:
    """Two classes, a hundred teachers, one of which changes its mind."""
    aggregator = pate.GaussianMax(noise=_calibrated(1.0, 1) * 2**0.5)
    source = Seeded(seed)
    deal = {"kind": "disjoint", "teachers": 100, "most_parts": 1, "unit": "example"}

    def mechanism(counts: tuple[int, int], runs: int) -> np.ndarray:
        held = votes.Votes(np.tile(np.array(counts), (runs, 1)), deal)
        return aggregator.answer(held, rng=source).labels

    found = audit.lower_bound(mechanism, (50, 50), (49, 51), trials=trials, delta=BUDGET.delta, confidence=CONFIDENCE)
    return audit.verdict(BUDGET, found)


@contextlib.contextmanager
def no_noise() -> Iterator[None]:
    """DP-SGD whose noise was left out."""
    with mock.patch.object(plan.Plan, "deviation_at", return_value=0.0):
        yield


@contextlib.contextmanager
def clip_after_averaging() -> Iterator[None]:
    """The lot's mean is clipped instead of each example."""
    unbounded = property(lambda self: sgd.Flat(1e9))  # noqa: ARG005

    def release(self: StepRelease, optimizer: torch.optim.Optimizer) -> dict[str, float]:  # noqa: ARG001
        bound = self.plan.first_bound
        means = {name: total / self.plan.lot for name, total in self.sums.items()}
        norm = torch.sqrt(sum((one.square().sum() for one in means.values()), torch.tensor(0.0)))
        draw = self.key.draw(keys.Purpose.NOISE, self.taken)
        for name, parameter in self.parameters.items():
            mean = means.get(name, torch.zeros_like(parameter)) * min(1.0, bound / max(float(norm), 1e-12))
            draw.add_normal(mean, self.plan.deviation_at(self.taken, bound) / self.plan.lot)
            parameter.grad = mean
        self.taken += 1
        self.clear()
        return {}

    with mock.patch.object(StepRelease, "rule", unbounded), mock.patch.object(StepRelease, "release", release):
        yield


@contextlib.contextmanager
def divided_by_drawn_size() -> Iterator[None]:
    """Sum and noise are divided by the size of the lot that was drawn, not by a public constant."""
    add, release = StepRelease.add, StepRelease.release

    def count(self: StepRelease, clipped: Clipped, *others: Any) -> None:
        self.drawn = len(clipped.norms)  # type: ignore[attr-defined]
        add(self, clipped, *others)

    def rescale(self: StepRelease, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        metrics = release(self, optimizer)
        for parameter in self.parameters.values():
            assert parameter.grad is not None
            parameter.grad *= self.plan.lot / max(getattr(self, "drawn", 0), 1)
        self.drawn = 0  # type: ignore[attr-defined]
        return metrics

    with mock.patch.object(StepRelease, "add", count), mock.patch.object(StepRelease, "release", rescale):
        yield


@contextlib.contextmanager
def silent_teachers() -> Iterator[None]:
    """PATE whose noise was left out."""
    with mock.patch.object(aggregators, "_lattice", lambda shape, scale, count, rng: np.zeros(count, dtype=np.int64)):  # noqa: ARG005
        yield


BUGS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[None]], Callable[[int], audit.Verdict]]] = {
    "DP-SGD, noise left out": (no_noise, canaries),
    "DP-SGD, clipping after averaging": (clip_after_averaging, canaries),
    "DP-SGD, noise divided by the drawn lot size": (divided_by_drawn_size, lot_size),
    "PATE without noise": (silent_teachers, teachers),
}
AUDITS: dict[str, Callable[[int], audit.Verdict]] = {
    "DP-SGD, canaries": canaries,
    "DP-SGD, lot size": lot_size,
    "PATE": teachers,
}


@cache
def _calibrated(rate: float, steps: int) -> float:
    from terrine.events import Gaussian, PoissonSampled, Repeated

    def family(value: float) -> Repeated:
        return Repeated(PoissonSampled(Gaussian(noise=value), rate=rate) if rate < 1 else Gaussian(noise=value), steps)

    return accounting.calibrate(family, BUDGET)


def _one_step(examples: int, absent: frozenset[int], seed: int) -> sgd.Plan:
    return sgd.Plan(
        examples=examples,
        lot=examples,
        clip=1.0,
        steps=1,
        noise=_calibrated(1.0, 1),
        delta=BUDGET.delta,
        sampling=Without(absent),
        seed=seed,
    )

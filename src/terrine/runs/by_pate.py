"""A run by PATE: teachers on disjoint private parts vote on public inputs; noisy answers teach the student.

The cost is the plan's, whatever the votes are: q answers by a Gaussian noisy maximum of sensitivity sqrt 2, with the
least noise that keeps the budget. Which inputs are asked is chosen among public ones alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from terrine import accounting
from terrine.audit import attacks
from terrine.events import Budget
from terrine.pate import GaussianMax
from terrine.pate import student as students
from terrine.pate.run import Data, Run
from terrine.rng import SYSTEM, Seeded
from terrine.runs import coins, recipes
from terrine.runs.folder import Folder
from terrine.runs.learned import Learned
from terrine.runs.material import Material
from terrine.runs.models import Architecture
from terrine.runs.settings import Settings

Progress = Callable[[int, int], None] | None
_STEPS = 600


def learn(
    folder: Folder,
    settings: Settings,
    material: Material,
    architecture: Architecture,
    features: Tensor,
    account: Any,
    *,
    progress: Callable[[str], Any],
) -> Learned:
    """Train teachers, buy labels, train the student; or go on where the run stopped."""
    assert material.public is not None
    count = len(material.labels)
    pairs = recipes.audited(settings, count) // 2
    tossed = coins.tossed(folder.owner / "coins.npz", examples=count, count=2 * pairs, seed=settings.test_seed)
    first, second = tossed.rows[:pairs], tossed.rows[pairs:]
    heads = tossed.heads[:pairs]
    kept = np.setdiff1d(np.arange(count), np.where(heads, second, first))
    private = Data(features.flatten(1).numpy()[kept], material.labels[kept])
    public = architecture.features(material.public)
    budget = Budget(settings.epsilon, recipes.delta(settings, count))
    teachers = recipes.teachers(settings, len(kept))
    asked = recipes.queries(settings, teachers=teachers, available=len(public), delta=budget.delta)
    public = public[torch.from_numpy(_order(public, asked))]
    answers = _labels(folder, settings, private, public, asked, budget, account, len(material.classes), progress)
    module = _student(architecture, public, answers, settings, progress)
    chosen = _score(module, features, material.labels, first) - _score(module, features, material.labels, second)
    return Learned(
        module,
        answers.event,
        min(accounting.epsilon(answers.event, delta=budget.delta), budget.epsilon),
        budget.delta,
        chosen if pairs else None,
        heads if pairs else None,
        facts={
            "sampler": "none: every private row is with exactly one teacher",
            "teachers": teachers,
            "queries": asked,
            "answered": len(answers.answered),
            "examples": len(kept),
            "public_inputs": len(public),
        },
    )


def _labels(
    folder: Folder,
    settings: Settings,
    private: Data,
    public: Tensor,
    asked: int,
    budget: Budget,
    account: Any,
    classes: int,
    progress: Callable[[str], Any],
) -> Any:
    """The answers; a run that was labelled before is not labelled again."""
    run = Run(folder.owner / "pate")
    if (run.folder / "labels.json").exists():
        return run.answers()
    teachers = recipes.teachers(settings, len(private.inputs))
    if not (run.folder / "run.json").exists():
        run.split(private, source="terrine train", teachers=teachers, classes=classes, seed=0)
    with progress("teachers") as shown:
        trained = run.train(private, model="logistic", progress=shown)
    run.vote(trained, Data(public.flatten(1).numpy()))
    noise = accounting.calibrate(lambda value: GaussianMax(noise=value).event(asked), budget)
    source = SYSTEM if settings.test_seed is None else Seeded(settings.test_seed)
    return run.label(aggregator="gaussian", fields={"noise": noise}, queries=asked, account=account, rng=source)


def _student(
    architecture: Architecture, public: Tensor, answers: Any, settings: Settings, progress: Callable[[str], Any]
) -> nn.Module:
    labels = np.full(len(public), -1, dtype=np.int64)
    labels[: len(answers.labels)] = answers.labels
    course = students.Course(steps=_STEPS, rate=0.05 if "linear" in architecture.name else 2e-3)
    with progress("student") as shown:
        return students.train(
            architecture.build,
            public,
            labels,
            students.Consistency(),
            course,
            seed=settings.test_seed or 0,
            progress=shown,
        )


def _order(public: Tensor, asked: int) -> Any:
    """Inputs that stand for the others first."""
    first = students.spread(public.flatten(1).numpy(), asked)
    return np.concatenate([first, np.setdiff1d(np.arange(len(public)), first)])


def _score(module: nn.Module, features: Tensor, labels: Any, rows: Any) -> Any:
    if not len(rows):
        return np.zeros(0)
    with torch.no_grad():
        return attacks.confidence(module(features[torch.from_numpy(rows)]).double().numpy(), labels[rows])

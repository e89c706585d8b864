"""A run by PATE: teachers on disjoint private parts vote on public inputs; noisy answers teach the student.

The cost is the plan's, whatever the votes are: q answers by a Gaussian noisy maximum of sensitivity sqrt 2, with the
least noise that keeps the budget. Which inputs are asked is chosen among public ones alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from terrine import accounting
from terrine.errors import InvalidArgument
from terrine.events import Budget, Event, Reproducible, Unit
from terrine.pate import Answers, GaussianMax
from terrine.pate import student as students
from terrine.pate.data import Data
from terrine.pate.run import RunFolder
from terrine.pipeline import coins, recipes
from terrine.pipeline.by_sgd import scores
from terrine.pipeline.folder import Folder
from terrine.pipeline.learned import Learned
from terrine.pipeline.material import Material, Opened
from terrine.pipeline.models import Architecture
from terrine.pipeline.settings import Settings
from terrine.receipts import Receipt
from terrine.rng import SYSTEM, Seeded

Progress = Callable[[int, int], None] | None
_STEPS = 600


@dataclass(frozen=True, eq=False)
class Labelling:
    """One run by PATE, planned: so many labels, bought by this rule from so many teachers."""

    event: Event
    """What the whole run costs."""
    rule: GaussianMax
    queries: int
    teachers: int
    pairs: int
    """Pairs of rows, or people, all with wrong labels, of which a coin uses one, for the audit."""


def planned(settings: Settings, opened: Opened) -> Labelling:
    """The labels that the settings' budget pays for.

    Raises:
        InvalidArgument: there are more teachers than rows.
    """
    total, unit = opened.units.count, opened.units.unit or Unit.EXAMPLE
    pairs = recipes.canaries(settings, total) // 2
    kept = total - pairs
    teachers = recipes.teachers(settings, kept)
    if teachers > kept:
        what = "rows" if opened.units.people is None else "people"
        raise InvalidArgument(f"teachers={teachers}: want at most one for each of the {kept} {what} that are used")
    budget = Budget(settings.epsilon, recipes.delta(settings, total))
    asked = recipes.queries(settings, teachers=teachers, available=opened.public, delta=budget.delta)
    rule = GaussianMax(accounting.calibrate(lambda noise: GaussianMax(noise).event(asked, unit=unit), budget))
    event = rule.event(asked, unit=unit)
    return Labelling(event if settings.seed is None else Reproducible(event), rule, asked, teachers, pairs)


def learn(
    labelling: Labelling,
    folder: Folder,
    settings: Settings,
    material: Material,
    architecture: Architecture,
    features: Tensor,
    receipt: Receipt,
    *,
    progress: Callable[[str], Any],
) -> Learned:
    """Train teachers, buy labels, train the student; or go on where the run stopped."""
    assert material.public is not None
    receipt.covers(labelling.event)
    units, pairs = material.units, labelling.pairs
    tossed = coins.tossed(folder.owner / "coins.npz", units=units.count, count=2 * pairs, seed=settings.seed)
    first, second = tossed.units[:pairs], tossed.units[pairs:]
    heads = tossed.heads[:pairs]
    kept = np.setdiff1d(np.arange(units.count), np.where(heads, second, first))
    rows = units.all_rows(kept)
    taught = coins.mislabelled(material, tossed.units)
    private = Data(features.flatten(1).numpy()[rows], taught[rows], None if units.ids is None else units.ids[rows])
    public = architecture.features(material.public)
    public = public[torch.from_numpy(_order(public, labelling.queries))]
    answers = _labels(folder, settings, labelling, private, public, len(material.classes), receipt, progress)
    module = _student(architecture, public, answers, settings, progress)
    chosen = scores(module, features, taught, units, first) - scores(module, features, taught, units, second)
    return Learned(
        module,
        chosen if pairs else None,
        heads if pairs else None,
        facts={
            "sampler": f"none: every private {'row' if units.people is None else 'person'} is with exactly one teacher",
            "teachers": labelling.teachers,
            "queries": labelling.queries,
            "answered": len(answers.answered),
            "examples" if units.people is None else "people": len(kept),
            "public_inputs": len(public),
        }
        | _in_words(pairs, "rows" if units.people is None else "people"),
    )


def _in_words(pairs: int, noun: str) -> dict[str, str]:
    """What the audit did to the labels, for the record."""
    said = f"{pairs} pairs of private {noun}, all with wrong labels; a fair coin used one of each"
    return {"canaries": said} if pairs else {}


def _labels(
    folder: Folder,
    settings: Settings,
    labelling: Labelling,
    private: Data,
    public: Tensor,
    classes: int,
    receipt: Receipt,
    progress: Callable[[str], Any],
) -> Answers:
    """The answers; a run that was labelled before is not labelled again."""
    run = RunFolder(folder.owner / "pate", private=True)
    if run.has("labels.json"):
        return run.answers()
    if not run.has("run.json"):
        run.split(private, source="terrine train", teachers=labelling.teachers, classes=classes, seed=0)
    with progress("teachers") as shown:
        trained = run.train(private, model="logistic", progress=shown)
    run.vote(trained, Data(public.flatten(1).numpy()))
    source = SYSTEM if settings.seed is None else Seeded(settings.seed)
    return run.label(
        aggregator="gaussian", fields={"noise": labelling.rule.noise}, queries=labelling.queries, receipt=receipt,
        rng=source,
    )  # fmt: skip


def _student(
    architecture: Architecture, public: Tensor, answers: Answers, settings: Settings, progress: Callable[[str], Any]
) -> nn.Module:
    labels = np.full(len(public), -1, dtype=np.int64)
    labels[: len(answers.labels)] = answers.labels
    course = students.Course(steps=_STEPS, learning_rate=0.05 if "linear" in architecture.name else 2e-3)
    with progress("student") as shown:
        return students.train(
            architecture.build,
            public,
            labels,
            students.Consistency(),
            course,
            seed=settings.seed or 0,
            progress=shown,
        )


def _order(public: Tensor, asked: int) -> Any:
    """Inputs that stand for the others first."""
    first = students.spread(public.flatten(1).numpy(), asked)
    return np.concatenate([first, np.setdiff1d(np.arange(len(public)), first)])

"""A run by DP-SGD.

Rows that a coin left out carry no label: their loss is 0, so they add nothing to any sum, and the number of examples
and the sampling rate stay what the plan says. Without public test rows, the accuracy is released with noise about the
rows left out (`measuring.py`), and paid for as part of the plan's event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from terrine import sgd
from terrine.audit import attacks
from terrine.common.targets import NumberLoss
from terrine.events import Budget, Event
from terrine.pipeline import coins, measuring, recipes, twin
from terrine.pipeline.folder import Folder
from terrine.pipeline.learned import Learned
from terrine.pipeline.material import Material, Opened
from terrine.pipeline.models import Architecture
from terrine.pipeline.settings import Settings
from terrine.pipeline.units import Floats, Integers, Units
from terrine.receipts import Receipt
from terrine.sgd.checkpoint import Checkpoint

SILENT = -100
"""The label of a row that adds nothing to any sum."""


@dataclass(frozen=True, eq=False)
class Training:
    """One run by DP-SGD, planned."""

    plan: sgd.Plan
    usual: recipes.Defaults
    learning_rate: float
    measured: measuring.AccuracyMeasurement | None
    """What measures accuracy on rows that were left out, where nothing public does."""
    loss: nn.Module

    @property
    def event(self) -> Event:
        """What the whole run costs."""
        return self.plan.event


def planned(settings: Settings, opened: Opened, architecture: Architecture, before: tuple[Event, ...]) -> Training:
    """The training that keeps the settings' budget together with what comes `before` it."""
    count, measured = opened.units.count, measuring.planned(settings, opened)
    usual = recipes.recipe(settings, architecture.kind, count)
    plan = sgd.Plan(
        **opened.units.planned,
        lot=usual.lot,
        epochs=usual.epochs,
        clip=usual.clip,
        budget=Budget(settings.epsilon, recipes.delta(settings, count)),
        preparation=(*before, *(() if measured is None else (measured.event,))),
        seed=settings.seed,
    )
    rate = settings.learning_rate or recipes.learning_rate(
        architecture.kind, noise=plan.noise, lot=plan.lot, clip=usual.clip
    )
    if opened.target is not None and settings.learning_rate is None:
        rate = min(rate, 0.3)  # the curvature of a squared error is that of its rows, not below it
    return Training(plan, usual, rate, measured, criterion(settings, opened.target is not None))


def learn(
    training: Training,
    folder: Folder,
    settings: Settings,
    material: Material,
    architecture: Architecture,
    features: Tensor,
    receipt: Receipt,
    *,
    quiet: bool,
) -> Learned:
    """Train on the private rows, or go on where the run stopped."""
    receipt.covers(training.event)
    units = material.units
    tossed = coins.of_run(folder.owner, settings, units.count, measuring.held(training.measured))
    canaries = tossed.canaries(recipes.canaries(settings, units.count))
    taught = coins.mislabelled(material, canaries.units)
    labels = silenced(taught, units.all_rows(tossed.out))
    module = built(architecture, settings)
    checkpoint = Checkpoint(folder.owner / "checkpoint.pt")
    fitted = trainer(
        checkpoint, module, training.plan, training.learning_rate, training.usual, training.loss, quiet,
        device=settings.device,
    )  # fmt: skip
    fitted.fit((features, labels), person=units.ids)
    module.cpu()
    return Learned(
        module,
        scores(module, features, taught, units, canaries.units) if len(canaries.units) else None,
        canaries.heads if len(canaries.units) else None,
        facts=facts(training.plan, training.learning_rate, training.usual) | in_words(canaries, units),
        accuracy=None
        if training.measured is None
        else measuring.released(training.measured, folder, settings, module, material, features, tossed),
        gradients=_twin(training, settings, architecture, (features, labels), units),
    )


def _twin(
    training: Training, settings: Settings, architecture: Architecture, rows: tuple[Tensor, Tensor], units: Units
) -> tuple[Floats, NDArray[np.bool_]] | None:
    if settings.gradient_canaries is None:
        return None
    found = twin.attacked(
        built(architecture, settings), training.plan, rows, count=settings.gradient_canaries,
        learning_rate=training.learning_rate, momentum=training.usual.momentum, criterion=training.loss,
        person=units.ids, seed=settings.seed,
    )  # fmt: skip
    return found.scores, found.included


def criterion(settings: Settings, number: bool = False) -> nn.Module:
    """The loss of one example, 0 where it is silenced."""
    return NumberLoss(settings.loss or "squared") if number else _OF_CLASSES


_OF_CLASSES = nn.CrossEntropyLoss(reduction="none", ignore_index=SILENT)


def silenced(taught: NDArray[Any], rows: Integers) -> Tensor:
    """The labels to train on; those of `rows` add nothing to any sum."""
    if taught.dtype.kind == "f":
        labels = torch.from_numpy(taught.astype(np.float32))
        labels[torch.from_numpy(rows)] = torch.nan
    else:
        labels = torch.from_numpy(taught.copy())
        labels[torch.from_numpy(rows)] = SILENT
    return labels


def built(architecture: Architecture, settings: Settings) -> nn.Module:
    """The module before training."""
    with torch.random.fork_rng(devices=[], enabled=settings.seed is not None):
        if settings.seed is not None:
            torch.manual_seed(settings.seed)
        return architecture.build()


def trainer(
    checkpoint: Checkpoint,
    module: nn.Module,
    plan: sgd.Plan,
    learning_rate: float,
    usual: recipes.Defaults,
    loss: nn.Module,
    quiet: bool,
    device: str | None = None,
) -> sgd.Trainer:
    """What trains `module` as planned, and goes on from `checkpoint`."""
    return sgd.Trainer(
        module,
        torch.optim.SGD(module.parameters(), lr=learning_rate, momentum=usual.momentum),
        loss,
        plan,
        average=sgd.Average(usual.average),
        checkpoint=checkpoint,
        device=device,
        progress=False if quiet else None,
    )


def scores(module: nn.Module, features: Tensor, labels: NDArray[Any], units: Units, chosen: Integers) -> Floats:
    """How sure the module is of the labels of the chosen units' rows: what the audit attacks."""
    if not len(chosen):
        return np.zeros(0)
    rows = units.all_rows(chosen)
    with torch.no_grad():
        logits = module(features[torch.from_numpy(rows)]).double().numpy()
    if labels.dtype.kind == "f":
        return units.mean(-np.abs(logits[:, 0] - labels[rows]), chosen)
    return units.mean(attacks.confidence(logits, labels[rows]), chosen)


def in_words(canaries: coins.Coins, units: Units) -> dict[str, str]:
    """What the audit did to the labels, for the record."""
    if not len(canaries.units):
        return {}
    noun, each = ("rows", "each") if units.people is None else ("people", "each with all rows,")
    return {"canaries": f"{len(canaries.units)} private {noun}, {each} in or out by a fair coin, carry wrong labels"}


def facts(plan: sgd.Plan, learning_rate: float, usual: recipes.Defaults) -> dict[str, Any]:
    """Public facts about the training, for the record."""
    return {
        "sampler": f"Poisson: every {plan.unit.value} falls into each lot independently",
        "noise": plan.noise,
        "clip": usual.clip,
        "lot": plan.lot,
        "rate": plan.rate,
        "steps": plan.steps,
        "epochs": usual.epochs,
        **({"examples": plan.examples} if plan.people is None else _of_people(plan)),
        "learning_rate": learning_rate,
        "momentum": usual.momentum,
        "average": usual.average,
    }


def _of_people(plan: sgd.Plan) -> dict[str, Any]:
    return {
        "people": plan.people,
        "rows_per_person": plan.rows_per_person,
        "contribution": f"the mean of the gradients of at most {plan.rows_per_person} of a person's rows, drawn in "
        "every step from its own rows, clipped as one",
    }

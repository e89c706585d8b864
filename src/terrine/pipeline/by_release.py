"""A run by one release: least squares from noisy sufficient statistics, no steps, nothing to tune (`terrine.linear`).

Rows that a coin left out count zero; a person counts with the mean over at most k of its rows. What was released is
kept in `owner/`, so that a run that goes on does not release twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from terrine import accounting, linear
from terrine.common.keys import Key
from terrine.events import Budget, Composed, Event, Gaussian, Neighbours, Reproducible, Unit
from terrine.linear import models as linear_models
from terrine.pipeline import by_sgd, coins, measuring, recipes
from terrine.pipeline.folder import Folder
from terrine.pipeline.learned import Learned
from terrine.pipeline.material import Material, Opened
from terrine.pipeline.models import Architecture
from terrine.pipeline.settings import Settings
from terrine.receipts import Receipt
from terrine.rng import SYSTEM, Seeded

_KEPT = "owner/statistics.npz"


@dataclass(frozen=True, eq=False)
class Releasing:
    """One release, planned."""

    plan: linear.StatisticsPlan
    release: Event
    """What the release alone costs."""
    event: Event
    """What the whole run costs."""
    measured: measuring.AccuracyMeasurement | None


def planned(settings: Settings, opened: Opened, architecture: Architecture, before: tuple[Event, ...]) -> Releasing:
    """The release that keeps the settings' budget together with what comes `before` it, and with the accuracy."""
    measured = measuring.planned(settings, opened)
    after = () if measured is None else (measured.event,)
    unit, classes = opened.units.unit, opened.classes

    def release(noise: float) -> Event:
        event = Gaussian(noise=noise, neighbours=Neighbours.ADD_REMOVE, unit=unit)
        return event if settings.seed is None else Reproducible(event)

    def whole(noise: float) -> Event:
        return Composed([*before, release(noise), *after])

    noise = accounting.calibrate(whole, Budget(settings.epsilon, recipes.delta(settings, opened.units.count)))
    plan = linear.StatisticsPlan(
        units=opened.units.count, features=architecture.width + 1,
        targets=linear_models.outputs(classes) if classes else 1, noise=noise, unit=unit,
    )  # fmt: skip
    return Releasing(plan, release(noise), whole(noise), measured)


def learn(
    releasing: Releasing,
    folder: Folder,
    settings: Settings,
    material: Material,
    architecture: Architecture,
    features: Tensor,
    receipt: Receipt,
) -> Learned:
    """Release the statistics, or read them back, and solve."""
    receipt.covers(releasing.release)
    units, measured = material.units, releasing.measured
    tossed = coins.of_run(folder.owner, settings, units.count, measuring.held(measured))
    canaries = tossed.canaries(recipes.canaries(settings, units.count))
    taught = coins.mislabelled(material, canaries.units)
    found = _statistics(releasing, folder, settings, material, features, taught, tossed)
    ridge = linear.strength(found)
    module = _module(architecture, found, ridge)
    return Learned(
        module,
        by_sgd.scores(module, features, taught, units, canaries.units) if len(canaries.units) else None,
        canaries.heads if len(canaries.units) else None,
        facts=_facts(releasing, units, ridge) | by_sgd.in_words(canaries, units),
        accuracy=None
        if measured is None
        else measuring.released(measured, folder, settings, module, material, features, tossed),
    )


def _statistics(
    releasing: Releasing,
    folder: Folder,
    settings: Settings,
    material: Material,
    features: Tensor,
    taught: NDArray[Any],
    tossed: coins.Coins,
) -> linear.Statistics:
    if not folder.has(_KEPT):
        plan, units = releasing.plan, material.units
        rows = linear_models.with_constant(features.flatten(1).double().numpy())
        shares = np.ones(len(rows), dtype=np.int64)
        if units.people is not None:
            key = Key.fresh() if settings.seed is None else Key.seeded(settings.seed)
            shares = units.people.whole_shares(units.most or 1, key)
        shares[units.all_rows(tossed.out)] = 0
        targets = linear_models.class_targets(taught, len(material.classes)) if material.classes else taught[:, None]
        source = SYSTEM if settings.seed is None else Seeded(settings.seed)
        released = plan.release(rows, targets, shares=shares, rng=source).value
        with folder.written(_KEPT) as file:
            np.savez(file, **vars(released))
    with np.load(folder.path / _KEPT, allow_pickle=False) as kept:
        deviations = float(kept["deviation"]), float(kept["cross_deviation"])
        return linear.Statistics(kept["second"], kept["cross"], *deviations, int(kept["units"]))


def _module(architecture: Architecture, found: linear.Statistics, ridge: float) -> nn.Module:
    solved = linear_models.class_model if architecture.classes else linear_models.model
    weights = solved(found, ridge)
    module = architecture.build()
    assert isinstance(module, nn.Linear)
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(weights.weights.T.copy()))
        module.bias.copy_(torch.from_numpy(weights.bias))
    return module


def _facts(releasing: Releasing, units: Any, ridge: float) -> dict[str, Any]:
    plan = releasing.plan
    count: dict[str, Any] = {"examples": plan.units}
    if units.people is not None:
        count = {"people": plan.units, "rows_per_person": units.most}
    if plan.unit is Unit.PERSON:
        count["contribution"] = f"the mean over at most {units.most} of a person's rows, drawn once from its own rows"
    return {
        "sampler": f"none: every {'row' if units.people is None else 'person'} counts once, in one release",
        "noise": plan.noise,
        "clip": 1.0,
        "sensitivity": math.sqrt(1 + plan.weight**2),
        "features": plan.features,
        "targets": plan.targets,
        "released_numbers": plan.size,
        "ridge": ridge,
        **count,
    }

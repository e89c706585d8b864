"""An accuracy on private rows that were left out: counted or added up with noise, released once, paid for by the plan.

    classes    right answers, a count with integer noise
    numbers    absolute errors, squared errors, targets and their squares: sums of numbers between public bounds

One row of each unit that its coin left out is looked at. How many are left out, and what is paid, are chosen so that
the result is within a stated width (`recipes.measuring`); where there are too few rows for that, nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from terrine import mechanisms
from terrine.errors import InvalidArgument
from terrine.events import Composed, Event
from terrine.pipeline import recipes
from terrine.pipeline.coins import Coins
from terrine.pipeline.folder import Folder
from terrine.pipeline.material import Material, Opened
from terrine.pipeline.settings import Settings
from terrine.pipeline.units import Units
from terrine.rng import SYSTEM, Seeded, Source

_KEPT = "owner/accuracy.json"
SUMS = 4
"""How many sums are released of numbers."""


@dataclass(frozen=True, eq=False)
class AccuracyMeasurement:
    """What is released about rows that were left out."""

    held: int
    """About how many units have to be left out."""
    within: float
    """How far the share of right answers may be off, 95% sure; of numbers, the mean error as a share of the range."""
    count: mechanisms.Counts | None
    """Classes: counts right answers."""
    sums: tuple[mechanisms.BoundedSum, ...] = ()
    """Numbers: sums of absolute errors, squared errors, targets and squared targets, of targets in [-1, 1]."""

    @property
    def event(self) -> Event:
        """What it costs."""
        return Composed([one.event for one in self.sums]) if self.count is None else self.count.event


def planned(settings: Settings, opened: Opened) -> AccuracyMeasurement | None:
    """The measurement that this run pays for; None where public rows measure, or there are too few rows.

    Raises:
        InvalidArgument: a width was asked for that cannot be kept.
    """
    if opened.tested:
        return None
    sums = 1 if opened.target is None else SUMS
    found = recipes.measuring(settings, opened.units.count, sums)
    if found is None:
        if settings.accuracy_within:
            raise InvalidArgument(
                f"--accuracy-within {settings.accuracy_within:g}: {too_few(settings, opened)}; want a wider one, or "
                "--test with public rows"
            )
        return None
    unit = opened.units.unit
    if opened.target is None:
        return AccuracyMeasurement(found.held, found.within, mechanisms.Counts(epsilon=found.epsilon, unit=unit))
    each = found.epsilon / SUMS
    bounds = ((0.0, 2.0), (0.0, 4.0), (-1.0, 1.0), (0.0, 1.0))
    made = tuple(mechanisms.BoundedSum(lower=low, upper=high, epsilon=each, unit=unit) for low, high in bounds)
    return AccuracyMeasurement(found.held, found.within, None, made)


def held(measurement: AccuracyMeasurement | None) -> int:
    """About how many units it leaves out."""
    return 0 if measurement is None else measurement.held


def too_few(settings: Settings, opened: Opened) -> str:
    """Why no accuracy is printed, and what would be."""
    sums = 1 if opened.target is None else SUMS
    noun, count = "rows" if opened.units.people is None else "people", opened.units.count
    reach = recipes.reachable(settings, count, sums)
    said = f"{count} private {noun} at epsilon {settings.epsilon:g} are too few"
    return said if reach > 50 else f"{said}: within {math.ceil(10 * reach) / 10:g} points is what they allow"


def released(
    measurement: AccuracyMeasurement,
    folder: Folder,
    settings: Settings,
    module: nn.Module,
    material: Material,
    features: torch.Tensor,
    tossed: Coins,
) -> dict[str, Any]:
    """Released once: what was drawn is kept, and read back by whoever asks again."""
    if folder.has(_KEPT):
        return folder.read(_KEPT)
    if not len(tossed.out):  # every coin fell on heads
        return {"measured_on": "nothing: no row was left out by its coin"}
    source: Source = SYSTEM if settings.seed is None else Seeded(settings.seed)
    told = _told(module, features, material.units, tossed.out)
    truth = material.labels[material.units.one_row(tossed.out)]
    if measurement.count is not None:
        record = _of_classes(measurement.count, told, truth, source)
    else:
        record = _of_numbers(measurement.sums, told, truth, material, source)
    record["measured_on"] = f"{of_each(material.units)} not trained on; {record['measured_on']}, paid for"
    folder.write(_KEPT, record)
    return record


def right_answers(module: nn.Module, features: torch.Tensor, material: Material, units: Any) -> int:
    """How many of these units have their class told right, by one row of each."""
    told = _told(module, features, material.units, units).argmax(axis=1)
    return int((told == material.labels[material.units.one_row(units)]).sum())


def public(module: nn.Module, features: torch.Tensor, labels: Any, material: Material) -> dict[str, Any]:
    """The same of rows that need no protection, exactly."""
    with torch.no_grad():
        told = torch.cat([module(part) for part in torch.split(features, 1000)]).double().numpy()
    if material.target is None:
        return {"accuracy": float((told.argmax(axis=1) == labels).mean())}
    errors = np.clip(told[:, 0], -1, 1) - labels
    return _scores([np.abs(errors).mean(), (errors**2).mean(), labels.mean(), (labels**2).mean()], material)


def of_each(units: Units) -> str:
    """What is looked at, in words."""
    return "private rows that were" if units.people is None else "one row of each of the people who were"


def _told(module: nn.Module, features: torch.Tensor, units: Units, chosen: Any) -> Any:
    with torch.no_grad():
        return module(features[torch.from_numpy(units.one_row(chosen))]).double().numpy()


def _of_classes(count: mechanisms.Counts, told: Any, truth: Any, source: Source) -> dict[str, Any]:
    held = len(truth)
    noisy = count.release(int((told.argmax(axis=1) == truth).sum()), rng=source).value
    return {
        "accuracy": min(max(int(np.asarray(noisy).reshape(-1)[0]) / held, 0.0), 1.0),
        "rows": held,
        "measured_on": "a noisy count",
        "off_by_at_most": recipes.off_by(held, count.epsilon),
    }


def _of_numbers(
    sums: tuple[mechanisms.BoundedSum, ...], told: Any, truth: Any, material: Material, source: Source
) -> dict[str, Any]:
    held, errors = len(truth), np.clip(np.nan_to_num(told[:, 0]), -1.0, 1.0) - truth
    values = (np.abs(errors), errors**2, truth, truth**2)
    means = [float(one.release(value, rng=source).value) / held for one, value in zip(sums, values, strict=True)]
    assert material.target is not None
    return _scores(means, material) | {
        "rows": held,
        "measured_on": "noisy sums",
        "off_by_at_most": recipes.off_by(held, sums[0].epsilon) * (material.target.high - material.target.low),
    }


def _scores(means: Sequence[float], material: Material) -> dict[str, Any]:
    """R2 and the errors in the label's own unit, of the four means over targets in [-1, 1]."""
    absolute, squared, mean, square = (float(one) for one in means)
    assert material.target is not None
    half, spread = (material.target.high - material.target.low) / 2, square - mean**2
    return {
        "r2": float(max(-1.0, min(1.0, 1 - max(squared, 0.0) / spread))) if spread > 1e-9 else None,
        "mean_absolute_error": float(half * min(max(absolute, 0.0), 2.0)),
        "root_mean_squared_error": float(half * math.sqrt(min(max(squared, 0.0), 4.0))),
    }

"""Features whitened before a run by DP-SGD: released once, billed as part of the run, kept with the model.

The mean of the features and their channels' second moments are released with noise (`whitening.py`); the plan gets
their event as preparation, so training has the noise that keeps the budget of both together. Rows that a coin left out
add nothing here either. What was released is kept in `owner/` as well: a run that goes on after a crash uses it again
instead of releasing twice, and the plan of its checkpoint holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save as as_bytes
from torch import Tensor

from terrine.events import Event
from terrine.events.codec import from_dict, to_dict
from terrine.features.whitening import Whitening, private_whitening, whitening_event
from terrine.pipeline import coins, recipes
from terrine.pipeline.folder import Folder
from terrine.pipeline.memory import is_large
from terrine.pipeline.models import Architecture
from terrine.pipeline.settings import Settings
from terrine.pipeline.units import Units
from terrine.receipts import Receipt

_KEPT = "owner/whitening.safetensors"


def event(settings: Settings, architecture: Architecture, units: Units) -> Event:
    """What whitening costs, known before it is done."""
    noise = recipes.whitening_noise(settings, units.count)
    return whitening_event(
        mean_noise=noise.mean, noise=noise.moments, power=architecture.ways.power, unit=units.unit,
        seed=settings.seed,
    )  # fmt: skip


def prepare(
    folder: Folder,
    settings: Settings,
    architecture: Architecture,
    features: Tensor,
    units: Units,
    receipt: Receipt,
    *,
    held: int = 0,
) -> tuple[Architecture, Tensor]:
    """The architecture with its whitening, and the features whitened; released now, or read back."""
    receipt.covers(event(settings, architecture, units))
    if not folder.has(_KEPT):
        save(folder, _KEPT, {}, _released(folder, settings, architecture, features, units, held))
    whitening = read(folder.path / _KEPT)[1]
    assert whitening is not None
    flat = features.flatten(1)
    in_place = is_large(features) and flat.shape[1] == math.prod(whitening.channels.shape[:1] + features.shape[2:])
    white = whitening.into(flat, features) if in_place else whitening(features)
    return replace(architecture, whitening=whitening), white


def _released(
    folder: Folder, settings: Settings, architecture: Architecture, features: Tensor, units: Units, held: int
) -> Whitening:
    noise = recipes.whitening_noise(settings, units.count)
    tossed = coins.of_run(folder.owner, settings, units.count, held)
    return private_whitening(
        features, mean_noise=noise.mean, noise=noise.moments, **architecture.ways._asdict(),
        without=torch.from_numpy(units.all_rows(tossed.out)), people=units.people, rows_per_person=units.most or 1,
        seed=settings.seed,
    )  # fmt: skip


def facts(settings: Settings, units: Units) -> dict[str, str]:
    """What was done, for the record."""
    noise = recipes.whitening_noise(settings, units.count)
    return {
        "whitening": "features centred and whitened by two noisy releases about the private rows, their mean "
        f"(noise {noise.mean:.4g}) and their channels' second moments (noise {noise.moments:.4g}): part of the bill"
    }


def save(folder: Folder, name: str, weights: Mapping[str, Tensor], whitening: Whitening | None) -> None:
    """A module's weights and its whitening in one file, whole or not at all."""
    tensors = {name: value.detach().contiguous() for name, value in weights.items()}
    words: dict[str, str] = {}
    if whitening is not None:
        tensors |= {"whitening.mean": whitening.mean, "whitening.channels": whitening.channels}
        words = {"whitening": json.dumps({"blur": whitening.blur, "event": to_dict(whitening.event)})}
    with folder.written(name) as file:
        file.write(as_bytes(tensors, metadata=words))


def read(path: Path) -> tuple[dict[str, Tensor], Whitening | None]:
    """What `save` wrote."""
    with safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        words = json.loads((file.metadata() or {}).get("whitening", "null"))
    if words is None:
        return tensors, None
    mean, channels = tensors.pop("whitening.mean"), tensors.pop("whitening.channels")
    return tensors, Whitening(mean, channels, float(words["blur"]), from_dict(words["event"]))

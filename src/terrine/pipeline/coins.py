"""Which private rows, or people, a fair coin puts in or leaves out, so that the finished model can be audited [SNJ23].

For DP-SGD, whose neighbours add or remove a unit (a row, or a person with all its rows), a coin leaves it in or
silences it: a silenced one may be drawn but adds nothing to any sum. For PATE, whose neighbours replace a unit, a coin
chooses which of a pair is used. Coins come from the operating system and stay with the owner.

Some of the audited are canaries: all their rows carry a wrong label, by an offset drawn for each. A model that learned
such a label learned it from that unit alone, so that an attack sees much more than on plain rows. Which units are
canaries and their offsets are public. A unit's wrong labels depend on nobody else's rows: neighbours stay neighbours,
and the number of units stays what the plan says. The price is accuracy, so canaries are few.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine import files
from terrine.audit import one_run
from terrine.errors import InvalidArgument
from terrine.pipeline import recipes
from terrine.pipeline.material import Material
from terrine.pipeline.settings import Settings

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Coins:
    """Audited units and their coins."""

    units: Integers
    heads: Flags

    @property
    def out(self) -> Integers:
        """The units that are left out."""
        return self.units[~self.heads]

    def canaries(self, count: int) -> Coins:
        """The first `count` of the audited in a public random order: those whose rows carry a wrong label."""
        chosen = np.sort(np.random.default_rng(0).permutation(len(self.units))[:count])
        return Coins(self.units[chosen], self.heads[chosen])


def of_run(owner: Path, settings: Settings, count: int, held: int = 0) -> Coins:
    """The coins of a run by DP-SGD on `count` units, so that about `held` are left out, in its owner's folder."""
    audited = recipes.audited(settings, count, held)
    return tossed(owner / "coins.npz", units=count, count=audited, seed=settings.seed)


def mislabelled(material: Material, canaries: Integers) -> NDArray[Any]:
    """The labels of all rows, those of the canaries' rows wrong; true labels stay with `material`."""
    labels, classes, units = material.labels.copy(), len(material.classes), material.units
    if material.target is not None:  # a number becomes the bound that it is farther from
        rows = np.isin(np.arange(units.count) if units.ids is None else units.ids, canaries)
        labels[rows] = np.where(labels[rows] > 0, -1.0, 1.0)
        return labels
    if classes < 2:
        return labels
    offsets = np.zeros(units.count, dtype=np.int64)
    offsets[canaries] = np.random.default_rng(0).integers(1, classes, size=len(canaries))
    return (labels + (offsets if units.ids is None else offsets[units.ids])) % classes


def tossed(path: Path, *, units: int, count: int, seed: int | None) -> Coins:
    """The run's coins: read where the run was begun before, otherwise tossed and kept.

    Raises:
        InvalidArgument: the run was begun with other numbers.
    """
    if path.exists():
        with np.load(path, allow_pickle=False) as kept:
            found, size = Coins(kept["units"], kept["heads"]), int(kept["of"])
        if size != units or len(found.units) != count:
            raise InvalidArgument(f"{path}: the run was begun on {size} rows or people, now {units}; want the same")
        return found
    generator = np.random.default_rng(seed)  # which units are audited may be known; their coins may not
    chosen = np.sort(generator.permutation(units)[:count]).astype(np.int64)
    heads = np.zeros(0, dtype=np.bool_)
    if count:
        heads = one_run.coins(count) if seed is None else generator.random(count) < 0.5
    with files.written(path, private=True) as file:
        np.savez(file, units=chosen, heads=heads, of=np.array(units))
    return Coins(chosen, heads)

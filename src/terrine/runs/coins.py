"""Which private rows, or people, a fair coin puts in or leaves out, so that the finished model can be audited [SNJ23].

For DP-SGD, whose neighbours add or remove a unit (a row, or a person with all its rows), a coin leaves it in or
silences it: a silenced one may be drawn but adds nothing to any sum. For PATE, whose neighbours replace a unit, a coin
chooses which of a pair is used. Coins come from the operating system and stay with the owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terrine import files
from terrine.audit import one_run
from terrine.errors import InvalidArgument
from terrine.runs import recipes
from terrine.runs.settings import Settings

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


def of_run(owner: Path, settings: Settings, count: int) -> Coins:
    """The coins of a run by DP-SGD on `count` units, in its owner's folder."""
    return tossed(owner / "coins.npz", units=count, count=recipes.audited(settings, count), seed=settings.test_seed)


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

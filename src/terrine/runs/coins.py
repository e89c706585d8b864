"""Which private rows a fair coin puts in or leaves out, so that the finished model can be audited [SNJ23].

For DP-SGD, whose neighbours add or remove a row, a coin leaves a row in or silences it: a silenced row may be drawn
but adds nothing to any sum. For PATE, whose neighbours replace a row, a coin chooses which row of a pair is used.
Coins come from the operating system and stay with the owner.
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
    """Audited rows and their coins."""

    rows: Integers
    heads: Flags

    @property
    def out(self) -> Integers:
        """The rows that are left out."""
        return self.rows[~self.heads]


def of_run(owner: Path, settings: Settings, examples: int) -> Coins:
    """The coins of a run by DP-SGD, in its owner's folder."""
    count = recipes.audited(settings, examples)
    return tossed(owner / "coins.npz", examples=examples, count=count, seed=settings.test_seed)


def tossed(path: Path, *, examples: int, count: int, seed: int | None) -> Coins:
    """The run's coins: read where the run was begun before, otherwise tossed and kept.

    Raises:
        InvalidArgument: the run was begun with other numbers.
    """
    if path.exists():
        with np.load(path, allow_pickle=False) as kept:
            found, size = Coins(kept["rows"], kept["heads"]), int(kept["examples"])
        if size != examples or len(found.rows) != count:
            raise InvalidArgument(f"{path}: the run was begun on {size} rows, now there are {examples}; want the same")
        return found
    generator = np.random.default_rng(seed)  # which rows are audited may be known; their coins may not
    rows = np.sort(generator.permutation(examples)[:count]).astype(np.int64)
    heads = np.zeros(0, dtype=np.bool_)
    if count:
        heads = one_run.coins(count) if seed is None else generator.random(count) < 0.5
    with files.written(path, private=True) as file:
        np.savez(file, rows=rows, heads=heads, examples=np.array(examples))
    return Coins(rows, heads)

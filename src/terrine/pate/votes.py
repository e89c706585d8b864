"""Vote histograms: how many teachers chose each class, for a set of public inputs, with the deal they were cast under.

Votes are private data: they stay on the owner's side, and only what an aggregator answers leaves it. Their repr shows
shapes, never counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from terrine import files
from terrine.errors import InvalidArgument
from terrine.events import Unit
from terrine.pate.partitions import Membership, Partition

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Votes:
    """Counts (queries, classes); each row sums to the number of teachers."""

    counts: Integers = field(repr=False)
    deal: dict[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        table = np.asarray(self.counts)
        if table.ndim != 2 or table.shape[1] < 2:
            raise InvalidArgument(f"votes have shape {table.shape}: want (queries, classes) with at least 2 classes")
        if table.dtype.kind not in "iu" or (table.size and table.min() < 0):
            raise InvalidArgument("votes hold values that are not counts: want whole numbers >= 0")
        if wrong := np.flatnonzero(table.sum(axis=1) != self.teachers).tolist():
            raise InvalidArgument(
                f"votes of query {wrong[0]} sum to {int(table[wrong[0]].sum())}: want {self.teachers}, one for each"
                " teacher"
            )
        object.__setattr__(self, "counts", np.ascontiguousarray(table, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return f"Votes({len(self)} queries, {self.classes} classes, {self.teachers} teachers)"

    @property
    def classes(self) -> int:
        return int(self.counts.shape[1])

    @property
    def teachers(self) -> int:
        return int(self.deal["teachers"])

    @property
    def unit(self) -> Unit:
        return Unit(self.deal["unit"])

    @property
    def disjoint(self) -> bool:
        """Whether one unit of private data reaches one teacher only."""
        return bool(self.deal["most_parts"] == 1 and self.deal["kind"] == "disjoint")

    def take(self, queries: ArrayLike) -> Votes:
        """The votes on some of the queries."""
        return Votes(self.counts[np.asarray(queries)], self.deal)

    def save(self, path: Path) -> None:
        """Write the votes and their deal to one file, readable by its owner only."""
        with files.written(Path(path), private=True) as file:
            np.savez_compressed(file, counts=self.counts, deal=np.array(json.dumps(self.deal)))

    @classmethod
    def load(cls, path: Path) -> Votes:
        """Read what `save` wrote."""
        try:
            with np.load(Path(path), allow_pickle=False) as stored:
                return cls(stored["counts"], json.loads(str(stored["deal"])))
        except (KeyError, ValueError, OSError) as error:
            raise InvalidArgument(f"{path}: not a votes file ({error}); make it with terrine pate vote") from None


def count(predictions: ArrayLike, *, classes: int, deal: Partition | Membership) -> Votes:
    """Votes from predictions (teachers, queries), each a class number.

    Raises:
        InvalidArgument: not one row for each teacher, not a number, or a class outside 0 .. classes-1.
    """
    table = np.asarray(predictions)
    teachers = int(deal.record()["teachers"])
    if table.ndim != 2 or len(table) != teachers:
        raise InvalidArgument(f"predictions have shape {table.shape}: want one row for each of {teachers} teachers")
    if table.dtype.kind == "f":
        if not np.isfinite(table).all():
            teacher, query = np.argwhere(~np.isfinite(table))[0]
            raise InvalidArgument(f"teacher {teacher} predicts {table[teacher, query]} for query {query}: want a class")
        if (table != np.rint(table)).any():
            raise InvalidArgument("predictions are not whole: want class numbers, not scores")
    table = table.astype(np.int64)
    if table.size and (table.min() < 0 or table.max() >= classes):
        wrong = table.min() if table.min() < 0 else table.max()
        raise InvalidArgument(f"a teacher predicts class {wrong}: want 0 .. {classes - 1}")
    flat = table + classes * np.arange(table.shape[1])
    counts = np.bincount(flat.reshape(-1), minlength=classes * table.shape[1])
    return Votes(counts.reshape(table.shape[1], classes), deal.record())

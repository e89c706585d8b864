"""People and their rows: who is drawn, and which of their rows count in a step.

Person-level DP-SGD draws people. A person's contribution is the mean over the gradients of at most k of its rows,
clipped as one vector, so a person moves the clipped sum by at most the clipping bound, whatever its number of rows.
Where a person has more than k rows, k of them are chosen at random in every step, from that person's rows alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine.common.keys import Key, Purpose
from terrine.errors import InvalidArgument

Indices = NDArray[np.int64]


class People:
    """Whose rows are whose: `ids` has one entry for each row, equal for rows of one person.

    Raises: InvalidArgument where it does not fit `rows` rows, or a row is nobody's.
    """

    def __init__(self, ids: Any, rows: int) -> None:
        given, known = _listed(ids), dict[int | str, int]()
        if len(given) != rows:
            raise InvalidArgument(f"person: {len(given)} ids; want one for each of the {rows} rows")
        self.of_rows = np.array([known.setdefault(one, len(known)) for one in given], dtype=np.int64)
        self._order = np.argsort(self.of_rows, kind="stable")
        self.counts = np.bincount(self.of_rows)
        self._starts = np.cumsum(self.counts) - self.counts

    def __len__(self) -> int:
        return len(self.counts)

    def rows(self, people: Indices, most: int, key: Key, step: int) -> tuple[Indices, tuple[int, ...]]:
        """The rows of these people at one step, at most `most` of each, and how many of each they are.

        Those with fewer rows come first: people with equally many rows are clipped together.
        """
        ranked = people[np.argsort(np.minimum(self.counts[people], most), kind="stable")]
        chosen = [self._chosen(int(one), most, key, step) for one in ranked]
        counts = tuple(len(one) for one in chosen)
        return np.concatenate([np.empty(0, dtype=np.int64), *chosen]), counts

    def whole_shares(self, most: int, key: Key) -> NDArray[np.int64]:
        """The same as whole numbers: r for each of r rows chosen, which count 1 / r each, and 0 for the others."""
        rows, counts = self.rows(np.arange(len(self)), most, key, 0)
        found = np.zeros(len(self.of_rows), dtype=np.int64)
        found[rows] = np.repeat(np.array(counts), counts)
        return found

    def shares(self, most: int, key: Key) -> NDArray[np.float32]:
        """What each row counts where a person counts once: 1 / r for r rows chosen of at most `most`, else 0."""
        rows, counts = self.rows(np.arange(len(self)), most, key, 0)
        found = np.zeros(len(self.of_rows), dtype=np.float32)
        found[rows] = np.repeat(1.0 / np.array(counts), counts)
        return found

    def _chosen(self, person: int, most: int, key: Key, step: int) -> Indices:
        start, count = self._starts[person], int(self.counts[person])
        rows = self._order[start : start + count]
        return rows if count <= most else rows[key.draw(Purpose.ROWS, step, person).subset(count, most)]


def _listed(ids: Any) -> list[int | str]:
    """The ids as whole numbers, or as texts: nothing that is different becomes equal on the way.

    Raises: InvalidArgument where one is missing, or they are of a kind that cannot be told apart for sure.
    """
    if isinstance(ids, str | bytes | dict | set | frozenset) or not hasattr(ids, "__len__"):
        raise InvalidArgument(f"person: a {type(ids).__name__}; want a list or an array, one id for each row in order")
    if hasattr(ids, "detach"):
        ids = ids.detach().cpu()
        if ids.is_floating_point() or ids.is_complex():
            raise InvalidArgument(f"person: ids of {ids.dtype}; want whole numbers or texts")
        ids = ids.numpy()
    if np.ma.is_masked(ids):
        raise InvalidArgument("person: an id is missing (masked); want every row to be somebody's")
    given = np.asarray(ids) if hasattr(ids, "__array__") else None
    if given is not None and given.ndim != 1:
        raise InvalidArgument(f"person of shape {given.shape}: want one id for each row")
    if given is not None and given.dtype == np.float64:
        if not np.all((np.abs(given) < 2.0**53) & (given == np.floor(given))):
            raise InvalidArgument("person: an id is missing (nan), no whole number, or too large to be exact")
        given = given.astype(np.int64)
    if given is not None and given.dtype.kind not in "iuUSO":
        raise InvalidArgument(f"person: ids of {given.dtype}; want whole numbers or texts")
    every = list(ids) if given is None else given.tolist()
    plain = [one.item() if isinstance(one, np.generic) else one for one in every]
    kinds = {type(one) for one in plain}
    if kinds not in ({int}, {str}, {bytes}, set()):  # 1 and "1", or 1 and 1.0, would be one person or two
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InvalidArgument(f"person: ids of {names}; want whole numbers or texts, none of them missing")
    return plain

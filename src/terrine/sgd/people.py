"""People and their rows: who is drawn, and which of their rows count in a step.

Person-level DP-SGD draws people. A person's contribution is the mean over the gradients of at most k of its rows,
clipped as one vector, so a person moves the clipped sum by at most the clipping bound, whatever its number of rows.
Where a person has more than k rows, k of them are chosen at random in every step, from that person's rows alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine.errors import InvalidArgument
from terrine.sgd.noise import Key, Purpose
from terrine.sgd.sampling import Indices


class People:
    """Whose rows are whose: `ids` has one entry for each row, equal for rows of one person.

    Raises: InvalidArgument where it does not fit `rows` rows, or a row is nobody's.
    """

    def __init__(self, ids: Any, rows: int) -> None:
        given = _array(ids)
        if given.shape != (rows,):
            raise InvalidArgument(f"person of shape {given.shape}: want one id for each of the {rows} rows")
        _, self.of_rows = np.unique(given, return_inverse=True)
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


def _array(ids: Any) -> np.ndarray[Any, Any]:
    """The ids as an array of numbers or texts.

    Raises: InvalidArgument where one is missing, or they are of a kind that cannot be compared.
    """
    if hasattr(ids, "detach"):
        ids = ids.detach().cpu().numpy()
    given = np.asarray(ids) if hasattr(ids, "__array__") else np.array(list(ids), dtype=object)
    if given.dtype == object:
        kinds = {type(one) for one in given.tolist()}
        if kinds not in ({int}, {str}, {float}, set()):  # 1 and "1" would become one person
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise InvalidArgument(f"person: ids of {names}; want whole numbers or texts, none of them missing")
        given = np.array(given.tolist())
    if given.dtype.kind == "f" and not np.all((np.abs(given) < 2.0**53) & (given == np.floor(given))):
        raise InvalidArgument("person: an id is missing (nan) or no whole number; want every row to be somebody's")
    if given.dtype.kind not in "iufUS":
        raise InvalidArgument(f"person: ids of {given.dtype}; want whole numbers or texts")
    return given

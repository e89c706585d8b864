"""Who a run protects: every row by itself, or every person with all its rows.

Rows of a table count one by one unless `--person` names the column that says whose a row is. Then people are drawn,
counted, left out by coins and dealt to teachers, each with all its rows. Where one value of each is looked at, it is
that of one of its rows, drawn by a public seed from its rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine.common.people import People
from terrine.events import Unit

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Units:
    """So many rows, and whose they are."""

    rows: int
    people: People | None = None
    most: int | None = None
    """How many rows of a person count at a time."""

    @property
    def count(self) -> int:
        """How many units there are."""
        return self.rows if self.people is None else len(self.people)

    @property
    def unit(self) -> Unit | None:
        """What one of them is, as events say it: without a word, an example."""
        return None if self.people is None else Unit.PERSON

    @property
    def ids(self) -> Integers | None:
        """For every row the number of its person, or nothing."""
        return None if self.people is None else self.people.of_rows

    @property
    def planned(self) -> dict[str, Any]:
        """What a plan for them is told."""
        return {"examples": self.rows} if self.people is None else {"people": self.count, "rows_per_person": self.most}

    def all_rows(self, units: Integers) -> Integers:
        """All rows of these units, in the table's order."""
        return units if self.people is None else np.flatnonzero(np.isin(self.people.of_rows, units)).astype(np.int64)

    def one_row(self, units: Integers) -> Integers:
        """One row of each of these units."""
        if self.people is None:
            return units
        shuffled = np.random.default_rng(0).permutation(self.rows)
        _, first = np.unique(self.people.of_rows[shuffled], return_index=True)
        chosen: Integers = shuffled[first].astype(np.int64)
        return chosen[units]

    def mean(self, values: Floats, units: Integers) -> Floats:
        """The mean of each unit's values, which are those of `all_rows(units)`."""
        if self.people is None:
            return values
        whose = self.people.of_rows[self.all_rows(units)]
        totals, counts = (np.bincount(whose, weights, self.count) for weights in (values, None))
        return np.asarray(totals[units] / counts[units])

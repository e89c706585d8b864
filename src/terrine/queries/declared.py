"""What the owner of the data declares about each table, before any analyst asks.

A private table holds rows of people, and one person may own many. `rows` is the contribution bound: however many rows
a person owns, together they count as at most `rows`. `groups` bounds how many groups of one question a person counts
in; left out, it is `rows`.

`complete` names columns that have a value in every row: then COUNT(*) and AVG of such a column need one count, not two.
It is not taken on trust: rows without a value are dropped from questions that aggregate it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrine import check

MOST_ROWS = 10**6
"""Contribution bounds above this would leave 64 bits, and protect nobody."""


@dataclass(frozen=True, kw_only=True)
class Private:
    """A table of people's rows. `person` is the column that says whose a row is; rows where it is NULL are dropped.

    Raises:
        InvalidArgument: a bound that is not a whole number from 1 to 10^6.
    """

    person: str
    rows: int
    groups: int | None = None
    complete: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "person", check.text("person", self.person, at_least=1))
        object.__setattr__(self, "rows", _bound("rows", self.rows))
        if self.groups is not None:
            object.__setattr__(self, "groups", _bound("groups", self.groups))
        names = (self.complete,) if isinstance(self.complete, str) else tuple(self.complete)
        object.__setattr__(self, "complete", tuple(check.text("complete", name, at_least=1) for name in names))

    @property
    def groups_touched(self) -> int:
        """In how many groups one person counts at most."""
        return self.rows if self.groups is None else self.groups


@dataclass(frozen=True)
class Public:
    """A table that holds nothing about the people who are protected, such as a list of hospitals."""


def _bound(name: str, value: int) -> int:
    bound = check.whole(name, value)
    if bound > MOST_ROWS:
        raise check.refuse(name, value, f"at most {MOST_ROWS:,}")
    return bound

"""What the owner of the data declares about each table, before any analyst asks.

A private table holds rows of people, and one person may own many. `rows` is the contribution bound: however many rows
a person owns, together they count as at most `rows`. `groups` bounds how many groups of one question a person counts
in; left out, it is `rows`.
"""

from __future__ import annotations

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "person", check.text("person", self.person, at_least=1))
        object.__setattr__(self, "rows", _bound("rows", self.rows))
        if self.groups is not None:
            object.__setattr__(self, "groups", _bound("groups", self.groups))

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

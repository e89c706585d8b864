"""Who is protected: the neighbour relation and the unit that an event's cost refers to."""

from __future__ import annotations

import enum


class Neighbours(enum.Enum):
    """Which two data sets must be hard to tell apart."""

    ADD_REMOVE = "add-remove"
    """One unit is present in one of them and absent from the other."""
    REPLACE_ONE = "replace-one"
    """One unit has another value in each; the number of units is public."""
    ZERO_OUT = "zero-out"
    """One unit is replaced by a blank that contributes nothing; the number of units is public."""


class Unit(enum.Enum):
    """What counts as one."""

    EXAMPLE = "example"
    PERSON = "person"
    CLIENT = "client"

"""What an attack says: one number for every member and every non-member, higher meaning "was in the data"."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from terrine.errors import InvalidArgument

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of those who were in the data and of those who were not.

    Raises:
        InvalidArgument: a side is empty, holds nan, or is not a list of numbers.
    """

    members: Floats = field(repr=False)
    non_members: Floats = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", checked("members", self.members))
        object.__setattr__(self, "non_members", checked("non_members", self.non_members))

    @classmethod
    def split(cls, scores: ArrayLike, included: ArrayLike) -> Scores:
        """One array of scores, cut in two by who was in the data."""
        every, flags = paired(scores, included)
        if flags.all() or not flags.any():
            only = "members" if flags.all() else "non-members"
            raise InvalidArgument(f"included: all {flags.size} are {only}; want some of each, or nothing can be told")
        return cls(every[flags], every[~flags])

    def __repr__(self) -> str:
        return f"Scores({self.members.size} members, {self.non_members.size} non-members)"


def checked(name: str, scores: ArrayLike) -> Floats:
    """Scores as a flat float array without nan; infinities are allowed."""
    try:
        array = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidArgument(f"{name}: not numbers; want one score each") from None
    if array.ndim != 1:
        raise InvalidArgument(f"{name}: shape {array.shape}; want one dimension, one score each")
    if array.size == 0:
        raise InvalidArgument(f"{name}: empty; want at least one score")
    if broken := int(np.isnan(array).sum()):
        raise InvalidArgument(f"{name}: {broken} of {array.size} scores are nan; want numbers (was the loss finite?)")
    return array


def paired(scores: ArrayLike, included: ArrayLike) -> tuple[Floats, Flags]:
    """Scores with a flag each that says who was in the data."""
    every = checked("scores", scores)
    flags = np.asarray(included)
    if flags.shape != every.shape:
        raise InvalidArgument(f"included: shape {flags.shape} for {every.size} scores; want one flag each")
    if flags.dtype != np.bool_ and not np.isin(flags, (0, 1)).all():
        raise InvalidArgument("included: values other than 0 and 1; want true for those in the data")
    return every, flags.astype(np.bool_)

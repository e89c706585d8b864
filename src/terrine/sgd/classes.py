"""Which classes there are, for estimators: told by the caller, never taken from private labels without a word."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from terrine.errors import InvalidArgument

PUBLIC = "public"
_MOST = 1000


def told(classes: ArrayLike | None, labels: NDArray[Any]) -> NDArray[Any]:
    """The classes in order: those given, or those that occur where the caller says that they are public.

    Raises:
        InvalidArgument: nobody says which classes there are; or labels that look like numbers to be predicted.
    """
    if classes is None:
        raise InvalidArgument(
            "classes: not given, and taking them from private labels tells which labels occur; want classes=[...] with "
            f'all that may occur, or classes="{PUBLIC}" where the labels that occur are public knowledge'
        )
    if not (isinstance(classes, str) and classes == PUBLIC):
        return np.unique(np.asarray(classes))
    found = np.unique(labels)
    if len(found) > _MOST or (labels.dtype.kind == "f" and len(found) > 20):
        raise InvalidArgument(
            f"y: {len(found)} different numbers; want classes, or PrivateRegressor(bounds=(low, high)) for a number"
        )
    return found


def placed(classes: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.int64]:
    """The place of each label among the classes.

    Raises:
        InvalidArgument: a label is none of them.
    """
    places = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    if not np.array_equal(classes[places], labels):
        raise InvalidArgument("y has a label that is not among the classes given; want classes to hold all of them")
    return places.astype(np.int64)

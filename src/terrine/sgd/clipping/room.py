"""How much memory per-example gradients may take, from a layer's backward pass to the end of their part of the lot."""

from __future__ import annotations

import math
import threading

from torch import Tensor

_here = threading.local()


def limit(room: float) -> None:
    """From now on `fits` says whether so many bytes of per-example gradients may be kept, in this thread."""
    _here.room = room


def fits(size: int, like: Tensor) -> bool:
    """Whether there is room to keep `size` more numbers of the type of `like`."""
    room: float = getattr(_here, "room", math.inf)
    return size * like.element_size() <= room

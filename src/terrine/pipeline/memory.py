"""Room for the rows of large tables: in memory up to a gigabyte, beyond that in a file that only this process has.

The file lies where temporary files do (`TMPDIR` says where) and has no name: nobody else can open it, and it is gone
when the process is, however that ends.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine.errors import InvalidArgument

_IN_MEMORY = 2**30


def room(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """An array of this shape, with nothing in it yet.

    Raises:
        InvalidArgument: there is not room enough where temporary files lie.
    """
    size = 4 * math.prod(shape)
    if size <= _IN_MEMORY:
        return np.empty(shape, dtype=np.float32)
    if size > (free := shutil.disk_usage(tempfile.gettempdir()).free):
        raise InvalidArgument(
            f"the rows take {size / 2**30:.0f} GB as features, and {tempfile.gettempdir()} has {free / 2**30:.0f}; "
            "want fewer columns or buckets, or TMPDIR with more room"
        )
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        return np.memmap(file, dtype=np.float32, mode="r+", shape=shape)


def is_large(array: Any) -> bool:
    """Whether an array is large enough that a copy of it matters."""
    return bool(array.nbytes > _IN_MEMORY // 4)

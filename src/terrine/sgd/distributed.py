"""Several processes that train one model: same key, same lots, each its share; sums added up before the noise.

Every process draws the same noise from the same key and adds it to the same total, so the noise is there once and
the replicas stay equal without being sent around.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from terrine.common.keys import Key
from terrine.errors import InvalidArgument


def share() -> tuple[int, int]:
    """This process' place, and how many there are."""
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if _together() else (0, 1)


def is_first() -> bool:
    """Whether this process speaks for all, to the account and the disk."""
    return share()[0] == 0


def agreed(key: Key) -> Key:
    """The first process' key, in every process."""
    return Key(from_first(key.secret)) if _together() else key


def gathered(value: Any) -> list[Any]:
    """Return every process' value, by rank: for small things that are not tensors."""
    if not _together():
        return [value]
    values: list[Any] = [None] * share()[1]
    torch.distributed.all_gather_object(values, value)
    return values


def check_same(**values: Any) -> None:
    """Refuse to go on where processes have others than the first has.

    Raises: InvalidArgument, in every process, naming what differs and where.
    """
    every = gathered(values)
    for name, value in every[0].items():
        strange = [rank for rank, own in enumerate(every) if own.get(name) != value]
        if strange:
            raise InvalidArgument(
                f"{name.replace('_', ' ')}: process {strange[0]} has another than process 0; want every process to be "
                "given the same model, plan and whole data set, and to take the same steps"
            )


def from_first(value: Any) -> Any:
    """Return the first process' value, in every process."""
    if not _together():
        return value
    holder = [value]
    torch.distributed.broadcast_object_list(holder, src=0)
    return holder[0]


def summed(value: Tensor) -> Tensor:
    """The sum of `value` over all processes."""
    if _together():
        torch.distributed.all_reduce(value)
    return value


def _together() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()

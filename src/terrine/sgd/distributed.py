"""Several processes that train one model: same key, same lots, each its share; sums added up before the noise.

Every process draws the same noise from the same key and adds it to the same total, so the noise is there once and
the replicas stay equal without being sent around.
"""

from __future__ import annotations

import torch
from torch import Tensor

from terrine.common.keys import Key


def share() -> tuple[int, int]:
    """This process' place, and how many there are."""
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if _together() else (0, 1)


def is_first() -> bool:
    """Whether this process speaks for all, to the account and the disk."""
    return share()[0] == 0


def agreed(key: Key) -> Key:
    """The first process' key, in every process."""
    if not _together():
        return key
    secret = torch.tensor(list(key.secret), dtype=torch.uint8)
    torch.distributed.broadcast(secret, src=0)
    return Key(bytes(secret.tolist()))


def summed(value: Tensor) -> Tensor:
    """The sum of `value` over all processes."""
    if _together():
        torch.distributed.all_reduce(value)
    return value


def _together() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()

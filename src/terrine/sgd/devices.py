"""The device that a run trains on: the parameters' own, to which lots move by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrine.errors import InvalidArgument


def find_device(model: nn.Module, device: str | torch.device | None) -> torch.device | None:
    """Move the model to `device`, where one is given; the device of its parameters, None where they have several.

    Raises:
        InvalidArgument: there is no such device here.
    """
    if device is not None:
        try:
            torch.empty(0, device=device)
            model.to(device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise InvalidArgument(f"device={str(device)!r}: want one that is here, such as cpu ({reason})") from error
    found = {parameter.device for parameter in model.parameters()}
    return found.pop() if len(found) == 1 else None


def move_batch(batch: Any, device: torch.device | None) -> Any:
    """A lot on the device of the run."""
    if device is None:
        return batch
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)

"""Where a run trains, and how exactly: the parameters' own device, and single precision that is single precision.

`torch.set_float32_matmul_precision("medium")` and its likes let products of single precision round what they multiply
to 8 or 11 bits. A sum made of such factors may hold up to 1% more of an example than its norm, made otherwise, allows.
Outputs and gradients may be as rough as the user likes; what is made of them here is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
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


EXACT = ("none", "ieee")


def is_exact() -> bool:
    """Whether products of single precision are asked to be in single precision."""
    if not _settings():  # as before torch 2.9
        return torch.get_float32_matmul_precision() == "highest"
    return all(one.fp32_precision in EXACT for one in _settings())


def exact() -> AbstractContextManager[None]:
    """Within, they are."""
    return _NOTHING if is_exact() else _exact()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Within, nothing is computed in half precision, whatever autocast surrounds it, and products are exact."""
    with torch.autocast(device.type, enabled=False), exact():
        yield


@contextmanager
def _exact() -> Iterator[None]:
    if not _settings():
        asked = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(asked)
        return
    before = [one.fp32_precision for one in _settings()]
    try:
        for one in _settings():
            one.fp32_precision = "ieee"
        yield
    finally:
        for one, precision in zip(_settings(), before, strict=True):
            one.fp32_precision = precision


@lru_cache(maxsize=1)
def _settings() -> tuple[Any, ...]:
    """What decides it, for each kind of product."""
    kinds = [getattr(torch.backends.mkldnn, "matmul", None), getattr(torch.backends.mkldnn, "conv", None)]
    if torch.cuda.is_available():
        kinds += [torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv", None)]
    return tuple(kind for kind in kinds if hasattr(kind, "fp32_precision"))


_NOTHING = nullcontext()

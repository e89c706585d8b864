"""The global generators that dropout and augmentations draw from: torch's, numpy's and Python's.

A run seeds them anew for every part of every lot, from its key, the step and the process. So nobody knows them: an
example that is taken out of a lot moves the draws of all behind it, which tells nothing as long as each is as likely as
any other, and everything if they come from a seed at the top of a script. After its step the caller has its own state
back, so that nothing else that is drawn, or saved, tells about a lot's draws.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


def seed(secret: bytes | None) -> None:
    """Seed them all, on every device, by 32 random bytes; leave them as they are by None."""
    if secret is None:
        return
    torch.manual_seed(int.from_bytes(secret[:8], "little"))
    np.random.seed(np.frombuffer(secret[8:24], dtype=np.uint32))
    random.seed(secret[24:])


@contextmanager
def untouched() -> Iterator[None]:
    """Whatever is drawn inside, outside nothing was."""
    before = _now()
    try:
        yield
    finally:
        _set(before)


@contextmanager
def seeded(secret: bytes) -> Iterator[None]:
    """Draws of their own inside, and nothing drawn outside."""
    with untouched():
        seed(secret)
        yield


class _State(NamedTuple):
    torchs: list[Tensor]
    numpys: Any
    pythons: Any


def _now() -> _State:
    return _State(states(_device()), np.random.get_state(), random.getstate())


def _set(state: _State) -> None:
    restore(state.torchs, _device())
    np.random.set_state(state.numpys)
    random.setstate(state.pythons)


def _device() -> torch.device:
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return torch.device("cpu") if found is None else found


def states(device: torch.device) -> list[Tensor]:
    """The states of torch's generators, of the CPU and of `device`."""
    other = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *other]


def restore(before: list[Tensor], device: torch.device) -> None:
    """Set them back."""
    torch.set_rng_state(before[0])
    for state in before[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def replayed(device: torch.device) -> Iterator[None]:
    """Whatever torch draws inside, it will draw again outside."""
    before = states(device)
    try:
        yield
    finally:
        restore(before, device)

"""The global generators that dropout and augmentations draw from: torch's, numpy's and Python's.

A run seeds them anew for every piece of every lot, from its key, the step and the process. So nobody knows them: an
example that is taken out of a lot moves the draws of all behind it, which tells nothing as long as each is as likely as
any other, and everything if they come from a seed at the top of a script. After its step a loop has its own state back,
so that nothing else that is drawn, or saved, tells about a lot's draws. And what a step draws is the same whenever it
is repeated, whatever was drawn before it: a repeated step has its old noise, so it must have its old gradient too, or
the difference of the two would be free of noise.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

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
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    device = torch.device("cpu") if found is None else found
    before, numpy_state, python_state = states(device), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        restore(before, device)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


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

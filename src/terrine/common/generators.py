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


class Lent:
    """The global generators while a lot is out: the loop's own state is kept, and given back, whoever has its turn."""

    def __init__(self) -> None:
        self._before: _State | None = None

    @property
    def is_out(self) -> bool:
        """Whether what is drawn now is this run's to draw."""
        return bool(_LENT) and _LENT[-1] is self

    def take(self) -> None:
        """Keep the loop's state; nothing, where it is kept already."""
        if self not in _LENT:
            self._before = _now()
            _LENT.append(self)

    def give_back(self) -> None:
        """The loop has its state again; a run that was lent the generators since then gives it back later."""
        if self in _LENT:
            place = _LENT.index(self)
            _LENT.pop(place)
            assert self._before is not None
            if place < len(_LENT):
                _LENT[place]._before = self._before
            else:
                _set(self._before)


_LENT: list[Lent] = []
"""Runs with a lot out, the last to hand one out at the end."""


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

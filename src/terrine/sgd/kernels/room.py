"""Memory that kernels work in, kept by every thread that calls them: fresh pages are dearer than the arithmetic."""

from __future__ import annotations

from threading import local

import torch
from torch import Tensor

_kept = local()


def room(purpose: str, threads: int, size: int) -> Tensor:
    """(threads, size) numbers, whatever they are, until the next call for the same purpose."""
    kept: dict[str, Tensor] = _kept.__dict__
    if purpose not in kept or kept[purpose].numel() < threads * size:
        kept[purpose] = torch.empty(threads * size)
    return kept[purpose][: threads * size].view(threads, size)

"""Fixed features of published images, computed once and kept on disk: one file for each public configuration.

    kept("mnist-scattering-2", found, scattering)     # (train, test), as half-precision arrays mapped from disk

The name says what was computed from what; the function sees one image at a time and nothing that was fitted, so the
features cost no privacy. They lie in $TERRINE_FEATURES, or in `features` in the data folder. An interrupted run goes on
with the block it was at.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terrine import datasets
from terrine.datasets import Images

Half = NDArray[np.float16]
_BLOCK = 2000


def folder() -> Path:
    """Where features are kept."""
    named = os.environ.get("TERRINE_FEATURES")
    return Path(named) if named else datasets.folder() / "features"


def kept(name: str, found: Images, compute: Callable[[Tensor], Tensor]) -> tuple[Half, Half]:
    """The features of both parts; `compute` takes images as bytes (n, channels, height, width)."""
    return _part(f"{name}-train", found.train, compute), _part(f"{name}-test", found.test, compute)


def with_mirrored(maps: Tensor) -> Tensor:
    """Scattering maps added to those of the mirrored image, left part only: what an object is has no left and right.

    Mirroring an image turns orientation k of 8 into 6 - k (mod 8), and moves what was sampled at pixel 4 j of 32 to
    pixel 31 - 4 j, next to sample 8 - j. So no other transform is needed, but the match is close, not exact.
    """
    width = maps.shape[3]
    columns = torch.arange(width // 2 + 1)
    other = maps[:, _mirrored_channels(maps.shape[1])]
    return maps[..., columns] + other[..., (width - columns).clamp(max=width - 1)]


def _mirrored_channels(channels: int) -> Tensor:
    """Where each of the 1 + 8 + 8 + 8 x 8 features of a colour finds its mirror image."""
    turned = (6 - torch.arange(8)) % 8
    pairs = (8 * turned[:, None] + turned).flatten()
    colour = torch.cat([torch.zeros(1, dtype=torch.long), 1 + turned, 9 + turned, 17 + pairs])
    return torch.cat([81 * at + colour for at in range(channels // 81)])


def _part(name: str, images: NDArray[np.uint8], compute: Callable[[Tensor], Tensor]) -> Half:
    whole = folder() / f"{name}.npy"
    if not whole.exists():
        whole.parent.mkdir(parents=True, exist_ok=True)
        _fill(whole, images, compute)
    mapped: Half = np.load(whole, mmap_mode="r")
    return mapped


def _fill(whole: Path, images: NDArray[np.uint8], compute: Callable[[Tensor], Tensor]) -> None:
    """Block by block into a file of its own name, with the number of blocks done beside it."""
    part, mark = whole.with_suffix(".part.npy"), whole.with_suffix(".done")
    done = int(mark.read_text()) if mark.exists() and part.exists() else 0
    held: Any = np.load(part, mmap_mode="r+") if done else None
    for at in range(done * _BLOCK, len(images), _BLOCK):
        block = compute(torch.from_numpy(np.array(images[at : at + _BLOCK]))).half().numpy()
        if held is None:
            shape = (len(images), *block.shape[1:])
            held = np.lib.format.open_memmap(part, mode="w+", dtype=np.float16, shape=shape)
        held[at : at + len(block)] = block
        held.flush()
        mark.write_text(str(at // _BLOCK + 1))
        print(f"{whole.stem}: {at + len(block)} of {len(images)}", file=sys.stderr)
    part.rename(whole)
    mark.unlink(missing_ok=True)

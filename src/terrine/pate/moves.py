"""Small moves of images that keep their class: what teachers and students see instead of the same image again.

shifted   a whole lot by the same few pixels
warped    each image turned, scaled and sheared (an affine map around its centre), shifted and bent on its own
cut       a square of each image blanked
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def shifted(x: Tensor, most: int, generator: np.random.Generator) -> Tensor:
    """Images (..., height, width) moved by up to `most` pixels each way, all alike, zeros moving in."""
    if not most:
        return x
    down, right = (int(value) for value in generator.integers(-most, most + 1, size=2))
    padded = functional.pad(x, (most, most, most, most))
    height, width = x.shape[-2:]
    return padded[..., most + down : most + down + height, most + right : most + right + width]


def warped(
    x: Tensor, strength: float, generator: np.random.Generator, *, shift: float = 0.0, bend: float = 0.0
) -> Tensor:
    """Images (examples, channels, height, width), each turned, scaled and sheared by up to `strength` x (15 degrees,
    15%, 0.2), shifted by up to `shift` pixels and bent by a smooth field of about `bend` pixels."""
    if not strength:
        return x
    angle, shear_x, shear_y = (generator.uniform(-1, 1, (3, len(x))).T * strength * [0.26, 0.2, 0.2]).T
    zoom_x, zoom_y = 1 + generator.uniform(-0.15, 0.15, (2, len(x))) * strength
    right, down = generator.uniform(-1, 1, (2, len(x))) * 2 * shift / x.shape[-1] if shift else np.zeros((2, len(x)))
    cosine, sine = np.cos(angle), np.sin(angle)
    rows = [[zoom_x * cosine, shear_x - sine, right], [shear_y + sine, zoom_y * cosine, down]]
    maps = torch.from_numpy(np.array(rows).transpose(2, 0, 1)).to(x.dtype)
    moved = []
    for part, theta in zip(torch.split(x, 1024), torch.split(maps, 1024), strict=True):
        grid = functional.affine_grid(theta, list(part.shape), align_corners=False)
        if bend:
            grid = grid + _field(part, bend, generator)
        moved.append(functional.grid_sample(part, grid, align_corners=False))
    return torch.cat(moved)


def cut(x: Tensor, share: float, generator: np.random.Generator) -> Tensor:
    """Images, each with a square of `share` of their width blanked, anywhere (also partly outside)."""
    side = round(share * x.shape[-1])
    if not side:
        return x
    height, width = x.shape[-2:]
    top, left = (torch.from_numpy(generator.integers(-side // 2, size - side // 2, len(x))) for size in (height, width))
    rows, columns = torch.arange(height), torch.arange(width)
    inside = (rows >= top[:, None]) & (rows < top[:, None] + side)
    across = (columns >= left[:, None]) & (columns < left[:, None] + side)
    return x * ~(inside[:, :, None] & across[:, None, :])[:, None]


def upright(x: Tensor) -> Tensor:
    """Square images with a dark background moved to their centre of mass and sheared upright, each on its own."""
    size = x.shape[-1]
    place = torch.arange(size, dtype=x.dtype) - (size - 1) / 2
    ink = x.sum(dim=1)
    mass = ink.sum((1, 2)).clamp_min(1e-6)
    down, right = ((ink.sum(axis) * place).sum(1) / mass for axis in (2, 1))
    rows, columns = place[None, :, None] - down[:, None, None], place[None, None, :] - right[:, None, None]
    slant = (ink * rows * columns).sum((1, 2)) / (ink * rows**2).sum((1, 2)).clamp_min(1e-6)
    maps = torch.zeros(len(x), 2, 3, dtype=x.dtype)
    maps[:, 0, 0] = maps[:, 1, 1] = 1
    maps[:, 0, 1], maps[:, 0, 2], maps[:, 1, 2] = slant, 2 * right / size, 2 * down / size
    grid = functional.affine_grid(maps, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, align_corners=False)


def _field(x: Tensor, pixels: float, generator: np.random.Generator) -> Tensor:
    """Smooth displacements (examples, height, width, 2) in the grid's units: noise on 5 x 5 points, drawn out."""
    coarse = generator.standard_normal((len(x), 2, 5, 5), dtype=np.float32) * (2 * pixels / x.shape[-1])
    fine = functional.interpolate(torch.from_numpy(coarse), list(x.shape[-2:]), mode="bicubic", align_corners=True)
    return fine.permute(0, 2, 3, 1).to(x.dtype)

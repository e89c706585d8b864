"""Images as kernels read them: (n, height, width, channels), and a frame of zeros around each where there is padding.

Nothing is laid out. A patch begins at a place of its own and has a segment for each line of the kernel; a frame is put
around one image at a time, in memory that its thread keeps in cache. Positions without neighbours, as a linear map has
them, are an image one line high under a kernel of one pixel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terrine.sgd.scratch import scratch


@dataclass(frozen=True)
class Image:
    """`pixels` (n, height, width, channels), float32, and the kernel that goes over them.

    Channels lie side by side; where there is padding or a kernel wider than a pixel, so does a whole line.
    """

    pixels: Tensor
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    dilation: int = 1  # of lines; columns of the kernel are neighbours

    def squares(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """|g_i|^2 for g_i = sum_p out_ip patch_ip^T, and sum_p out_ip: `out` (n, positions, e)."""
        from terrine.sgd.kernels.gram import squares

        self._refuse_others(out)
        return squares(self, out)

    def gradients(self, out: Tensor, rows: Tensor) -> tuple[bool, Tensor, Tensor]:
        """Fill `rows` (n, numbers) with the g_i: whether as (lines, run, e) instead of (e, lines, run).

        Then the same as `squares`.
        """
        from terrine.sgd.kernels import outer, slices

        self._refuse_others(out)
        if rows.shape != (len(out), self.lines * self.run * out.shape[2]) or not rows.is_contiguous():
            raise ValueError(f"rows {tuple(rows.shape)}: want a place for every number of {len(out)} gradients")
        if self.prefers_slices(out.shape[2]):
            return False, *slices.gradients(self, out, rows)
        return outer.gradients(self, out, rows)

    def prefers_slices(self, height: int) -> bool:
        """Whether numbers are better laid out before they are multiplied with so many outputs."""
        from terrine.sgd.kernels.slices import are_faster

        return are_faster(self, height)

    def weighted(self, out: Tensor, factor: Tensor) -> Tensor:
        """sum_i factor_i g_i, (e, lines, run), of numbers laid out before."""
        from terrine.sgd.kernels.slices import summed

        self._refuse_others(out)
        if factor.shape != (len(out),) or not factor.is_contiguous():
            raise ValueError(f"factor {tuple(factor.shape)}: want a number for each of {len(out)} examples")
        return summed(self, out, factor)

    def summed(self, out: Tensor) -> tuple[bool, Tensor]:
        """sum_i g_i of images without frames: whether as (lines, run, e), not (e, lines, run), and its numbers."""
        from terrine.sgd.kernels.outer import summed

        self._refuse_others(out)
        if self.framed:
            raise ValueError(f"padding {self.padding}: want none")
        return summed(self, out)

    def _refuse_others(self, out: Tensor) -> None:
        """Kernels read wherever they are told to: what they are told has to be in memory."""
        (n, _, _, channels), (_, _, column, side) = self.pixels.shape, self.pixels.stride()
        (high, wide), positions = self.places, out.shape[1]
        if min(high, wide) < 0 or (len(out), positions) != (n, high * wide):
            raise ValueError(f"out {tuple(out.shape)}: want {n} examples of {high} x {wide} positions")
        apart = (side != 1 and channels > 1) or (out.stride(2) != 1 and out.shape[2] > 1)
        lines = self.framed or self.kernel[1] > 1
        if apart or (lines and column != channels and self.pixels.shape[2] > 1):
            raise ValueError("want channels, and for a wide kernel a line's pixels, side by side in memory")

    @property
    def lines(self) -> int:
        return self.kernel[0]

    @property
    def run(self) -> int:
        """The numbers of a patch's segment."""
        return self.kernel[1] * int(self.pixels.shape[3])

    @property
    def framed(self) -> bool:
        return any(map(any, self.padding))

    @property
    def sizes(self) -> tuple[int, int]:
        """Lines and columns, the frame among them."""
        (top, bottom), (left, right) = self.padding
        return self.pixels.shape[1] + top + bottom, self.pixels.shape[2] + left + right

    @property
    def places(self) -> tuple[int, int]:
        """Lines and columns of positions."""
        high, wide = self.sizes
        reach = (self.kernel[0] - 1) * self.dilation + 1
        return (high - reach) // self.stride[0] + 1, (wide - self.kernel[1]) // self.stride[1] + 1

    @property
    def steps(self) -> tuple[int, int]:
        """How far apart lines and columns lie, the frame among them."""
        channels = int(self.pixels.shape[3])
        return (self.sizes[1] * channels, channels) if self.framed else (self.pixels.stride(1), self.pixels.stride(2))

    @property
    def strides(self) -> tuple[int, int]:
        """How far apart neighbouring patches begin."""
        line, pixel = self.steps
        return self.stride[0] * line, self.stride[1] * pixel

    def starts(self) -> Table:
        """Where each position's patch begins."""
        return every_step(*self.places, *self.strides)

    def frames(self) -> Tensor:
        """Room for a framed image for every thread; none where images need none."""
        return scratch("frames", (self.threads if self.framed else 0, self.sizes[0] * self.steps[0]), self.pixels)

    @property
    def threads(self) -> int:
        """How many can be at work: each takes an image at a time."""
        return min(torch.get_num_threads(), len(self.pixels))


class Table(NamedTuple):
    """Whole numbers, and where in memory they are for as long as somebody holds this."""

    numbers: NDArray[np.int64]
    address: int


@lru_cache(maxsize=256)
def every_step(high: int, wide: int, line: int, pixel: int) -> Table:
    """Where the places of a grid lie, line by line."""
    rows, columns = np.arange(high, dtype=np.int64) * line, np.arange(wide, dtype=np.int64) * pixel
    numbers = (rows[:, None] + columns).reshape(-1)
    return Table(numbers, numbers.ctypes.data)

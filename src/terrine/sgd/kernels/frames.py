"""What kernels do with every example: put the image into its frame, and add up its outputs."""

from __future__ import annotations

from typing import Any

from numba import types
from torch import Tensor

from terrine.sgd.kernels.image import Image
from terrine.sgd.kernels.team import AT, FIRST, WHOLE, WORKERS, floats, inner, instruction, taken
from terrine.sgd.kernels.vectors import Builder, Stretch, Value, load, loop, store

PIXELS, APART, HIGH, WIDE, FRAMES, SIZE, LINE, CORNER, OUTS, OUTS_APART, OUT, HEIGHT, POSITIONS, SUMS, NEXT = range(
    FIRST, FIRST + 15
)
"""Where a job has them, in the order of `job`."""


def job(image: Image, frames: Tensor, out: Tensor, sums: Tensor) -> tuple[int, ...]:
    """What both need to know: `out` (n, positions, e), an e's numbers side by side, and room for its sums (n, e)."""
    _, high, wide, channels = image.pixels.shape
    (top, _), (left, _) = image.padding
    line, pixel = image.steps
    return (
        image.pixels.data_ptr(), image.pixels.stride(0), high, wide * channels,
        frames.data_ptr() if image.framed else 0, frames.shape[1], line, top * line + left * pixel,
        out.data_ptr(), out.stride(0), out.stride(1), out.shape[2], out.shape[1], sums.data_ptr(),
    )  # fmt: skip


@inner
def cleared(job: Any) -> Any:
    """The number of this thread, whose frame is clear."""
    worker = taken(job, WORKERS)
    if job[FRAMES] != 0:
        frame, size = floats(job[FRAMES] + 4 * worker * job[SIZE]), job[SIZE]
        for k in range(size):
            frame[k] = 0.0
    return worker


@inner
def added_up(job: Any, i: int) -> Any:
    """The address of example i's outputs, the sum of which is in its place."""
    outs, height = job[OUTS] + 4 * i * job[OUTS_APART], job[HEIGHT]
    target = floats(job[SUMS] + 4 * i * height)
    for k in range(height):
        target[k] = 0.0
    _add_up(floats(outs), job[OUT], job[POSITIONS], height, target)
    return outs


@instruction(types.void, AT, WHOLE, WHOLE, WHOLE, AT)
def _add_up(builder: Builder, out: Value, apart: Value, positions: Value, height: Value, target: Value) -> None:
    """Add all positions' outputs to what is in the target, in the order in which they come from memory."""
    stretch = Stretch(builder, height)
    with loop(builder, positions) as position:
        row = builder.gep(out, [builder.mul(position.index, apart)])

        def add(offset: Value, mask: Value | None) -> None:
            to, more = (builder.gep(base, [offset]) for base in (target, row))
            store(builder, builder.fadd(load(builder, to, mask), load(builder, more, mask)), to, mask)

        stretch.each(add)


@inner
def framed(job: Any, i: int, worker: int) -> Any:
    """The address of image i, in its frame if it needs one."""
    image = job[PIXELS] + 4 * i * job[APART]
    if job[FRAMES] == 0:
        return image
    frame = job[FRAMES] + 4 * worker * job[SIZE]
    source, target = floats(image), floats(frame + 4 * job[CORNER])
    high, wide, line = job[HIGH], job[WIDE], job[LINE]
    for y in range(high):
        for x in range(wide):
            target[y * line + x] = source[y * wide + x]
    return frame

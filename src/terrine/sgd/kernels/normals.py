"""Box and Muller's pairs of normal values in one compiled pass over a block: made, added, rounded and scaled.

    radius = deviation sqrt(-2 ln u),  pair = radius (cos a, sin a),   u uniform on (0, 1), a uniform on a turn

A turn's 32 bits are two for the quarter and 30 for the angle within it, so nothing is ever reduced. Logarithm, sine
and cosine are polynomials through Chebyshev's nodes, good to the last bits of float32:

    ln(1 + m) = m - m^2/2 + m^3 L(m),   sin t = t + t^3 S(t^2),   cos t = 1 - t^2/2 + t^4 C(t^2)
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numba import carray, njit
from numpy.typing import NDArray
from torch import Tensor

from terrine.sgd.kernels import FLOATS, SPARE, Floats, Words, aes
from terrine.sgd.kernels.team import FIRST, ITEMS, TAKEN, WORKERS, Kernel, floats, inner, kept, numbers, taken, words
from terrine.sgd.scratch import scratch

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile on the first call, without Python's lock.

    Multiplying and adding may be one rounding instead of two; sums stay in the order in which they are written.
    """
    settings = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}
    return kept(lambda cache: cast(F, njit(cache=cache, **settings)(function)))


SEGMENT, RUN, BLOCK, KEYS, ADDRESS, TABLE, TOTAL, ROOM, SIZE, SETTINGS = range(FIRST, FIRST + 10)


def add_blocks(tensors: Sequence[Tensor], secret: bytes, address: int, first: int, run: int, block: int,
               settings: tuple[float, float, float]) -> None:  # fmt: skip
    """Add noise to contiguous float32 tensors as if they were one, a block of numbers at a time, on torch's threads.

    `run` blocks take a segment of the keystream, from `first` on; its key is `secret`, and `address` the first 8 bytes
    of every block of bits, as a whole number of this machine. `settings` are `add_normals`' deviation, shift and over.
    """
    table = array("q")
    for tensor in tensors:
        table.extend((tensor.data_ptr(), tensor.numel()))
    total = sum(table[1::2])
    blocks, largest = -(-total // block), min(block, total) + 1
    size = 3 * largest + SPARE + aes.MADE  # for words, uniform values and what lies in several tensors
    place = scratch("noise", (min(torch.get_num_threads(), blocks), size), FLOATS)
    keys, wanted = aes.schedule(secret), array("f", settings)
    _blocks.work(
        blocks, first, run, block, keys.address, address, table.buffer_info()[0], total,
        place.data_ptr(), size, wanted.buffer_info()[0],
    )  # fmt: skip


@partial(Kernel, available=aes.available())
def _blocks(job: Any) -> None:
    table, settings = numbers(job[TABLE]), floats(job[SETTINGS])
    place = job[ROOM] + 4 * taken(job, WORKERS) * job[SIZE]
    while True:
        i = taken(job, TAKEN)
        if i >= job[ITEMS]:
            break
        start, which = i * job[BLOCK], 0
        size = min(job[BLOCK], job[TOTAL] - start)
        while start >= table[2 * which + 1]:
            start -= table[2 * which + 1]
            which += 1
        even = size + size % 2
        segment, counter = job[SEGMENT] + i // job[RUN], 2 + i % job[RUN] * (job[BLOCK] + SPARE) // 4
        many = (even + SPARE + aes.MADE - 1) // aes.MADE
        aes.stream(words(place), many, words(job[KEYS]), job[ADDRESS], _turned(segment), counter)
        uniform = place + 4 * (even + SPARE + aes.MADE)
        alone = start + size <= table[2 * which + 1] and even == size
        sums = table[2 * which] + 4 * start if alone else uniform + 2 * even
        if not alone:
            _moved(table, which, start, size, sums, True)
        add_normals(carray(floats(sums), even), carray(words(place), even + SPARE), carray(floats(uniform), even // 2),
                    settings[0], settings[1], settings[2])  # fmt: skip
        if not alone:
            _moved(table, which, start, size, sums, False)


@inner
def _moved(table: Any, which: int, start: int, size: int, together: int, there: bool) -> None:
    """Copy so many numbers, from the start in one tensor on and wherever they go on, to one place; or back."""
    while size > 0:
        many = min(size, table[2 * which + 1] - start)
        one, other = floats(table[2 * which] + 4 * start), floats(together)
        for k in range(many):
            if there:
                other[k] = one[k]
            else:
                one[k] = other[k]
        together += 4 * many
        size -= many
        start, which = 0, which + 1


@inner
def _turned(segment: int) -> int:
    """Four bytes, the highest first."""
    return (segment & 255) << 24 | (segment & 0xFF00) << 8 | segment >> 8 & 0xFF00 | segment >> 24 & 255


def through_nodes(remainder: Callable[[NDArray[np.float64]], NDArray[np.float64]], low: float, high: float,
                   degree: int) -> tuple[np.float32, ...]:  # fmt: skip
    """The coefficients, from the constant on, of the polynomial that meets `remainder` at Chebyshev's nodes."""
    found = np.polynomial.Chebyshev.interpolate(remainder, degree, domain=[low, high])
    return tuple(np.float32(one) for one in found.convert(kind=np.polynomial.Polynomial, domain=[-1, 1]).coef)


SMALL = 256
"""Below this many units of 2^-32 a uniform value is refined by 53 more bits, so that the tail reaches 10 sigma.

`SPARE` words are there for that in every block, two a value: a block needs more than half of them once in 10^80.
"""
_f, _i = np.float32, np.int32
_HALF = math.sqrt(0.5)
_HALF_BITS = _i(np.float32(_HALF).view(np.int32))
_LN2, _UNIT, _ANGLE = _f(math.log(2.0)), _f(2.0**-32), _f(math.pi * 2.0**-31)
_EDGE = (math.pi / 4) ** 2
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = through_nodes(
    lambda m: (np.log1p(m) - m + m**2 / 2) / m**3, _HALF - 1, 2 * _HALF - 1, 8
)
_S0, _S1, _S2 = through_nodes(lambda s: (np.sin(np.sqrt(s)) / np.sqrt(s) - 1) / s, 0.0, _EDGE, 2)
_C0, _C1, _C2 = through_nodes(lambda s: (np.cos(np.sqrt(s)) - 1 + s / 2) / s**2, 0.0, _EDGE, 2)


@compiled
def refine(uniform: Floats, words: Words, spare: Words) -> None:
    """Give uniform values close to 0 the bits that their whole part lacks, while there are spare ones."""
    used = 0
    for i in range(words.size):
        if words[i] < SMALL and used + 1 < spare.size:
            more = (np.uint64(spare[used]) << np.uint64(21)) | (np.uint64(spare[used + 1]) >> np.uint64(11))
            uniform[i] = _f(words[i] + (more + 0.5) * 2.0**-53)
            used += 2


@compiled
def add_normals(sums: Floats, words: Words, uniform: Floats, deviation: np.float32, shift: np.float32,
                over: np.float32) -> None:  # fmt: skip
    """sums = round(sums + normal) * over; the two of pair i go to i and to half the size + i.

    Half of the random `words` are for radii, half for turns, and `SPARE` more for radii whose bits are too few;
    `uniform` is room for the radii's. Floats around `shift` are a grid apart: adding it and taking it away rounds.
    """
    half = sums.size // 2
    first, second, turns = sums[:half], sums[half:], words[half : 2 * half]
    least = words[0]
    for i in range(half):
        uniform[i] = _f(words[i])  # in units of 2^-32
        least = min(least, words[i])
    if least < SMALL:
        refine(uniform, words[:half], words[2 * half :])
    for i in range(half):
        bits = _f(uniform[i] * _UNIT).view(np.int32)
        exponent = _i(_i(bits - _HALF_BITS) >> _i(23))
        m = _i(bits - _i(exponent << _i(23))).view(np.float32) - _f(1.0)
        tail = _L5 + m * (_L6 + m * (_L7 + m * _L8))
        tail = _L0 + m * (_L1 + m * (_L2 + m * (_L3 + m * (_L4 + m * tail))))
        logarithm = _f(exponent) * _LN2 + (m + m * m * (m * tail - _f(0.5)))
        turn = _i(turns[i])
        within = _i(_i(turn << _i(2)) >> _i(2))
        quarter = _i(_i(turn - within) >> _i(30))
        radius = _f(np.sqrt(logarithm * _f(-2.0))) * (deviation if _i(quarter & _i(2)) == _i(0) else -deviation)
        t = _f(within) * _ANGLE
        s = t * t
        sine = t + t * s * (_S0 + s * (_S1 + s * _S2))
        cosine = _f(1.0) + s * (s * (_C0 + s * (_C1 + s * _C2)) - _f(0.5))
        across = _i(quarter & _i(1)) != _i(0)
        one, other = (sine, cosine) if across else (cosine, sine)
        first[i] = (((first[i] + radius * one) + shift) - shift) * over
        second[i] = (((second[i] + radius * other) + shift) - shift) * over

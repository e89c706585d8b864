"""From real vectors to whole numbers and back: clip, rotate, scale, round at random. [KLS21] Section 4

    x  ->  clip to C in l2  ->  H D x (randomised Hadamard, public signs D)  ->  times s  ->  rounded up or down

Each entry is rounded up with probability its fraction, so the rounding is right on average; and rounded anew until the
norm of the whole is at most `reach` grid steps, so the bound that is billed holds surely. s is the largest for which

    reach^2  >=  min( (sC + sqrt d)^2,  (sC)^2 + d/4 + (sC + sqrt(d)/2) ):

up to the first norm no rounding goes, and the second is kept by two of five at least (beta = e^-1/2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from terrine.errors import InvalidArgument
from terrine.rng import Source

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_TRIES = 50
_RADIX = 32
_SURE = 1 - 1e-9
"""Norms are computed in floats: they must keep the bound by more than what floats may be off."""


@dataclass(frozen=True)
class Quantiser:
    """Vectors of `dimension` numbers, clipped to `clip`, as whole numbers of l2 norm at most `reach`."""

    dimension: int
    clip: float
    reach: float
    signs_seed: int
    """Public, and new for every round."""

    @property
    def length(self) -> int:
        """How many whole numbers: the next power of two."""
        return 1 << (self.dimension - 1).bit_length()

    @property
    def scale(self) -> float:
        """s, grid steps per unit.

        Raises:
            InvalidArgument: so many entries do not fit into so few steps.
        """
        root = math.sqrt(self.length)
        inside = 1 - 4 * (self.length / 4 + root / 2 - self.reach**2 * _SURE)
        kept = max((math.sqrt(inside) - 1) / 2 if inside > 1 else 0.0, self.reach * math.sqrt(_SURE) - root)
        if kept <= 0:
            raise InvalidArgument(
                f"dimension={self.dimension}: rounding alone moves it by more than the {self.reach:g} grid steps of a "
                "contribution; want more bits, or give the plan its dimension="
            )
        return kept / self.clip * (1 - 1e-12)

    def to_integers(self, vector: Floats, rng: Source) -> Integers:
        """A contribution as whole numbers; a vector that is not finite contributes zeros."""
        scaled = self._rotated(clipped(vector, self.clip)) * self.scale
        floor = np.floor(scaled)
        fraction = scaled - floor
        for _ in range(_TRIES):
            uniform = (rng.words(self.length) >> np.uint64(11)) * 2.0**-53
            rounded = floor + (uniform < fraction)
            if _fits(rounded, self.reach):
                return rounded.astype(np.int64)
        cut = np.trunc(scaled)  # towards 0: never longer than what was clipped
        return cut.astype(np.int64) if _fits(cut, self.reach) else np.zeros(self.length, dtype=np.int64)

    def to_real(self, total: Integers) -> Floats:
        """A sum of whole numbers as a sum of vectors."""
        turned = hadamard(total.astype(np.float64)) * self._signs()
        return turned[: self.dimension] / self.scale

    def _rotated(self, vector: Floats) -> Floats:
        padded = np.zeros(self.length)
        padded[: self.dimension] = vector
        return hadamard(padded * self._signs())

    def _signs(self) -> Floats:
        words = np.random.Philox(self.signs_seed).random_raw(-(-self.length // 64))
        bits = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")[: self.length]
        signs: Floats = 1.0 - 2.0 * bits.astype(np.float64)
        return signs


def clipped(vector: Floats, bound: float) -> Floats:
    """`vector`, scaled to l2 norm at most `bound`; zeros where an entry is not finite."""
    if not np.isfinite(vector).all():
        return np.zeros_like(vector)
    largest = float(np.abs(vector).max(initial=0.0))
    if largest == 0:
        return vector
    with np.errstate(over="ignore"):  # in two steps, because the norm of finite numbers need not be finite
        factor = bound / largest / float(np.linalg.norm(vector / largest)) * (1 - 1e-12)
    return vector * factor if factor < 1 else vector


def with_bit(change: Floats, bound: float, weight: float) -> Floats:
    """(x / C, weight (bit - 1/2)): x clipped to C, and whether it was within, as `plan.AdaptiveClipping` wants it."""
    inside = bool(np.isfinite(change).all()) and float(np.linalg.norm(change)) <= bound
    return np.append(clipped(change, bound) / bound, weight * (0.5 if inside else -0.5))


def hadamard(vector: Floats) -> Floats:
    """The orthonormal Walsh-Hadamard transform, its own inverse; the length is a power of two.

    Five bits of the index at a time: the lowest are transformed, and then become the highest.
    """
    turned, rest = vector, len(vector)
    while rest > 1:
        size = min(rest, _RADIX)
        turned = (turned.reshape(-1, size) @ _matrix(size)).T.reshape(-1)
        rest //= size
    return turned / math.sqrt(len(vector))


@lru_cache(maxsize=8)
def _matrix(size: int) -> Floats:
    """Hadamard's matrix of +-1."""
    found = np.ones((1, 1))
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return found


def checked(vector: object, dimension: int | None = None) -> Floats:
    """A contribution as a flat array of floats.

    Raises:
        InvalidArgument: it is not a vector of numbers, or not of that length.
    """
    try:
        given = np.asarray(vector)
        found = given.astype(np.float64) if given.dtype.kind in "iuf" else None
    except (TypeError, ValueError):
        found = None
    if found is None:
        raise InvalidArgument(f"a vector of type {type(vector).__name__}: want real numbers")  # not what is in it
    if found.ndim != 1 or found.size == 0 or (dimension is not None and found.size != dimension):
        raise InvalidArgument(f"a vector of shape {found.shape}: want {dimension or 'one or more'} numbers in a row")
    return found


def _fits(whole: Floats, reach: float) -> bool:
    return float(np.dot(whole, whole)) <= reach**2 * _SURE

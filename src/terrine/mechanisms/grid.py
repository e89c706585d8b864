"""A public grid: where float answers live, so that their low bits say nothing [Mir12].

    answer = round(value / step) * step + K * step,      K integer noise, step a power of 2

The step follows from the declared sensitivity, the noise and the number of entries, never from the value. Rounding
moves neighbours apart, and that is paid for: of two neighbours at distance D in one entry, the rounded ones are at
most ceil(D / step) steps apart; with n entries their l1 distance grows by at most n steps, their l2 distance by
at most sqrt(n) steps. Integers are on every grid with step <= 1 and pay nothing.

The sum is formed exactly and rounded to a float once, at the end: a post-processing.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine import check
from terrine.errors import InvalidArgument
from terrine.mechanisms import lattice
from terrine.rng import Source

Floats = NDArray[np.float64]

_DETAIL = 20
_LEAST_DETAIL = 5
_EXACT = 2**53
_LARGEST = float(np.finfo(np.float64).max)
_CHUNK = 1 << 14
_SMALLEST_EXPONENT = -900


class Norm(enum.Enum):
    """How the sensitivity of a vector is measured."""

    L1 = "l1"
    L2 = "l2"


@dataclass(frozen=True)
class GridPlan:
    """Step 2^exponent, and the noise in steps."""

    exponent: int
    steps: int
    noise: lattice.IntegerNoise

    @property
    def step(self) -> float:
        return math.ldexp(1.0, self.exponent)

    @property
    def scale(self) -> float:
        """The scale of the noise, in the value's own unit."""
        return math.ldexp(self.noise.scale, self.exponent)


@lru_cache(maxsize=1024)
def plan(
    shape: lattice.Shape, norm: Norm, sensitivity: float, noise: float, step: float | None, size: int, whole: bool
) -> GridPlan:
    """Grid and noise such that scale / (sensitivity after rounding) is at least `noise`."""
    exponent = _exponent(norm, sensitivity, noise, size) if step is None else power_of_two("grid", step)
    on_grid = whole and exponent <= 0
    steps = Fraction(sensitivity) / Fraction(2) ** exponent
    if not on_grid and size > 1:
        steps += size if norm is Norm.L1 else math.isqrt(size - 1) + 1
    reach = math.ceil(steps)
    scale = float(steps if norm is Norm.L2 and size > 1 else reach) * noise * (1 + 2.0**-50)  # outward
    if scale > lattice.LARGEST_SCALE:
        raise InvalidArgument(
            f"noise of {scale:.3g} grid steps: want at most {lattice.LARGEST_SCALE:.3g}; "
            "raise epsilon, split the vector, or give a coarser grid"
        )
    return GridPlan(exponent, reach, lattice.noise(shape, scale, rounded=True))


def power_of_two(name: str, value: Any) -> int:
    """The exponent of a grid step."""
    step = check.positive(name, value)
    mantissa, exponent = math.frexp(step)
    if mantissa != 0.5 or not _SMALLEST_EXPONENT <= exponent - 1 <= -_SMALLEST_EXPONENT:
        raise check.refuse(name, value, "a power of 2, such as 1, 0.25 or 2**-10")
    return exponent - 1


def size_of(value: Any) -> tuple[int, bool]:
    """How many entries a checked value has, and whether its type is integer: both public."""
    if isinstance(value, np.ndarray):
        return value.size, value.dtype.kind in "iuO"
    return 1, isinstance(value, int)


def checked(name: str, value: Any) -> int | float | NDArray[Any]:
    """A finite number (int or float) or a non-empty array of them; arrays of huge integers keep type object.

    Raises:
        InvalidArgument: not numbers, not finite, or nothing at all.
    """
    if type(value) is float or type(value) is int:
        if type(value) is float and not math.isfinite(value):
            raise check.refuse(name, value, "a finite number", "clamp or drop such values before the sum")
        return value
    array = _one_type(name, value)
    if array.dtype.kind == "O":
        if not all(type(one) is int for one in array.flat):
            raise InvalidArgument(
                f"{name}: want numbers; an array of {type(array.flat[0]).__name__} among others arrived"
            )
    elif array.dtype.kind == "f":
        if array.dtype.itemsize > 8:
            raise InvalidArgument(f"{name}: {array.dtype} arrived; want float64, so that no rounding is hidden")
        array = array.astype(np.float64)
        if not np.isfinite(array).all():
            raise InvalidArgument(
                f"{name}: holds nan or infinity; want finite numbers; clamp or drop them before the sum"
            )
    elif array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name}: {array.dtype} arrived; want numbers")
    if array.ndim == 0:
        return int(array) if array.dtype.kind in "iuO" else float(array)
    if not array.size:
        raise InvalidArgument(f"{name}: empty; want at least one number")
    return array


def release(plan: GridPlan, value: int | float | NDArray[Any], rng: Source) -> float | Floats:
    """A checked value, on the plan's grid, with the plan's noise."""
    if not isinstance(value, np.ndarray):
        return _add_one(value, plan.noise.draw(rng), plan.exponent)
    flat, out = value.reshape(-1), np.empty(value.size, dtype=np.float64)
    for begin in range(0, flat.size, _CHUNK):
        part = flat[begin : begin + _CHUNK]
        out[begin : begin + _CHUNK] = _add_many(part, plan.noise.sample(part.size, rng), plan.exponent)
    return out.reshape(value.shape)


def index_of(value: int | float, exponent: int) -> int:
    """The nearest grid point, halves upward, as a whole number of steps."""
    if isinstance(value, int):
        return value << -exponent if exponent <= 0 else (value + (1 << (exponent - 1))) >> exponent
    if abs(value) < math.ldexp(float(_EXACT), max(exponent, _SMALLEST_EXPONENT)):
        scaled = math.ldexp(value, -exponent)
        floor = math.floor(scaled)
        return floor + (scaled - floor >= 0.5)
    return math.floor(Fraction(value) / Fraction(2) ** exponent + Fraction(1, 2))


def to_float(index: int, exponent: int) -> float:
    """`index` steps as the nearest float, or the largest float where that is beyond it."""
    if -_EXACT <= index <= _EXACT:
        return math.ldexp(float(index), exponent)
    try:
        return float(Fraction(index) * Fraction(2) ** exponent)
    except OverflowError:
        return _LARGEST if index > 0 else -_LARGEST


def _exponent(norm: Norm, sensitivity: float, noise: float, size: int) -> int:
    """Fine enough that rounding costs about 2^-20 of the sensitivity, coarse enough to count in 64 bits."""
    spread = size if norm is Norm.L1 else math.sqrt(size)
    size_bits = math.ceil(math.log2(spread))
    detail = _DETAIL + size_bits + max(0, math.ceil(-math.log2(noise)))
    most = math.floor(math.log2(lattice.LARGEST_SCALE) - 2 - math.log2(noise))
    detail = min(detail, most)
    if detail < size_bits + _LEAST_DETAIL:
        raise InvalidArgument(
            f"noise of {noise:.3g} sensitivities on {size} entries needs more than 64 bits; raise epsilon or split them"
        )
    exponent = math.frexp(sensitivity)[1] - 1 - detail
    if not _SMALLEST_EXPONENT <= exponent <= -_SMALLEST_EXPONENT:
        raise check.refuse("sensitivity", sensitivity, "between about 1e-250 and 1e250", "change the unit")
    return exponent


def array_of(name: str, value: Any) -> NDArray[Any]:
    """`value` as an array, of whatever type.

    Raises:
        InvalidArgument: it is none, such as lists of different lengths.
    """
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        told = f"{type(value).__name__} arrived that is no array"
        raise InvalidArgument(f"{name}: {told}; want a number or numbers in lists of one length") from None


def _one_type(name: str, value: Any) -> NDArray[Any]:
    array = array_of(name, value)
    if array.dtype.kind == "f" and isinstance(value, list | tuple):
        flat = np.asarray(value, dtype=object).flat
        if any(isinstance(one, int) and abs(one) > _EXACT for one in flat):
            raise InvalidArgument(
                f"{name}: integers beyond 2^53 mixed with floats; want one type, or they would be rounded"
            )
    return array


def _add_one(value: int | float, noise: int, exponent: int) -> float:
    return to_float(index_of(value, exponent) + noise, exponent)


def _add_many(value: NDArray[Any], noise: lattice.Integers, exponent: int) -> Floats:
    as_float = _as_floats(value)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = np.ldexp(as_float, -exponent)
        floor = np.floor(scaled)
        nearest = np.ldexp(floor + (scaled - floor >= 0.5), exponent)
        on_grid = np.abs(scaled) >= _EXACT  # such a float is a whole number of steps already
        summed = np.where(on_grid, as_float, nearest) + np.ldexp(noise.astype(np.float64), exponent)
    out: Floats = np.clip(summed, -_LARGEST, _LARGEST)
    hard = np.abs(noise) >= _EXACT
    if value.dtype.kind in "iuO":
        hard = hard | (np.abs(as_float) >= _EXACT)  # a float may have rounded these: add them as whole numbers
    for place in np.flatnonzero(hard):
        entry = value[place]
        exact = float(entry) if value.dtype.kind == "f" else int(entry)
        out[place] = _add_one(exact, int(noise[place]), exponent)
    return out


def _as_floats(value: NDArray[Any]) -> Floats:
    if value.dtype.kind != "O":
        return value.astype(np.float64)
    flat = [to_float(int(one), 0) for one in value.flat]
    return np.array(flat, dtype=np.float64).reshape(value.shape)

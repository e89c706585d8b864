"""Sufficient statistics of a linear model, released once with Gaussian noise: no iterations, no learning rate.

For rows x with |x| <= 1 and targets y with |y| <= 1 (one number, or one for each class):

    A = sum x x^T          written as its diagonal and sqrt 2 times what lies above it: its length is its Frobenius norm
    B = sum x y^T          written with a weight w, which says how the noise is shared between A and B
    |(A, w B) of one row|^2 = |x|^4 + w^2 |x|^2 |y|^2 <= 1 + w^2

So one row, added or removed, moves the whole vector by at most sqrt(1 + w^2), and the mean over a person's rows moves
it by no more: one Gaussian mechanism pays for everything that is learned from them (docs/theory.md, section 10).

Sums are of whole numbers: a row is scaled, then cut toward zero to a public grid of 2^-16, so no sum depends on its
order and no cut makes a row longer. A row of which anything is not finite adds exactly zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terrine import check
from terrine.errors import InvalidArgument
from terrine.events import Event, Gaussian, Neighbours, Unit
from terrine.mechanisms import grid
from terrine.mechanisms.lattice import Shape
from terrine.mechanisms.release import Release, stamped
from terrine.rng import SYSTEM, Source

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

LARGEST_WIDTH = 8192
"""More features than this are refused: their products fill memory, and their noise drowns what they say."""

_BITS = 16
_AT_ONCE = 1 << 14
_MOST_ROWS = 1 << 30
"""So that sums of whole steps keep within 62 bits."""
_INSIDE = 1 - 2.0**-30
"""Rows are scaled to this length, so that no rounding of a float makes one longer than 1."""


@dataclass(frozen=True, eq=False)
class Statistics:
    """What was released: enough for every ridge model of these targets on these features."""

    second: Floats
    """(features, features): the noisy sum of x x^T, symmetric."""
    cross: Floats
    """(features, targets): the noisy sum of x y^T."""
    deviation: float
    """The noise's standard deviation on the diagonal of `second`; 1 / sqrt 2 of it beside the diagonal."""
    cross_deviation: float
    """... and on `cross`."""
    units: int
    """How many rows or people the plan counted."""


@dataclass(frozen=True, kw_only=True)
class StatisticsPlan:
    """One release of the statistics of `units` rows, or people: what it costs and how it is made.

    Guarantee: `release` costs `event` under add/remove neighbours, whatever rows and targets hold.

    Raises:
        InvalidArgument: a field is out of range.
    """

    units: int
    features: int
    targets: int
    noise: float
    """The noise's deviation, relative to what one unit can move."""
    weight: float = 1.0
    """How much B counts beside A: more of it is less noise on B, and more on A."""
    unit: Unit | None = None

    def __post_init__(self) -> None:
        for name in ("units", "features", "targets"):
            object.__setattr__(self, name, check.whole(name, getattr(self, name)))
        for name in ("noise", "weight"):
            object.__setattr__(self, name, check.positive(name, getattr(self, name)))
        if self.features > LARGEST_WIDTH:
            hint = "fewer features, or a model that is trained"
            raise check.refuse("features", self.features, f"at most {LARGEST_WIDTH} for one release", hint)
        self._grid()  # refuses now what the release would refuse after the charge

    @property
    def size(self) -> int:
        """How many numbers are released."""
        return self.features * (self.features + 1) // 2 + self.features * self.targets

    @property
    def sensitivity(self) -> float:
        """The most that one unit, added or removed, moves the released vector, in l2.

        The last factor covers that sums of whole numbers are rounded to floats once, by at most 2^-51 of themselves.
        """
        exact = math.sqrt(1 + self.weight**2)
        return exact * (1 + 2.0**-50) + (self.units + 1) * 2.0**-51 * math.sqrt(self.size) * max(1.5, self.weight)

    @property
    def event(self) -> Event:
        """What the release costs."""
        return Gaussian(noise=self.noise, neighbours=Neighbours.ADD_REMOVE, unit=self.unit)

    def release(
        self, rows: Floats, targets: Floats, *, shares: Integers | None = None, rng: Source = SYSTEM
    ) -> Release[Statistics]:
        """The statistics of (n, features) rows and (n, targets) targets, with noise.

        Rows and targets longer than 1 are scaled to length 1. A row counts 1 / `shares`, or not at all where that is 0:
        the rows of one unit must count at most 1 in all.

        Raises:
            InvalidArgument: the shapes are not those of the plan.
        """
        vector = self.vector(rows, targets, shares)
        chosen = self._grid()
        noisy = np.asarray(grid.release(chosen, vector, rng), dtype=np.float64)
        return Release(self._unpacked(noisy, chosen.scale), stamped(self.event, rng))

    def vector(self, rows: Floats, targets: Floats, shares: Integers | None = None) -> Floats:
        """What `release` adds noise to: private, and moved by at most `sensitivity` where one unit comes or goes."""
        wanted = ((len(rows), self.features), (len(rows), self.targets))
        if (rows.shape, targets.shape) != wanted:
            raise InvalidArgument(f"rows {rows.shape}, targets {targets.shape}: want {wanted[0]} and {wanted[1]}")
        counted = np.ones(len(rows), dtype=np.int64) if shares is None else np.asarray(shares, dtype=np.int64)
        if len(rows) > _MOST_ROWS:
            raise InvalidArgument(f"{len(rows)} rows: want at most {_MOST_ROWS} in one release")
        if counted.shape != (len(rows),) or (counted < 0).any():
            raise InvalidArgument("shares: want one whole number >= 0 for each row")
        if (1 / counted[counted > 0]).sum() > self.units + 1e-6 * len(rows) + 1e-6:
            raise InvalidArgument(f"rows count for more than the {self.units} units of the plan: want 1 for each unit")
        second, cross = self._sums(rows, targets, counted)
        upper, length = self._upper
        return np.concatenate([second[upper] * length, self.weight * cross.reshape(-1)])

    def _grid(self) -> grid.GridPlan:
        return grid.plan(Shape.GAUSSIAN, grid.Norm.L2, self.sensitivity, self.noise, None, self.size, False)

    @property
    def _upper(self) -> tuple[tuple[Integers, Integers], Floats]:
        """Where the numbers of A stand that are written, and by how much each is stretched."""
        rows, columns = np.triu_indices(self.features)
        return (rows, columns), np.where(rows == columns, 1.0, math.sqrt(2))

    def _sums(self, rows: Floats, targets: Floats, shares: Integers) -> tuple[Floats, Floats]:
        """A and B, exactly, of the rows as they were cut."""
        second = np.zeros((self.features, self.features), dtype=np.int64)
        cross = np.zeros((self.features, self.targets), dtype=np.int64)
        for at in range(0, len(rows), _AT_ONCE):
            part = slice(at, at + _AT_ONCE)
            x, y = whole_rows(rows[part], shares[part]), whole_rows(targets[part], shares[part])
            x = x * np.asarray(np.isfinite(targets[part]).all(axis=1))[:, None]  # nor does a row without a target
            second += (x.T @ x).astype(np.int64)  # whole numbers below 2^46: exact, in any order
            cross += (x.T @ y).astype(np.int64)
        unit = 2.0 ** (-2 * _BITS)
        return np.asarray(second * unit), np.asarray(cross * unit)

    def _unpacked(self, noisy: Floats, scale: float) -> Statistics:
        upper, length = self._upper
        second = np.zeros((self.features, self.features))
        second[upper] = noisy[: len(length)] / length
        second.T[upper] = second[upper]
        cross = noisy[len(length) :].reshape(self.features, self.targets) / self.weight
        return Statistics(second, cross, scale, scale / self.weight, self.units)


def whole_rows(rows: Floats, shares: Integers) -> Floats:
    """Each row scaled to length at most 1 / sqrt(share), in whole steps of 2^-16, never longer; not finite: zero.

    As floats that hold whole numbers, so that products of matrices are fast and exact.
    """
    found = np.asarray(rows, dtype=np.float64)
    usable = np.isfinite(found).all(axis=1) & (shares > 0)
    found = np.where(usable[:, None], found, 0.0)
    largest = np.maximum(np.abs(found).max(axis=1, initial=0.0), 1.0)[:, None]
    scaled = found / largest  # no square of these leaves floating point
    norms = np.linalg.norm(scaled, axis=1)[:, None]
    scaled /= np.where(largest > 1.0, norms, np.maximum(norms, 1.0))
    counted = np.maximum(shares, 1)
    steps = np.trunc(scaled * (2.0**_BITS * _INSIDE) / np.sqrt(counted)[:, None])
    inside = (steps * steps).sum(axis=1) <= (1 << (2 * _BITS)) // counted  # by construction, not by trust in floats
    return np.asarray(steps * inside[:, None])

"""From noisy measurements to the columns of an answer, each with its half-width at 95%: arithmetic after the noise.

Half-widths are made of the noise's scales and of noisy numbers, never of rows. What clamping and weights left out of
the data adds its own error, which is private and not part of them.

    mean       |S'/N' - S/N| <= (h_S + |S'/N'| h_N) / (N' - h_N)      with S, N true and S', N' noisy, both within h
    variance   T/N - (S/N)^2 in the same way, with the squared distances T
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terrine.queries import quantiles
from terrine.queries.measurements import MeasureKind, Measurement
from terrine.queries.noise import CONFIDENCE, NoiseKind
from terrine.queries.planning import AskedColumn, QueryPlan
from terrine.queries.question import Kind
from terrine.queries.running import Noisy

Floats = NDArray[np.float64]
_CHANCE = 1 - CONFIDENCE


@dataclass(frozen=True)
class NoisyColumn:
    """One noisy column: its values and half-widths, one per cell."""

    values: Floats
    half_widths: Floats
    whole: bool = False


def estimated(plan: QueryPlan, noisy: Mapping[Measurement, Noisy]) -> list[NoisyColumn]:
    """A column for each aggregate that was asked."""
    return [_Reader(plan, noisy, one).estimate() for one in plan.asked]


@dataclass(frozen=True)
class _Reader:
    plan: QueryPlan
    noisy: Mapping[Measurement, Noisy]
    asked: AskedColumn

    def estimate(self) -> NoisyColumn:
        match self.asked.aggregate.kind:
            case Kind.COUNT:
                return self._count()
            case Kind.PEOPLE:
                found = self.noisy[Measurement(MeasureKind.PEOPLE)]
                return self._single(found, whole=True)
            case Kind.SUM:
                return self._sum()
            case Kind.MEAN:
                return self._mean()
            case Kind.QUANTILE:
                return self._quantile()
            case _:
                return self._variance()

    @property
    def _noise(self) -> NoiseKind:
        return self.plan.noise

    def _find(self, measure: MeasureKind) -> Noisy | None:
        for one, found in self.noisy.items():
            same = one.column == self.asked.column and (one.bounds == self.asked.bounds or measure in _BARE)
            if one.measure is measure and same:
                return found
        return None

    def _single(self, found: Noisy, *, whole: bool = False, column: int = 0) -> NoisyColumn:
        values = found.values[:, column]
        return NoisyColumn(values, np.full(values.shape, self._noise.reach(found.scale) + whole * 0.5), whole)

    def _count(self) -> NoisyColumn:
        if self.asked.column is not None:
            return self._single(self._present(), whole=True)
        plain = self.noisy.get(Measurement(MeasureKind.ROWS))
        if plain is not None:
            return self._single(plain, whole=True)
        split = next(found for one, found in self.noisy.items() if one.measure is MeasureKind.SPLIT)
        values = split.values.sum(axis=1)
        width = self._noise.reach(split.scale, split.scale) + 0.5
        return NoisyColumn(values, np.full(values.shape, width), whole=True)

    def _sum(self) -> NoisyColumn:
        total = self._find(MeasureKind.TOTAL)
        if total is not None:
            return self._single(total)
        centred, present = self._moments()
        middle = _middle(self.asked)
        values = centred.values[:, 0] + middle * present.values[:, 0]
        width = self._noise.reach(centred.scale, middle * present.scale)
        return NoisyColumn(values, np.full(values.shape, width))

    def _moments(self) -> tuple[Noisy, Noisy]:
        centred = self._find(MeasureKind.CENTRED)
        assert centred is not None
        return centred, self._present()

    def _present(self) -> Noisy:
        """How many rows have a value; all of them where the column is complete."""
        found = (
            self._find(MeasureKind.PRESENT)
            or self._find(MeasureKind.SPLIT)
            or self.noisy.get(Measurement(MeasureKind.ROWS))
        )
        assert found is not None
        return found

    def _mean(self) -> NoisyColumn:
        centred, present = self._moments()
        lower, upper = self.asked.bounds
        offset, width = self._ratio(centred, present, share=2)
        values = np.clip(_middle(self.asked) + offset, lower, upper)
        return NoisyColumn(values, np.minimum(width, upper - lower))

    def _ratio(self, top: Noisy, present: Noisy, *, share: int) -> tuple[Floats, Floats]:
        """top / present and its half-width; `share` is how many noises have to keep within theirs."""
        count = np.maximum(present.values[:, 0], 1.0)
        ratio = top.values[:, 0] / count
        reach_top = self._noise.reach(top.scale, chance=_CHANCE / share)
        reach_count = self._noise.reach(present.scale, chance=_CHANCE / share)
        least = present.values[:, 0] - reach_count
        with np.errstate(divide="ignore"):
            width = (reach_top + np.abs(ratio) * reach_count) / np.where(least > 0, least, 0.0)
        return ratio, width

    def _variance(self) -> NoisyColumn:
        centred, present = self._moments()
        squares = self._find(MeasureKind.SQUARES)
        assert squares is not None
        half = (self.asked.bounds[1] - self.asked.bounds[0]) / 2
        first, first_width = self._ratio(centred, present, share=3)
        second, second_width = self._ratio(squares, present, share=3)
        with np.errstate(invalid="ignore", over="ignore"):
            values = half * half / 2 + second - first * first
            widths = second_width + first_width * (2 * np.abs(first) + first_width)
        widths = np.minimum(np.nan_to_num(widths, nan=math.inf), half * half)
        values = np.clip(values, 0.0, half * half)
        kind = self.asked.aggregate.kind
        if kind in (Kind.VARIANCE, Kind.DEVIATION):
            count = np.maximum(present.values[:, 0], 2.0)
            values, widths = values * count / (count - 1), widths * count / (count - 1)
        if kind in (Kind.DEVIATION, Kind.DEVIATION_POPULATION):
            return _root(values, widths)
        return NoisyColumn(values, widths)

    def _quantile(self) -> NoisyColumn:
        found = next(
            (one, noisy)
            for one, noisy in self.noisy.items()
            if one.measure is MeasureKind.TREE and one.column == self.asked.column and one.bounds == self.asked.bounds
        )
        measurement, tree = found
        ranks = quantiles.ranks_of(tree.values)
        reach = quantiles.REACH[self._noise.shape] * tree.scale
        edge = measurement.grid.reach * measurement.grid.step
        lower, upper = self.asked.bounds
        read = [
            quantiles.read(one, self.asked.aggregate.q, reach, measurement.middle - edge, measurement.middle + edge)
            for one in ranks
        ]
        values = np.clip(np.array([value for value, _ in read]), lower, upper)
        return NoisyColumn(values, np.minimum(np.array([width for _, width in read]), upper - lower))


_BARE = {MeasureKind.PRESENT, MeasureKind.SPLIT}


def _middle(asked: AskedColumn) -> float:
    return asked.bounds[0] + (asked.bounds[1] - asked.bounds[0]) / 2


def _root(values: Floats, widths: Floats) -> NoisyColumn:
    roots = np.sqrt(values)
    above = np.sqrt(values + widths) - roots
    below = roots - np.sqrt(np.maximum(values - widths, 0.0))
    return NoisyColumn(roots, np.maximum(above, below))

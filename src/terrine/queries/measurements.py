"""What is measured with noise, so that every aggregate of a question follows without more noise.

    COUNT(*)           rows                        or present + absent, where another aggregate needs `present`
    COUNT(x)           present
    SUM(x)             total                       or centred + middle x present, where AVG(x) is asked, too
    AVG(x)             middle + centred / present
    VARIANCE(x)        from centred, squares and present
    QUANTILE(x, q)     a tree of counts (`quantiles`)
    COUNT(DISTINCT p)  people

`centred` sums distances from the middle of the bounds, which halves the sensitivity of (0, upper), and `squares` sums
squared distances, less their own middle. `split` counts rows with and without a value: no row is both, so the two
counts move together by at most k, and cost one measurement. With k UNIT the most that one person's weights add up to:

    rows, present, split     l1 = l2 = k UNIT
    total, centred, squares  l1 = l2 = k UNIT x the most steps of one value
    tree                     l1 = LEVELS k UNIT,  l2 = sqrt(LEVELS) k UNIT
    people, g groups         l1 = g UNIT,  l2 = sqrt(g) UNIT
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ibis

from terrine.mechanisms.lattice import Shape
from terrine.queries import quantiles, rows
from terrine.queries.bounding import UNIT
from terrine.queries.question import Kind
from terrine.queries.rows import ValueGrid
from terrine.queries.scope import Column

_MEANS = {
    Kind.MEAN,
    Kind.VARIANCE,
    Kind.VARIANCE_POPULATION,
    Kind.DEVIATION,
    Kind.DEVIATION_POPULATION,
}


class MeasureKind(enum.Enum):
    """What is summed per group."""

    ROWS = "rows"
    PRESENT = "rows with a value"
    SPLIT = "rows with and without a value"
    TOTAL = "sum"
    CENTRED = "sum of distances from the middle of the bounds"
    SQUARES = "sum of squared distances from the middle of the bounds"
    TREE = "tree of counts over the bounds"
    PEOPLE = "people"


@dataclass(frozen=True)
class Measurement:
    """One vector of whole numbers, a few per group, that gets noise once. `grid` is that of the value."""

    measure: MeasureKind
    column: Column | None = None
    bounds: tuple[float, float] = (0.0, 1.0)
    share: float = field(default=1.0, compare=False)
    """Its part of the budget, where an ordinary measurement has 1."""

    @property
    def parts(self) -> int:
        """How many numbers per group."""
        many: dict[MeasureKind, int] = {MeasureKind.SPLIT: 2, MeasureKind.TREE: quantiles.NODES}
        return many.get(self.measure, 1)

    @property
    def grid(self) -> ValueGrid:
        """Of the value that is summed; for squares, of the squared distance less its middle."""
        if self.measure is MeasureKind.TOTAL:
            return ValueGrid.of(*self.bounds)
        half = (self.bounds[1] - self.bounds[0]) / 2 * (1 + 2.0**-50)
        if self.measure is MeasureKind.SQUARES:
            return ValueGrid.of(-half * half / 2, half * half / 2)
        return ValueGrid.of(-half, half)

    @property
    def middle(self) -> float:
        return self.bounds[0] + (self.bounds[1] - self.bounds[0]) / 2

    @property
    def unit(self) -> float:
        """What one whole number of this measurement stands for."""
        summed = self.measure in (MeasureKind.TOTAL, MeasureKind.CENTRED, MeasureKind.SQUARES)
        return (self.grid.step if summed else 1.0) / UNIT

    def sensitivity(self, shape: Shape, most: int, groups: int) -> float:
        """How far one person moves the whole vector: l1 for Laplace, l2 for Gaussian noise."""
        if self.measure is MeasureKind.PEOPLE:
            return float(groups * UNIT) if shape is Shape.LAPLACE else _root(groups) * UNIT
        if self.measure is MeasureKind.TREE:
            levels = quantiles.LEVELS if shape is Shape.LAPLACE else _root(quantiles.LEVELS)
            return levels * most * UNIT
        if self.measure in (MeasureKind.TOTAL, MeasureKind.CENTRED, MeasureKind.SQUARES):
            return _up(most * UNIT * self.grid.reach)
        return float(most * UNIT)

    def columns(self, table: Any) -> list[Any]:
        """What to sum, for rows that carry their weight; not for people and trees."""
        weight = table["weight"]
        if self.measure is MeasureKind.ROWS:
            return [weight]
        assert self.column is not None
        missing = present(table, self.column).isnull()
        if self.measure is MeasureKind.PRESENT:
            return [ibis.ifelse(missing, 0, weight)]
        if self.measure is MeasureKind.SPLIT:
            return [ibis.ifelse(missing, 0, weight), ibis.ifelse(missing, weight, 0)]
        return [(self.steps(table) * weight).fill_null(0)]

    def steps(self, table: Any) -> Any:
        """The value in steps of its grid; NULL where there is none."""
        assert self.column is not None
        value = rows.number(table, self.column)
        if self.measure is MeasureKind.TOTAL:
            return self.grid.steps_of(value)
        lower, upper = self.bounds
        clamped = ibis.cases((value >= upper, upper), (value <= lower, lower), else_=value)
        distance = clamped - self.middle
        if self.measure is MeasureKind.SQUARES:
            tiny = ibis.ifelse(distance.abs() < (upper - lower) * 2.0**-60, 0.0, distance)  # its square is no number
            half = (upper - lower) / 2
            return self.grid.steps_of(tiny * tiny - half * half / 2)
        return self.grid.steps_of(distance)

    def bin(self, table: Any) -> Any:
        """The bin of the tree that the value falls into; NULL where there is none."""
        grid, steps = self.grid, self.steps(table)
        first, last = -grid.reach, grid.reach
        share = ((steps - first) * quantiles.BINS / (last - first)).floor().cast("int64")
        return ibis.cases((share < 0, 0), (share >= quantiles.BINS, quantiles.BINS - 1), else_=share)


def present(table: Any, column: Column) -> Any:
    """The column, NULL where it holds no value: NULL, and NaN or text that is no number where numbers are wanted."""
    return rows.number(table, column) if column.sort.name == "NUMBER" else table[column.place]


def measured(asked: Sequence[tuple[Kind, Column | None, tuple[float, float]]], *, people: bool) -> list[Measurement]:
    """The fewest measurements that answer everything `asked`; with `people`, their number in each group, too."""
    found: dict[Measurement, None] = {}
    values = {(column, bounds): set[Kind]() for _, column, bounds in asked if column is not None}
    for kind, column, bounds in asked:
        if column is not None:
            values[column, bounds].add(kind)
    for (column, bounds), kinds in values.items():
        for one in _of_value(kinds):
            if one is MeasureKind.PRESENT and column.complete:
                found[Measurement(MeasureKind.ROWS)] = None
            else:
                found[Measurement(one, column, bounds if one not in _BARE else (0.0, 1.0))] = None
    if any(kind is Kind.COUNT and column is None for kind, column, _ in asked):
        _count_rows(found)
    if people or any(kind is Kind.PEOPLE for kind, _, _ in asked):
        found[Measurement(MeasureKind.PEOPLE)] = None
    return list(found)


_BARE = {MeasureKind.PRESENT, MeasureKind.SPLIT}
_COUNTED, _SPLIT = 2.5, 1 + math.sqrt(2)
"""Shares of a count that is asked for and divides means, too. A split's two noises add up in COUNT(*): beside one other
measurement its share makes it as near as a count that is measured alone with half of the budget."""


def _count_rows(found: dict[Measurement, None]) -> None:
    """Make COUNT(*) follow from what is counted anyway, or count it."""
    means = any(one.measure is MeasureKind.CENTRED for one in found)
    present = next((one for one in found if one.measure is MeasureKind.PRESENT), None)
    if Measurement(MeasureKind.ROWS) in found or present is None:
        found.pop(Measurement(MeasureKind.ROWS), None)
        found[Measurement(MeasureKind.ROWS, share=_COUNTED if means else 1.0)] = None
    else:
        del found[present]
        found[Measurement(MeasureKind.SPLIT, present.column, share=_SPLIT)] = None


def _of_value(kinds: set[Kind]) -> list[MeasureKind]:
    found = []
    if kinds & _MEANS or Kind.COUNT in kinds:
        found.append(MeasureKind.PRESENT)
    if kinds & _MEANS:
        found.append(MeasureKind.CENTRED)
    if kinds & (_MEANS - {Kind.MEAN}):
        found.append(MeasureKind.SQUARES)
    if Kind.SUM in kinds and not kinds & _MEANS:
        found.append(MeasureKind.TOTAL)
    if Kind.QUANTILE in kinds:
        found.append(MeasureKind.TREE)
    return found


def _root(value: int) -> float:
    """The square root, rounded up."""
    root = math.isqrt(value)
    return float(root) if root * root == value else math.nextafter(math.sqrt(value), math.inf)


def _up(value: int) -> float:
    """The nearest float that is not below."""
    near = float(value)
    return near if int(near) >= value else math.nextafter(near, math.inf)

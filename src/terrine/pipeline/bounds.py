"""Bounds of numbers that nobody knows, found privately and billed.

A tenth of epsilon is shared among the columns whose bounds are not confirmed: each pays for a low and a high quantile
by the exponential mechanism, on a logarithmic grid between -10^9 and 10^9 that does not depend on the rows. The
quantiles are the 1st and 99th percentile where there are rows enough, otherwise as far inward as the error in ranks
asks for, so that a bound falls among the values with probability 0.999.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine import mechanisms
from terrine.errors import InvalidArgument
from terrine.events import Event, Repeated, Unit
from terrine.pipeline.units import Units
from terrine.rng import SYSTEM, Seeded
from terrine.tables import Number, Schema
from terrine.tables.cells import numbers

SHARE = 0.1
_FARTHEST = math.log1p(1e9)
_POINTS = 2**11

Found = dict[str, tuple[float, float]]


def unknown(schema: Schema) -> list[str]:
    """The columns whose bounds are to be found."""
    return [name for name, column in schema.columns.items() if isinstance(column, Number) and not column.confirmed]


def event(columns: int, epsilon: float, unit: Unit | None) -> Event:
    """What finding the bounds of so many columns costs."""
    return Repeated(_quantile(0.5, columns, epsilon, unit).event, times=2 * columns)


def check_units(units: Units, columns: int, epsilon: float) -> float:
    """How far from the ends the quantiles must be, so that noise does not carry a bound far outside.

    Raises:
        InvalidArgument: there are too few rows, or people, for any such place.
    """
    q = max(0.01, 1.1 * _quantile(0.01, columns, epsilon, units.unit).error(confidence=0.999) / units.count)
    if q > 0.25:
        what = "rows" if units.people is None else "people"
        raise InvalidArgument(
            f"--private-bounds: {units.count} {what} are too few for this epsilon and this many columns; want "
            "confirmed bounds"
        )
    return q


def find(table: Any, schema: Schema, units: Units, *, epsilon: float, seed: int | None) -> Found:
    """Bounds for every unknown column, by one value of each unit. They cost `event`, to be charged before.

    A `seed` is for tests.
    """
    columns = unknown(schema)
    source = SYSTEM if seed is None else Seeded(seed)
    q = check_units(units, len(columns), epsilon)
    chosen = None if units.people is None else units.one_row(np.arange(units.count))
    found = {}
    for name in columns:
        values = numbers(table.column(name), _number(schema, name).decimal)
        values = values if chosen is None else values[chosen]
        steps = _log(values[np.isfinite(values)])
        low, high = (
            _power(float(_quantile(share, len(columns), epsilon, units.unit).release(steps, rng=source).value))
            for share in (q, 1 - q)
        )
        found[name] = (min(low, high), max(low, high) if low != high else low + 1.0)
    return found


def applied(schema: Schema, found: Found) -> Schema:
    """The schema with these bounds, which were paid for."""
    if strange := set(unknown(schema)) ^ set(found):
        raise InvalidArgument(f"the run was begun with other columns to bound ({', '.join(sorted(strange))})")
    columns = dict(schema.columns)
    for name, (low, high) in found.items():
        columns[name] = Number(low, high, decimal=_number(schema, name).decimal)
    return dataclasses.replace(schema, columns=columns)


def _quantile(q: float, columns: int, epsilon: float, unit: Unit | None) -> mechanisms.Quantile:
    each = SHARE * epsilon / (2 * columns)
    return mechanisms.Quantile(q=q, lower=-_FARTHEST, upper=_FARTHEST, epsilon=each, points=_POINTS, unit=unit)


def _number(schema: Schema, name: str) -> Number:
    column = schema.columns[name]
    assert isinstance(column, Number)
    return column


def _log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.copysign(np.log1p(np.abs(values)), values))


def _power(step: float) -> float:
    return math.copysign(math.expm1(abs(step)), step)

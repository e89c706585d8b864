"""Made-up rows of the same schema: an analyst can try a question for nothing, and sees nobody's data.

The rows follow from the schema, the declared bounds and the public keys alone.
"""

from __future__ import annotations

import datetime
from typing import Any

import duckdb
import ibis
import numpy as np
import pyarrow as pa

from terrine.queries.planning import QueryPlan
from terrine.queries.scope import Column, Sort

ROWS = 2_000
_PEOPLE = 500
_WORDS = ("alpha", "beta", "gamma", "delta")


def made_up(plan: QueryPlan) -> tuple[Any, list[Any]]:
    """A DuckDB of its own with a made-up table for each table of the plan, and those tables."""
    connection = duckdb.connect()
    for number in range(len(plan.scope.sources)):
        generator = np.random.default_rng(number)
        used = [one for one in plan.scope.columns if one.table == number]
        data = {one.name: _column(plan, one, generator) for one in used} or {"nothing": pa.array([1] * ROWS)}
        connection.register(f"mock_{number}", pa.table(data))
    backend = ibis.duckdb.from_connection(connection)
    return backend, [backend.table(f"mock_{number}") for number in range(len(plan.scope.sources))]


def _column(plan: QueryPlan, column: Column, generator: np.random.Generator) -> pa.Array:
    key = next((one for one in plan.keys if one.column.place == column.place), None)
    if key is not None and key.values and not key.edges:
        return pa.array([key.values[place] for place in generator.integers(len(key.values), size=ROWS)])
    numbers = generator.integers(_PEOPLE if column.person else len(_WORDS), size=ROWS)
    lower, upper = _bounds(plan, column)
    match column.sort:
        case Sort.WHOLE:
            spread = np.floor(generator.uniform(lower, upper + 1, size=ROWS))
            return pa.array(numbers if column.person else spread.astype(np.int64))
        case Sort.NUMBER:
            return pa.array(generator.uniform(lower, upper, size=ROWS))
        case Sort.TRUTH:
            return pa.array(numbers % 2 == 0)
        case Sort.DAY:
            return pa.array([datetime.date(2024, 1, 1) + datetime.timedelta(int(one)) for one in numbers])
        case Sort.MOMENT:
            return pa.array([datetime.datetime(2024, 1, 1) + datetime.timedelta(int(one)) for one in numbers])
        case _:
            return pa.array([_text(plan, column, int(one), generator) for one in numbers])


def _text(plan: QueryPlan, column: Column, number: int, generator: np.random.Generator) -> str:
    if column.person:
        return f"person {number}"
    bounded = any(one.column is not None and one.column.place == column.place for one in plan.asked)
    return str(generator.uniform(*_bounds(plan, column))) if bounded else _WORDS[number]


def _bounds(plan: QueryPlan, column: Column) -> tuple[float, float]:
    for one in plan.asked:
        if one.column is not None and one.column.place == column.place:
            return max(one.bounds[0], -(2.0**52)), min(one.bounds[1], 2.0**52)
    for key in plan.keys:
        if key.edges and key.column.place == column.place:
            return max(key.edges[0], -(2.0**52)), min(key.edges[-1], 2.0**52)
    return 0.0, 3.0

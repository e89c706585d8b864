"""From a plan that was charged to noisy numbers: the engine bounds and sums, noise is added here, once.

Exact per-group sums exist only inside `_release`, between the engine and the noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine.mechanisms import grid
from terrine.queries import bounding, quantiles
from terrine.queries.bounding import PERSON
from terrine.queries.engines import Engine
from terrine.queries.measurements import MeasureKind, Measurement, present
from terrine.queries.planning import QueryPlan, selection_noise
from terrine.queries.rows import condition, joined
from terrine.queries.scope import Sort
from terrine.rng import SYSTEM, Source

Cell = tuple[Any, ...]
MOST_FILTERED = 1_000
"""Longer lists of keys are not written into SQL, which takes milliseconds a key: rows of other groups are dropped here.
The bound is the same; those rows count among their person's, so each of the person's rows weighs a little less."""


@dataclass(frozen=True)
class Noisy:
    """One measurement after the noise: per cell its numbers, in the value's own unit, and the scale of the noise."""

    values: NDArray[np.float64]
    scale: float


def bounded_rows(plan: QueryPlan, tables: Sequence[Any], *, cells: Sequence[Cell] | None = None) -> Any:
    """Rows that count: joined, of a known person, kept by WHERE and in a group; keys are k0, k1, ...

    `cells` are the groups that were selected; None takes the public lists.
    """
    rows = joined(plan.scope, tables)
    if plan.question.where is not None:
        rows = rows.filter(condition(rows, plan.question.where, plan.scope))
    names = {f"k{place}": key.expression(rows) for place, key in enumerate(plan.keys)}
    rows = rows.mutate(**{PERSON: rows[plan.scope.person.place]}, **names)
    kept = [rows[PERSON].notnull()]
    for place, key in enumerate(plan.keys):
        values = key.values
        if values is None and cells is not None:
            values = tuple(dict.fromkeys(cell[place] for cell in cells))
        column = rows[f"k{place}"]
        listed = values is not None and not key.edges and len(values) <= MOST_FILTERED
        kept += [] if listed or key.edges else key.showable(rows, f"k{place}")
        kept.append(column.isin(list(values or ())) if listed else column.notnull())
    for one in plan.asked:
        if one.column is not None and one.column.complete:
            kept.append(present(rows, one.column).notnull())
    return rows.filter(*kept)


def selected(plan: QueryPlan, engine: Engine, tables: Sequence[Any], rng: Source) -> list[Cell]:
    """The groups that are shown: the public ones, or those whose noisy number of people passes the threshold."""
    if plan.selection is None:
        return plan.cells()
    keys = _key_names(plan)
    secret = f"{rng.word():016x}{rng.word():016x}"
    pairs = bounding.chosen_pairs(bounded_rows(plan, tables), keys, plan.selection.groups, secret)
    found = engine.run(pairs.group_by(keys).aggregate(people=pairs.count()))
    if not found.num_rows:
        return []
    counts = np.array(found["people"].to_pylist(), dtype=np.int64)
    noisy = np.asarray(grid.release(selection_noise(plan.noise, plan.selection.groups), counts, rng))
    passed = np.flatnonzero(noisy >= plan.selection.threshold)
    columns = [found[key].to_pylist() for key in keys]
    return sorted({tuple(column[place] for column in columns) for place in passed})


def rehearse(plan: QueryPlan, engine: Engine, tables: Sequence[Any]) -> None:
    """Build and compile every expression and every noise, on no rows: what cannot be answered is not charged.

    Raises:
        InvalidArgument: the engine cannot do it, merges different texts, or the noise leaves 64 bits.
    """
    texts = [key.column for key in plan.keys if not key.edges]
    texts += [column for column in plan.scope.columns if column.person]  # people that are taken for one are one
    for column in texts:
        if column.sort is Sort.TEXT:
            engine.must_tell_apart(tables[column.table], column.name)
    dry = engine.rehearsal()
    selected(plan, dry, tables, SYSTEM)
    cells = plan.cells() if plan.selection is None else [tuple(key.example for key in plan.keys)]
    exact_sums(plan, dry, tables, cells)
    for one in plan.measurements:
        sensitivity = one.sensitivity(plan.noise.shape, plan.rows, plan.touched(len(cells)))
        plan.noise.of_share(one.share).plan(sensitivity, len(cells) * one.parts)


def measure(plan: QueryPlan, engine: Engine, tables: Sequence[Any], cells: Sequence[Cell], rng: Source) -> list[Noisy]:
    """Every measurement of the plan, noisy, for `cells`."""
    if not cells:
        return [Noisy(np.zeros((0, one.parts)), 0.0) for one in plan.measurements]
    sums = exact_sums(plan, engine, tables, cells)
    return [_release(plan, one, sums[one], len(cells), rng) for one in plan.measurements]


def exact_sums(
    plan: QueryPlan, engine: Engine, tables: Sequence[Any], cells: Sequence[Cell]
) -> dict[Measurement, NDArray[Any]]:
    """The bounded sums of every measurement, shape (cells, parts), without noise: private."""
    rows = bounded_rows(plan, tables, cells=cells)
    index = {cell: place for place, cell in enumerate(cells)}
    weighted = bounding.weighted(rows, plan.rows)
    found = {one: np.zeros((len(cells), one.parts), dtype=object) for one in plan.measurements}
    _fill_sums(plan, engine, weighted, index, found)
    for one in plan.measurements:
        if one.measure is MeasureKind.PEOPLE:
            _fill_people(plan, engine, rows, index, found[one])
        elif one.measure is MeasureKind.TREE:
            found[one] = _tree(plan, engine, weighted, index, one)
    return found


def _fill_sums(
    plan: QueryPlan, engine: Engine, weighted: Any, index: Mapping[Cell, int], found: Mapping[Measurement, NDArray[Any]]
) -> None:
    plain = [one for one in plan.measurements if one.measure not in (MeasureKind.PEOPLE, MeasureKind.TREE)]
    if not plain:
        return
    columns = {
        f"m{place}_{part}": column
        for place, one in enumerate(plain)
        for part, column in enumerate(one.columns(weighted))
    }
    keys = _key_names(plan)
    table = engine.run(bounding.summed(weighted, keys, columns, wide=engine.traits.wide))
    for place, one in enumerate(plain):
        for part in range(one.parts):
            _place(table, keys, f"m{place}_{part}", index, found[one][:, part])


def _fill_people(plan: QueryPlan, engine: Engine, rows: Any, index: Mapping[Cell, int], out: NDArray[Any]) -> None:
    keys = _key_names(plan)
    most = None if len(index) <= plan.groups else plan.groups
    pairs = bounding.weighted_pairs(rows, keys, most)
    table = engine.run(bounding.summed(pairs, keys, {"people": pairs["weight"]}, wide=engine.traits.wide))
    _place(table, keys, "people", index, out[:, 0])


def _tree(plan: QueryPlan, engine: Engine, weighted: Any, index: Mapping[Cell, int], one: Measurement) -> NDArray[Any]:
    keys = [*_key_names(plan), "bin"]
    binned = weighted.mutate(bin=one.bin(weighted)).filter(lambda table: table["bin"].notnull())
    table = engine.run(bounding.summed(binned, keys, {"rows": binned["weight"]}, wide=engine.traits.wide))
    bins = np.zeros((len(index), quantiles.BINS), dtype=np.int64)
    columns = [table[key].to_pylist() for key in keys]
    weights = [int(value) for value in table["rows"].to_pylist()]
    for *cell, place, weight in zip(*columns, weights, strict=True):
        number = index.get(tuple(cell))
        if number is not None:
            bins[number, place] = weight
    return quantiles.nodes_of(bins)


def _place(table: Any, keys: Sequence[str], name: str, index: Mapping[Cell, int], out: NDArray[Any]) -> None:
    """Sums into the places of their cells; a group that is none of the cells is left out."""
    columns = [table[key].to_pylist() for key in keys]
    for *cell, value in zip(*columns, table[name].to_pylist(), strict=True):
        place = index.get(tuple(cell))
        if place is not None and value is not None:
            out[place] = int(value)


def _release(plan: QueryPlan, one: Measurement, exact: NDArray[Any], cells: int, rng: Source) -> Noisy:
    sensitivity = one.sensitivity(plan.noise.shape, plan.rows, plan.touched(cells))
    flat, noise = exact.reshape(-1), plan.noise.of_share(one.share)
    noisy = noise.add(flat, sensitivity, rng).reshape(exact.shape) * one.unit
    return Noisy(noisy, noise.scale(sensitivity, flat.size) * one.unit)


def _key_names(plan: QueryPlan) -> list[str]:
    return [f"k{place}" for place in range(len(plan.keys))]

"""What an analyst gets: a table with half-widths, and an explanation of a plan before it is paid for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from terrine.events import Event
from terrine.queries import quantiles
from terrine.queries.estimates import NoisyColumn, estimated
from terrine.queries.measurements import MeasureKind, Measurement
from terrine.queries.planning import QueryPlan, certified
from terrine.queries.question import HIGHEST, LOWEST, Kind
from terrine.queries.running import Cell, Noisy
from terrine.queries.scope import Sort
from terrine.rounding import up

HALF_WIDTH = "_half_width"
_LARGEST = 2.0**62


@dataclass(frozen=True)
class Answer:
    """A noisy table. Beside every noisy column stands its half-width: the noise stays within it with 95%.

    `event` is what was charged before anything was looked at; `epsilon` and `delta` are what it is proven to cost.
    """

    table: pa.Table
    event: Event
    epsilon: float
    delta: float
    notes: tuple[str, ...]

    @property
    def half_widths(self) -> dict[str, float]:
        """Of every noisy column, the largest half-width of its cells."""
        found = {}
        for name in self.table.column_names:
            if name.endswith(HALF_WIDTH) and name.removesuffix(HALF_WIDTH) in self.table.column_names:
                widths = [one for one in self.table[name].to_pylist() if one is not None]
                found[name.removesuffix(HALF_WIDTH)] = max(widths, default=0.0)
        return found


@dataclass(frozen=True)
class CellError:
    """What is expected of one noisy column: `half_width` is None where it depends on how many rows a group has."""

    column: str
    measured: str
    half_width: float | None
    note: str = ""


@dataclass(frozen=True)
class Explanation:
    """What a question would cost and how good its answer would be; made without a look at any row, and free."""

    epsilon: float
    delta: float
    event: Event
    mechanism: str
    reason: str
    cells: tuple[CellError, ...]
    bounds: tuple[str, ...]

    def __str__(self) -> str:
        price = f"price: epsilon {up(self.epsilon)}, delta {self.delta:g}; {self.mechanism}: {self.reason}"
        lines = [price, "expected error, each at 95%:"]
        for one in self.cells:
            width = one.note if one.half_width is None else f"+-{up(one.half_width, 4)} {one.note}".rstrip()
            lines.append(f"  {one.column}: {width}; measured: {one.measured}")
        return "\n".join([*lines, "bounded:", *(f"  {line}" for line in self.bounds)])

    def record(self) -> dict[str, Any]:
        """The same, as JSON can hold it."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "mechanism": self.mechanism,
            "reason": self.reason,
            "half_widths": {one.column: one.half_width for one in self.cells},
            "cells": [vars(one) for one in self.cells],
            "bounds": list(self.bounds),
        }


def answered(
    plan: QueryPlan, cells: Sequence[Cell], noisy: Sequence[Noisy], event: Event, extra: tuple[str, ...] = ()
) -> Answer:
    """The table of an answer, in the order of the question."""
    found = dict(zip(plan.measurements, noisy, strict=True))
    estimates = {one.aggregate.alias: two for one, two in zip(plan.asked, estimated(plan, found), strict=True)}
    shown = _shown(plan, len(cells), found)
    keys = {key.alias: (place, key) for place, key in enumerate(plan.keys)}
    order = _order(plan, cells)
    columns: dict[str, pa.Array] = {}
    for name in plan.question.columns:
        if name in keys:
            place, key = keys[name]
            values = [key.shown(cells[row][place]) for row in order]
            columns[name] = pa.array(values, type=_arrow(key.column.sort if not key.edges else Sort.TEXT))
        else:
            columns[name], columns[name + HALF_WIDTH] = _columns(estimates[name], order, shown)
    epsilon = certified(plan.event, plan.delta)
    return Answer(pa.table(columns), event, epsilon, plan.delta, notes(plan) + extra)


def _columns(estimate: NoisyColumn, order: Sequence[int], shown: Any) -> tuple[pa.Array, pa.Array]:
    values = np.clip(estimate.values[order], -_LARGEST, _LARGEST) if estimate.whole else estimate.values[order]
    hidden = ~shown[order] if len(order) else np.zeros(0, dtype=bool)
    whole = pa.array(np.rint(values).astype(np.int64) if estimate.whole else values, mask=hidden)
    return whole, pa.array(estimate.half_widths[order], mask=hidden)


def _shown(plan: QueryPlan, cells: int, found: Mapping[Measurement, Noisy]) -> Any:
    if plan.min_group is None or plan.selection is not None:
        return np.ones(cells, dtype=bool)
    return found[Measurement(MeasureKind.PEOPLE)].values[:, 0] >= plan.min_group


def _order(plan: QueryPlan, cells: Sequence[Cell]) -> list[int]:
    rows = list(range(len(cells)))
    for order in reversed(plan.question.order):
        place = next(place for place, key in enumerate(plan.keys) if key.alias == order.alias)
        rows.sort(key=lambda row, place=place: cells[row][place], reverse=order.descending)  # type: ignore[misc]
    return rows


def _arrow(sort: Sort) -> Any:
    return {Sort.WHOLE: pa.int64(), Sort.TRUTH: pa.bool_(), Sort.DAY: pa.date32()}.get(sort, pa.string())


def notes(plan: QueryPlan) -> tuple[str, ...]:
    """How contributions were bounded, in words."""
    person = plan.scope.person.name
    found = [
        f"at most {plan.rows:,} rows of one {person} count: of n rows, if n is more, each weighs {plan.rows:,} / n, "
        "so that no row has to be chosen",
        f"rows without a {person} are dropped; NaN counts as NULL; infinities are clamped to the bounds",
    ]
    if plan.selection is not None:
        found.append(
            f"groups are shown from {plan.selection.threshold:,} noisy people on; each {person} counts in at most "
            f"{plan.selection.groups:,} of them, chosen by a secret hash"
        )
    elif plan.keys:
        found.append("all public groups are answered, empty ones with noise alone; rows of other groups are dropped")
    if any(one.measure is MeasureKind.PEOPLE for one in plan.measurements):
        found.append(
            f"one {person} counts in at most {plan.groups:,} groups, or has a weight of {plan.groups:,} / groups"
        )
    if plan.min_group is not None:
        found.append(f"groups of fewer than {plan.min_group:,} noisy people are left blank")
    for one in dict.fromkeys((one.column, one.bounds) for one in plan.asked if one.column is not None):
        if one[1] != (0.0, 1.0) or any(
            two.column == one[0] and two.aggregate.kind is not Kind.COUNT for two in plan.asked
        ):
            found.append(f"{one[0]} is clamped to {one[1][0]:g} to {one[1][1]:g}")
    for column in dict.fromkeys(one.column for one in plan.asked if one.column is not None and one.column.complete):
        found.append(f"rows without a {column} are dropped: it was declared complete")
    for asked in plan.asked:
        if asked.aggregate.kind is Kind.QUANTILE and asked.aggregate.q in (LOWEST, HIGHEST):
            found.append(
                f"{asked.aggregate.alias} is the {asked.aggregate.q:g} quantile: an extreme is one person's value"
            )
    return tuple(found)


def explained(plan: QueryPlan) -> Explanation:
    """Price, expected errors and bounds of a plan."""
    cells = plan.groups if plan.selection is not None else math.prod(len(key.values or ()) for key in plan.keys)
    other = "Gaussian" if plan.noise.name == "Laplace" else "Laplace"
    reason = f"smaller half-widths than {other} at this budget"
    if not plan.compared:
        own = f"; delta {plan.delta:g} is what private keys may fail by" if plan.selection is not None else ""
        reason = f"no delta was given for Gaussian noise{own}"
    return Explanation(
        epsilon=certified(plan.event, plan.delta),
        delta=plan.delta,
        event=plan.event,
        mechanism=f"{plan.noise.name} noise on {len(plan.measurements) + (plan.selection is not None)} measurements",
        reason=reason,
        cells=tuple(_cell(plan, place, cells) for place in range(len(plan.asked))),
        bounds=notes(plan),
    )


def _cell(plan: QueryPlan, place: int, cells: int) -> CellError:
    """The expected error of one column: what the estimator says of empty groups, or per number of rows."""
    asked = plan.asked[place]
    needed = [
        one
        for one in plan.measurements
        if one.column == asked.column or (one.measure is MeasureKind.SPLIT and asked.column is None)
    ]
    said = ", ".join(dict.fromkeys(one.measure.value for one in needed)) or "people"
    if asked.aggregate.kind is Kind.PEOPLE:
        said = "people"
    widths = {}
    for size in (100, 10_000):
        estimate = estimated(plan, {one: _imagined(plan, one, cells, size) for one in plan.measurements})[place]
        widths[size] = float(estimate.half_widths[0])
    if widths[100] == widths[10_000]:
        return CellError(asked.aggregate.alias, said, widths[100])
    note = ", ".join(f"+-{up(width, 3)} where {size:,} rows count" for size, width in widths.items())
    return CellError(asked.aggregate.alias, said, None, note)


def _imagined(plan: QueryPlan, one: Measurement, cells: int, size: int) -> Noisy:
    """A group of `size` rows spread evenly over the bounds, as if it had been measured."""
    sensitivity = one.sensitivity(plan.noise.shape, plan.rows, plan.touched(cells))
    multiplier = plan.noise.of_share(one.share).multiplier
    scale = sensitivity * multiplier * one.unit * (1 + 2.0**-12)  # more than the grid's rounding adds
    values = np.zeros((1, one.parts))
    if one.measure in (MeasureKind.ROWS, MeasureKind.PRESENT, MeasureKind.SPLIT, MeasureKind.PEOPLE):
        values[0, 0] = size
    elif one.measure is MeasureKind.TREE:
        values[:] = quantiles.nodes_of(np.full((1, quantiles.BINS), size / quantiles.BINS))
    return Noisy(values, scale)


def as_json(answer: Answer) -> str:
    """`answer` as one line of JSON: rows as lists in the order of `columns`."""
    columns = answer.table.column_names
    rows = [[row[name] for name in columns] for row in answer.table.to_pylist()]
    record = {
        "rows": rows,
        "columns": columns,
        "half_widths": answer.half_widths,
        "epsilon": answer.epsilon,
        "delta": answer.delta,
        "notes": list(answer.notes),
    }
    return json.dumps(record, default=str, allow_nan=False)

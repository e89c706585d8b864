"""The bounded sums by definition: a loop over people in plain Python, to hold the engines' expressions against."""

import math
from collections import Counter, defaultdict

from terrine.queries import parsing, quantiles, running
from terrine.queries.measurements import MeasureKind
from terrine.queries.planning import Options

UNIT = 2**20


def plan_of(session, sql, **options):
    options.setdefault("epsilon", 1.0)
    return session.plan(parsing.question_of(sql), Options(**options))


def engine_sums(session, plan, cells=None):
    """What the engine makes of the plan: {measurement: [[numbers of a cell]]}."""
    tables = [session._tables[source.table] for source in plan.scope.sources]
    found = running.exact_sums(plan, session._engine, tables, plan.cells() if cells is None else cells)
    return {one: sums.tolist() for one, sums in found.items()}


def slow_sums(plan, rows, value="cost", keys=("region",), person="patient_id"):
    """The same from a list of dictionaries: rows that WHERE and joins left."""
    cells = plan.cells()
    index = {cell: place for place, cell in enumerate(cells)}
    kept = [row for row in rows if row[person] is not None and tuple(row[key] for key in keys) in index]
    owned = Counter(row[person] for row in kept)
    found = {one: [[0] * one.parts for _ in cells] for one in plan.measurements}
    bins = {one: [[0] * quantiles.BINS for _ in cells] for one in plan.measurements if one.measure is MeasureKind.TREE}
    for row in kept:
        weight = UNIT if owned[row[person]] <= plan.rows else plan.rows * UNIT // owned[row[person]]
        place = index[tuple(row[key] for key in keys)]
        for one in plan.measurements:
            if one.measure is MeasureKind.TREE:
                if (number := number_of(row[value])) is not None:
                    bins[one][place][slow_bin(one, number)] += weight
            elif one.measure is not MeasureKind.PEOPLE:
                for part, amount in enumerate(slow_parts(one, number_of(row.get(value)))):
                    found[one][place][part] += amount * weight
    for one, counts in bins.items():
        found[one] = [slow_nodes(leaves) for leaves in counts]
    for one in plan.measurements:
        if one.measure is MeasureKind.PEOPLE:
            found[one] = slow_people(plan, kept, index, keys, person)
    return found


def slow_people(plan, kept, index, keys, person):
    groups = defaultdict(set)
    for row in kept:
        groups[row[person]].add(tuple(row[key] for key in keys))
    out = [[0] for _ in index]
    for mine in groups.values():
        many = len(index) > plan.groups and len(mine) > plan.groups
        for cell in mine:
            out[index[cell]][0] += plan.groups * UNIT // len(mine) if many else UNIT
    return out


def number_of(value):
    """NaN is NULL."""
    return None if value is None or (isinstance(value, float) and math.isnan(value)) else float(value)


def slow_parts(one, number):
    if one.measure is MeasureKind.ROWS:
        return [1]
    if one.measure is MeasureKind.PRESENT:
        return [int(number is not None)]
    if one.measure is MeasureKind.SPLIT:
        return [int(number is not None), int(number is None)]
    return [0 if number is None else slow_steps(one, number)]


def slow_steps(one, number):
    lower, upper = one.bounds
    clamped = min(max(number, lower), upper)
    if one.measure is MeasureKind.TOTAL:
        summed = clamped
    else:
        summed = clamped - (lower + (upper - lower) / 2)
        if one.measure is MeasureKind.SQUARES:
            summed = summed * summed - ((upper - lower) / 2) ** 2 / 2
    return math.floor(math.ldexp(summed, -one.grid.exponent) + 0.5)


def slow_bin(one, number):
    steps, reach = slow_steps(one, number), one.grid.reach
    return min(quantiles.BINS - 1, max(0, math.floor((steps + reach) * quantiles.BINS / (2 * reach))))


def slow_nodes(leaves):
    found = []
    for level in range(1, quantiles.LEVELS + 1):
        width = quantiles.BINS // quantiles.BRANCHES**level
        found += [sum(leaves[start : start + width]) for start in range(0, quantiles.BINS, width)]
    return found


def distances(first, second):
    """l1 and l2 distances of two results, per measurement."""
    out = {}
    for one, sums in first.items():
        gaps = [a - b for mine, yours in zip(sums, second[one], strict=True) for a, b in zip(mine, yours, strict=True)]
        out[one] = (sum(map(abs, gaps)), math.sqrt(sum(gap * gap for gap in gaps)))
    return out

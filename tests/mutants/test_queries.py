"""Every bounding rule, left out on purpose: the neighbours must notice."""

import math

import ibis
import pytest

from terrine import queries
from terrine.queries import bounding, measurements, planning, rows, running
from terrine.queries.bounding import PERSON, UNIT
from tests.queries import people
from tests.queries.conftest import DuckDB
from tests.queries.oracle import engine_sums, plan_of, slow_sums
from tests.queries.shapes import SHAPES, violations

OTHERS = people.ordinary(people=12, seed=3)
MANY = [people.row(10**6, region, 5000.0) for region in people.REGIONS] * 10
SEVEN = [people.row(10**6, "N", 5000.0)] * 7
HUGE = [people.row(10**6, "N", 20_000.0)] * 3
MULTIPLIED = [people.row(10**6, "N", 5000.0, hospital=1)] * 3


@pytest.fixture(scope="module")
def engine():
    return DuckDB()


def unweighted(table, most):
    return table.mutate(weight=ibis.literal(UNIT, type="int64"))


def rounded_up(table, most):
    owned = table.group_by(heavy=table[PERSON]).aggregate(owned=table.count())
    share = (ibis.literal(most * UNIT) / owned["owned"]).ceil().cast("int64")
    heavy = owned.filter(owned["owned"] > most).select("heavy", weight=share)
    joined = table.left_join(heavy, table[PERSON] == heavy["heavy"])
    return joined.select(*table.columns, weight=joined["weight"].fill_null(UNIT))


def every_pair(table, keys, most):
    pairs = table.select(PERSON, *keys).distinct()
    return pairs.mutate(weight=ibis.literal(UNIT, type="int64"))


def unclamped(self, number):
    return (number * 2.0**-self.exponent + 0.5).floor().cast("int64")


def per_group(table, most):
    """Rows bounded in every group, not in all of them together."""
    place = ibis.row_number().over(group_by=[table[PERSON], *(table[key] for key in table.columns if key[0] == "k")])
    return (
        table.mutate(place=place)
        .filter(lambda one: one["place"] < most)
        .mutate(weight=ibis.literal(UNIT, type="int64"))
    )


MUTANTS = {
    "rows are not bounded": (bounding, "weighted", unweighted, "count", MANY),
    "weights are rounded up": (bounding, "weighted", rounded_up, "count", SEVEN),
    "rows are bounded per group only": (bounding, "weighted", per_group, "count by group", MANY),
    "groups are not bounded": (bounding, "weighted_pairs", every_pair, "people by group", MANY),
    "values are not clamped": (rows.ValueGrid, "steps_of", unclamped, "sum", HUGE),
    "rows are not bounded for quantiles": (bounding, "weighted", unweighted, "quantiles", MANY),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_rule_left_out_is_caught(engine, monkeypatch, mutant):
    owner, name, replacement, shape, mine = MUTANTS[mutant]
    others = [row for row in OTHERS if row["cost"] is not None and abs(row["cost"]) < 1e9]
    assert not violations(engine, shape, mine, others)
    monkeypatch.setattr(owner, name, replacement)
    assert violations(engine, shape, mine, others)


def test_bounding_before_the_join_is_caught(engine, monkeypatch):
    """A person's three rows become six by a join; bounded before it, they would count six times."""
    right = running.bounded_rows

    def before(plan, tables, **options):
        table = right(plan, tables, **options)
        return table.mutate(**{PERSON: table[PERSON]})

    def weighted(table, most):
        return unweighted(table, most)  # each of the three rows was within the bound of three before the join

    assert not violations(engine, "public join", MULTIPLIED, OTHERS)
    monkeypatch.setattr(running, "bounded_rows", before)
    monkeypatch.setattr(bounding, "weighted", weighted)
    assert violations(engine, "public join", MULTIPLIED, OTHERS)


def test_nan_that_clamps_to_the_upper_bound_is_caught(engine, monkeypatch):
    """DuckDB's order puts NaN above everything, so a clamp alone makes it the upper bound."""
    mine = people.ordinary()
    engine.load("visits", people.table(mine))
    session = queries.Session(engine.connection, None, {"visits": queries.Private(person="patient_id", rows=3)})
    sql, options = SHAPES["sum"]
    plan = plan_of(session, sql, **options)
    assert engine_sums(session, plan) == slow_sums(plan, mine)
    monkeypatch.setattr(measurements.rows, "number", lambda table, column: table[column.place].cast("float64"))
    assert engine_sums(session, plan) != slow_sums(plan, mine)


def test_people_without_an_id_would_be_unbounded(engine, monkeypatch):
    mine = [{**row, "patient_id": None} for row in MANY]
    assert not violations(engine, "count", mine, OTHERS)

    def kept(plan, tables, **options):
        table = running.joined(plan.scope, tables)
        return table.mutate(**{PERSON: table[plan.scope.person.place]})

    monkeypatch.setattr(running, "bounded_rows", kept)
    assert violations(engine, "count", mine, OTHERS)


def test_a_threshold_that_forgets_how_many_keys_one_person_has_is_caught(engine):
    """delta is shared by the keys that one person alone may have."""
    engine.load("visits", people.table(OTHERS))
    session = queries.Session(
        engine.connection, None, {"visits": queries.Private(person="patient_id", rows=9, groups=9)}
    )
    sql = "SELECT region, COUNT(*) AS n FROM visits GROUP BY region"
    plan = plan_of(session, sql, keys="private", delta=1e-6)
    scale = planning.selection_noise(plan.noise, 9).scale

    def fails(threshold):
        return 9 * 0.5 * math.exp(-(threshold - 1.5) / scale) > 1e-6  # the noise, rounded, is threshold - 1 or more

    assert not fails(plan.selection.threshold)
    assert fails(plan.selection.threshold - 1)  # and it is no larger than it has to be
    forgetful = plan_of(session, sql, keys="private", delta=9e-6).selection.threshold
    assert fails(forgetful)

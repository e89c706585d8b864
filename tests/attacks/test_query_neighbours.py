"""Adding one person, whatever rows they own, moves every bounded aggregate by at most what the plan claims."""

import pytest
from hypothesis import HealthCheck, given, settings

from terrine import queries
from terrine.queries import bounding, running
from tests.queries import people
from tests.queries.conftest import *  # noqa: F403 - the engines' fixtures
from tests.queries.conftest import DuckDB
from tests.queries.oracle import plan_of
from tests.queries.shapes import SHAPES, hostile_rows, violations
from tests.thorough import examples

OTHERS = people.ordinary(people=12, seed=3)
WORST = [people.row(10**6, region, cost) for region in people.REGIONS for cost in (5000.0, -50.0, 1e308)] * 9
SAME = [people.row(10**6, "N", 5000.0)] * 400


@pytest.fixture(scope="module")
def engine():
    return DuckDB()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mine", [WORST, SAME, SAME[:3], WORST[:1]], ids=["everywhere", "one place", "three", "one"])
def test_the_worst_person_stays_within_the_claim(engine, shape, mine):
    assert not violations(engine, shape, mine, OTHERS)


@settings(max_examples=examples(4), deadline=None, suppress_health_check=list(HealthCheck))
@given(mine=hostile_rows)
def test_any_person_stays_within_the_claim(engine, mine):
    for shape in ("mean and count", "two keys", "private join", "quantiles"):
        assert not violations(engine, shape, mine, OTHERS)


@pytest.mark.parametrize("shape", ["mean and count", "variance", "private join", "people by group"])
def test_the_worst_person_on_postgresql(engines, shape):
    assert not violations(engines("postgres"), shape, WORST, OTHERS)


def test_a_person_with_a_hundred_thousand_rows(engine):
    mine = [people.row(10**6, region, 5000.0) for region in people.REGIONS] * 25_000
    assert not violations(engine, "mean and count", mine, OTHERS)


def test_the_claim_is_reached_and_not_only_kept(engine):
    """A bound that is far too large would pass the tests above and waste the budget."""
    sql, options = SHAPES["sum"]
    results = []
    for rows in (OTHERS, [*OTHERS, *SAME]):
        engine.load("visits", people.table(rows))
        session = queries.Session(engine.connection, None, {"visits": queries.Private(person="patient_id", rows=3)})
        plan = plan_of(session, sql, **options)
        tables = [session._tables["visits"]]
        results.append(running.exact_sums(plan, session._engine, tables, plan.cells())[plan.measurements[0]])
    moved = int(abs(results[1] - results[0]).sum())
    assert 0.99 * 3 * bounding.UNIT * plan.measurements[0].grid.reach < moved


def test_people_without_an_id_add_nothing(engine):
    sql, options = SHAPES["mean and count"]
    sums = []
    for rows in (OTHERS, [*OTHERS, *({**row, "patient_id": None} for row in WORST)]):
        engine.load("visits", people.table(rows))
        session = queries.Session(engine.connection, None, {"visits": queries.Private(person="patient_id", rows=3)})
        plan = plan_of(session, sql, **options)
        found = running.exact_sums(plan, session._engine, [session._tables["visits"]], plan.cells())
        sums.append({one: value.tolist() for one, value in found.items()})
    assert sums[0] == sums[1]


def test_a_person_has_at_most_the_declared_votes_for_private_keys(engine):
    mine = [people.row(10**6, f"key {number}") for number in range(50)]
    engine.load("visits", people.table(mine))
    session = queries.Session(
        engine.connection, None, {"visits": queries.Private(person="patient_id", rows=9, groups=4)}
    )
    plan = plan_of(session, "SELECT region, COUNT(*) AS n FROM visits GROUP BY region", keys="private", delta=1e-6)
    rows = running.bounded_rows(plan, [session._tables["visits"]])
    kept = []
    for secret in ("one", "two"):
        pairs = bounding.chosen_pairs(rows, ["k0"], plan.selection.groups, secret)
        kept.append(sorted(session._engine.run(pairs)["k0"].to_pylist()))
    assert [len(one) for one in kept] == [4, 4]
    assert kept[0] != kept[1]  # another question, another choice

"""Whole questions, run on two neighbours thousands of times: what they betray is never above what was charged.

And the peers' published mistakes, tried here: epsilon charged once and spent per column; answers from unclamped rows.
"""

import numpy as np
import pytest

from terrine import audit, queries
from terrine.accounting import composition
from terrine.events import Repeated
from terrine.queries import running
from terrine.queries.answers import answered
from terrine.queries.noise import NoiseKind
from terrine.rng import SYSTEM
from tests.queries import people
from tests.queries.conftest import DuckDB
from tests.queries.oracle import plan_of

TABLES = {"visits": queries.Private(person="patient_id", rows=2, groups=2)}
OTHERS = [people.row(person, region, 100.0) for person in range(20) for region in ("N", "S")]
MINE = [people.row(10**6, region, 5000.0) for region in ("N", "S", "mine alone")] * 5


def world(rows, sql, options):
    """Everything before the noise: a plan, and the engine with one of two neighbouring tables."""
    duck = DuckDB()
    duck.load("visits", people.table(rows))
    session = queries.Session(duck.connection, None, TABLES)
    return plan_of(session, sql, **options), session._engine, [session._tables["visits"]]


def outcomes(value, count):
    """The sum of a column of `count` answers; the engine is asked once: without noise it always says the same."""
    plan, engine, tables = value
    cells = plan.cells()
    sums = running.exact_sums(plan, engine, tables, cells)
    found = []
    for _ in range(count):
        noisy = [running._release(plan, one, sums[one], len(cells), SYSTEM) for one in plan.measurements]
        found.append(sum(map(float, answered(plan, cells, noisy, plan.event).table["x"].to_pylist())))
    return np.array(found)


QUESTIONS = {
    "count": ("SELECT COUNT(*) AS x FROM visits", {}),
    "sum": (
        "SELECT region, SUM(cost) AS x FROM visits GROUP BY region",
        {"bounds": {"cost": (0, 5000)}, "keys": {"region": ["N", "S"]}},
    ),
    "people": (
        "SELECT region, COUNT(DISTINCT patient_id) AS x FROM visits GROUP BY region",
        {"keys": {"region": ["N", "S"]}},
    ),
    "mean": ("SELECT AVG(cost) AS x FROM visits", {"bounds": {"cost": (0, 5000)}}),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_whole_question_betrays_no_more_than_it_costs(question):
    sql, options = QUESTIONS[question]
    worlds = [world(rows, sql, {**options, "epsilon": 1.0}) for rows in (OTHERS, [*OTHERS, *MINE])]
    found = audit.lower_bound(outcomes, *worlds, trials=3000, confidence=1 - 1e-6)
    assert found.epsilon <= worlds[0][0].epsilon


def test_half_the_noise_is_found_out():
    sql, options = QUESTIONS["sum"]
    worlds = [world(rows, sql, {**options, "epsilon": 2.0}) for rows in (OTHERS, [*OTHERS, *MINE])]
    for plan, *_ in worlds:
        object.__setattr__(plan, "noise", NoiseKind(plan.noise.shape, plan.noise.multiplier / 4))
    assert audit.lower_bound(outcomes, *worlds, trials=6000, confidence=1 - 1e-6).epsilon > 2.0


def test_a_key_that_one_person_alone_has_is_hardly_ever_shown():
    sql = "SELECT region, COUNT(*) AS x FROM visits GROUP BY region"
    plan, engine, tables = world([*OTHERS, *MINE], sql, {"epsilon": 5.0, "delta": 1e-6, "keys": "private"})
    seen = [str(running.selected(plan, engine, tables, SYSTEM)) for _ in range(60)]
    assert not any("mine alone" in one for one in seen)
    assert any("N" in one for one in seen)


@pytest.mark.parametrize("columns", [1, 2, 5, 9])
def test_smartnoise_charged_one_epsilon_and_spent_one_per_column(columns):
    """Here all columns of a question share the one epsilon that was asked for."""
    duck = DuckDB()
    duck.load("visits", people.table(OTHERS))
    session = queries.Session(duck.connection, None, TABLES)
    aggregates = ", ".join(
        f"SUM({name}) AS s{place}, AVG({name}) AS m{place}"
        for place, name in enumerate(["cost", "price", "visits"] * 3)
        if place < columns
    )
    bounds = dict.fromkeys(("cost", "price", "visits")[: min(columns, 3)], (0, 10))
    plan = plan_of(session, f"SELECT {aggregates} FROM visits", bounds=bounds)
    assert composition.pure(plan.event) <= 1.0
    assert isinstance(plan.event, Repeated)
    assert plan.event.times == len(plan.measurements) >= 2 * min(columns, 3)


def test_qrlew_answered_from_unclamped_rows():
    """One person's 1e300 must not show: the answer stays near the sum of clamped values."""
    duck = DuckDB()
    duck.load("visits", people.table([*OTHERS, people.row(7, "N", 1e300), people.row(8, "N", -1e300)]))
    session = queries.Session(duck.connection, None, TABLES)
    answer = session.sql("SELECT SUM(cost) AS s FROM visits", epsilon=20, bounds={"cost": (0, 100)})
    assert abs(answer.table["s"].to_pylist()[0]) < 6000


def test_the_grid_of_an_answer_follows_from_public_things_alone():
    """Low bits of an answer say nothing: they are those of a grid that both neighbours share."""
    sql, options = QUESTIONS["sum"]
    grids = set()
    for rows in (OTHERS, [*OTHERS, *MINE], []):
        plan, engine, tables = world(rows, sql, {**options, "epsilon": 1.0})
        one = plan.measurements[0]
        noise = plan.noise.plan(one.sensitivity(plan.noise.shape, plan.rows, 2), 2)
        grids.add(noise.exponent)
        value = running.measure(plan, engine, tables, plan.cells(), SYSTEM)[0].values[0, 0] / one.unit
        assert value % 2.0**noise.exponent == 0
    assert len(grids) == 1

"""One suite over every engine: bounded sums are exact whole numbers, the same everywhere, and those of a slow loop."""

import math

import pytest

from terrine import queries
from terrine.errors import InvalidArgument
from tests.queries import people
from tests.queries.conftest import *  # noqa: F403 - the engines' fixtures
from tests.queries.oracle import engine_sums, plan_of, slow_sums

ENGINES = ["duckdb", "postgres"]
"""And Spark, in one test, so that one worker starts one machine for it."""
TABLES = {
    "visits": queries.Private(person="patient_id", rows=3, groups=2),
    "hospitals": queries.Public(),
}
KEYS = {"region": people.REGIONS}
EVERYTHING = (
    "SELECT region, COUNT(*) AS n, AVG(cost) AS mean, VARIANCE(cost) AS v, MEDIAN(cost) AS q, "
    "COUNT(DISTINCT patient_id) AS p FROM visits GROUP BY region"
)


@pytest.fixture(scope="module")
def rows():
    return people.ordinary()


@pytest.fixture(scope="module", params=ENGINES)
def session(request, engines, rows):
    return session_on(engines(request.param), rows)


def session_on(engine, rows):
    engine.load("visits", people.table(rows))
    engine.load("hospitals", people.HOSPITALS)
    return queries.Session(engine.connection, None, TABLES)


def test_every_measurement_is_the_slow_loops(session, rows):
    plan = plan_of(session, EVERYTHING, bounds={"cost": (0, 5000)}, keys=KEYS)
    assert engine_sums(session, plan) == slow_sums(plan, rows)


@pytest.mark.parametrize(
    ("column", "bounds"),
    [("cost", (-1e90, 1e90)), ("price", (0.1, 99999.7)), ("visits", (-(10**6), 10**11))],
)
def test_sums_of_every_type_of_number(session, rows, column, bounds):
    plan = plan_of(session, f"SELECT SUM({column}) AS s FROM visits", bounds={column: bounds})
    assert engine_sums(session, plan) == slow_sums(plan, rows, value=column, keys=())


WHERE = [
    ("cost > 1000 AND NOT urgent", lambda row: row["cost"] is not None and row["cost"] > 1000 and not row["urgent"]),
    ("cost IS NULL OR region IN ('N', 'it''s')", lambda row: missing(row["cost"]) or row["region"] == "N"),
    ("day BETWEEN DATE '2024-01-03' AND '2024-01-09'", lambda row: 3 <= row["day"].day <= 9),
    ("price <= 12345.67 AND visits <> 5", lambda row: row["price"] is not None and float(row["price"]) <= 12345.67),
    ("region LIKE 'e%re' OR hospital = 2", lambda row: row["region"] == "elsewhere" or row["hospital"] == 2),
    ("visits < cost", lambda row: not missing(row["cost"]) and row["visits"] < row["cost"]),
]


def missing(value):
    return value is None or math.isnan(value)


@pytest.mark.parametrize(("where", "kept"), WHERE, ids=[where for where, _ in WHERE])
def test_where_keeps_the_same_rows(session, rows, where, kept):
    plan = plan_of(session, f"SELECT COUNT(*) AS n FROM visits WHERE {where}")
    wanted = [
        row for row in rows if not (isinstance(row["cost"], float) and math.isnan(row["cost"]) and "cost >" in where)
    ]
    assert engine_sums(session, plan) == slow_sums(plan, [row for row in wanted if kept(row)], keys=())


def test_a_join_with_a_public_table_is_bounded_after_it(session, rows):
    sql = "SELECT h.kind, COUNT(*) AS n FROM visits v JOIN hospitals h ON v.hospital = h.id GROUP BY h.kind"
    plan = plan_of(session, sql, keys={"kind": ["a", "b", "c"]})
    kinds = {0: ["a"], 1: ["b", "c"], 2: ["a"], 3: ["b"]}
    joined = [{**row, "kind": kind} for row in rows for kind in kinds.get(row["hospital"], [])]
    assert engine_sums(session, plan) == slow_sums(plan, joined, keys=("kind",))


def test_private_keys_show_what_many_people_have(session):
    sql = "SELECT region, COUNT(*) AS n FROM visits GROUP BY region"
    answer = session.sql(sql, epsilon=20, delta=1e-3, keys="private")
    assert set(answer.table["region"].to_pylist()) <= {*people.REGIONS, "elsewhere"}
    assert answer.table.num_rows >= 2
    assert answer.table["region"].to_pylist() == sorted(answer.table["region"].to_pylist())


def test_keys_of_other_types(session, rows):
    sql = "SELECT day, urgent, hospital, COUNT(*) AS n FROM visits WHERE cost > 0 GROUP BY day, urgent, hospital"
    days = sorted({row["day"] for row in rows})
    plan = plan_of(session, sql, keys={"day": days, "urgent": [True, False], "hospital": list(range(5))})
    kept = [row for row in rows if not missing(row["cost"]) and row["cost"] > 0]
    assert engine_sums(session, plan) == slow_sums(plan, kept, keys=("day", "urgent", "hospital"))


def test_text_that_is_no_number_fails_nowhere(session):
    if session._engine.name == "postgres":
        with pytest.raises(InvalidArgument, match="holds text"):
            plan_of(session, "SELECT SUM(region) AS s FROM visits", bounds={"region": (0, 1)})
        return
    plan = plan_of(session, "SELECT SUM(region) AS s FROM visits", bounds={"region": (0, 1)})
    assert list(engine_sums(session, plan).values()) == [[[0]]]


@pytest.mark.parametrize("text", ["it's", "a''b", '"', "; DROP TABLE visits; --", "é\u202e", "%_", "{{y}}", ":z", "$1"])
def test_hostile_constants_stay_constants(session, text):
    written = text.replace("'", "''")
    plan = plan_of(session, f"SELECT COUNT(*) AS n FROM visits WHERE region = '{written}'")
    assert list(engine_sums(session, plan).values()) == [[[0]]]


def test_all_of_it_on_spark(engines, rows):
    """Fewer questions of each kind: each takes seconds."""
    session = session_on(engines("pyspark"), rows)
    test_every_measurement_is_the_slow_loops(session, rows)
    test_sums_of_every_type_of_number(session, rows, "price", (0.1, 99999.7))
    for where, kept in (WHERE[1], WHERE[2], WHERE[4]):
        test_where_keeps_the_same_rows(session, rows, where, kept)
    test_a_join_with_a_public_table_is_bounded_after_it(session, rows)
    test_private_keys_show_what_many_people_have(session)
    test_keys_of_other_types(session, rows)
    test_text_that_is_no_number_fails_nowhere(session)
    test_hostile_constants_stay_constants(session, "it's")

"""Every shape a plan can have, and a person's rows that no bound may give way to."""

import math

from hypothesis import strategies as st

from terrine import queries
from terrine.mechanisms.lattice import Shape
from tests.queries import people
from tests.queries.oracle import distances, engine_sums, plan_of

TABLES = {
    "visits": queries.Private(person="patient_id", rows=3, groups=2, complete=("price",)),
    "patients": queries.Private(person="patient_id", rows=1),
    "hospitals": queries.Public(),
}
KEYS = {"region": people.REGIONS}
COST = {"cost": (-50, 5000)}
SHAPES = {
    "count": ("SELECT COUNT(*) AS n FROM visits", {}),
    "count by group": ("SELECT region, COUNT(*) AS n FROM visits GROUP BY region", {"keys": KEYS}),
    "count of a column": ("SELECT region, COUNT(cost) AS n FROM visits GROUP BY region", {"keys": KEYS}),
    "people": ("SELECT COUNT(DISTINCT patient_id) AS p FROM visits", {}),
    "people by group": ("SELECT region, COUNT(DISTINCT patient_id) AS p FROM visits GROUP BY region", {"keys": KEYS}),
    "sum": ("SELECT region, SUM(cost) AS s FROM visits GROUP BY region", {"keys": KEYS, "bounds": COST}),
    "mean and count": (
        "SELECT region, AVG(cost) AS m, COUNT(*) AS n, SUM(cost) AS s FROM visits GROUP BY region",
        {"keys": KEYS, "bounds": COST},
    ),
    "variance": (
        "SELECT VARIANCE(cost) AS v, STDDEV(visits) AS d FROM visits",
        {"bounds": {**COST, "visits": (-9, 9)}},
    ),
    "quantiles": (
        "SELECT region, MEDIAN(cost) AS q, MIN(cost) AS lo, MAX(cost) AS hi FROM visits GROUP BY region",
        {"keys": KEYS, "bounds": COST},
    ),
    "histogram": ("SELECT cost, COUNT(*) AS n FROM visits GROUP BY cost", {"bins": {"cost": [0, 10, 100, 1000]}}),
    "two keys": (
        "SELECT region, urgent, COUNT(*) AS n, COUNT(DISTINCT patient_id) AS p FROM visits GROUP BY region, urgent",
        {"keys": {**KEYS, "urgent": [True, False]}},
    ),
    "complete column": ("SELECT COUNT(*) AS n, AVG(price) AS m FROM visits", {"bounds": {"price": (0, 50)}}),
    "where": ("SELECT SUM(price) AS s FROM visits WHERE cost > 10 OR region IS NULL", {"bounds": {"price": (0, 50)}}),
    "public join": (
        "SELECT h.kind, SUM(v.cost) AS s, COUNT(DISTINCT v.patient_id) AS p FROM visits v "
        "JOIN hospitals h ON v.hospital = h.id GROUP BY h.kind",
        {"keys": {"kind": ["a", "b", "c"]}, "bounds": COST},
    ),
    "outer public join": (
        "SELECT COUNT(*) AS n, COUNT(h.kind) AS k FROM visits v LEFT JOIN hospitals h ON v.hospital = h.id",
        {},
    ),
    "private join": (
        "SELECT p.sex, AVG(v.cost) AS m, COUNT(DISTINCT v.patient_id) AS n FROM visits v "
        "JOIN patients p ON v.patient_id = p.patient_id GROUP BY p.sex",
        {"keys": {"sex": ["f", "m"]}, "bounds": COST},
    ),
    "smallest group": (
        "SELECT region, SUM(cost) AS s FROM visits GROUP BY region",
        {"keys": KEYS, "bounds": COST, "min_group": 5},
    ),
}
_costs = st.one_of(
    st.none(),
    st.sampled_from([math.nan, math.inf, -math.inf, -50.0, 5000.0, 1e308, -1e308, 5e-324, -0.0, 2475.0]),
    st.floats(-6000, 6000),
)
_row = st.fixed_dictionaries(
    {
        "region": st.sampled_from([*people.REGIONS, None, "mine alone", "mine too"]),
        "cost": _costs,
        "price": st.sampled_from([None, "0.00", "50.00", "99999999.99", "-99999999.99"]),
        "visits": st.sampled_from([0, 9, -9, 2**62, -(2**62)]),
        "urgent": st.booleans(),
        "hospital": st.integers(0, 5),
    }
)
hostile_rows = st.builds(
    lambda rows, times: [people.row(10**6, **one) for one in rows * times],
    st.lists(_row, min_size=1, max_size=8),
    st.sampled_from([1, 1, 2, 7, 40]),
)


def load(engine, rows):
    import pyarrow as pa

    engine.load("visits", people.table(rows))
    ids = sorted({row["patient_id"] for row in rows if row["patient_id"] is not None})
    sexes = {
        "patient_id": [one for one in ids for _ in range(2)],
        "sex": [("f", "m")[(one + i) % 2] for one in ids for i in (0, 1)],
    }
    engine.load(
        "patients",
        pa.table({"patient_id": pa.array(sexes["patient_id"], pa.int64()), "sex": pa.array(sexes["sex"], pa.string())}),
    )


def violations(engine, shape, mine, others):
    """The measurements that one person's rows, `mine`, move by more than the plan claims; empty if the bounds hold."""
    sql, options = SHAPES[shape]
    engine.load("hospitals", people.HOSPITALS)
    results = []
    for rows in (others, [*others, *mine]):
        load(engine, rows)
        session = queries.Session(engine.connection, None, TABLES)
        plan = plan_of(session, sql, **options)
        results.append(engine_sums(session, plan))
    found = []
    for one, (l1, l2) in distances(*results).items():
        groups = plan.touched(len(plan.cells()))
        claims = {shape: one.sensitivity(shape, plan.rows, groups) for shape in Shape}
        if l1 > claims[Shape.LAPLACE] or l2 > claims[Shape.GAUSSIAN] * (1 + 1e-12):
            found.append((one.measure.name, l1 / claims[Shape.LAPLACE], l2 / claims[Shape.GAUSSIAN]))
    return found

"""A session from end to end: charge first, answers near the truth, half-widths that hold, refusals that are free."""

import datetime
import math

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from terrine import accounting, ledger, queries
from terrine.accounting import composition
from terrine.errors import BudgetExceeded, EngineFailed, InvalidArgument, WeakGuarantee
from terrine.events import Budget, Reproducible, Unit, leaves, settled_unit
from terrine.mechanisms.lattice import Shape
from terrine.queries import quantiles
from terrine.queries.noise import NoiseKind
from terrine.rng import Seeded
from tests.queries.oracle import engine_sums, plan_of

SQL = "SELECT region, COUNT(*) AS n, AVG(cost) AS mean FROM visits GROUP BY region"
EVERYTHING = (
    "COUNT(*) AS n, COUNT(cost) AS c, SUM(cost) AS s, AVG(cost) AS m, VARIANCE(cost) AS v, MEDIAN(cost) AS q, "
    "COUNT(DISTINCT patient_id) AS p"
)
ASKED = {"epsilon": 1.0, "bounds": {"cost": (0, 10_000)}, "keys": {"region": ["N", "S"]}}


@pytest.fixture
def visits(duck):
    generator = np.random.default_rng(0)
    rows = 30_000
    made = pa.table(
        {
            "patient_id": generator.integers(0, 10_000, rows),
            "region": pa.array(np.array(["N", "S", "E"])[generator.integers(0, 3, rows)]),
            "cost": generator.gamma(2, 1000, rows),
            "day": pa.array([datetime.date(2024, 1, 1 + i % 28) for i in range(rows)]),
        }
    )
    duck.load("visits", made)
    return duck


def session_on(visits, account=None, rows=10, **options):
    return queries.Session(
        visits.connection, account, {"visits": queries.Private(person="patient_id", rows=rows)}, **options
    )


def truth(visits, sql):
    return visits.connection.execute(sql).fetchall()


def test_the_contract(visits, account):
    answer = session_on(visits, account).sql(SQL, **ASKED)
    assert answer.table.column_names == ["region", "n", "n_half_width", "mean", "mean_half_width"]
    assert answer.table["region"].to_pylist() == ["N", "S"]
    assert answer.event == next(account.history()).event
    assert settled_unit(answer.event) is Unit.PERSON
    assert 0 < answer.epsilon <= 1.0
    assert answer.delta == 0
    assert composition.pure(answer.event) <= 1.0
    assert set(answer.half_widths) == {"n", "mean"}
    for row, (_, count, mean) in zip(answer.table.to_pylist(), sorted(truth(visits, SQL))[1:], strict=True):
        assert abs(row["n"] - count) < 5 * row["n_half_width"]
        assert abs(row["mean"] - mean) < 5 * row["mean_half_width"]


def test_the_charge_is_on_disk_before_a_row_is_looked_at(visits, account, monkeypatch):
    session = session_on(visits, account)

    def look(expression):
        assert len(list(account.history())) == 1
        raise EngineFailed("seen")

    monkeypatch.setattr(session._engine, "run", look)
    with pytest.raises(EngineFailed):
        session.sql(SQL, **ASKED)
    assert len(list(account.history())) == 1


def test_a_refused_charge_looks_at_nothing(visits, account, monkeypatch):
    session = session_on(visits, account)
    monkeypatch.setattr(session._engine, "run", lambda expression: pytest.fail("a row was looked at"))
    with pytest.raises(BudgetExceeded):
        session.sql(SQL, **{**ASKED, "epsilon": 11.0})
    assert not list(account.history())


def test_an_account_of_another_unit_is_refused(visits, tmp_path):
    with ledger.Ledger.open(f"sqlite:///{tmp_path}/other.db") as book:
        rows = book.account("rows", budget=Budget(epsilon=1, delta=0), unit=Unit.EXAMPLE)
        with pytest.raises(InvalidArgument, match=r"Unit\.PERSON"):
            session_on(visits, rows)


def test_explain_and_mock_look_at_nothing_and_are_free(visits, account, monkeypatch):
    session = session_on(visits, account)
    monkeypatch.setattr(session._engine, "run", lambda expression: pytest.fail("a row was looked at"))
    explained = session.explain(SQL, **ASKED)
    assert "epsilon 1" in str(explained)
    assert explained.cells[0].half_width > 0
    assert explained.record()["half_widths"]["n"] == explained.cells[0].half_width
    mocked = session.sql(SQL, **ASKED, mock=True)
    assert mocked.table["region"].to_pylist() == ["N", "S"]
    assert not list(account.history())


@pytest.mark.parametrize("delta", [None, 1e-6])
@pytest.mark.parametrize(
    "select",
    [
        "COUNT(*) AS x",
        "SUM(cost) AS x",
        "AVG(cost) AS x",
        "STDDEV(cost) AS x",
        "COUNT(DISTINCT patient_id) AS x",
        "MEDIAN(cost) AS x",
    ],
)
def test_half_widths_hold_95_of_100_times(visits, select, delta):
    """False alarm: 24 cells, each within its half-width with 95%; 8 or more outside has probability below 3e-5."""
    plain = select.replace("cost", "least(cost, 10000)")
    wanted = dict(truth(visits, f"SELECT region, {plain} FROM visits GROUP BY region"))
    outside = 0
    session = session_on(visits, rows=30)
    bounds = {"cost": (0, 10_000)} if "cost" in select else None
    for _ in range(8):
        answer = session.sql(
            f"SELECT region, {select} FROM visits GROUP BY region",
            epsilon=8,
            delta=delta,
            bounds=bounds,
            keys={"region": ["N", "S", "E"]},
        )
        for row in answer.table.to_pylist():
            outside += abs(row["x"] - wanted[row["region"]]) > row["x_half_width"]
    assert outside < 8


def test_half_widths_are_not_far_too_wide():
    noise = NoiseKind(Shape.LAPLACE, 1.0)
    draws = np.random.default_rng(0).laplace(size=(2, 100_000))
    for scales in ((1.0,), (1.0, 1.0), (2.0, 0.5)):
        total = sum(scale * draw for scale, draw in zip(scales, draws, strict=False))
        assert np.mean(np.abs(total) > noise.reach(*scales)) == pytest.approx(0.05, abs=0.003)


@pytest.mark.parametrize(("shape", "draw"), [(Shape.LAPLACE, "laplace"), (Shape.GAUSSIAN, "normal")])
def test_the_reach_of_a_tree_is_what_simulation_finds(shape, draw):
    noise = getattr(np.random.default_rng(1), draw)(size=(2000, quantiles.NODES))
    ranks = quantiles.ranks_of(noise)
    worst = max(np.quantile(np.abs(ranks - q * ranks[:, -1:])[:, ::7], 0.95, axis=0).max() for q in (0, 0.5, 1))
    assert 0.85 * quantiles.REACH[shape] < worst < 1.1 * quantiles.REACH[shape]


def test_the_smaller_noise_is_chosen_and_said(visits):
    session = session_on(visits)
    few = session.explain("SELECT COUNT(*) AS n FROM visits", epsilon=1.0, delta=1e-6)
    assert "Laplace" in few.mechanism
    assert few.delta == 0
    days = {"day": [datetime.date(2024, 1, 1 + day) for day in range(28)]}
    sql = "SELECT day, COUNT(DISTINCT patient_id) AS p FROM visits GROUP BY day"
    crowd = session.explain(sql, epsilon=1.0, delta=1e-6, keys=days)
    assert "Gaussian" in crowd.mechanism
    assert accounting.epsilon(crowd.event, delta=1e-6) <= 1.0
    assert crowd.cells[0].half_width < session.explain(sql, epsilon=1.0, keys=days).cells[0].half_width


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 7.3])
@pytest.mark.parametrize("delta", [None, 1e-9, 1e-3])
@pytest.mark.parametrize("keys", [{"region": ["N"]}, "private"])
def test_the_certified_total_is_within_what_was_asked(visits, epsilon, delta, keys):
    sql = f"SELECT region, {EVERYTHING} FROM visits GROUP BY region"
    found = session_on(visits).explain(sql, epsilon=epsilon, delta=delta, bounds={"cost": (0, 1)}, keys=keys)
    assert 0.99 * epsilon < found.epsilon <= epsilon
    assert found.delta <= (delta or 1e-8)
    if found.delta:
        assert accounting.epsilon(found.event, delta=found.delta) <= epsilon * (1 + 1e-9)
    else:
        assert composition.pure(found.event) <= epsilon


def test_private_keys_hide_what_few_people_have(visits, account):
    visits.connection.execute("INSERT INTO visits SELECT 77, 'only me', 5, DATE '2024-01-01' FROM range(500)")
    answer = session_on(visits, account).sql(SQL, **{**ASKED, "keys": "private"})
    assert answer.table["region"].to_pylist() == ["E", "N", "S"]
    assert answer.delta == pytest.approx(1e-8)  # a hundredth of the account's
    assert accounting.epsilon(answer.event, delta=answer.delta) <= 1.0


def test_some_keys_public_some_private(visits):
    answer = session_on(visits).sql(
        "SELECT region, day, COUNT(*) AS n FROM visits GROUP BY region, day",
        epsilon=8,
        delta=1e-4,
        keys={"region": ["N"], "day": "private"},
    )
    assert set(answer.table["region"].to_pylist()) <= {"N"}
    assert answer.table.num_rows > 5


def test_empty_public_groups_get_noise_and_small_ones_can_be_left_blank(visits):
    session = session_on(visits)
    asked = {"epsilon": 5.0, "keys": {"region": ["N", "nowhere"]}}
    sql = "SELECT region, COUNT(*) AS n FROM visits GROUP BY region"
    seen = {session.sql(sql, **{**asked, "epsilon": 0.1}).table["n"].to_pylist()[1] for _ in range(8)}
    assert len(seen) > 3  # noise of scale 100
    blank = session.sql(sql, **asked, min_group=500).table.to_pylist()[1]
    assert blank["n"] is None
    assert blank["n_half_width"] is None


def test_an_empty_table_is_noise_alone(duck):
    duck.connection.execute("CREATE TABLE visits (patient_id BIGINT, region VARCHAR, cost DOUBLE)")
    session = session_on(duck)
    row = session.sql(f"SELECT {EVERYTHING} FROM visits", epsilon=1, bounds={"cost": (0, 10)}).table.to_pylist()[0]
    assert all(value is not None and math.isfinite(value) for value in row.values())
    assert 0 <= row["m"] <= 10
    assert session.sql(SQL, **{**ASKED, "keys": "private"}).table.num_rows == 0


def test_the_fluent_form_asks_the_same(visits):
    session = session_on(visits, rng=Seeded(1))
    fluent = (
        session.table("visits")
        .where("cost > 10")
        .group_by("region", keys=["N", "S"])
        .count("n")
        .mean("cost", bounds=(0, 10_000), alias="mean")
    )
    first = fluent.answer(epsilon=1.0)
    again = session_on(visits, rng=Seeded(1)).sql(SQL.replace("GROUP", "WHERE cost > 10 GROUP"), **ASKED)
    assert first.table == again.table
    assert isinstance(first.event, Reproducible)
    many = (
        session.table("visits")
        .quantiles("cost", [0.1, 0.5, 0.9], bounds=(0, 10_000))
        .minimum("cost", bounds=(0, 10_000))
    )
    assert len(list(leaves(many.explain().event))) == 1  # four quantiles, one price
    histogram = session.table("visits").group_by("cost", bins=[0, 1000, 2000]).count().people()
    assert histogram.answer(epsilon=1).table["cost"].to_pylist() == ["[0, 1000)", "[1000, 2000]"]


def test_order_by_keys(visits):
    answer = session_on(visits).sql(SQL + " ORDER BY region DESC", **ASKED)
    assert answer.table["region"].to_pylist() == ["S", "N"]


REFUSED = [
    ("SELECT SUM(cost) AS s FROM visits", {}, "no bounds"),
    ("SELECT AVG(cost) AS s FROM visits", {"bounds": {"cost": (5, 5)}}, "lower < upper"),
    ("SELECT AVG(cost) AS s FROM visits", {"bounds": {"cost": (0, math.inf)}}, "1e100"),
    ("SELECT AVG(cost) AS s FROM visits", {"bounds": {"cost": 5}}, "two finite"),
    ("SELECT AVG(cost) AS s FROM visits", {"bounds": {"cost": (0, 1), "coast": (0, 1)}}, "coast"),
    ("SELECT AVG(cost) AS s FROM visits", {"bounds": {"cost": (1e9, 1e9 + 1e-6)}}, "too close"),
    ("SELECT AVG(day) AS s FROM visits", {"bounds": {"day": (0, 1)}}, "want numbers"),
    ("SELECT region, COUNT(*) AS n FROM visits GROUP BY region", {}, "may be private"),
    ("SELECT region, COUNT(*) AS n FROM visits GROUP BY region", {"keys": {"region": []}}, "1 to"),
    ("SELECT region, COUNT(*) AS n FROM visits GROUP BY region", {"keys": {"region": ["N", "N"]}}, "once"),
    ("SELECT region, COUNT(*) AS n FROM visits GROUP BY region", {"keys": {"region": [None]}}, "text"),
    ("SELECT region, COUNT(*) AS n FROM visits GROUP BY region", {"keys": {"reign": ["N"]}}, "no GROUP BY"),
    ("SELECT region, COUNT(*) AS n FROM visits GROUP BY region", {"keys": "public"}, "private"),
    ("SELECT region, COUNT(*) AS n FROM visits GROUP BY region", {"keys": {"region": "N"}}, "private"),
    ("SELECT cost, COUNT(*) AS n FROM visits GROUP BY cost", {"keys": "private"}, "bins"),
    ("SELECT cost, COUNT(*) AS n FROM visits GROUP BY cost", {"bins": {"cost": [3, 2]}}, "rising"),
    ("SELECT patient_id, COUNT(*) AS n FROM visits GROUP BY patient_id", {"keys": "private"}, "who a person is"),
    ("SELECT COUNT(*) AS n FROM visits WHERE patient_id = 7", {}, "who a person is"),
    ("SELECT SUM(patient_id) AS s FROM visits", {"bounds": {"patient_id": (0, 1)}}, "who a person is"),
    ("SELECT COUNT(patient_id) AS s FROM visits", {}, "who a person is"),
    ("SELECT COUNT(DISTINCT region) AS s FROM visits", {}, "COUNT\\(DISTINCT patient_id\\)"),
    ("SELECT COUNT(*) AS n FROM '/etc/passwd'", {}, "not registered"),
    ("SELECT COUNT(*) AS n FROM duckdb_tables", {}, "not registered"),
    ("SELECT COUNT(*) AS n FROM visits WHERE nothing = 1", {}, "in no table"),
    ("SELECT COUNT(*) AS n FROM visits WHERE region > 'N'", {}, "order"),
    ("SELECT COUNT(*) AS n FROM visits WHERE cost = 'N'", {}, "constants of its type"),
    ("SELECT COUNT(*) AS n FROM visits WHERE cost LIKE 'N'", {}, "LIKE"),
    ("SELECT COUNT(*) AS n FROM visits WHERE region", {}, "constants of its type"),
    ("SELECT COUNT(*) AS n, SUM(cost) AS n_half_width FROM visits", {"bounds": {"cost": (0, 1)}}, "two of one name"),
    ("SELECT COUNT(*) AS n FROM visits v JOIN visits w ON v.patient_id = w.patient_id", {}, "twice"),
    ("SELECT COUNT(*) AS n FROM visits", {"epsilon": 0}, "epsilon"),
    ("SELECT COUNT(*) AS n FROM visits", {"epsilon": math.nan}, "epsilon"),
    ("SELECT COUNT(*) AS n FROM visits", {"delta": 1}, "delta"),
    ("SELECT COUNT(*) AS n FROM visits", {"delta": -1e-6}, "delta"),
    ("SELECT COUNT(*) AS n FROM visits", {"min_group": 0}, "min_group"),
]


@pytest.mark.parametrize(("sql", "options", "word"), REFUSED, ids=[f"{sql} {options}" for sql, options, _ in REFUSED])
def test_a_refusal_costs_nothing(visits, account, sql, options, word):
    session = session_on(visits, account)
    with pytest.raises(InvalidArgument, match=word) as refusal:
        session.sql(sql, **{"epsilon": 1.0, **options})
    assert "\n" not in str(refusal.value)
    assert not list(account.history())


def test_private_tables_join_on_the_person_alone(duck):
    duck.connection.execute("CREATE TABLE visits AS SELECT 1 AS patient_id, 'N' AS region, 2 AS doctor")
    duck.connection.execute("CREATE TABLE patients AS SELECT 1 AS patient_id, 2 AS doctor, 'x' AS name")
    duck.connection.execute("CREATE TABLE hospitals AS SELECT 1 AS id, 'big' AS kind")
    private = queries.Private(person="patient_id", rows=2)
    session = queries.Session(
        duck.connection, None, {"visits": private, "patients": private, "hospitals": queries.Public()}
    )
    for on in ("v.doctor = p.doctor", "v.patient_id = p.doctor"):
        with pytest.raises(InvalidArgument, match="on the person"):
            session.explain(f"SELECT COUNT(*) AS n FROM visits v JOIN patients p ON {on}")
    with pytest.raises(InvalidArgument, match="public key"):
        session.explain("SELECT COUNT(*) AS n FROM visits v JOIN hospitals h ON v.patient_id = h.id")
    with pytest.raises(InvalidArgument, match="is public"):
        session.explain("SELECT COUNT(*) AS n FROM hospitals")
    with pytest.raises(InvalidArgument, match="in several tables"):
        session.explain("SELECT COUNT(*) AS n FROM visits v JOIN patients p USING (patient_id) WHERE doctor = 2")
    good = session.explain("SELECT COUNT(*) AS n FROM visits v JOIN patients p USING (patient_id)")
    assert "at most 4 rows" in str(good)


def test_names_fold_their_case_unless_quoted(duck):
    duck.connection.execute('CREATE TABLE visits AS SELECT 1 AS patient_id, 2.0 AS "Cost"')
    session = session_on(duck)
    assert session.explain("SELECT SUM(COST) AS s FROM VISITS", bounds={"cost": (0, 1)}).cells
    with pytest.raises(InvalidArgument, match="in no table"):
        session.explain('SELECT SUM("cost") AS s FROM visits', bounds={"cost": (0, 1)})


def test_an_engines_words_are_withheld(visits, account, monkeypatch):
    session = session_on(visits, account)

    def fail(expression):
        raise ValueError("patient 17 has cost abc")

    monkeypatch.setattr(session._engine._backend, "to_pyarrow", fail)
    with pytest.raises(EngineFailed, match="withheld") as failure:
        session.sql("SELECT COUNT(*) AS n FROM visits", epsilon=1)
    assert "17" not in str(failure.value)
    assert failure.value.__cause__ is None
    assert failure.value.__context__ is None
    assert len(list(account.history())) == 1


def test_files(tmp_path, visits):
    made = visits.connection.execute("SELECT * FROM visits").to_arrow_table()
    pyarrow.parquet.write_table(made, tmp_path / "visits.parquet")
    pyarrow.csv.write_csv(made, tmp_path / "visits.csv")
    visits.connection.execute(
        f"ATTACH '{tmp_path}/visits.duckdb' AS other; CREATE TABLE other.visits AS SELECT * FROM visits; DETACH other"
    )
    answers = []
    for suffix in ("parquet", "csv", "duckdb"):
        table = {"visits": queries.Private(person="patient_id", rows=10)}
        session = queries.Session(tmp_path / f"visits.{suffix}", None, table, rng=Seeded(3))
        answers.append(session.sql(SQL.replace("GROUP", "WHERE cost > 100.5 GROUP"), **ASKED).table)
    assert answers[0] == answers[1] == answers[2]


def test_a_csv_is_text_whatever_its_rows_say(tmp_path):
    (tmp_path / "visits.csv").write_text(
        "patient_id,cost,region\n1,5,N\n2,abc,N\n3,,S\n4,nan,N\n5,7\n6,1e999,N,extra\n"
    )
    session = queries.Session(tmp_path / "visits.csv", None, {"visits": queries.Private(person="patient_id", rows=1)})
    assert {str(kind) for kind in session._schemas["visits"].values()} == {"string"}
    answer = session.sql("SELECT COUNT(*) AS n, SUM(cost) AS s FROM visits", epsilon=1e4, bounds={"cost": (0, 10)})
    assert answer.table["s"].to_pylist()[0] == pytest.approx(5, abs=0.5)


def test_connections_that_are_none():
    private = {"visits": queries.Private(person="p", rows=1)}
    for connection in (None, 5, "nowhere.parquet", "/etc/passwd", "mysql://x", "https://x/y.parquet"):
        with pytest.raises(InvalidArgument):
            queries.Session(connection, None, private)
    with pytest.raises(InvalidArgument, match="not in duckdb"):
        queries.Session(ibis.duckdb.connect(), None, private)
    with pytest.raises(InvalidArgument, match="tables"):
        queries.Session(ibis.duckdb.connect(), None, {})


def test_a_person_column_must_tell_people_apart(duck):
    duck.connection.execute("CREATE TABLE visits AS SELECT 1.5::DOUBLE AS patient_id")
    with pytest.raises(InvalidArgument, match="whole numbers, text or UUIDs"):
        session_on(duck).explain("SELECT COUNT(*) AS n FROM visits")


def test_a_weak_guarantee_is_said_aloud(visits):
    with pytest.warns(WeakGuarantee):
        session_on(visits).sql("SELECT COUNT(*) AS n FROM visits", epsilon=50)


PREDICATES = [
    "n IN (1, 2) AND t NOT IN ('a', 'b')",
    "NOT (n = 1 OR t = 'a')",
    "n NOT BETWEEN 1 AND 2",
    "t IS NOT NULL AND NOT n IS NULL",
    "t NOT LIKE '_b%'",
    "3 > n",
    "n <> 2 OR t <> 'a'",
    "f >= 0.1 AND f <= 0.3",
    "b",
    "NOT b OR b IS NULL",
    "b IS FALSE",
    "d > '2024-01-02' AND m < TIMESTAMP '2024-01-02 12:00:00'",
    "n < f OR n = 3",
    "((n = 1 AND (t = 'a' OR f > 0)) OR b = TRUE) AND NOT (n = 2)",
]


@pytest.mark.parametrize("where", PREDICATES)
def test_where_means_what_it_means_in_sql(duck, where):
    duck.connection.execute("""
        CREATE TABLE visits AS SELECT row_number() OVER () AS patient_id, * FROM
        (SELECT unnest([NULL, 1, 2, 3]) AS n), (SELECT unnest([NULL, 'a', 'b', 'abc']) AS t),
        (SELECT unnest([NULL, 0.1::DOUBLE, 0.2, -5]) AS f), (SELECT unnest([NULL, TRUE, FALSE]) AS b),
        (SELECT unnest([DATE '2024-01-02', DATE '2024-01-03']) AS d),
        (SELECT unnest([TIMESTAMP '2024-01-02 11:00:00', NULL]) AS m)
    """)
    wanted = truth(duck, f"SELECT COUNT(*) FROM visits WHERE {where}")[0][0]
    session = session_on(duck, rows=1)
    plan = plan_of(session, f"SELECT COUNT(*) AS n FROM visits WHERE {where}")
    assert engine_sums(session, plan) == {plan.measurements[0]: [[wanted * 2**20]]}


def test_a_connection_of_psycopg(engines):
    engine = engines("postgres")
    engine.load("people_visits", pa.table({"patient_id": [1, 2, 3], "region": ["N", "N", "S"]}))
    session = queries.Session(engine.raw, None, {"people_visits": queries.Private(person="patient_id", rows=1)})
    sql = "SELECT region, COUNT(*) AS n FROM people_visits GROUP BY region"
    answer = session.sql(sql, epsilon=20, keys={"region": ["N", "S"]})
    assert abs(answer.table["n"].to_pylist()[0] - 2) < 5


def test_a_complete_column_needs_one_count_and_is_not_taken_on_trust(duck):
    duck.connection.execute("CREATE TABLE visits AS SELECT i AS patient_id, i::DOUBLE AS cost FROM range(100) t(i)")
    duck.connection.execute("INSERT INTO visits VALUES (200, NULL), (201, 'nan'::DOUBLE), (202, 'inf'::DOUBLE)")
    whole = queries.Private(person="patient_id", rows=1, complete=("cost",))
    session = queries.Session(duck.connection, None, {"visits": whole})
    sql = "SELECT COUNT(*) AS n, COUNT(cost) AS c, AVG(cost) AS m, SUM(cost) AS s FROM visits"
    plan = plan_of(session, sql, bounds={"cost": (0, 100)})
    assert [one.measure.name for one in plan.measurements] == ["CENTRED", "ROWS"]
    rows = next(sums for one, sums in engine_sums(session, plan).items() if one.measure.name == "ROWS")
    assert rows == [[101 * 2**20]]  # NULL and NaN are dropped, so that both counts are one
    answer = session.sql(sql, epsilon=20, bounds={"cost": (0, 100)})
    assert answer.table["n"] == answer.table["c"]
    assert (
        answer.half_widths["n"]
        < session_on(duck, rows=1).sql(sql, epsilon=20, bounds={"cost": (0, 100)}).half_widths["n"]
    )
    with pytest.raises(InvalidArgument, match="declared"):
        queries.Session(
            duck.connection, None, {"visits": queries.Private(person="patient_id", rows=1, complete=("x",))}
        )

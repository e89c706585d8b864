"""What a hostile reader tried on questions: each way in is shut, and stays shut."""

import datetime

import pyarrow as pa
import pytest

from terrine import queries
from terrine.errors import InvalidArgument
from terrine.queries import planning
from tests.queries import people
from tests.queries.conftest import *  # noqa: F403 - the engines' fixtures
from tests.queries.oracle import engine_sums, plan_of

GROUPS = "SELECT region, COUNT(*) AS n FROM visits GROUP BY region"


def session_on(duck, **tables):
    private = {"visits": queries.Private(person="patient_id", rows=3)}
    return queries.Session(duck.connection, None, tables or private)


@pytest.mark.parametrize("collation", ["NOCASE", "NOACCENT"])
@pytest.mark.parametrize("keys", [{"region": ["N", "S"]}, "private"])
def test_one_row_could_rename_a_group_under_a_loose_collation(duck, account, collation, keys):
    """Under NOCASE 'N' and 'n' are one group, called by whichever row comes first: one row could empty a group."""
    duck.connection.execute(f"CREATE TABLE visits (patient_id BIGINT, region VARCHAR COLLATE {collation})")
    session = queries.Session(duck.connection, account, {"visits": queries.Private(person="patient_id", rows=3)})
    with pytest.raises(InvalidArgument, match="takes different texts for equal"):
        session.sql(GROUPS, epsilon=1, delta=1e-7, keys=keys)
    assert not list(account.history())


def test_a_loose_collation_by_default(duck):
    duck.connection.execute("CREATE TABLE visits (patient_id BIGINT, region VARCHAR)")
    session = session_on(duck)
    duck.connection.execute("PRAGMA default_collation = NOCASE")
    with pytest.raises(InvalidArgument, match="takes different texts for equal"):
        session.sql(GROUPS, epsilon=1, keys={"region": ["N"]})


@pytest.mark.parametrize("kind", ["citext", "char(5)", "text COLLATE loose"])
def test_loose_text_on_postgresql(engines, kind):
    engine = engines("postgres")
    try:
        engine.raw.execute("CREATE EXTENSION IF NOT EXISTS citext")
        engine.raw.execute(
            "CREATE COLLATION IF NOT EXISTS loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
        )
    except Exception as error:
        pytest.skip(f"this server has no citext or ICU: {error}")
    engine.raw.execute("DROP TABLE IF EXISTS loose_visits")
    engine.raw.execute(f"CREATE TABLE loose_visits (patient_id bigint, region {kind})")
    session = queries.Session(engine.connection, None, {"loose_visits": queries.Private(person="patient_id", rows=3)})
    with pytest.raises(InvalidArgument, match="takes different texts for equal"):
        session.sql(GROUPS.replace("visits", "loose_visits"), epsilon=1, keys={"region": ["N"]})


def test_a_date_that_python_cannot_hold_tells_nothing(duck):
    """Dates beyond the year 9999 and 'infinity' fail on their way home: one person could make every answer fail."""
    duck.connection.execute("CREATE TABLE visits (patient_id BIGINT, day DATE)")
    duck.connection.execute("INSERT INTO visits VALUES (1, 'infinity'), (2, '-infinity'), (3, '200000-01-01')")
    duck.connection.execute("INSERT INTO visits SELECT i, DATE '2024-05-05' FROM range(1000) t(i)")
    answer = session_on(duck).sql(
        "SELECT day, COUNT(*) AS n FROM visits GROUP BY day", epsilon=5, delta=1e-4, keys="private"
    )
    assert answer.table["day"].to_pylist() == [datetime.date(2024, 5, 5)]


def test_a_key_of_a_million_letters_is_in_no_group(duck):
    duck.connection.execute(
        "CREATE TABLE visits AS SELECT i AS patient_id, repeat('x', 1000000) AS region FROM range(200) t(i)"
    )
    assert session_on(duck).sql(GROUPS, epsilon=5, delta=1e-4, keys="private").table.num_rows == 0


def test_distinct_people_of_an_outer_joined_table_are_not_everybody(duck):
    """COUNT(DISTINCT p.patient_id) after a LEFT JOIN counts those who matched; answering with all would be a lie."""
    duck.connection.execute("CREATE TABLE visits AS SELECT 1 AS patient_id")
    duck.connection.execute("CREATE TABLE patients AS SELECT 1 AS patient_id")
    one = queries.Private(person="patient_id", rows=1)
    session = session_on(duck, visits=one, patients=one)
    sql = "SELECT COUNT(DISTINCT {}.patient_id) AS n FROM visits v LEFT JOIN patients p ON v.patient_id = p.patient_id"
    assert session.explain(sql.format("v")).cells
    with pytest.raises(InvalidArgument, match="LEFT JOIN"):
        session.explain(sql.format("p"))


def test_what_the_engine_cannot_do_is_not_charged(duck, account, monkeypatch):
    duck.load("visits", people.table([people.row(1)]))
    session = queries.Session(duck.connection, account, {"visits": queries.Private(person="patient_id", rows=3)})

    def refuse(expression):
        raise NotImplementedError("this engine has no floor")

    monkeypatch.setattr(session._engine._backend, "compile", refuse)
    with pytest.raises(InvalidArgument, match="nothing was charged"):
        session.sql("SELECT COUNT(*) AS n FROM visits", epsilon=1)
    assert not list(account.history())


def test_columns_that_are_called_like_ours(duck):
    """Tables may have columns called person, weight, k0, c0, bin or heavy: inside the engine they have others."""
    names = ["patient_id", "person", "weight", "k0", "c0", "c1", "bin", "heavy", "owned", "rank", "m0_0"]
    duck.load("visits", pa.table({name: [1, 1, 2] if name == "patient_id" else [5, 6, 7] for name in names}))
    session = session_on(duck)
    for name in names[1:]:
        select = f"{name}, SUM({name}) AS s, MEDIAN({name}) AS q, COUNT(DISTINCT patient_id) AS p"
        sql = f"SELECT {select} FROM visits WHERE {name} > 5 GROUP BY {name}"
        plan = plan_of(session, sql, bounds={name: (0, 10)}, keys={name: [5, 6, 7]})
        sums = next(iter(engine_sums(session, plan).values()))
        assert [one[0] > 0 for one in sums] == [False, True, True]


def test_types_that_cannot_be_compared_are_refused_in_one_line(duck):
    duck.connection.execute("CREATE TABLE visits AS SELECT 1 AS patient_id, 7::UBIGINT AS u")
    with pytest.raises(InvalidArgument, match="WHERE") as refusal:
        session_on(duck).explain("SELECT COUNT(*) AS n FROM visits WHERE u > -1")
    assert "\n" not in str(refusal.value)


def test_a_name_with_quotes_and_semicolons(duck):
    name = 'co"st; DROP TABLE visits; --'
    duck.load("visits", pa.table({"patient_id": [1, 2], name: [3.0, 4.0]}))
    session = session_on(duck)
    quoted = '"' + name.replace('"', '""') + '"'
    answer = session.sql(f"SELECT SUM({quoted}) AS s FROM visits", epsilon=1, bounds={name: (0, 10)})
    assert answer.table.num_rows == 1


def test_a_table_that_stands_twice_under_another_case(duck):
    duck.load("visits", people.table([people.row(1)]))
    session = session_on(duck)
    with pytest.raises(InvalidArgument, match="twice"):
        session.explain("SELECT COUNT(*) AS n FROM visits a JOIN VISITS b ON a.patient_id = b.patient_id")


def test_the_alias_of_a_key_does_not_hide_a_column(duck):
    """SELECT cost AS region ... GROUP BY region could mean two things; it is refused, not guessed."""
    duck.load("visits", people.table([people.row(1)]))
    with pytest.raises(InvalidArgument, match="bare column"):
        session_on(duck).explain(
            "SELECT visits AS region, COUNT(*) AS n FROM visits GROUP BY region", keys="private", delta=1e-6
        )


def test_noise_that_leaves_64_bits_is_refused_before_the_charge(duck, account):
    duck.load("visits", people.table(people.ordinary(people=3)))
    session = queries.Session(duck.connection, account, {"visits": queries.Private(person="patient_id", rows=10**6)})
    keys = {"region": [f"r{place}" for place in range(300)], "visits": list(range(300))}
    sums = ", ".join(f"SUM({name}) AS s{place}" for place, name in enumerate(["cost", "price", "hospital"]))
    sql = f"SELECT region, visits, {sums} FROM visits GROUP BY region, visits"
    with pytest.raises(InvalidArgument, match="64 bits"):
        session.sql(sql, epsilon=1e-6, bounds=dict.fromkeys(["cost", "price", "hospital"], (0, 1e90)), keys=keys)
    assert not list(account.history())


def test_a_long_list_of_keys_is_bounded_as_a_short_one_is(duck):
    """Long lists are not written into SQL; a person's rows outside the list must not loosen the bound."""
    mine = [people.row(1, f"r{place}", 10.0) for place in range(40)] + [people.row(1, "not listed", 10.0)] * 10
    duck.load("visits", people.table(mine))
    plan = plan_of(
        session_on(duck),
        "SELECT region, SUM(cost) AS s, COUNT(DISTINCT patient_id) AS p FROM visits GROUP BY region",
        bounds={"cost": (0, 10)},
        keys={"region": [f"r{place}" for place in range(1500)]},
    )
    for one, sums in engine_sums(session_on(duck), plan).items():
        moved = sum(abs(cell[0]) for cell in sums)
        assert 0 < moved <= one.sensitivity(plan.noise.shape, plan.rows, plan.touched(1500))


def test_a_whole_number_of_64_unsigned_bits_as_a_private_key(duck):
    made = "SELECT i AS patient_id, 18446744073709551615::UBIGINT AS region FROM range(900) t(i)"
    duck.connection.execute(f"CREATE TABLE visits AS {made}")
    assert session_on(duck).sql(GROUPS, epsilon=5, delta=1e-4, keys="private").table.num_rows == 0


def test_half_widths_are_the_same_whatever_the_rows(duck):
    """Of counts, sums and people they are public; only those of ratios follow the noisy answers."""
    sql = "SELECT region, COUNT(*) AS n, SUM(cost) AS s, COUNT(DISTINCT patient_id) AS p FROM visits GROUP BY region"
    seen = set()
    for rows in (people.ordinary(), people.ordinary(people=3, seed=9), [people.row(1)]):
        duck.load("visits", people.table(rows))
        answer = session_on(duck).sql(sql, epsilon=1, bounds={"cost": (0, 10)}, keys={"region": people.REGIONS})
        seen.add(tuple(sorted(answer.half_widths.items())))
    assert len(seen) == 1


def test_a_plan_holds_nothing_of_the_rows(duck):
    plans = []
    for rows in (people.ordinary(), [people.row(1)]):
        duck.load("visits", people.table(rows))
        plan = plan_of(session_on(duck), GROUPS, keys="private", delta=1e-6)
        plans.append((plan.event, plan.selection, plan.noise, plan.measurements, plan.keys))
    assert plans[0] == plans[1]
    assert isinstance(plan, planning.QueryPlan)

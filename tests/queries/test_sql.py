"""SQL that cannot lie: what is understood, what is refused by name, and that nothing else ever happens."""

import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from terrine.errors import InvalidArgument
from terrine.queries.parsing import LONGEST, question_of
from terrine.queries.question import Kind, Name, Question

REFUSED = {
    "SELECT COUNT(*) FROM visits; SELECT COUNT(*) FROM visits": "statements",
    "DROP TABLE visits": "DROP",
    "CREATE TABLE x AS SELECT COUNT(*) FROM visits": "CREATE",
    "INSERT INTO visits VALUES (1)": "INSERT",
    "UPDATE visits SET cost = 1": "UPDATE",
    "DELETE FROM visits": "DELETE",
    "COPY visits TO '/tmp/x.csv'": "COPY",
    "PRAGMA database_list": "PRAGMA",
    "ATTACH 'x.db'": "",
    "SET threads = 1": "SET",
    "EXPLAIN SELECT COUNT(*) FROM visits": "not",
    "SELECT COUNT(*) FROM (SELECT * FROM visits)": "subquery",
    "WITH v AS (SELECT * FROM visits) SELECT COUNT(*) FROM v": "WITH",
    "SELECT COUNT(*) FROM visits UNION ALL SELECT COUNT(*) FROM visits": "UNION",
    "SELECT COUNT(*) FROM visits EXCEPT SELECT 1": "UNION",
    "SELECT COUNT(*) OVER (PARTITION BY region) FROM visits": "window",
    "SELECT region, COUNT(*) FROM visits GROUP BY region HAVING COUNT(*) > 5": "HAVING",
    "SELECT region, COUNT(*) AS n FROM visits GROUP BY region ORDER BY n": "ORDER BY",
    "SELECT region, COUNT(*) FROM visits GROUP BY region ORDER BY COUNT(*)": "ORDER BY",
    "SELECT region, COUNT(*) FROM visits GROUP BY region LIMIT 3": "LIMIT",
    "SELECT region, COUNT(*) FROM visits GROUP BY region OFFSET 3": "OFFSET",
    "SELECT COUNT(*) FROM visits TABLESAMPLE (10 PERCENT)": "SAMPLE",
    "SELECT COUNT(*) FROM visits USING SAMPLE 5": "",
    "SELECT COUNT(*) FROM visits WHERE random() < 0.5": "RAND",
    "SELECT random() FROM visits": "RAND",
    "SELECT COUNT(*) FROM read_csv('/etc/passwd')": "function",
    "SELECT COUNT(*) FROM generate_series(1, 5)": "function",
    "SELECT COUNT(*) FROM visits, visits AS other": "JOIN",
    "SELECT COUNT(*) FROM visits CROSS JOIN hospitals": "JOIN",
    "SELECT COUNT(*) FROM visits NATURAL JOIN hospitals": "JOIN",
    "SELECT COUNT(*) FROM visits RIGHT JOIN hospitals ON a = b": "JOIN",
    "SELECT COUNT(*) FROM visits FULL JOIN hospitals ON a = b": "JOIN",
    "SELECT COUNT(*) FROM visits JOIN hospitals ON a = b AND c = d": "JOIN",
    "SELECT COUNT(*) FROM visits JOIN hospitals ON a < b": "JOIN",
    "SELECT COUNT(*) FROM visits ASOF JOIN hospitals ON a = b": "",
    "SELECT COUNT(*) FROM visits SEMI JOIN hospitals ON a = b": "JOIN",
    "SELECT COUNT(*) FROM main.visits": "DB",
    "SELECT * FROM visits": r"\*",
    "SELECT visits.* FROM visits": r"\*",
    "SELECT COUNT(visits.*) FROM visits": "",
    "SELECT cost FROM visits": "bare column",
    "SELECT region, cost, COUNT(*) FROM visits GROUP BY region": "bare column",
    "SELECT cost + 1, COUNT(*) FROM visits": "ADD",
    "SELECT 1 FROM visits": "",
    "SELECT region FROM visits GROUP BY region": "aggregate",
    "SELECT COUNT(*) FROM visits GROUP BY region": "SELECT",
    "SELECT region, COUNT(*) FROM visits GROUP BY ALL": "",
    "SELECT region, COUNT(*) FROM visits GROUP BY 1": "GROUP BY",
    "SELECT region, COUNT(*) FROM visits GROUP BY ROLLUP (region)": "",
    "SELECT region, COUNT(*) FROM visits GROUP BY CUBE (region)": "",
    "SELECT region, COUNT(*) FROM visits GROUP BY GROUPING SETS ((region))": "",
    "SELECT upper(region), COUNT(*) FROM visits GROUP BY upper(region)": "",
    "SELECT DISTINCT COUNT(*) FROM visits": "DISTINCT",
    "SELECT DISTINCT ON (region) COUNT(*) FROM visits": "DISTINCT",
    "SELECT SUM(DISTINCT cost) FROM visits": "DISTINCT",
    "SELECT AVG(DISTINCT cost) FROM visits": "DISTINCT",
    "SELECT COUNT(DISTINCT region, cost) FROM visits": "several",
    "SELECT COUNT(*) FILTER (WHERE cost > 1) FROM visits": "FILTER",
    "SELECT SUM(cost * 2) FROM visits": "MUL",
    "SELECT SUM(1 / cost) FROM visits": "DIV",
    "SELECT SUM(CAST(region AS INT)) FROM visits": "CAST",
    "SELECT SUM(CASE WHEN cost > 1 THEN 1 ELSE 0 END) FROM visits": "CASE",
    "SELECT SUM((SELECT MAX(cost) FROM visits)) FROM visits": "",
    "SELECT STRING_AGG(region) FROM visits": "",
    "SELECT ARRAY_AGG(cost) FROM visits": "",
    "SELECT ANY_VALUE(cost) FROM visits": "",
    "SELECT FIRST(cost) FROM visits": "",
    "SELECT MODE(cost) FROM visits": "",
    "SELECT pg_sleep(5), COUNT(*) FROM visits": "",
    "SELECT MIN(cost, 3) FROM visits": "",
    "SELECT QUANTILE(cost, 2) FROM visits": "between 0 and 1",
    "SELECT QUANTILE(cost, [0.5, 0.6]) FROM visits": "",
    "SELECT QUANTILE(cost, -0.5) FROM visits": "",
    "SELECT COUNT(*) FROM visits WHERE 1 / cost > 0": "DIV",
    "SELECT COUNT(*) FROM visits WHERE CAST(region AS INT) = 1": "",
    "SELECT COUNT(*) FROM visits WHERE cost IN (SELECT cost FROM visits)": "subquery",
    "SELECT COUNT(*) FROM visits WHERE EXISTS (SELECT 1)": "",
    "SELECT COUNT(*) FROM visits WHERE cost > (SELECT AVG(cost) FROM visits)": "subquery",
    "SELECT COUNT(*) FROM visits WHERE SUM(cost) > 1": "",
    "SELECT COUNT(*) FROM visits WHERE region ILIKE 'n%'": "",
    "SELECT COUNT(*) FROM visits WHERE region SIMILAR TO 'n'": "",
    "SELECT COUNT(*) FROM visits WHERE region LIKE 'a!%' ESCAPE '!'": "",
    "SELECT COUNT(*) FROM visits WHERE regexp_matches(region, '(a+)+$')": "",
    "SELECT COUNT(*) FROM visits WHERE cost = NULL": "",
    "SELECT COUNT(*) FROM visits WHERE cost IS DISTINCT FROM 3": "",
    "SELECT COUNT(*) FROM visits WHERE cost > ALL (SELECT 1)": "",
    "SELECT COUNT(*) FROM visits WHERE region = 'a\\b'": "backslash",
    "SELECT COUNT(*) FROM visits WHERE region = '${spark.app.name}'": "control characters",
    "SELECT COUNT(*) FROM visits WHERE cost > 1e999": "64 bits",
    "SELECT COUNT(*) FROM visits WHERE cost > 99999999999999999999": "64 bits",
    "SELECT COUNT(*) FROM visits WHERE day > CURRENT_DATE": "",
    "SELECT COUNT(*) FROM visits WHERE day > DATE '2024-13-01'": "YYYY",
    "SELECT COUNT(*) FROM visits WHERE day > TIMESTAMP '2024-01-01 00:00:00+02'": "",
    "SELECT COUNT(*) FROM visits WHERE TRUE": "",
    "SELECT COUNT(*) FROM visits FOR UPDATE": "",
    "SELECT COUNT(*) INTO x FROM visits": "",
    "SELECT COUNT(*) AS n, SUM(cost) AS N FROM visits": "two columns",
    "SELECT region, region AS again, COUNT(*) FROM visits GROUP BY region": "twice",
    "SELECT region, COUNT(*) FROM visits GROUP BY DISTINCT region": "DISTINCT",
    "SELECT COUNT(*)": "FROM",
    "": "SELECT",
    "   ": "",
    "SELECT": "",
    ";;;": "",
    "-- nothing": "",
    "SELECT COUNT(*) FROM visits WHERE (": "",
    "SELECT COUNT(*) FROM visits WHERE " + "(" * 900 + "a" + ")" * 900: "nested",
    "SELECT COUNT(*) FROM visits WHERE " + "(" * 5000: "words",
    "SELECT COUNT(*) FROM visits WHERE " + "NOT " * 2000 + "a": "",
    "SELECT COUNT(*) FROM visits WHERE x > " + "- " * 1500 + "1": "nested",
    "SELECT COUNT(*) FROM visits WHERE a = 1" + " OR a = 1" * 5000: "characters",
    "SELECT " + "a." * 1000 + "b FROM visits": "",
    "SELECT COUNT(*) FROM visits WHERE a = '" + "x" * LONGEST + "'": "characters",
    "SELECT COUNT(*) FROM visits WHERE a = '\x00'": "NUL",
    "SELECT COUNT(*) FROM \u202evisits": "",
}


@pytest.mark.parametrize(("sql", "word"), REFUSED.items(), ids=[sql[:60] for sql in REFUSED])
def test_refused_by_name(sql, word):
    with pytest.raises(InvalidArgument, match=word or None) as refusal:
        question_of(sql)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("sql", [None, 5, b"SELECT", ["SELECT"]])
def test_not_text(sql):
    with pytest.raises(InvalidArgument):
        question_of(sql)


def test_what_a_question_holds():
    found = question_of(
        'select v.Region as r, count(*) n, COUNT(DISTINCT patient_id), avg("Cost") AS mean, median(cost), max(cost) '
        "from visits as v join hospitals h on h.id = v.hospital where v.cost > 5 and not urgent group by v.Region "
        "order by r desc -- a comment"
    )
    assert (found.table, found.alias, found.joins[0].table) == ("visits", "v", "hospitals")
    assert found.keys[0].column == Name("Region", "v")
    assert [one.kind for one in found.aggregates] == [Kind.COUNT, Kind.PEOPLE, Kind.MEAN, Kind.QUANTILE, Kind.QUANTILE]
    assert found.aggregates[2].column == Name("Cost", exact=True)
    assert found.columns == ("r", "n", "people", "mean", "median_cost", "max_cost")
    assert found.joins[0].left == Name("hospital", "v")
    assert found.order[0].descending


@pytest.mark.parametrize(
    "written",
    ["QUANTILE(cost, 0.25)", "QUANTILE_CONT(cost, 0.25)", "PERCENTILE_CONT(0.25) WITHIN GROUP (ORDER BY cost)"],
)
def test_ways_to_write_a_quantile(written):
    found = question_of(f"SELECT {written} AS q FROM visits").aggregates[0]
    assert (found.kind, found.q, found.column) == (Kind.QUANTILE, 0.25, Name("cost"))


def test_a_thousand_conditions_in_a_row_are_no_depth():
    found = question_of("SELECT COUNT(*) FROM t WHERE a = 1" + " AND b = 2" * 400)
    assert len(found.where.parts) == 401


WORDS = [
    "SELECT",
    "FROM",
    "WHERE",
    "GROUP",
    "BY",
    "HAVING",
    "ORDER",
    "LIMIT",
    "DISTINCT",
    "COUNT",
    "SUM",
    "AVG",
    "MIN",
    "MAX",
    "MEDIAN",
    "QUANTILE",
    "(",
    ")",
    "(",
    ")",
    ",",
    ",",
    "*",
    ".",
    "=",
    "<>",
    "<",
    ">",
    "AND",
    "OR",
    "NOT",
    "IN",
    "IS",
    "NULL",
    "LIKE",
    "BETWEEN",
    "CASE",
    "WHEN",
    "THEN",
    "ELSE",
    "END",
    "CAST",
    "AS",
    "JOIN",
    "LEFT",
    "ON",
    "USING",
    "UNION",
    "ALL",
    "WITH",
    "OVER",
    "PARTITION",
    "FILTER",
    "WITHIN",
    "visits",
    "hospitals",
    "region",
    "cost",
    "patient_id",
    "'N'",
    "1",
    "0.5",
    "-1",
    "DATE",
    "'2024-01-01'",
    ";",
    "--",
    "/*",
    "*/",
    '"',
    "'",
    "[",
    "]",
    "{",
    "}",
    "::",
    "->",
    "@",
    "$1",
    "?",
    "random()",
    "LATERAL",
    "VALUES",
    "QUALIFY",
    "WINDOW",
    "TABLESAMPLE",
    "PIVOT",
    "UNNEST",
    "EXCEPT",
    "INTERSECT",
    "INTERVAL",
    "EXISTS",
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join))
@example("SELECT COUNT ( DISTINCT region ) FROM visits")
def test_any_words_are_a_question_or_a_refusal(sql):
    assert_honest(sql)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=string.printable + "é\u202e\x00'\"();", max_size=80))
def test_any_text_is_a_question_or_a_refusal(sql):
    assert_honest(sql)


GOOD = [
    "SELECT",
    "region",
    ",",
    "COUNT",
    "(",
    "*",
    ")",
    "AS",
    "n",
    ",",
    "AVG",
    "(",
    "cost",
    ")",
    "AS",
    "m",
    "FROM",
    "visits",
    "WHERE",
    "cost",
    ">",
    "1",
    "GROUP",
    "BY",
    "region",
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD)), st.sampled_from(WORDS)), min_size=1, max_size=4))
def test_words_put_into_a_good_question_are_kept_or_refused(places):
    """What is understood must be all that was said: no word may be dropped on the way."""
    words = list(GOOD)
    for place, word in places:
        words.insert(place, word)
    found = assert_honest(" ".join(words))
    dangerous = {
        "HAVING",
        "LIMIT",
        "OVER",
        "FILTER",
        "UNION",
        "WITH",
        "QUALIFY",
        "WINDOW",
        "TABLESAMPLE",
        "PIVOT",
        "CASE",
        "CAST",
    }
    inserted = {word for _, word in places}
    if found is not None and not inserted & {"--", "/*", "'", '"', "AS"}:
        names = {found.table, found.alias, *found.columns, *(join.alias for join in found.joins)}
        assert not (inserted & dangerous) - {name.upper() for name in names}
        assert "DISTINCT" not in inserted or any(one.kind is Kind.PEOPLE for one in found.aggregates)


def assert_honest(sql):
    try:
        found = question_of(sql)
    except InvalidArgument as error:
        found = error
    if isinstance(found, InvalidArgument):
        assert "\n" not in str(found)
        return None
    assert isinstance(found, Question)
    assert found.aggregates
    return found

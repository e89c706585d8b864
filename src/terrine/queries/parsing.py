"""SQL that cannot lie: text in, a `Question` out, or a refusal that names what was not understood.

sqlglot reads the text. A node of its tree is accepted only if its type is on a list AND every argument it carries is:
DISTINCT, HAVING or FILTER are arguments of nodes that look harmless without them. Nothing is ignored, nothing is
guessed, and no text goes on to an engine. Length and depth are capped before sqlglot sees the text.
"""

from __future__ import annotations

import logging
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.tokens import TokenType

from terrine import check
from terrine.errors import InvalidArgument
from terrine.queries.clauses import identifier, name_of, only, order_of, predicate_of, refused, source_of
from terrine.queries.question import HIGHEST, LOWEST, Aggregate, AskedKey, Join, Kind, Name, Predicate, Question

LONGEST = 10_000
DEEPEST = 40
MOST_WORDS = 2_000

_REFUSED: dict[str, tuple[str, str]] = {
    "with_": ("WITH", "ask each part as its own question"),
    "distinct": ("SELECT DISTINCT", "GROUP BY the columns"),
    "having": ("HAVING", "min_group=... drops small groups by their noisy size"),
    "qualify": ("QUALIFY", "sort and filter the answer, which is public"),
    "limit": ("LIMIT", "cut the answer, which is public"),
    "offset": ("OFFSET", "cut the answer, which is public"),
    "sample": ("TABLESAMPLE", "ask about all rows"),
    "windows": ("WINDOW", "GROUP BY the columns"),
    "laterals": ("LATERAL", "make a view of it"),
    "pivots": ("PIVOT", "GROUP BY the columns"),
    "into": ("INTO", "keep answer.table"),
    "locks": ("FOR UPDATE", "leave it out"),
}
_SIMPLE: dict[type[exp.Expr], Kind] = {
    exp.Sum: Kind.SUM,
    exp.Avg: Kind.MEAN,
    exp.Variance: Kind.VARIANCE,
    exp.VariancePop: Kind.VARIANCE_POPULATION,
    exp.Stddev: Kind.DEVIATION,
    exp.StddevSamp: Kind.DEVIATION,
    exp.StddevPop: Kind.DEVIATION_POPULATION,
}
_QUANTILES: dict[type[exp.Expr], float] = {exp.Median: 0.5, exp.Min: LOWEST, exp.Max: HIGHEST}
_QUANTILE_NAMES = frozenset({"QUANTILE_CONT", "PERCENTILE_CONT", "QUANTILE"})
_KNOWN = "COUNT, SUM, AVG, VARIANCE, VAR_POP, STDDEV, STDDEV_POP, MIN, MAX, MEDIAN and QUANTILE(column, q)"


def question_of(sql: str) -> Question:
    """The question that one SELECT asks.

    Raises:
        InvalidArgument: it is not one SELECT over the accepted grammar; the error names the piece and the next step.
    """
    tree = _parsed(sql)
    if not isinstance(tree, exp.Select):
        raise refused(_statement(tree), "want one SELECT ... FROM ... [WHERE ...] [GROUP BY ...]")
    for name, (word, hint) in _REFUSED.items():
        if tree.args.get(name):
            raise refused(word, hint)
    only(tree, {"expressions", "from_", "joins", "where", "group", "order"}, "SELECT")
    if not tree.args.get("from_"):
        raise refused("SELECT without FROM", "name a registered table")
    table, alias = source_of(tree.args["from_"].this)
    grouped = _grouped(tree.args.get("group"))
    keys, aggregates, columns = _selected(tree.expressions, grouped)
    if not aggregates:
        raise refused("SELECT without an aggregate", f"want one or more of {_KNOWN}")
    where = tree.args.get("where")
    return Question(
        table=table,
        alias=alias,
        keys=keys,
        aggregates=aggregates,
        columns=columns,
        joins=tuple(_join(one) for one in tree.args.get("joins") or ()),
        where=None if where is None else predicate_of(where.this),
        order=order_of(tree.args.get("order"), [key.alias for key in keys]),
    )


def predicate_in(text: str) -> Predicate:
    """The predicate that `text` writes, as it would stand after WHERE."""
    tree = _parsed(f"SELECT 1 FROM t WHERE {check.text('where', text, at_least=1)}")
    if not isinstance(tree, exp.Select) or not tree.args.get("where"):
        raise refused("WHERE", "want a condition on columns of a row")
    only(tree, {"expressions", "from_", "where"}, "WHERE")
    return predicate_of(tree.args["where"].this)


def _parsed(sql: str) -> exp.Expr:
    if not isinstance(sql, str) or not 0 < len(sql) <= LONGEST:
        raise check.refuse("sql", sql, f"a SELECT of at most {LONGEST:,} characters")
    if "\x00" in sql:
        raise check.refuse("sql", sql, "text without NUL characters")
    level = logging.getLogger("sqlglot").level
    try:
        tokens = sqlglot.tokenize(sql)
        _shallow(tokens)
        logging.getLogger("sqlglot").setLevel(logging.CRITICAL)
        trees = [tree for tree in sqlglot.parse(sql) if tree is not None]
    except InvalidArgument:
        raise
    except RecursionError:
        raise refused("a text nested too deeply", f"want at most {DEEPEST} levels") from None
    except (SqlglotError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise _not_understood(error) from None
    finally:
        logging.getLogger("sqlglot").setLevel(level)
    if len(trees) != 1:
        raise refused(f"{len(trees)} statements", "want exactly one SELECT")
    tree: exp.Expr = trees[0]
    return tree


def _not_understood(error: Exception) -> InvalidArgument:
    """Which word was not understood, and after which; the parser's own words name its classes."""
    places = getattr(error, "errors", None) or [{}]
    word, before = (str(places[0].get(name) or "") for name in ("highlight", "start_context"))
    if not word:
        return InvalidArgument("sql: not understood; is a quote open, or the end left out? want one SELECT")
    after = f" after {check.shown(' '.join(before.split())[-30:].strip())}" if before.strip() else ""
    return InvalidArgument(
        f"sql: not understood at {check.shown(word, 40)}{after}; want one SELECT, with double quotes around names that "
        'are words of SQL, such as "when"'
    )


def _shallow(tokens: list[Any]) -> None:
    """Few words, few levels: what nests is counted on the words, so that no parser has to dive for it."""
    if len(tokens) > MOST_WORDS:
        raise refused(f"a text of {len(tokens):,} words", f"want at most {MOST_WORDS:,}")
    opening = {TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.L_BRACE, TokenType.CASE, TokenType.NOT, TokenType.DASH}
    closing = {TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.R_BRACE, TokenType.END, TokenType.COMMA}
    depth = 0
    for token in tokens:
        if token.token_type in opening:
            depth += 1
        elif token.token_type in closing or token.token_type in {TokenType.AND, TokenType.OR}:
            depth = max(0, depth - 1)
        if depth > DEEPEST:
            raise refused("a text nested too deeply", f"want at most {DEEPEST} levels")


def _statement(tree: exp.Expr) -> str:
    if isinstance(tree, exp.SetOperation):
        return "UNION, INTERSECT or EXCEPT"
    if isinstance(tree, exp.Command):
        return str(tree.this).upper()
    return type(tree).__name__.upper()


def _grouped(group: exp.Expr | None) -> list[exp.Expr]:
    if group is None:
        return []
    only(group, {"expressions"}, "GROUP BY")
    if group.args.get("all") is not None:  # False is what the parser keeps of DISTINCT
        raise refused("GROUP BY ALL or DISTINCT", "name the columns")
    for one in group.expressions:
        if not isinstance(one, exp.Column):
            raise refused(f"GROUP BY {_short(one)}", "want plain columns; bins={...} makes a histogram of a number")
    return list(group.expressions)


def _selected(
    items: list[exp.Expr], grouped: list[exp.Expr]
) -> tuple[tuple[AskedKey, ...], tuple[Aggregate, ...], tuple[str, ...]]:
    by = [name_of(one) for one in grouped]
    keys: list[AskedKey] = []
    aggregates: list[Aggregate] = []
    columns: list[str] = []
    for item in items:
        inner, alias = item, ""
        if isinstance(item, exp.Alias):
            only(item, {"this", "alias"}, "AS")
            inner, alias = item.this, identifier(item.args["alias"])
        if isinstance(inner, exp.Column):
            keys.append(_key(inner, alias, by))
            columns.append(keys[-1].alias)
        else:
            aggregates.append(_aggregate(inner, alias))
            columns.append(aggregates[-1].alias)
    if len(keys) > len(by):
        raise refused("a GROUP BY column that stands twice in SELECT", "name it once")
    missing = [name for name in by if not any(_same(name, key.column) for key in keys)]
    if missing:
        raise refused(f"GROUP BY {missing[0]} without it in SELECT", f"add {missing[0]} to SELECT")
    for place, column in enumerate(columns):
        if column.casefold() in {other.casefold() for other in columns[:place]}:
            raise refused(f"two columns called {column}", "give each its own AS name")
    return tuple(keys), tuple(aggregates), tuple(columns)


def _key(column: exp.Expr, alias: str, grouped: list[Name]) -> AskedKey:
    if isinstance(column.this, exp.Star):
        raise refused("SELECT *", "name group keys and aggregates")
    name = name_of(column)
    if not any(_same(name, other) for other in grouped):
        raise refused(f"{name}, a bare column,", f"GROUP BY it, or aggregate it: want one of {_KNOWN}")
    return AskedKey(name, alias or name.column)


def _same(one: Name, two: Name) -> bool:
    equal = one.column == two.column if one.exact and two.exact else one.column.casefold() == two.column.casefold()
    return equal and (one.table is None or two.table is None or one.table.casefold() == two.table.casefold())


def _aggregate(node: exp.Expr, alias: str) -> Aggregate:
    match node:
        case exp.Count():
            return _count(node, alias)
        case exp.Star():
            raise refused("SELECT *", "name group keys and aggregates")
        case exp.Window():
            raise refused("OVER (a window)", "GROUP BY the columns")
        case exp.Filter():
            raise refused("FILTER", "put the condition into WHERE")
        case exp.Subquery() | exp.Select():
            raise refused("a subquery", "ask each part as its own question")
        case exp.WithinGroup() | exp.Quantile() | exp.ApproxQuantile() | exp.PercentileCont() | exp.Anonymous():
            return _quantile(node, alias)
        case _:
            return _simple(node, alias)


def _simple(node: exp.Expr, alias: str) -> Aggregate:
    kind = _SIMPLE.get(type(node))
    q = _QUANTILES.get(type(node))
    if kind is None and q is None:
        raise refused(_short(node), f"want one of {_KNOWN}")
    only(node, {"this"}, _short(node))
    column = _argument(node.this, _short(node))
    word = kind.name.lower() if kind else type(node).__name__.lower()
    return Aggregate(kind or Kind.QUANTILE, alias or f"{word}_{column.column}", column, 0.5 if q is None else q)


def _count(node: exp.Expr, alias: str) -> Aggregate:
    only(node, {"this", "big_int"}, "COUNT")
    inner = node.this
    if isinstance(inner, exp.Star):
        only(inner, set(), "COUNT(*)")
        return Aggregate(Kind.COUNT, alias or "count")
    if isinstance(inner, exp.Literal) and not inner.is_string:
        return Aggregate(Kind.COUNT, alias or "count")
    if isinstance(inner, exp.Distinct):
        only(inner, {"expressions"}, "DISTINCT")
        if len(inner.expressions) != 1:
            raise refused("COUNT(DISTINCT ...) of several columns", "want COUNT(DISTINCT person)")
        column = _argument(inner.expressions[0], "COUNT(DISTINCT ...)")
        return Aggregate(Kind.PEOPLE, alias or "people", column)
    column = _argument(inner, "COUNT")
    return Aggregate(Kind.COUNT, alias or f"count_{column.column}", column)


def _quantile(node: exp.Expr, alias: str) -> Aggregate:
    """QUANTILE(column, q), QUANTILE_CONT(column, q), or PERCENTILE_CONT(q) WITHIN GROUP (ORDER BY column)."""
    match node:
        case exp.WithinGroup(this=exp.PercentileCont() as inner, expression=exp.Order() as order):
            only(node, {"this", "expression"}, "WITHIN GROUP")
            only(inner, {"this"}, "PERCENTILE_CONT")
            only(order, {"expressions"}, "ORDER BY")
            if len(order.expressions) != 1 or order.expressions[0].args.get("desc"):
                raise refused("PERCENTILE_CONT ordered otherwise", "want WITHIN GROUP (ORDER BY column)")
            column, q = order.expressions[0].this, inner.this
        case exp.Quantile() | exp.ApproxQuantile():
            only(node, {"this", "quantile"}, "QUANTILE")
            column, q = node.this, node.args["quantile"]
        case exp.Anonymous() if str(node.this).upper() in _QUANTILE_NAMES and len(node.expressions) == 2:
            only(node, {"this", "expressions"}, str(node.this))
            column, q = node.expressions
        case _:
            raise refused(_short(node), f"want one of {_KNOWN}")
    name = _argument(column, "QUANTILE")
    if not isinstance(q, exp.Literal) or q.is_string:
        raise refused(f"QUANTILE at {_short(q)}", "want a number between 0 and 1")
    share = check.number("q", float(q.this))
    if not 0 <= share <= 1:
        raise check.refuse("q", share, "between 0 and 1", "the median is 0.5")
    return Aggregate(Kind.QUANTILE, alias or f"quantile_{name.column}", name, share)


def _argument(node: Any, of: str) -> Name:
    if isinstance(node, exp.Distinct):
        raise refused(f"DISTINCT in {of}", "only COUNT(DISTINCT person) is answered")
    if not isinstance(node, exp.Column) or isinstance(node.this, exp.Star):
        raise refused(f"{of} of {_short(node)}", "want one plain column; make a view for an expression")
    return name_of(node)


def _join(node: exp.Expr) -> Join:
    only(node, {"this", "on", "using", "side", "kind"}, "JOIN")
    side, kind = str(node.args.get("side") or ""), str(node.args.get("kind") or "")
    if side not in ("", "LEFT") or kind not in ("", "INNER", "OUTER") or (kind == "OUTER" and not side):
        raise refused(f"{side} {kind} JOIN".strip(), "want JOIN or LEFT JOIN")
    table, alias = source_of(node.this)
    on, using = node.args.get("on"), node.args.get("using")
    if using and len(using) == 1:
        word = identifier(using[0])
        return Join(table, alias, Name(word), Name(word, alias), outer=side == "LEFT")
    if not isinstance(on, exp.EQ) or not all(isinstance(one, exp.Column) for one in (on.left, on.right)):
        raise refused("JOIN without one equality", "want JOIN table ON one.column = other.column")
    only(on, {"this", "expression"}, "JOIN")
    left, right = name_of(on.left), name_of(on.right)
    if (left.table or "").casefold() == alias.casefold():
        left, right = right, left
    return Join(table, alias, left, right, outer=side == "LEFT")


def _short(node: Any) -> str:
    if isinstance(node, exp.Func) and not isinstance(node, exp.Anonymous):
        return str(node.sql_name()).upper()
    if isinstance(node, exp.Anonymous):
        return check.shown(str(node.this).upper(), 40, written=str)
    return type(node).__name__.upper()

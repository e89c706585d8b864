"""The clauses of a SELECT that hold no aggregate: names, FROM, WHERE and ORDER BY, each by its own list.

A predicate compares a column with constants, or with a column of the same row. It has no arithmetic, no casts of
columns and no functions: those can fail on some rows (division by zero, overflow, text that is no number), and whether
they do would tell about the rows without noise.
"""

from __future__ import annotations

import datetime
import math
from typing import Any

from sqlglot import exp

from terrine import check
from terrine.errors import InvalidArgument
from terrine.queries.question import (
    AllOf,
    Among,
    AnyOf,
    Compare,
    Comparison,
    Holds,
    Literal,
    Missing,
    Name,
    Negated,
    Order,
    Predicate,
)

_COMPARISONS: dict[type[exp.Expr], Comparison] = {
    exp.EQ: Comparison.EQUAL,
    exp.NEQ: Comparison.UNEQUAL,
    exp.LT: Comparison.LESS,
    exp.LTE: Comparison.AT_MOST,
    exp.GT: Comparison.MORE,
    exp.GTE: Comparison.AT_LEAST,
    exp.Like: Comparison.LIKE,
}
_MIRRORED = {
    Comparison.LESS: Comparison.MORE,
    Comparison.AT_MOST: Comparison.AT_LEAST,
    Comparison.MORE: Comparison.LESS,
    Comparison.AT_LEAST: Comparison.AT_MOST,
}
_ACCEPTED = "compare columns with constants by = <> < <= > >= IN BETWEEN LIKE IS NULL, joined by AND, OR and NOT"
_LARGEST = 2**63
MOST_VALUES = 1_000


def identifier(node: Any) -> str:
    """The name that an identifier writes."""
    if not isinstance(node, exp.Identifier):
        raise refused(type(node).__name__.upper(), "want a plain name")
    only(node, {"this", "quoted"}, "a name")
    return check.text("name", node.this, at_least=1)


def name_of(node: exp.Expr) -> Name:
    """The column that `node` names."""
    if not isinstance(node, exp.Column):
        raise refused(type(node).__name__.upper(), "want a plain column")
    only(node, {"this", "table"}, "a column")
    table = node.args.get("table")
    inner = node.this
    if isinstance(inner, exp.Star):
        raise refused("*", "name the columns")
    return Name(identifier(inner), None if table is None else identifier(table), bool(inner.args.get("quoted")))


def source_of(node: Any) -> tuple[str, str]:
    """The registered table's name and its alias."""
    if isinstance(node, exp.Subquery):
        raise refused("a subquery", "ask each part as its own question")
    if not isinstance(node, exp.Table) or not isinstance(node.this, exp.Identifier):
        raise refused("FROM a function, a file or a list of values", "name a registered table")
    if node.args.get("sample"):
        raise refused("TABLESAMPLE", "ask about all rows")
    only(node, {"this", "alias"}, "FROM")
    table, alias = identifier(node.this), node.args.get("alias")
    if alias is None:
        return table, table
    only(alias, {"this"}, "an alias")
    return table, identifier(alias.this)


def order_of(node: exp.Expr | None, keys: list[str]) -> tuple[Order, ...]:
    """ORDER BY group keys, which are public; anything else is refused."""
    if node is None:
        return ()
    only(node, {"expressions"}, "ORDER BY")
    found = []
    for one in node.expressions:
        only(one, {"this", "desc", "nulls_first"}, "ORDER BY")
        name = name_of(one.this).column if isinstance(one.this, exp.Column) else ""
        alias = next((key for key in keys if key.casefold() == name.casefold()), None)
        if alias is None:
            raise refused("ORDER BY on private values", "order by group keys, or sort the answer, which is public")
        found.append(Order(alias, bool(one.args.get("desc"))))
    return tuple(found)


def predicate_of(node: Any) -> Predicate:
    """The predicate that `node` writes."""
    match node:
        case exp.Paren():
            only(node, {"this"}, "WHERE")
            return predicate_of(node.this)
        case exp.And() | exp.Or():
            only(node, {"this", "expression"}, "WHERE")
            parts = tuple(predicate_of(one) for one in _chain(node, type(node)))
            return AllOf(parts) if isinstance(node, exp.And) else AnyOf(parts)
        case exp.Not():
            only(node, {"this"}, "NOT")
            return Negated(predicate_of(node.this))
        case exp.Is():
            return _is(node)
        case exp.In():
            return _in(node)
        case exp.Between():
            only(node, {"this", "low", "high"}, "BETWEEN")
            column = name_of(node.this)
            low, high = constant(node.args["low"]), constant(node.args["high"])
            return AllOf((Compare(column, Comparison.AT_LEAST, low), Compare(column, Comparison.AT_MOST, high)))
        case exp.Column():
            return Holds(name_of(node))
        case exp.Like() if node.args.get("negate"):
            return Negated(_compare(node))
        case _ if type(node) in _COMPARISONS:
            return _compare(node)
        case _:
            raise refused(f"{_word(node)} in WHERE", _ACCEPTED)


def constant(node: Any) -> Literal:
    """A number, a text, a truth value, or DATE '...' and TIMESTAMP '...'."""
    match node:
        case exp.Neg():
            only(node, {"this"}, "a number")
            value = constant(node.this)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise refused(f"-{value}", "want a number")
            return -value
        case exp.Literal():
            only(node, {"this", "is_string"}, "a constant")
            return _text(node.this) if node.is_string else _number(node.this)
        case exp.Boolean():
            return bool(node.this)
        case exp.Cast() if isinstance(node.this, exp.Literal) and node.this.is_string:
            only(node, {"this", "to"}, "a constant")
            return _moment(str(node.this.this), node.args["to"])
        case _:
            raise refused(f"{_word(node)} where a constant is wanted", _ACCEPTED)


def _chain(node: Any, kind: type[exp.Expr]) -> list[Any]:
    """The operands of a AND b AND c, left to right, without recursion over their number."""
    found: list[Any] = []
    while type(node) is kind:
        only(node, {"this", "expression"}, "WHERE")
        found.append(node.args["expression"])
        node = node.this
    return [node, *reversed(found)]


def _is(node: exp.Expr) -> Predicate:
    only(node, {"this", "expression"}, "IS")
    column, wanted = name_of(node.this), node.args["expression"]
    if isinstance(wanted, exp.Null):
        return Missing(column)
    if isinstance(wanted, exp.Boolean):
        return Compare(column, Comparison.EQUAL, bool(wanted.this))
    raise refused("IS something else than NULL, TRUE or FALSE", _ACCEPTED)


def _in(node: exp.Expr) -> Among:
    if node.args.get("query"):
        raise refused("a subquery", "write the values out")
    only(node, {"this", "expressions"}, "IN")
    values = tuple(constant(one) for one in node.expressions)
    if not 0 < len(values) <= MOST_VALUES:
        raise refused(f"IN with {len(values)} values", f"want 1 to {MOST_VALUES:,}")
    return Among(name_of(node.this), values)


def _compare(node: exp.Expr) -> Compare:
    only(
        node, {"this", "expression", "negate"} if isinstance(node, exp.Like) else {"this", "expression"}, "a comparison"
    )
    comparison, left, right = _COMPARISONS[type(node)], node.this, node.args["expression"]
    if isinstance(left, exp.Column) and isinstance(right, exp.Column):
        if comparison is Comparison.LIKE:
            raise refused("LIKE with a column as its pattern", "want a constant pattern")
        return Compare(name_of(left), comparison, name_of(right))
    if isinstance(right, exp.Column) and comparison is not Comparison.LIKE:
        return Compare(name_of(right), _MIRRORED.get(comparison, comparison), constant(left))
    return Compare(name_of(left), comparison, constant(right))


def _text(value: str) -> str:
    """Text that every engine reads alike: a backslash is a sign of its own on some of them."""
    if not plain_text(value):
        raise check.refuse("text", value, "text without backslashes, control characters and ${")
    return value


def plain_text(value: str) -> bool:
    """Whether a constant is safe from what engines do with text before they read it; Spark fills in ${...}.

    Half a character (a lone surrogate) cannot be sent to an engine at all: it would fail after the charge.
    """
    whole = all(ord(one) >= 32 and not 0xD800 <= ord(one) <= 0xDFFF for one in value)
    return whole and "\\" not in value and "${" not in value


def _number(written: str) -> int | float:
    try:
        value: int | float = int(written)
    except ValueError:
        try:
            value = float(written)
        except ValueError:
            raise check.refuse("number", written, "a decimal number") from None
    if not -_LARGEST <= value < _LARGEST if isinstance(value, int) else not math.isfinite(value):
        raise check.refuse("number", written, "a number of 64 bits")
    return value


def _moment(written: str, kind: Any) -> Literal:
    try:
        if kind.this == exp.DataType.Type.DATE:
            return datetime.date.fromisoformat(written)
        if kind.this in (exp.DataType.Type.TIMESTAMP, exp.DataType.Type.DATETIME):
            moment = datetime.datetime.fromisoformat(written)
            if moment.tzinfo is None:
                return moment
    except ValueError:
        pass
    raise check.refuse("constant", written, "DATE 'YYYY-MM-DD' or TIMESTAMP 'YYYY-MM-DD HH:MM:SS'", "without a zone")


def only(node: Any, allowed: set[str], where: str) -> None:
    """Refuse whatever `node` carries beyond `allowed`."""
    for name, value in node.args.items():
        if name not in allowed and value not in (None, False, []):
            raise refused(f"{where} with {name.strip('_').upper()}", "leave it out")


def _word(node: Any) -> str:
    if isinstance(node, exp.Anonymous):
        return check.shown(f"{node.this}()".upper(), 40, written=str)
    if isinstance(node, exp.Subquery | exp.Select | exp.Exists):
        return "a subquery"
    return type(node).__name__.upper()


def refused(what: str, hint: str) -> InvalidArgument:
    """The error for a piece of SQL, ready to raise."""
    return InvalidArgument(f"sql: {what} is not answered; {hint}")

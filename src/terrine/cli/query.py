"""`terrine query`: one question about a private table, answered with noise, error bars and a charge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrine import check
from terrine.cli import tables
from terrine.cli.charging import NOWHERE, AccountName, By, LedgerUrl, Purpose, Weak, charging
from terrine.cli.schema import Separator
from terrine.cli.wording import as_options
from terrine.errors import InvalidArgument
from terrine.rounding import up

if TYPE_CHECKING:
    from terrine.queries import Answer, Private, Public, Session

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_FILES = {".parquet", ".pq", ".csv"}
Pairs = list[str] | None


def query(
    source: Annotated[
        str, typer.Argument(metavar="FILE|URL", help="A .parquet, .csv or .duckdb file, or postgresql://")
    ],
    person: Annotated[str, typer.Option(help="The column that says whose a row is.")],
    sql: Annotated[str, typer.Option(help="One SELECT; a file's table is called by the file's stem.")],
    epsilon: Annotated[float, typer.Option(help="The most that may be learned about one person.")],
    delta: Annotated[float | None, typer.Option(help="With it, Gaussian noise may be used; 0 if left out.")] = None,
    rows: Annotated[int, typer.Option(help="At most so many rows of one person count.")] = 20,
    groups: Annotated[int | None, typer.Option(help="One person counts in at most so many groups.")] = None,
    bounds: Annotated[Pairs, typer.Option(metavar="C=LOW:HIGH", help="Public bounds of a column; repeat.")] = None,
    keys: Annotated[Pairs, typer.Option(metavar="C=A,B|private", help="Public values of a key; repeat.")] = None,
    bins: Annotated[Pairs, typer.Option(metavar="C=0,10,20", help="Public edges of a histogram; repeat.")] = None,
    min_group: Annotated[int | None, typer.Option(help="Leave groups of fewer people blank.")] = None,
    encoding: Annotated[str | None, typer.Option(help="A CSV file's encoding, such as cp1252; else UTF-8.")] = None,
    separator: Separator = None,
    public: Annotated[list[str] | None, typer.Option(help="A table that holds nothing private; repeat.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say price and expected error; free.")] = False,
    mock: Annotated[bool, typer.Option("--mock", help="Answer from made-up rows of the same schema; free.")] = False,
    weak_guarantee: Weak = False,
    ledger: LedgerUrl = None,
    account: AccountName = None,
    by: By = None,
    purpose: Purpose = None,
    as_json: AsJson = False,
) -> None:
    """Ask one question about people's rows, privately; what is refused is not charged."""
    told: dict[str, Any] = {
        "epsilon": check.positive("epsilon", epsilon),
        "delta": None if delta is None else check.half_open_unit("delta", delta),
        "bounds": read_bounds(bounds),
        "keys": read_keys(keys),
        "bins": read_bins(bins),
        "min_group": min_group,
    }
    weakness = check.weakness(told["epsilon"], delta or 0.0, units=None)
    if weakness and not weak_guarantee:
        raise InvalidArgument(f"{weakness}; --weak-guarantee goes on all the same")
    from terrine.queries import Private, Session

    with charging(ledger, account, by=by, purpose=purpose, usual="terrine query") as charged, as_options():
        declared = _declared(source, sql, Private(person=person, rows=rows, groups=groups), public or [])
        connection = _connection(source, encoding, separator)
        session = Session(connection, charged.account, declared, purpose=charged.purpose, by=charged.by)
        if explain:
            _explain(session, sql, told, as_json)
            return
        answer = session.sql(sql, **told, mock=mock)
    _show(answer, as_json, mock)
    if charged.account is None and not mock:
        typer.echo(f"{NOWHERE} this answer to a budget", err=True)


def _connection(source: str, encoding: str | None, separator: str | None) -> Any:
    if encoding is None and separator is None:
        return source
    from terrine.queries.engines import csv_backend

    if Path(source).suffix.lower() != ".csv":
        raise InvalidArgument(f"{source}: --encoding and --separator are for a .csv file; want them left out")
    return csv_backend(Path(source), encoding=encoding, separator=separator)


def _declared(source: str, sql: str, private: Private, public: list[str]) -> dict[str, Private | Public]:
    """The file's own table; of a database, the tables that the question names."""
    from terrine.queries import Public
    from terrine.queries.parsing import question_of

    if Path(source).suffix.lower() in _FILES:
        if public:
            raise InvalidArgument(f"--public {public[0]}: a file is one table, and private; want a database with both")
        return {Path(source).stem: private}
    question = question_of(sql)
    names = [question.table, *(join.table for join in question.joins)]
    if unused := [name for name in public if name not in names]:
        raise InvalidArgument(f"--public {unused[0]}: not in the question, whose tables are {', '.join(names)}")
    return {name: Public() if name in public else private for name in names}


def _explain(session: Session, sql: str, told: dict[str, Any], as_json: bool) -> None:
    found = session.explain(sql, **told)
    typer.echo(json.dumps(found.record()) if as_json else str(found))


def _show(answer: Answer, as_json: bool, mock: bool) -> None:
    from terrine.queries.answers import as_json as written

    if as_json:
        record = json.loads(written(answer))
        typer.echo(json.dumps(record | ({"mock": True} if mock else {})))
        return
    tables.show(answer.table.column_names, (row.values() for row in answer.table.to_pylist()))
    typer.echo(f"epsilon {up(answer.epsilon)}, delta {answer.delta:g}; half-widths hold with 95%")
    for note in answer.notes:
        typer.echo(f"- {note}")


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise check.refuse(option, text, "COLUMN=VALUES")
    return name.strip(), value.strip()


def read_bounds(given: Pairs) -> dict[str, tuple[float, float]]:
    """COLUMN=LOW:HIGH, each."""
    return dict(_bounds(one) for one in given or ())


def read_bins(given: Pairs) -> dict[str, list[float]]:
    """COLUMN=EDGE,EDGE,..., each."""
    return dict(_edges(one) for one in given or ())


def _bounds(text: str) -> tuple[str, tuple[float, float]]:
    name, value = _pair("--bounds", text)
    try:
        lower, upper = (float(one) for one in value.split(":"))
    except ValueError:
        raise check.refuse("--bounds", text, "COLUMN=LOW:HIGH, such as cost=0:10000") from None
    return name, (lower, upper)


def _edges(text: str) -> tuple[str, list[float]]:
    name, value = _pair("--bins", text)
    try:
        return name, [float(one) for one in value.split(",")]
    except ValueError:
        raise check.refuse("--bins", text, "COLUMN=EDGE,EDGE,..., such as cost=0,100,1000") from None


def read_keys(given: Pairs) -> dict[str, Any] | str | None:
    """COLUMN=VALUE,VALUE,... or COLUMN=private, each; or just private."""
    if not given:
        return None
    if given == ["private"]:
        return "private"
    found: dict[str, Any] = {}
    for text in given:
        name, value = _pair("--keys", text)
        if name in found:
            raise check.refuse("--keys", text, "every column once")
        found[name] = value if value == "private" else [one.strip() for one in value.split(",")]
    return found

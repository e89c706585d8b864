"""`terrine schema`: the public facts about a table, asked for one by one.

Every answer is kept at once, in the schema's own file: facts that were not asked yet are there with confirmed = false.
So an interview that was interrupted goes on where it stopped, by the same command.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrine import files
from terrine.errors import InvalidArgument

if TYPE_CHECKING:
    from terrine.tables import Column, Encoder, Schema

Encoding = Annotated[str | None, typer.Option(help="A text file's encoding, such as cp1252; else it is guessed.")]
Separator = Annotated[str | None, typer.Option(help="What is between its cells: ',', ';', tab; else the header tells.")]
TableName = Annotated[str | None, typer.Option("--table", help="A table of a SQLite or DuckDB file.")]
TextModel = Annotated[str | None, typer.Option(help="A folder with a local sentence encoder for free texts.")]

_LEAVE_OUT = ("leave out", "leave it out", "-")
_HELP = "leave out, unknown; or the kind it really is: number, category, hashed, date, text"


def schema(
    table: Annotated[str, typer.Argument(help="A private table: a file, a folder, a pattern, file.db::table.")],
    label: Annotated[str | None, typer.Option(help="The column to predict; else asked for, or the last.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; else TABLE.schema.toml beside the table.")] = None,
    kind: Annotated[
        str | None,
        typer.Option("--target", help="Whether the label is a class or a number; else guessed from the rows."),
    ] = None,
    person: Annotated[str | None, typer.Option(help="The column that says whose a row is: no feature.")] = None,
    table_name: TableName = None,
    encoding: Encoding = None,
    separator: Separator = None,
    text_model: TextModel = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: draft all facts, unconfirmed.")] = False,
    accept_guesses: Annotated[
        bool, typer.Option("--accept-guesses", help="Ask nothing: take facts from the rows. They leak; reports say so.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a schema that is there.")] = False,
) -> None:
    """Draft the public facts about a table; asks to confirm each, since facts taken from the rows leak."""
    from terrine import tables

    table = tables.named(table, table_name)
    target = tables.schema_path(table) if out is None else out
    begun = _begun(target, force, quiet=yes)
    if begun is None:
        with _answers_come():
            found = _drafted(table, label, kind, person, encoding, separator, text_model, quiet=yes or accept_guesses)
    elif label is not None and label != begun.label:
        raise InvalidArgument(f"{target} is for label {begun.label!r}, not {label!r}: want --force to begin again")
    else:
        found = begun

    def keep(one: Schema) -> None:
        files.write(target, one.to_toml(), private=True)  # drafts hold values of the rows

    keep(found)
    if accept_guesses:
        found = _accepted(found)
        keep(found)
    elif not yes:
        try:
            with _answers_come():
                found = _asked(found, keep, resumed=begun is not None)
        except (typer.Abort, KeyboardInterrupt, InvalidArgument):
            typer.echo(f"\nThe answers so far are kept in {target}; the same command goes on.", err=True)
            raise
    _say(target, found)


@contextlib.contextmanager
def _answers_come() -> Iterator[None]:
    """Tell the end of the input from Ctrl-C, which typer's prompts make one.

    Raises:
        InvalidArgument: no more answers came.
    """
    try:
        yield
    except typer.Abort as stop:
        if isinstance(stop.__context__, EOFError):
            raise InvalidArgument(
                "no more answers came (the input has ended); want a terminal to answer in, or --yes, which asks nothing"
            ) from None
        raise


def _begun(target: Path, force: bool, *, quiet: bool) -> Schema | None:
    """The schema of an interview that was interrupted, or nothing.

    Raises:
        InvalidArgument: a finished one is there.
    """
    from terrine.tables import Schema

    if force or not target.exists():
        return None
    found = Schema.load(target)
    if quiet or not _open(found):
        raise InvalidArgument(f"{target} is there already: want --force to write over it, or another --out")
    return found


def _open(found: Schema) -> list[str]:
    """The facts that were not asked yet; to have answered that nobody knows is an answer."""
    return [name for name in found.unconfirmed if name not in found.unknown]


def _drafted(
    table: str,
    label: str | None,
    kind: str | None,
    person: str | None,
    encoding: str | None,
    separator: str | None,
    text_model: str | None,
    *,
    quiet: bool,
) -> Schema:
    from terrine import tables

    source, form = tables.sniffed_table(table, encoding=encoding, separator=separator)
    for given, flag in ((encoding, "--encoding"), (separator, "--separator")):
        if given is not None and form is None:
            raise InvalidArgument(f"{flag}: for text files only; {source.name} says itself how it is written")
    last = source.column_names[-1]
    label = label or (last if quiet else typer.prompt("the column to predict", default=last))
    if person is not None and (person == label or person not in source.column_names):
        raise InvalidArgument(f"--person {person}: want a column of the table, other than the label")
    encoder: Encoder | None = None if text_model is None else tables.load_encoder(text_model)
    drafted = tables.draft(source, label, target=kind, form=form, encoder=encoder)
    if person is None:
        return drafted
    return replace(drafted, columns=drafted.columns | {person: tables.Ignored()})


def _accepted(found: Schema) -> Schema:
    """All that was guessed, taken as it is, and marked."""
    columns = {
        name: column if column.confirmed or name in found.unknown else _marked(column)
        for name, column in found.columns.items()
    }
    classes = found.classes_guessed or not found.classes_confirmed
    form = None if found.file is None else replace(found.file, confirmed=True)
    return replace(found, columns=columns, classes_confirmed=True, classes_guessed=classes, file=form)


def _marked(column: Column) -> Column:
    from terrine.tables import Ignored

    return replace(column, confirmed=True, guessed=not isinstance(column, Ignored))


def _asked(found: Schema, keep: Callable[[Schema], None], *, resumed: bool) -> Schema:
    """The schema with every open question answered; each answer is kept at once."""
    if resumed:
        typer.echo(f"Going on: {len(_open(found))} facts are still open.")
    typer.echo("Each fact below was guessed from the private rows. Give it only if it is known without them: from a")
    typer.echo(f"form's limits, a code book, the law of nature. Other answers for a column: {_HELP}.")
    if found.file is not None and not found.file.confirmed:
        told = _answer(f"the file is not UTF-8; its encoding (seems {found.file.encoding})", _encoding_of)
        found = replace(found, file=replace(found.file, encoding=told, confirmed=True))
        keep(found)
    if not found.classes_confirmed and found.target is not None:
        found = replace(found, target=_ask_target(found.label, found.target), classes_confirmed=True)
        keep(found)
    if not found.classes_confirmed:
        classes = _answer(f"label {found.label}: its classes {_shown(found.classes)}", _list_of(found.classes, least=2))
        found = replace(found, classes=classes, classes_confirmed=True)
        keep(found)
    for name in _open(found):
        column = _ask_column(name, found.columns[name])
        found = replace(found, columns=found.columns | {name: column})
        keep(found)
    return found


def _ask_column(name: str, column: Column) -> Column:
    """One column's facts; the answer may be that it is of another kind."""
    from terrine.tables import Category, Date, Hashed, Ignored, Number, Text

    while True:
        match column:
            case Number():
                found = _ask_number(name, column)
            case Category():
                found = _ask_category(name, column)
            case Date():
                found = _ask_date(name, column)
            case Hashed():
                found = _ask_count(name, "a category of many values, hashed into so many buckets", column, "buckets")
            case Text():
                what = f"free text, by the encoder {column.encoder}" if column.encoder else "free text, hashed into"
                found = replace(column, confirmed=True) if column.encoder and _ask_yes(name, what) else None
                found = found or _ask_count(name, "free text, its words hashed into so many buckets", column, "buckets")
            case _:
                found = _ask_ignored(name)
        if isinstance(found, str):
            column = _of_kind(found)
            continue
        if isinstance(found, Number) and found.unknown:
            typer.echo(f"  {name}: terrine train --private-bounds finds its bounds and pays for them")
        return found if found is not None else Ignored()


def _of_kind(kind: str) -> Column:
    """A column of that kind, without facts."""
    from terrine.tables import Category, Date, Hashed, Ignored, Number, Text

    usual: dict[str, Column] = {
        "number": Number(confirmed=False), "category": Category(("?",), confirmed=False),
        "hashed": Hashed(confirmed=False), "date": Date("1900-01-01", "2100-01-01", confirmed=False),
        "text": Text(confirmed=False), "ignored": Ignored(),
    }  # fmt: skip
    return usual[kind]


def _ask_number(name: str, column: Any) -> Any:
    bare = column == _of_kind("number")
    seen = "" if bare else f" (the rows seem to go from {column.low:g} to {column.high:g})"
    while True:
        low = _answer(f"{name}: a number{seen}; the lowest it can be", _number_of)
        if not isinstance(low, float):
            return _unknown_number(column) if low == "unknown" else low
        high = _answer(f"{name}: the highest it can be", _number_of)
        if not isinstance(high, float):
            return _unknown_number(column) if high == "unknown" else high
        if low < high:
            return replace(column, low=low, high=high, confirmed=True, unknown=False)
        typer.echo(f"  {low:g} is not below {high:g}: once more")


def _ask_target(label: str, target: Any) -> Any:
    while True:
        found = _ask_number(f"label {label}", target)
        if getattr(found, "confirmed", False):
            return found
        typer.echo("  the label's bounds have to be known: predictions are kept within them")


def _unknown_number(column: Any) -> Any:
    from terrine.tables import Number

    return Number(confirmed=False, unknown=True, decimal=column.decimal)


def _ask_category(name: str, column: Any) -> Any:
    values = () if column.values == ("?",) else column.values
    found = _answer(f"{name}: a category; its values {_shown(values)}", _list_of(values, least=1))
    if found == "unknown":
        return _ask_count(name, "then its values are hashed, into so many buckets", _of_kind("hashed"), "buckets")
    return replace(column, values=found, confirmed=True) if isinstance(found, tuple) else found


def _ask_date(name: str, column: Any) -> Any:
    from terrine.errors import TerrineError

    written = f", written {column.format}" if column.format else ""
    while True:
        low = _answer(
            f"{name}: a date{written} (seems {column.low} to {column.high}); the earliest it can be", _date_of
        )
        if low is None or low in _KINDS:
            return low
        high = _answer(f"{name}: the latest it can be", _date_of)
        if high is None or high in _KINDS:
            return high
        try:
            return replace(column, low=low, high=high, confirmed=True)
        except TerrineError as error:
            typer.echo(f"  {error}: once more")


def _ask_count(name: str, what: str, column: Any, field: str) -> Any:
    usual = getattr(column, field)
    found = _answer(f"{name}: {what} [{usual}]", _count_of(usual))
    return replace(column, **{field: found}, confirmed=True) if isinstance(found, int) else found


def _ask_yes(name: str, what: str) -> bool:
    return typer.confirm(f"{name}: {what}", default=True)


def _ask_ignored(name: str) -> Any:
    def read(told: str) -> Any:
        if told.lower() in ("", "y", "yes"):
            return None
        raise _Again("Enter leaves it out; otherwise type what it is: number, category, hashed, date, text")

    return _answer(f"{name}: looks like a name or a number of a row; leave it out? [Y]", read)


class _Again(Exception):
    """An answer that is none."""


_KINDS = ("number", "category", "hashed", "date", "text")


def _answer(question: str, read: Callable[[str], Any]) -> Any:
    """An answer that `read` takes; None is to leave the column out, and a kind's name asks for that kind."""
    while True:
        told = str(typer.prompt(question, default="", show_default=False)).strip()
        if told.lower() in _LEAVE_OUT:
            return None
        if told.lower() in _KINDS and read is not _encoding_of:
            return told.lower()
        try:
            return read(told)
        except _Again as error:
            typer.echo(f"  {error}")


def _number_of(told: str) -> Any:
    import math

    from terrine.tables import as_number

    if told.lower() == "unknown":
        return "unknown"
    found = as_number(told)
    if not math.isfinite(found):
        raise _Again("want a number, typed: Enter does not take it from the rows (or: leave out, unknown)")
    return found


def _date_of(told: str) -> Any:
    from terrine.tables.cells import as_moment

    if told.lower() == "unknown":
        raise _Again("then leave it out: the bounds of dates are not found privately")
    if as_moment(told) != as_moment(told):
        raise _Again("want a date such as 2024-01-31, typed: Enter does not take it from the rows (or: leave out)")
    return told


def _list_of(values: tuple[str, ...], *, least: int) -> Callable[[str], Any]:
    def read(told: str) -> Any:
        if told.lower() == "unknown" and least == 1:
            return "unknown"
        found = values if told == "=" else tuple(one.strip() for one in told.split("|") if one.strip())
        if len(found) < least or len(set(found)) < len(found):
            raise _Again(f"want {least} or more, each once, separated by |; = takes the list that is shown")
        return found

    return read


def _count_of(usual: int) -> Callable[[str], Any]:
    def read(told: str) -> Any:
        if told in ("", "unknown"):
            return usual  # it says nothing about the rows
        if not told.isascii() or not told.isdigit() or not 2 <= int(told) <= 2**20:
            raise _Again("want a whole number from 2, or Enter for the one that is shown")
        return int(told)

    return read


def _encoding_of(told: str) -> str:
    from terrine.tables import FileFormat

    try:
        return FileFormat(told or "?").encoding
    except InvalidArgument as error:
        raise _Again(str(error)) from None


def _shown(values: tuple[str, ...]) -> str:
    listed = "|".join(values)
    return f"({listed}) (separated by |; = takes these)" if values else "(separated by |)"


def _say(target: Path, found: Schema) -> None:
    typer.echo(f"written: {target}")
    if found.guessed:
        typer.echo(f"taken from the rows, which leaks: {', '.join(found.guessed)}; the report and the card will say so")
    if found.unknown:
        typer.echo(f"bounds unknown: {', '.join(found.unknown)}; terrine train finds them with --private-bounds")
    if left := _open(found):
        typer.echo(f"not confirmed: {', '.join(left)}; terrine train refuses these until confirmed = true")


__all__ = ["Encoding", "Separator", "TableName", "TextModel", "schema"]

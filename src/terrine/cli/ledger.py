"""`terrine ledger`: open, show, charge, verify, export and import durable budgets, and print the hash to write down.

LEDGER is a file, or a database URL. The key for sealed fields is read from $TERRINE_LEDGER_KEY.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from terrine import check
from terrine.cli import ledger_page as page
from terrine.errors import InvalidArgument
from terrine.events import (
    Budget,
    Event,
    Gaussian,
    Laplace,
    Neighbours,
    PoissonSampled,
    Repeated,
    Unit,
    from_json,
)

if TYPE_CHECKING:
    from terrine.ledger import Finding, Ledger

app = typer.Typer(help="Durable budgets: every charge is on disk before anything is shown.", no_args_is_help=True)

_T = TypeVar("_T", Unit, Neighbours)

Where = Annotated[str, typer.Argument(metavar="LEDGER", help="A file, or a database URL.")]
Name = Annotated[str, typer.Option("--account", "-a", help="The account's name.")]
SomeName = Annotated[str | None, typer.Option("--account", "-a", help="Only this account.")]
Against = Annotated[
    list[str] | None,
    typer.Option(metavar="HASH", help="A hash that `head` or `charge` printed: it must be there. Repeat for several."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def create(
    ledger: Where,
    epsilon: Annotated[float, typer.Option(help="The budget's epsilon, for one unit (--unit).")],
    delta: Annotated[float, typer.Option(help="The budget's delta; 0 for pure DP.")],
    account: Name = "main",
    unit: Annotated[str, typer.Option(help="Who is protected: example, person or client.")] = "example",
    neighbours: Annotated[str, typer.Option(help="add-remove, replace-one or zero-out.")] = "add-remove",
    partition: Annotated[list[str] | None, typer.Option(help="A disjoint part of the data; repeat for each.")] = None,
    as_json: AsJson = False,
) -> None:
    """Open an account with a budget, in a new or an existing ledger."""
    budget = Budget(epsilon=epsilon, delta=delta)
    who, relation = _choice("unit", unit, Unit), _choice("neighbours", neighbours, Neighbours)
    account = check.text("account", account, at_least=1)
    with _opened(ledger, create=True) as book:
        if account in [one.name for one in book.accounts()]:
            raise InvalidArgument(f"account {account!r}: already in this ledger; what was declared never changes")
        made = book.account(account, budget=budget, unit=who, neighbours=relation, partitions=partition or ())
        _print(page.summary(made), f"opened {account!r} in {_place(ledger)} with {page.budget(made)}", as_json)


@app.command()
def show(
    ledger: Where,
    account: SomeName = None,
    delta: Annotated[float | None, typer.Option(help="Show what was spent at this delta.")] = None,
    last: Annotated[int, typer.Option(min=0, help="How many charges to list, the newest ones.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Print what was spent and what is left, and of the newest charges who made them, when and what for."""
    with _opened(ledger) as book:
        accounts = [book.account(account)] if account is not None else book.accounts()
        if as_json:
            typer.echo(json.dumps({"accounts": [page.summary(one, delta=delta, last=last) for one in accounts]}))
            return
        if not accounts:
            typer.echo("no accounts; `terrine ledger create` opens one")
        for one in accounts:
            page.show(one, delta, last)


@app.command()
def charge(
    ledger: Where,
    account: Name = "main",
    event: Annotated[str | None, typer.Option(help="The event, as JSON.")] = None,
    events: Annotated[Path | None, typer.Option(help="A file with the event or events, as JSON.")] = None,
    noise: Annotated[float | None, typer.Option(help="Gaussian noise, standard deviation / sensitivity.")] = None,
    laplace: Annotated[float | None, typer.Option(help="Laplace noise, scale / sensitivity.")] = None,
    rate: Annotated[float, typer.Option(help="With --noise: the Poisson sampling rate.")] = 1.0,
    steps: Annotated[int, typer.Option(help="With --noise or --laplace: how many times.")] = 1,
    purpose: Annotated[str, typer.Option(help="What it is for.")] = "",
    by: Annotated[str | None, typer.Option(help="Who asks; your login name if left out.")] = None,
    partition: Annotated[str, typer.Option(help="The declared partition it touches; the whole if left out.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would cost; charge nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Charge an event, if it fits; refused charges change nothing."""
    from terrine.ledger.report import percent

    wanted = _event(event, events, noise, laplace, rate, steps)
    with _opened(ledger) as book:
        one = book.account(account)
        if dry_run:
            quote = one.would_cost(wanted, partition=partition)
            verdict = "fits" if quote.fits else "does not fit"
            text = f"would use {percent(quote.share)} of {page.budget(one)}: {verdict}; nothing was charged"
            _print({"fits": quote.fits, "share": page.finite(quote.share)}, text, as_json)
            return
        done = one.charge(wanted, purpose=purpose, by=_user() if by is None else by, partition=partition)
        left = one.remaining(partition=partition)
        record = {
            "account": one.name,
            "sequence": done.sequence,
            "at": done.at.isoformat(),
            "by": done.by,
            "purpose": done.purpose,
            "hash": done.hash,
            "claimed": page.finite(one.spent()),
            "filter": {"used": one.used(), "left": left.share, "largest_epsilon": left.epsilon},
        }
        told = f"charge {done.sequence} on {one.name!r}: {percent(one.used())} of the budget's room for charges is used"
        _print(record, f"{told}\nhash {done.hash}", as_json)


@app.command()
def head(ledger: Where, account: SomeName = None, as_json: AsJson = False) -> None:
    """Print the hash of each account's newest record, to write down elsewhere for `verify --against`."""
    with _opened(ledger) as book:
        accounts = book.accounts() if account is None else [book.account(account)]
        if not accounts:
            book.head()  # says that there is none
        hashes = {one.name: one.head() for one in accounts}
    _print({"head": " ".join(hashes.values()), "accounts": hashes}, "\n".join(hashes.values()), as_json)


@app.command()
def verify(
    ledger: Annotated[str, typer.Argument(metavar="LEDGER", help="A file, a database URL, or what `export` wrote.")],
    against: Against = None,
    as_json: AsJson = False,
) -> None:
    """Replay every account; exit code 1 and a line for each finding if something was changed.

    Records cut off the end are found only with --against a hash that was written down before.
    """
    findings = _findings(ledger, _hashes(against))
    good = "every charge follows from the one before it, down to the account it was made on"
    if against:
        good += "; every hash you gave is there, so nothing up to it was cut or rewritten"
    else:
        good += (
            "\nwhat was cut off the end would not show: give --against a hash that `terrine ledger head` once printed"
        )
    record = {"ok": not findings, "findings": [finding.__dict__ for finding in findings], "against": against or []}
    _print(record, "\n".join(map(str, findings)) or good, as_json)
    if findings:
        raise typer.Exit(1)


@app.command()
def export(
    ledger: Where,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file to write; the screen if left out.")] = None,
    account: SomeName = None,
    as_json: AsJson = False,
) -> None:
    """Write every record as JSON Lines; sealed fields stay sealed."""
    with _opened(ledger) as book:
        if out is None:
            book.export(sys.stdout, account=account)
            return
        # Written aside and moved into place: an export that fails leaves no half file behind.
        try:
            with tempfile.NamedTemporaryFile("w", dir=out.parent, delete=False, encoding="utf-8") as draft:
                lines = book.export(draft, account=account)
            os.replace(draft.name, out)
        except OSError as error:
            raise InvalidArgument(f"{out}: {error.strerror}; nothing was written") from None
    _print({"file": str(out), "lines": lines}, f"wrote {lines} lines to {out}", as_json)


@app.command("import")
def import_(
    ledger: Where,
    file: Annotated[Path, typer.Argument(help="What `export` wrote.")],
    against: Against = None,
    as_json: AsJson = False,
) -> None:
    """Add the accounts of an export, bit for bit, all or none."""
    try:
        with open(file, encoding="utf-8") as lines, _opened(ledger, create=True) as book:
            count = book.import_(lines, against=_hashes(against))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file}: {error}; nothing was imported") from None
    _print({"file": str(file), "lines": count}, f"imported {count} lines from {file}", as_json)


@app.command()
def key() -> None:
    """Print a fresh key for sealed fields, for $TERRINE_LEDGER_KEY."""
    from terrine.ledger import new_key

    typer.echo(new_key())


def _opened(where: str, *, create: bool = False) -> Ledger:
    from terrine.ledger import Ledger

    return Ledger.open(where, key=os.environ.get("TERRINE_LEDGER_KEY"), create=create)


def _hashes(against: list[str] | None) -> str | None:
    return None if against is None else " ".join(against)


def _findings(where: str, against: str | None) -> list[Finding]:
    from terrine.ledger import verify_export

    if not _is_export(where):
        with _opened(where) as book:
            return book.verify(against=against)
    with open(where, encoding="utf-8") as lines:
        return verify_export(lines, against=against)


def _is_export(where: str) -> bool:
    if "://" in where or not Path(where).is_file():
        return False
    with open(where, "rb") as file:
        return file.read(1) == b"{"


def _event(
    event: str | None, events: Path | None, noise: float | None, laplace: float | None, rate: float, steps: int
) -> Event:
    given = [one for one in (event, events, noise, laplace) if one is not None]
    if len(given) != 1:
        raise InvalidArgument("charge: want exactly one of --event, --events, --noise and --laplace")
    if events is not None:
        try:
            return from_json(events.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{events}: {error}") from None
    if event is not None:
        return from_json(event)
    step: Event = Gaussian(noise=noise) if noise is not None else Laplace(noise=laplace or 0.0)
    if rate != 1.0:
        step = PoissonSampled(step, rate=rate)
    return step if steps == 1 else Repeated(step, times=steps)


def _print(record: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(record) if as_json else text)


def _place(where: str) -> str:
    return where.split("@")[-1]


def _choice(name: str, value: str, kinds: type[_T]) -> _T:
    for kind in kinds:
        if kind.value == value:
            return kind
    raise InvalidArgument(f"{name}={value!r}: want one of {', '.join(kind.value for kind in kinds)}")


def _user() -> str:
    with contextlib.suppress(Exception):
        return getpass.getuser()
    return ""

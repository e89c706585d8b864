"""`terrine ledger`: open, show, charge, verify, export and import durable budgets.

LEDGER is a file, or a database URL. The key for sealed fields is read from $TERRINE_LEDGER_KEY.
"""

from __future__ import annotations

import collections
import contextlib
import getpass
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

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
    to_json,
)

if TYPE_CHECKING:
    from rich.table import Table

    from terrine.ledger import Account, Ledger

app = typer.Typer(help="Durable budgets: every charge is on disk before anything is shown.", no_args_is_help=True)

_T = TypeVar("_T", Unit, Neighbours)
_WIDTH = 40

Where = Annotated[str, typer.Argument(metavar="LEDGER", help="A file, or a database URL.")]
Name = Annotated[str, typer.Option("--account", "-a", help="The account's name.")]
SomeName = Annotated[str | None, typer.Option("--account", "-a", help="Only this account.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def create(
    ledger: Where,
    epsilon: Annotated[float, typer.Option(help="The budget's epsilon.")],
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
    with _opened(ledger, create=True) as book:
        if account in [one.name for one in book.accounts()]:
            raise InvalidArgument(f"account {account!r}: already in this ledger; what was declared never changes")
        made = book.account(account, budget=budget, unit=who, neighbours=relation, partitions=partition or ())
        _print(_summary(made), f"opened {account!r} in {_place(ledger)} with {_budget_text(made)}", as_json)


@app.command()
def show(
    ledger: Where,
    account: SomeName = None,
    delta: Annotated[float | None, typer.Option(help="Show what was spent at this delta.")] = None,
    last: Annotated[int, typer.Option(min=0, help="How many charges to list, the newest ones.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Print what was spent and what is left, with the newest charges."""
    with _opened(ledger) as book:
        accounts = [book.account(account)] if account is not None else book.accounts()
        if as_json:
            typer.echo(json.dumps({"accounts": [_summary(one, delta=delta, last=last) for one in accounts]}))
            return
        if not accounts:
            typer.echo("no accounts; `terrine ledger create` opens one")
        for one in accounts:
            _show(one, delta, last)


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
    wanted = _event(event, events, noise, laplace, rate, steps)
    with _opened(ledger) as book:
        one = book.account(account)
        if dry_run:
            quote = one.would_cost(wanted, partition=partition)
            verdict = "fits" if quote.fits else "does not fit"
            text = f"would use {_percent(quote.share)} of {_budget_text(one)}: {verdict}; nothing was charged"
            _print({"fits": quote.fits, "share": _finite(quote.share)}, text, as_json)
            return
        done = one.charge(wanted, purpose=purpose, by=_user() if by is None else by, partition=partition)
        left = one.remaining(partition=partition)
        record = {
            "account": account,
            "sequence": done.sequence,
            "at": done.at.isoformat(),
            "hash": done.hash,
            "spent": _finite(one.spent()),
            "used": one.used(),
            "remaining": {"share": left.share, "epsilon": left.epsilon},
        }
        _print(record, f"charge {done.sequence} on {account!r}: {_percent(one.used())} of the budget is used", as_json)


@app.command()
def verify(ledger: Where, as_json: AsJson = False) -> None:
    """Replay every account; exit code 1 and a line for each finding if something was changed."""
    with _opened(ledger) as book:
        findings = book.verify()
        accounts = len(book.accounts()) if not findings else None
    record = {"ok": not findings, "findings": [finding.__dict__ for finding in findings]}
    text = "\n".join(map(str, findings)) or f"every charge of {accounts} account(s) follows from the one before it"
    _print(record, text, as_json)
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
    as_json: AsJson = False,
) -> None:
    """Add the accounts of an export, bit for bit, all or none."""
    try:
        with open(file, encoding="utf-8") as lines, _opened(ledger, create=True) as book:
            count = book.import_(lines)
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


def _summary(account: Account, *, delta: float | None = None, last: int = 0) -> dict[str, Any]:
    report, left = account.report(delta), account.remaining()
    newest = collections.deque(account.history(), maxlen=last) if last else ()
    return {
        "account": account.name,
        "epsilon": account.budget.epsilon,
        "delta": account.budget.delta,
        "unit": account.unit.value,
        "neighbours": account.neighbours.value,
        "partitions": list(account.partitions),
        "charges": report.charges,
        "used": _finite(report.used),
        "spent": {
            "delta": report.delta,
            "adaptive": _finite(report.adaptive),
            "planned": None if report.planned is None else _finite(report.planned),
            "theorem": report.theorem,
        },
        "remaining": {"share": left.share, "epsilon": left.epsilon},
        "reproducible": report.reproducible,
        "history": [
            {
                "sequence": one.sequence,
                "at": one.at.isoformat(),
                "event": json.loads(to_json(one.event)),
                "purpose": one.purpose,
                "by": one.by,
                "partition": one.partition,
                "sealed": one.sealed,
                "hash": one.hash,
            }
            for one in newest
        ],
    }


def _show(account: Account, delta: float | None, last: int) -> None:
    from rich.console import Console
    from rich.markup import escape

    summary, console = _summary(account, delta=delta, last=last), Console()
    full = round(_WIDTH * min(1.0, account.used()))
    console.print(f"[bold]{escape(account.name)}[/bold]  {_budget_text(account)}", highlight=False)
    bar = "█" * full + "░" * (_WIDTH - full)
    left = summary["remaining"]
    console.print(f"{bar}  {_percent(account.used())} used, {_percent(left['share'])} left", highlight=False)
    spent = summary["spent"]
    console.print(f"spent at delta {spent['delta']:g}: epsilon {_number(spent['adaptive'])}", highlight=False)
    planned = "no proven bound" if spent["planned"] is None else f"epsilon {_number(spent['planned'])}"
    console.print(f"  as one plan fixed in advance: {planned}", highlight=False)
    console.print(f"  which holds: {spent['theorem']}", highlight=False)
    if summary["reproducible"]:
        console.print("[red]some noise came from a seed: whoever knows it sees through[/red]")
    if summary["history"]:
        console.print(_table(summary["history"]))
    if (hidden := summary["charges"] - len(summary["history"])) > 0:
        console.print(f"and {hidden} earlier charges; --last {summary['charges']} lists them all", highlight=False)


def _table(history: list[dict[str, Any]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    columns = {
        "charge": [str(one["sequence"]) for one in history],
        "time (UTC)": [one["at"][:19].replace("T", " ") for one in history],
        "event": [_event_text(one["event"]["event"]) for one in history],
        "purpose": [one["purpose"] for one in history],
        "by": [one["by"] for one in history],
        "partition": [one["partition"] for one in history],
        "sealed": ["yes" if one["sealed"] else "" for one in history],
    }
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table()
    for name in kept:
        table.add_column(name, overflow="fold", no_wrap=name == "charge")
    for cells in zip(*kept.values(), strict=True):
        table.add_row(*map(escape, cells))
    return table


def _event_text(record: dict[str, Any]) -> str:
    inner = [_event_text(record["event"])] if "event" in record else []
    inner += [_event_text(part) for part in record.get("parts", [])[:3]]
    fields = [f"{name}={value}" for name, value in record.items() if name not in ("kind", "event", "parts")]
    return f"{record['kind']}({', '.join(inner + fields)})"


def _budget_text(account: Account) -> str:
    budget = f"epsilon={account.budget.epsilon:g}, delta={account.budget.delta:g}"
    return f"{budget} for one {account.unit.value}, {account.neighbours.value}"


def _print(record: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(record) if as_json else text)


def _place(where: str) -> str:
    return where.split("@")[-1]


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%" if math.isfinite(share) else "more than all"


def _number(value: float | None) -> str:
    return "unbounded" if value is None else f"{math.ceil(value * 1e4) / 1e4:.4f}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _choice(name: str, value: str, kinds: type[_T]) -> _T:
    for kind in kinds:
        if kind.value == value:
            return kind
    raise InvalidArgument(f"{name}={value!r}: want one of {', '.join(kind.value for kind in kinds)}")


def _user() -> str:
    with contextlib.suppress(Exception):
        return getpass.getuser()
    return ""

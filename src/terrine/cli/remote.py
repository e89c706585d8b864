"""`terrine remote`: ask a gateway from the command line; every answer is checked before it is shown.

The address and the token are read from $TERRINE_GATEWAY and $TERRINE_TOKEN: a token on the command line would be seen.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrine.cli import tables
from terrine.cli.query import Pairs, read_bins, read_bounds, read_keys
from terrine.cli.wording import as_options
from terrine.errors import InvalidArgument
from terrine.rounding import up

if TYPE_CHECKING:
    from terrine.client import Gateway, RemoteAnswer, Request

app = typer.Typer(name="remote", help="Ask a gateway from afar.", no_args_is_help=True)

Url = Annotated[str | None, typer.Option("--url", help="The gateway's address; else $TERRINE_GATEWAY.")]
Key = Annotated[Path | None, typer.Option("--signed-by", help="The gateway's public key: answers must be signed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object or list.")]
Dataset = Annotated[str | None, typer.Option(help="The data set; the token's, if left out.")]
Sql = Annotated[str, typer.Option(help="One SELECT.")]
Epsilon = Annotated[float, typer.Option(help="The most that may be learned about one person.")]
Delta = Annotated[float | None, typer.Option(help="With it, Gaussian noise may be used.")]
Bounds = Annotated[Pairs, typer.Option(metavar="C=LOW:HIGH", help="Public bounds of a column; repeat.")]
Keys = Annotated[Pairs, typer.Option(metavar="C=A,B|private", help="Public values of a key; repeat.")]
Bins = Annotated[Pairs, typer.Option(metavar="C=0,10,20", help="Public edges of a histogram; repeat.")]
RequestName = Annotated[str, typer.Argument(metavar="REQUEST", help="What `ask`, `train` or `requests` printed.")]


@app.command()
def datasets(url: Url = None, as_json: AsJson = False) -> None:
    """The data sets that are lent, with their budgets."""
    with _gateway(url) as gateway:
        found, balances = gateway.datasets(), {one["dataset"]: one for one in gateway.budget()}
    if as_json:
        typer.echo(json.dumps([one | {"balance": balances.get(one["dataset"])} for one in found]))
        return
    for one in found:
        left = balances[one["dataset"]]
        typer.echo(f"{one['dataset']}: {one['about']}".rstrip(": "))
        typer.echo(f"  epsilon {up(left['spent'])} of {one['budget']['epsilon']:g} spent by all; {_allowed(left)}")


@app.command()
def price(
    sql: Sql,
    epsilon: Epsilon,
    delta: Delta = None,
    bounds: Bounds = None,
    keys: Keys = None,
    bins: Bins = None,
    dataset: Dataset = None,
    url: Url = None,
) -> None:
    """What a question would cost, and how good its answer would be: free."""
    with _gateway(url) as gateway, as_options():
        found = gateway.price(sql, epsilon=epsilon, dataset=dataset, **_options(delta, bounds, keys, bins))
    typer.echo(
        f"epsilon {up(found.epsilon)}, delta {found.delta:g}" + ("; in your archive" if found.in_archive else "")
    )
    for column, width in found.half_widths.items():
        typer.echo(f"  {column}: " + ("depends on the group" if width is None else f"+-{up(width, 4)}"))
    typer.echo(
        f"  {'fits' if found.fits_budget else 'does NOT fit'} the budget; "
        f"{'within' if found.fits_allowance else 'BEYOND'} your allowance "
        f"(epsilon {found.allowance_left:.6g}, delta {found.allowance_delta_left:.3g} left)"
    )


@app.command()
def ask(
    sql: Sql,
    epsilon: Epsilon,
    delta: Delta = None,
    bounds: Bounds = None,
    keys: Keys = None,
    bins: Bins = None,
    purpose: Annotated[str, typer.Option(help="What for, as the ledger keeps it.")] = "",
    reason: Annotated[str, typer.Option(help="Beyond your allowance: why; then it waits for approval.")] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Pay again instead of taking it from the archive.")] = False,
    signed_by: Key = None,
    dataset: Dataset = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Ask one question; it is charged before any row is looked at, and checked before it is shown."""
    with _gateway(url, signed_by) as gateway, as_options():
        options = _options(delta, bounds, keys, bins) | {"purpose": purpose, "reason": reason, "fresh": fresh}
        _show(gateway.ask(sql, epsilon=epsilon, dataset=dataset, **options), as_json)


@app.command()
def collect(request: RequestName, signed_by: Key = None, url: Url = None, as_json: AsJson = False) -> None:
    """The answer to a request that was approved since: costs nothing."""
    with _gateway(url, signed_by) as gateway:
        _show(gateway.collect(request), as_json)


@app.command()
def requests(
    state: Annotated[str | None, typer.Option(help="Only those in this state.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Your requests, or all of a data set that you watch, the newest first."""
    with _gateway(url) as gateway:
        found = gateway.requests(state=state)
    if as_json:
        typer.echo(json.dumps([one.record for one in found]))
        return
    for one in found:
        typer.echo(_line(one))


@app.command()
def show(request: RequestName, url: Url = None) -> None:
    """One request with its question and its reason, as JSON: no character in it is unseen."""
    with _gateway(url) as gateway:
        typer.echo(json.dumps(gateway.request(request).record, indent=2))


@app.command()
def approve(
    request: RequestName,
    reason: Annotated[str, typer.Option(help="Why, as the request keeps it.")] = "",
    url: Url = None,
) -> None:
    """As owner or officer: approve what waits; it is charged and answered now."""
    with _gateway(url) as gateway:
        typer.echo(_line(gateway.approve(request, reason=reason)))


@app.command()
def deny(
    request: RequestName,
    reason: Annotated[str, typer.Option(help="Why, as the request keeps it.")] = "",
    url: Url = None,
) -> None:
    """As owner or officer: deny what waits; nothing is charged."""
    with _gateway(url) as gateway:
        typer.echo(_line(gateway.deny(request, reason=reason)))


@app.command()
def spending(
    export: Annotated[Path | None, typer.Option(help="Write the account here, for `terrine ledger verify`.")] = None,
    dataset: Dataset = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """As owner or officer: who spent how much of a data set, for what."""
    with _gateway(url) as gateway:
        found = gateway.spending(dataset)
        if export is not None:
            export.write_text(gateway.export(dataset), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(found))
        return
    balance = found["balance"]
    typer.echo(f"{found['dataset']}: epsilon {up(balance['spent'])} of {balance['budget']['epsilon']:g} spent by all")
    for one in found["members"]:
        spent = f"epsilon {up(one['epsilon'])}, delta {up(one['delta'], 3)}"
        typer.echo(f"  {one['member']}: {one['charges']} charges, in sum {spent}")
    for one in found["charges"]:
        when = datetime.datetime.fromtimestamp(one["at"], datetime.UTC).isoformat(" ", "minutes")
        typer.echo(f"  {one['sequence']}  {when}  {one['by']}: {one['purpose']}")


@app.command()
def train(
    label: Annotated[str, typer.Option(help="The column to predict.")],
    epsilon: Epsilon,
    delta: Delta = None,
    model: Annotated[str | None, typer.Option(help="linear or mlp.")] = None,
    lot: Annotated[int | None, typer.Option(help="Expected people in a lot.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    clip: Annotated[float | None, typer.Option(help="The bound on one person's gradient.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The learning rate.")] = None,
    tune: Annotated[int | None, typer.Option(help="The best of about so many runs; all of it is billed.")] = None,
    purpose: Annotated[str, typer.Option(help="What for, as the ledger keeps it.")] = "",
    reason: Annotated[str, typer.Option(help="Beyond your allowance: why.")] = "",
    out: Annotated[Path | None, typer.Option(help="Wait, then unpack and verify the release here.")] = None,
    signed_by: Key = None,
    dataset: Dataset = None,
    url: Url = None,
) -> None:
    """Have a model trained; with --out, wait for it, fetch it and verify it."""
    told = {
        "delta": delta, "model": model, "lot": lot, "epochs": epochs, "clip": clip, "learning_rate": learning_rate,
        "tune": tune, "purpose": purpose, "reason": reason,
    }  # fmt: skip
    given = {name: value for name, value in told.items() if value not in (None, "")}
    with _gateway(url, signed_by) as gateway:
        made = gateway.train(dataset=dataset, label=label, epsilon=epsilon, **given)
        typer.echo(f"{made.request}: {made.said}", err=out is not None)
        if out is not None:
            ended = gateway.wait(made.request)
            if ended.state != "answered":
                raise InvalidArgument(f"the training is {ended.state}: {ended.said}")
            _fetch(gateway, made.request, out)


@app.command()
def download(
    request: RequestName,
    out: Annotated[Path, typer.Option(help="A new folder.")],
    signed_by: Key = None,
    url: Url = None,
) -> None:
    """Unpack the release of a finished training into a new folder, and verify it."""
    with _gateway(url, signed_by) as gateway:
        _fetch(gateway, request, out)


@app.command()
def cancel(request: RequestName, url: Url = None) -> None:
    """Take a request back, or end a training; what was charged stays charged."""
    with _gateway(url) as gateway:
        typer.echo(_line(gateway.cancel(request)))


@app.command()
def resume(request: RequestName, url: Url = None) -> None:
    """Go on with a training that was charged and then ended, at no new cost."""
    with _gateway(url) as gateway:
        typer.echo(_line(gateway.resume(request)))


def _gateway(url: str | None, signed_by: Path | None = None) -> Gateway:
    from terrine.client import Gateway

    where, token = url or os.environ.get("TERRINE_GATEWAY"), os.environ.get("TERRINE_TOKEN")
    if not where or not token:
        raise InvalidArgument("want the gateway's address in --url or $TERRINE_GATEWAY, and a token in $TERRINE_TOKEN")
    return Gateway(where, token, signed_by=signed_by)


def _options(delta: float | None, bounds: Pairs, keys: Pairs, bins: Pairs) -> dict[str, Any]:
    return {"delta": delta, "bounds": read_bounds(bounds), "keys": read_keys(keys), "bins": read_bins(bins)}


def _show(answer: RemoteAnswer, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(answer.record))
        return
    tables.show(answer.columns, answer.rows)
    cost = "from the archive: it cost nothing now" if answer.from_archive else "charged now"
    typer.echo(f"epsilon {up(answer.epsilon)}, delta {answer.delta:g}; {cost}; half-widths hold with 95%")
    signed = ", signature" if answer.signed else "; not signed by a key you gave"
    typer.echo(f"checked: event, price, charge{signed}; write down the charge: {answer.charge}")


def _line(one: Request) -> str:
    cost = f"epsilon {up(one.epsilon)} at delta {one.delta:g} {'charged' if one.charged else 'not charged'}"
    told = (f"{one.request} {one.kind} by {one.member} on {one.dataset}: {one.state}, {cost}", one.said or one.progress)
    return "; ".join(part for part in told if part)


def _fetch(gateway: Gateway, request: str, out: Path) -> None:
    found = gateway.download(request, out)
    typer.echo(f"{out}: verifies ({', '.join(one.name for one in found.checks)})")
    for one in found.unchecked:
        typer.echo(f"  not checked: {one.name}: {one.detail}")


def _allowed(left: dict[str, Any]) -> str:
    if left["allowance"] is None:
        return "no allowance: your role does not ask"
    return (
        f"of your allowance {left['allowance_spent']:.6g} of {left['allowance']:.6g}, "
        f"and {left['allowance_delta_spent']:.3g} of delta {left['allowance_delta']:.3g}"
    )

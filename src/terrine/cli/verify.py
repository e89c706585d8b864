"""`terrine verify` and `terrine keys`: check a release without its data; sign one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terrine import check

if TYPE_CHECKING:
    from terrine.verify import Verification

keys = typer.Typer(name="keys", help="Keys that sign releases.", no_args_is_help=True)


def verify(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run, or what was handed on of it.")],
    signed_by: Annotated[Path | None, typer.Option(help="The signer's public key; the release must be signed.")] = None,
    ledger: Annotated[str | None, typer.Option(help="The ledger that was charged: its address.")] = None,
    statement: Annotated[Path | None, typer.Option(help="Or what terrine ledger export wrote of it.")] = None,
    registry: Annotated[
        Path | None, typer.Option(help="Write an entry for a public registry of deployments here, if all is well.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a release without its data: files, claim, signature, charge; exit 1 and the first lie by name."""
    from terrine.verify import verify as checked

    found = checked(run, signed_by=signed_by, ledger=ledger, statement=statement)
    if registry is not None and found.ok:
        from terrine import files
        from terrine.verify.registry import entry

        files.write(registry, json.dumps(entry(run), indent=2, allow_nan=False) + "\n", private=False)
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
    else:
        _print(run, found)
    if not found.ok:
        raise typer.Exit(1)


@keys.command("new")
def new(
    path: Annotated[Path, typer.Argument(help="A file for the private key; the public one is PATH.pub.")],
) -> None:
    """Make an Ed25519 key pair."""
    from terrine.verify import signing

    private, public = signing.new_key(path)
    typer.echo(f"private key: {private} (keep it)")
    typer.echo(f"public key:  {public} (hand it to whoever verifies), {signing.name_of(signing.load_public(public))}")


def _print(run: Path, found: Verification) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    table = Table("checked", "", "found")
    for one in found.checks:
        table.add_row(one.name, Text("ok", "green") if one.ok else Text("LIE", "bold red"), Text(one.detail))
    for one in found.unchecked:
        table.add_row(one.name, Text("-", "yellow"), Text(f"not checked: {one.detail}"))
    console.print(table)
    name = check.printable(str(run))
    if (lie := found.lie) is not None:
        console.print(Text(f"{name} does NOT verify: {lie.name}: {lie.detail}", "bold red"))
    else:
        console.print(Text(f"{name} verifies", "bold green"))

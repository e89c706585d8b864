"""The command's root: every sub-command hangs here, and every refusal leaves as one line and exit code 2."""

from __future__ import annotations

import sys

import typer

from terrine.cli import ledger
from terrine.errors import TerrineError

app = typer.Typer(
    name="terrine",
    help="Learn from private data, and say with a certificate how much the result can tell.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


app.add_typer(ledger.app, name="ledger")


@app.command()
def version() -> None:
    """Print Terrine's version."""
    from terrine import __version__

    typer.echo(__version__)


@app.callback()
def root() -> None:
    """Learn from private data, and say with a certificate how much the result can tell."""


def main() -> None:
    """Run the command line."""
    try:
        app()
    except TerrineError as error:
        typer.echo(f"terrine: {error}", err=True)
        sys.exit(2)

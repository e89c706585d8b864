"""The command's root: every sub-command hangs here, and every refusal leaves as one line and exit code 2."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import terrine
from terrine.cli import (
    accounting,
    audit,
    demo,
    federated,
    ledger,
    pate,
    prompt,
    query,
    remote,
    schema,
    serve,
    sums,
    train,
    verify,
)
from terrine.cli.examples import show_examples
from terrine.errors import TerrineError, WeakGuarantee

Command = Callable[..., None] | typer.Typer
_COMMANDS: dict[str, dict[str, Command]] = {
    "Every day": {
        "demo": demo.demo,
        "schema": schema.schema,
        "train": train.train,
        "predict": train.predict,
        "report": train.report,
        "verify": verify.verify,
        "query": query.query,
        "ledger": ledger.app,
        "keys": verify.keys,
    },
    "With others": {"serve": serve.serve, "remote": remote.app},
    "Other ways to learn, and attacks": {
        "pate": pate.app,
        "prompt": prompt.app,
        "federated": federated.app,
        "sums": sums.sums,
        "audit": audit.app,
    },
    "Accounting": {
        "epsilon": accounting.epsilon,
        "noise": accounting.noise,
        "steps": accounting.steps,
        "compare": accounting.compare,
    },
}
_ORDER = [name for commands in _COMMANDS.values() for name in commands]
_INTERRUPTED = 130


class InOrder(TyperGroup):
    """Commands in the order in which a newcomer meets them; typer would put those of groups last."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_ORDER.index)


app = typer.Typer(
    name="terrine",
    cls=InOrder,
    help="Learn from private data, and say with a certificate how much the result can tell about any one person.",
    epilog="Epsilon and delta hold for one unit: an example (a row), a person (--person) or a client; every command "
    "says which. Begin with: terrine demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for section, commands in _COMMANDS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=section)
        else:
            app.command(name, rich_help_panel=section)(command)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(terrine.__version__)
        raise typer.Exit


@app.callback()
def root(
    asked: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What comes before any command."""


show_examples(app)


def main() -> None:
    """Run the command line."""
    warnings.simplefilter("ignore", WeakGuarantee)  # a command refuses such a guarantee, or says in words what it is
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        code = app(standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt) as stop:
        _leave(str(stop) or "interrupted", code=_INTERRUPTED)
    except TerrineError as error:
        _leave(str(error), code=2)
    except OSError as error:
        _leave(f"{error.filename}: {error.strerror}" if error.filename else str(error), code=2)
    except Exception as error:
        if not hasattr(error, "format_message"):  # a usage error, whichever click typer brings along
            raise
        _leave(error.format_message(), code=2)
    if code == _INTERRUPTED:  # typer's answer to Ctrl-C where no command explains itself
        _leave("interrupted", code=_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _leave(message: str, *, code: int) -> NoReturn:
    typer.echo(f"terrine: {' '.join(message.split())}", err=True)
    sys.exit(code)

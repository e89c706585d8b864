"""The command's root: every sub-command hangs here, and every refusal leaves as one line and exit code 2."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

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

Command = Callable[..., None]
_EVERY_DAY, _OFFICE = "Every day", "With others"
_OTHER_WAYS, _ACCOUNTING = "Other ways to learn, and attacks", "Accounting"
_ORDER = (
    "demo", "schema", "train", "predict", "report", "verify", "query", "ledger", "keys", "serve", "remote",
    "pate", "prompt", "federated", "sums", "audit",
    "epsilon", "noise", "steps", "compare", "version",
)  # fmt: skip


class InOrder(TyperGroup):
    """Commands in the order in which a newcomer meets them; any that is not in the list comes last."""

    def list_commands(self, ctx: Any) -> list[str]:
        place = {name: number for number, name in enumerate(_ORDER)}
        return sorted(super().list_commands(ctx), key=lambda name: place.get(name, len(place)))


app = typer.Typer(
    name="terrine",
    cls=InOrder,
    help="Learn from private data, and say with a certificate how much the result can tell about any one person.",
    epilog="Epsilon and delta hold for one unit: an example (a row), a person (--person) or a client; every command "
    "says which. Begin with: terrine demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_DAILY: dict[str, Command] = {
    "demo": demo.demo,
    "schema": schema.schema,
    "train": train.train,
    "predict": train.predict,
    "report": train.report,
    "verify": verify.verify,
    "query": query.query,
}
for name, function in _DAILY.items():
    app.command(name, rich_help_panel=_EVERY_DAY)(function)
app.add_typer(ledger.app, name="ledger", rich_help_panel=_EVERY_DAY)
app.add_typer(verify.keys, rich_help_panel=_EVERY_DAY)
app.command("serve", rich_help_panel=_OFFICE)(serve.serve)
app.add_typer(remote.app, rich_help_panel=_OFFICE)
for group, called in ((pate.app, "pate"), (prompt.app, "prompt"), (federated.app, "federated"), (audit.app, "audit")):
    app.add_typer(group, name=called, rich_help_panel=_OTHER_WAYS)
app.command("sums", rich_help_panel=_OTHER_WAYS)(sums.sums)
_ABOUT_EPSILON: dict[str, Command] = {
    "epsilon": accounting.epsilon,
    "noise": accounting.noise,
    "steps": accounting.steps,
    "compare": accounting.compare,
}
for name, function in _ABOUT_EPSILON.items():
    app.command(name, rich_help_panel=_ACCOUNTING)(function)

_INTERRUPTED = 130


@app.command(rich_help_panel=_ACCOUNTING)
def version() -> None:
    """Print Terrine's version."""
    from terrine import __version__

    typer.echo(__version__)


def _show_version(asked: bool) -> None:
    if asked:
        version()
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

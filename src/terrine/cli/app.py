"""The command's root: every sub-command hangs here, and every refusal leaves as one line and exit code 2."""

from __future__ import annotations

import sys
import warnings
from typing import NoReturn

import typer

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
from terrine.errors import TerrineError, WeakGuarantee

app = typer.Typer(
    name="terrine",
    help="Learn from private data, and say with a certificate how much the result can tell.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("epsilon")(accounting.epsilon)
app.command("noise")(accounting.noise)
app.command("steps")(accounting.steps)
app.command("compare")(accounting.compare)
app.add_typer(ledger.app, name="ledger")
app.add_typer(pate.app)
app.add_typer(audit.app)
app.add_typer(prompt.app)
app.command("train")(train.train)
app.command("predict")(train.predict)
app.command("report")(train.report)
app.command("schema")(schema.schema)
app.command("verify")(verify.verify)
app.add_typer(verify.keys)
app.command("demo")(demo.demo)
app.command("query")(query.query)
app.add_typer(federated.app, name="federated")
app.command("sums")(sums.sums)
app.command("serve")(serve.serve)
app.add_typer(remote.app)


@app.command()
def version() -> None:
    """Print Terrine's version."""
    from terrine import __version__

    typer.echo(__version__)


def main() -> None:
    """Run the command line."""
    warnings.simplefilter("ignore", WeakGuarantee)  # a command refuses such a guarantee, or says in words what it is
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        code = app(standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt) as stop:
        _leave(str(stop) or "interrupted", code=130)
    except (TerrineError, OSError) as error:
        _leave(str(error), code=2)
    except Exception as error:
        if not hasattr(error, "format_message"):  # a usage error, whichever click typer brings along
            raise
        _leave(error.format_message(), code=2)
    sys.exit(code if isinstance(code, int) else 0)


def _leave(message: str, *, code: int) -> NoReturn:
    typer.echo(f"terrine: {' '.join(message.split())}", err=True)
    sys.exit(code)

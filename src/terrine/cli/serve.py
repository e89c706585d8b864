"""`terrine serve`: a gateway, by its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terrine.errors import InvalidArgument


def serve(
    configuration: Annotated[Path, typer.Argument(metavar="CONFIG", help="A gateway.toml.")],
    init: Annotated[
        bool, typer.Option("--init", help="Make the ledger, and print the first owner's token: this once.")
    ] = False,
    port: Annotated[int | None, typer.Option(help="Another port than the file says.", min=0, max=65_535)] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Open everything, serve nothing. With --init, too, the ledger is made.")
    ] = False,
) -> None:
    """Lend data out by budget: analysts ask from afar, an officer watches. Listens on loopback by default."""
    from terrine.gateway import configuration as configurations
    from terrine.gateway import create_app
    from terrine.gateway import serve as run

    found = configurations.load(configuration)
    if not init and "://" not in found.ledger and not Path(found.database).is_file():
        raise InvalidArgument(f"{found.database}: no such ledger; terrine serve {configuration} --init makes one")
    app = create_app(found, create=init)
    gateway = app.state.gateway
    if init:
        try:
            token = gateway.first_token()
        except Exception:
            gateway.stop()
            raise
        typer.echo("the first owner's token, shown this once and kept as a hash; put it where it is safe:", err=True)
        typer.echo(token)
    if check:
        gateway.stop()
        typer.echo("the configuration holds: database, key and data sets can be opened", err=True)
        return
    scheme = "https" if found.tls_key is not None else "http"
    typer.echo(f"serving on {scheme}://{found.host}:{found.port if port is None else port}; Ctrl-C ends it", err=True)
    run(found, app=app, port=port)

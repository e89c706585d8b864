"""The gateway: an owner lends data out by budget, analysts ask from afar, an officer watches.

    token -> policy of the route -> price (public) -> archive | allowance -> ledger.charge -> engine -> stored answer

Everything that matters lies in the ledger's database, so that two servers on one PostgreSQL agree and a server that is
killed forgets nothing. No code of an analyst is ever run: SQL goes through the allow-list of `terrine.queries`,
trainings take named settings.

    terrine serve gateway.toml --init
"""

import importlib.util

from terrine.errors import MissingExtra

if importlib.util.find_spec("fastapi") is None:
    raise MissingExtra("fastapi", extra="gateway")
if importlib.util.find_spec("uvicorn") is None:
    raise MissingExtra("uvicorn", extra="gateway")
if importlib.util.find_spec("jinja2") is None:
    raise MissingExtra("jinja2", extra="gateway")

from terrine.gateway.configuration import Configuration
from terrine.gateway.server import create_app, serve

__all__ = ["Configuration", "create_app", "serve"]

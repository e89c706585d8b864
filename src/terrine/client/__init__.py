"""Asking a gateway from afar, and checking what arrives.

    from terrine.client import Gateway

    gateway = Gateway("http://127.0.0.1:8787", token)
    answer = gateway.ask("SELECT COUNT(*) AS n FROM visits", epsilon=0.1)
    answer.table, answer.cost

`Gateway` works for analysts, who ask and train, and for officers, who decide and read what was spent.
"""

import importlib.util

from terrine.errors import MissingExtra

if importlib.util.find_spec("httpx") is None:
    raise MissingExtra("httpx", extra="gateway")

from terrine.client.gateway import BeyondAllowance, Gateway, GatewayRefused
from terrine.client.values import Price, RemoteAnswer, RemoteTraining, Request

__all__ = ["BeyondAllowance", "Gateway", "GatewayRefused", "Price", "RemoteAnswer", "RemoteTraining", "Request"]

"""What there is to read: data sets and what is left of them, requests, spending, the access log."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from sqlalchemy import select

from terrine.gateway import members, schema
from terrine.gateway.api import watching
from terrine.gateway.api.door import Asker
from terrine.gateway.bodies import DatasetName, Identifier
from terrine.gateway.pages.rendering import render
from terrine.gateway.pages.wording import STATES
from terrine.gateway.policy import GuardedRoute, Where, allow

router = APIRouter(route_class=GuardedRoute)
_LATEST, _ENTRIES = 5, 200


@router.get("/", include_in_schema=False)
@allow(page=True)
def home(request: Request, caller: Asker) -> Response:
    """The data sets in scope, with what is spent and left; what waits; what was asked last."""
    gateway = request.app.state.gateway
    found = [one | {"balance": gateway.balance(caller, one["dataset"])} for one in gateway.visible(caller)]
    waiting = gateway.requests(caller, state="waiting")
    latest = gateway.requests(caller)[:_LATEST]
    return render(request, "home.html", datasets=found, waiting=waiting, requests=latest)


@router.get("/pages/datasets/{name}", include_in_schema=False)
@allow(where=Where.DATASET, page=True)
def dataset(request: Request, caller: Asker, name: DatasetName) -> Response:
    """One data set: what is left, its tables, made-up rows."""
    gateway = request.app.state.gateway
    return render(request, "dataset.html", one=gateway.described(name), balance=gateway.balance(caller, name))


@router.get("/pages/datasets/{name}/spending", include_in_schema=False)
@allow("owner", "officer", where=Where.DATASET, page=True, logged=True)
def spending(request: Request, caller: Asker, name: DatasetName) -> Response:
    """Who spent how much of a data set, and every charge."""
    found = request.app.state.gateway.spending(caller, name)
    return render(request, "spending.html", name=name, found=found | {"charges": found["charges"][::-1]})


@router.get("/pages/requests", include_in_schema=False)
@allow(page=True)
def requests(request: Request, caller: Asker, state: str = "", dataset: str = "") -> Response:
    """Who asked what at what price; an analyst sees their own."""
    gateway = request.app.state.gateway
    names = [one["dataset"] for one in gateway.visible(caller)]
    wanted = {"state": state if state in STATES else None, "dataset": dataset if dataset in names else None}
    return render(request, "requests.html", requests=gateway.requests(caller, **wanted), names=names, wanted=wanted)


@router.get("/pages/requests/{request}", include_in_schema=False)
@allow(where=Where.REQUEST, page=True)
def request_(http: Request, caller: Asker, request: Identifier) -> Response:
    """One request and what became of it."""
    return shown(http, caller, request)


@router.get("/pages/log", include_in_schema=False)
@allow("owner", "officer", page=True, logged=True)
def log(request: Request, caller: Asker) -> Response:
    """The newest entries of the access log."""
    gateway = request.app.state.gateway
    with gateway.database.read() as session:
        last = session.execute(select(schema.META.c.log_sequence)).scalar() or 0
    found = watching.log(request, caller, after=max(0, last - _ENTRIES))
    return render(request, "log.html", entries=found["entries"][::-1], broken=found["broken"])


def shown(http: Request, caller: Any, request: str, *, status: int = 200, **told: Any) -> Response:
    """A request's page: also what a form on it comes back to."""
    gateway = http.app.state.gateway
    one = gateway.request(caller, request)
    found: dict[str, Any] = {"balance": None, "member": None}
    if caller.role != "analyst":
        found["balance"] = gateway.balance(caller, one["dataset"])
        with gateway.database.read() as session:
            member = members.find(session, one["dataset"], one["member"])
        found["member"] = None if member is None else members.shown(member)
    return render(http, "request.html", status=status, one=one, **found | told)

"""Requests and their approval, budgets, spending, exports and the access log."""

from __future__ import annotations

import io
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse

from terrine.gateway import access_log, answers
from terrine.gateway.api.door import Asker
from terrine.gateway.bodies import DatasetName, DecisionBody, Identifier, State
from terrine.gateway.policy import GuardedRoute, Where, allow
from terrine.gateway.tokens import ALL

router = APIRouter(route_class=GuardedRoute)
_DECIDED: dict[int | str, dict[str, Any]] = {
    409: {"model": answers.Problem, "description": "the request is in another state, or the budget does not hold it"},
    500: {"model": answers.Problem, "description": "failed after the charge: it stays charged"},
}


_LINES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}, "description": "JSON Lines"}
}


@router.get("/requests", response_model=list[answers.RequestShown])
@allow()
def requests(
    http: Request, caller: Asker, state: State | None = None, dataset: DatasetName | None = None
) -> list[dict[str, Any]]:
    """Requests in scope, the newest first; an analyst sees their own."""
    return http.app.state.gateway.requests(caller, state=state, dataset=dataset)  # type: ignore[no-any-return]


@router.get("/requests/{request}", response_model=answers.RequestShown)
@allow(where=Where.REQUEST)
def request_(http: Request, caller: Asker, request: Identifier) -> dict[str, Any]:
    """One request, and what became of it; only its analyst sees the answer."""
    return http.app.state.gateway.request(caller, request)  # type: ignore[no-any-return]


@router.post("/requests/{request}/approve", response_model=answers.RequestShown, responses=_DECIDED)
@allow("owner", "officer", where=Where.REQUEST)
def approve(http: Request, caller: Asker, request: Identifier, body: DecisionBody) -> dict[str, Any]:
    """Approve what waits: it is charged and answered now, beyond its analyst's allowance."""
    return http.app.state.gateway.approve(caller, request, body.reason)  # type: ignore[no-any-return]


@router.post("/requests/{request}/deny", response_model=answers.RequestShown, responses=_DECIDED)
@allow("owner", "officer", where=Where.REQUEST)
def deny(http: Request, caller: Asker, request: Identifier, body: DecisionBody) -> dict[str, Any]:
    """Deny what waits."""
    return http.app.state.gateway.deny(caller, request, body.reason)  # type: ignore[no-any-return]


@router.post("/requests/{request}/cancel", response_model=answers.RequestShown, responses=_DECIDED)
@allow("analyst", "owner", where=Where.REQUEST)
def cancel(http: Request, caller: Asker, request: Identifier) -> dict[str, Any]:
    """Take back what waits, or end a training; what was charged stays charged."""
    return http.app.state.gateway.cancel(caller, request)  # type: ignore[no-any-return]


@router.get("/budget", response_model=list[answers.BalanceShown])
@allow()
def budget(http: Request, caller: Asker) -> list[dict[str, Any]]:
    """Of every data set in scope: what was spent by everyone together, what is left, and the caller's allowance."""
    gateway = http.app.state.gateway
    return [gateway.balance(caller, one["dataset"]) for one in gateway.visible(caller)]


@router.get("/datasets/{name}/spending", response_model=answers.Spending)
@allow("owner", "officer", where=Where.DATASET, logged=True)
def spending(http: Request, caller: Asker, name: DatasetName) -> dict[str, Any]:
    """Who spent how much of the data set, and every charge."""
    return http.app.state.gateway.spending(caller, name)  # type: ignore[no-any-return]


@router.get("/datasets/{name}/export", response_model=None, responses=_LINES)
@allow("owner", "officer", where=Where.DATASET, logged=True)
def export(http: Request, caller: Asker, name: DatasetName) -> PlainTextResponse:
    """The data set's account as JSON Lines, for `terrine ledger verify`."""
    file = io.StringIO()
    http.app.state.gateway.database.ledger.export(file, account=name)
    return PlainTextResponse(file.getvalue(), media_type="application/jsonl")


@router.get("/log", response_model=answers.Log)
@allow("owner", "officer", logged=True)
def log(http: Request, caller: Asker, after: Annotated[int, Query(ge=0, le=2**62)] = 0) -> dict[str, Any]:
    """The access log of what is in scope, a thousand entries after `after`."""
    with http.app.state.gateway.database.read() as session:
        dataset = None if caller.dataset == ALL else caller.dataset
        return {
            "entries": access_log.read(session, after=after, dataset=dataset),
            "broken": access_log.broken(session),
        }

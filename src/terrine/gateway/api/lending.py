"""Data sets, members and tokens: what owners register, lend and revoke."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from terrine.gateway import answers, members, tokens
from terrine.gateway.api.door import Asker
from terrine.gateway.bodies import DatasetBody, DatasetName, Identifier, MemberBody, MemberName, TokenBody
from terrine.gateway.policy import GuardedRoute, Where, allow

router = APIRouter(route_class=GuardedRoute)
_CONFLICT: dict[int | str, dict[str, Any]] = {409: {"model": answers.Problem, "description": "does not fit"}}


@router.get("/datasets", response_model=list[answers.Dataset])
@allow()
def datasets(request: Request, caller: Asker) -> list[dict[str, Any]]:
    """The data sets in the token's scope."""
    return request.app.state.gateway.visible(caller)  # type: ignore[no-any-return]


@router.post("/datasets/{name}", response_model=answers.Dataset, status_code=201, responses=_CONFLICT)
@allow("owner", where=Where.WHOLE)
def register(request: Request, caller: Asker, name: DatasetName, body: DatasetBody) -> dict[str, Any]:
    """Register a data set, with its one budget."""
    request.state.dataset = name
    return request.app.state.gateway.datasets.register(name, body, caller.member)  # type: ignore[no-any-return]


@router.get("/datasets/{name}", response_model=answers.DatasetShown)
@allow(where=Where.DATASET)
def dataset(request: Request, caller: Asker, name: DatasetName) -> dict[str, Any]:
    """A data set's public facts: schemas, bounds, made-up rows."""
    return request.app.state.gateway.described(name)  # type: ignore[no-any-return]


@router.delete("/datasets/{name}", response_model=answers.Done)
@allow("owner", where=Where.DATASET)
def close(request: Request, caller: Asker, name: DatasetName) -> dict[str, Any]:
    """Close a data set for ever: it is asked no more; what was spent stays on record."""
    request.app.state.gateway.datasets.close(name)
    return {"done": True}


@router.get("/datasets/{name}/members", response_model=list[answers.Member])
@allow("owner", "officer", where=Where.DATASET)
def member_list(request: Request, caller: Asker, name: DatasetName) -> list[dict[str, Any]]:
    """Everyone who has, or had, a role for the data set."""
    with request.app.state.gateway.database.read() as session:
        return members.listed(session, name)


@router.put("/datasets/{name}/members/{member}", response_model=answers.Member, responses=_CONFLICT)
@allow("owner", where=Where.DATASET)
def lend(request: Request, caller: Asker, name: DatasetName, member: MemberName, body: MemberBody) -> dict[str, Any]:
    """Lend the data set to somebody, or change their allowance."""
    request.state.subject = member
    return request.app.state.gateway.lend(caller, name, member, body)  # type: ignore[no-any-return]


@router.delete("/datasets/{name}/members/{member}", response_model=answers.Done)
@allow("owner", where=Where.DATASET)
def take_back(request: Request, caller: Asker, name: DatasetName, member: MemberName) -> dict[str, Any]:
    """Take a loan back: the member's tokens for the data set count no more."""
    gateway, request.state.subject = request.app.state.gateway, member
    with gateway.database.write() as session:
        members.revoke(session, gateway.database, name, member)
    return {"done": True}


@router.put("/members/{member}", response_model=answers.Member, responses=_CONFLICT)
@allow("owner", where=Where.WHOLE)
def appoint(request: Request, caller: Asker, member: MemberName, body: MemberBody) -> dict[str, Any]:
    """Make somebody owner or officer of every data set."""
    request.state.subject = member
    return request.app.state.gateway.lend(caller, tokens.ALL, member, body)  # type: ignore[no-any-return]


@router.get("/tokens", response_model=list[answers.Token])
@allow("owner", "officer")
def token_list(request: Request, caller: Asker) -> list[dict[str, Any]]:
    """The tokens in scope, without their secrets."""
    with request.app.state.gateway.database.read() as session:
        return tokens.listed(session, caller)


@router.post("/tokens", response_model=answers.NewToken, status_code=201, responses=_CONFLICT)
@allow("owner")
def issue(request: Request, caller: Asker, body: TokenBody) -> dict[str, Any]:
    """Issue a token to a member; its secret is shown this once."""
    request.state.subject = body.member
    return request.app.state.gateway.issue(caller, body)  # type: ignore[no-any-return]


@router.delete("/tokens/{token}", response_model=answers.Done)
@allow("owner")
def revoke(request: Request, caller: Asker, token: Identifier) -> dict[str, Any]:
    """Revoke a token, and the logins made with it."""
    gateway, request.state.subject = request.app.state.gateway, token
    with gateway.database.write() as session:
        tokens.revoke(session, gateway.database, caller, token)
    return {"done": True}

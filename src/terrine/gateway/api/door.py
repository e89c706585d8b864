"""Health, the OpenAPI document, and who one is."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from sqlalchemy import text

from terrine import __version__
from terrine.gateway import answers
from terrine.gateway.policy import GuardedRoute, Where, allow, caller_of
from terrine.gateway.tokens import Caller

router = APIRouter(route_class=GuardedRoute)
Asker = Annotated[Caller, Depends(caller_of)]


@router.get("/health", response_model=answers.Health)
@allow(where=Where.OPEN)
def health(request: Request) -> dict[str, Any]:
    """Whether the server can reach its database."""
    with request.app.state.gateway.database.read() as session:
        session.execute(text("SELECT 1"))
    return {"ok": True, "version": __version__}


@router.get("/openapi.json", include_in_schema=False)
@allow(where=Where.OPEN)
def document(request: Request) -> JSONResponse:
    """The OpenAPI document."""
    return JSONResponse(request.app.openapi())


@router.get("/me", response_model=answers.Me)
@allow()
def me(caller: Asker) -> dict[str, Any]:
    """Who the caller is, by their token."""
    return {"member": caller.member, "role": caller.role, "dataset": caller.dataset, "token": caller.token}

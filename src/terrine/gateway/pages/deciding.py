"""Decisions about requests: approve or deny with a reason, take back, go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from terrine.gateway.api import jobs
from terrine.gateway.api.door import Asker
from terrine.gateway.bodies import DecisionBody, Identifier
from terrine.gateway.pages import forms
from terrine.gateway.pages.forms import Form
from terrine.gateway.pages.reading import shown
from terrine.gateway.pages.rendering import see
from terrine.gateway.policy import GuardedRoute, Where, allow

router = APIRouter(route_class=GuardedRoute)


@router.post("/pages/requests/{request}/approve", include_in_schema=False)
@allow("owner", "officer", where=Where.REQUEST, page=True)
def approve(http: Request, caller: Asker, request: Identifier, form: Form) -> Response:
    """Approve what waits: it is charged and answered now."""
    gateway = http.app.state.gateway
    return _done(
        http, caller, request, "approved", lambda: gateway.approve(caller, request, _reason(form)), form.get("reason")
    )


@router.post("/pages/requests/{request}/deny", include_in_schema=False)
@allow("owner", "officer", where=Where.REQUEST, page=True)
def deny(http: Request, caller: Asker, request: Identifier, form: Form) -> Response:
    """Deny what waits."""
    gateway = http.app.state.gateway
    return _done(
        http, caller, request, "denied", lambda: gateway.deny(caller, request, _reason(form)), form.get("reason")
    )


@router.post("/pages/requests/{request}/cancel", include_in_schema=False)
@allow("analyst", "owner", where=Where.REQUEST, page=True)
def cancel(http: Request, caller: Asker, request: Identifier, form: Form) -> Response:
    """Take back what waits, or end a training."""
    gateway = http.app.state.gateway
    return _done(http, caller, request, "cancelled", lambda: gateway.cancel(caller, request))


@router.post("/pages/requests/{request}/resume", include_in_schema=False)
@allow("analyst", "owner", where=Where.REQUEST, page=True)
def resume(http: Request, caller: Asker, request: Identifier, form: Form) -> Response:
    """Go on with a training that was charged and then ended."""
    return _done(http, caller, request, "resumed", lambda: jobs.resume(http, caller, request))


def _reason(form: dict[str, str]) -> str:
    return DecisionBody.model_validate({"reason": forms.reason(form)}).reason


def _done(
    http: Request, caller: Any, request: str, done: str, act: Callable[[], Any], reason: str | None = None
) -> Response:
    tried = forms.tried(act)
    if tried.failed:
        return shown(http, caller, request, status=tried.status, said=tried.said, reason=reason or "")
    return see(f"/pages/requests/{request}", done)

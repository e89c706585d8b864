"""Login, logout, and what pages look like."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, Response

from terrine.gateway import tokens
from terrine.gateway.api.door import Asker
from terrine.gateway.pages.rendering import HERE, render, see
from terrine.gateway.policy import COOKIE, GuardedRoute, Where, allow, form_of
from terrine.gateway.refusals import Refused, missing

router = APIRouter(route_class=GuardedRoute)
_STATIC = {
    "style.css": "text/css; charset=utf-8",
    "gateway.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""The files that may be had, by name: no path is ever put together from a request."""


@router.get("/static/{file}", include_in_schema=False)
@allow(where=Where.OPEN)
def static(file: str) -> FileResponse:
    """Styles and scripts."""
    if file not in _STATIC:
        raise missing("file")
    return FileResponse(HERE / "static" / file, media_type=_STATIC[file], headers={"cache-control": "max-age=3600"})


@router.get("/login", include_in_schema=False)
@allow(where=Where.OPEN, page=True)
def login_page(request: Request) -> Response:
    """Where a token is exchanged for a cookie."""
    return render(request, "login.html", said="")


@router.post("/login", include_in_schema=False)
@allow(where=Where.OPEN, page=True)
async def login(request: Request) -> Response:
    """Exchange a token for a cookie that scripts cannot read and other sites cannot send."""
    gateway = request.app.state.gateway
    _from_here(request)
    address = f"failures {request.client.host if request.client else ''}"
    form = await form_of(request)
    hours = gateway.limits.session_hours
    try:
        cookie, request.state.caller = await run_in_threadpool(
            tokens.log_in, gateway.database, form.get("token", "").strip()[:200], hours=hours
        )
    except Refused:
        gateway.rates.count(address, gateway.limits.failures_per_minute)
        return render(request, "login.html", status=401, said="That token is not known, or it is expired or revoked.")
    if COOKIE in request.cookies:  # whoever was logged in here before is so no more
        await run_in_threadpool(tokens.log_out, gateway.database, request.cookies[COOKIE])
    response = see("/")
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=int(hours * 3_600),
        httponly=True,
        samesite="strict",
        secure=gateway.configuration.encrypted,
        path="/",
    )
    return response


@router.post("/logout", include_in_schema=False)
@allow(page=True)
def logout(request: Request, caller: Asker) -> Response:
    """End the login."""
    if caller.cookie:
        tokens.log_out(request.app.state.gateway.database, request.cookies[COOKIE])
    response = see("/login")
    response.delete_cookie(COOKIE, path="/")
    return response


def _from_here(request: Request) -> None:
    """Refuse a login form that another site sent: it would log people in as somebody else."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    here = origin is None or origin.split("://")[-1] == request.headers.get("host")
    if not (here if site is None else site in ("same-origin", "none")):
        raise Refused(403, "the form was sent by another site")

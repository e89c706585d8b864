"""Pages for people: rendered here, filled in by templates, without a build step or anything from elsewhere.

A page is a route like any other, with a policy (`page=True`): its caller comes from the login's cookie, forms carry
`csrf`, and what is refused is shown as a page. Styles and scripts lie in `static/`: the content security policy allows
nothing inline and nothing from elsewhere.

    @router.get("/...", include_in_schema=False)
    @allow("officer", where=Where.ANY, page=True)
    def spending(request: Request, caller: Asker) -> Response:
        return render(request, "spending.html", caller=caller, ...)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from terrine.gateway import tokens
from terrine.gateway.api.door import Asker
from terrine.gateway.policy import COOKIE, GuardedRoute, Where, allow, form_of
from terrine.gateway.refusals import Refused, missing

router = APIRouter(route_class=GuardedRoute)
_HERE = Path(__file__).parent
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined
)
_STATIC = {"style.css": "text/css; charset=utf-8"}
"""The files that may be had, by name: no path is ever put together from a request."""


def render(request: Request, template: str, *, status: int = 200, **told: Any) -> HTMLResponse:
    """A page; templates know the caller and their CSRF token."""
    caller = getattr(request.state, "caller", None)
    text = _TEMPLATES.get_template(template).render(
        caller=caller, csrf="" if caller is None else caller.csrf, path=request.url.path, **told
    )
    return HTMLResponse(text, status_code=status)


def problem(request: Request, status: int, said: str) -> Response | None:
    """A refusal as a page, where a page was asked for."""
    policy = getattr(request.scope.get("endpoint"), "policy", None)
    if policy is None or not policy.page:
        return None
    if status == 401 and request.url.path != "/login":
        return RedirectResponse("/login", status_code=303)
    return render(request, "problem.html", status=status, number=status, said=said)


@router.get("/static/{file}", include_in_schema=False)
@allow(where=Where.OPEN)
def static(file: str) -> FileResponse:
    """Styles and scripts."""
    if file not in _STATIC:
        raise missing("file")
    return FileResponse(_HERE / "static" / file, media_type=_STATIC[file], headers={"cache-control": "max-age=3600"})


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
    response = RedirectResponse("/", status_code=303)
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
    response = RedirectResponse("/login", status_code=303)
    response.delete_cookie(COOKIE, path="/")
    return response


@router.get("/", include_in_schema=False)
@allow(page=True)
def home(request: Request, caller: Asker) -> Response:
    """The data sets in scope, with what is spent and left."""
    gateway = request.app.state.gateway
    found = [one | {"balance": gateway.balance(caller, one["dataset"])} for one in gateway.visible(caller)]
    return render(request, "home.html", datasets=found)


def _from_here(request: Request) -> None:
    """Refuse a login form that another site sent: it would log people in as somebody else."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    here = origin is None or origin.split("://")[-1] == request.headers.get("host")
    if not (here if site is None else site in ("same-origin", "none")):
        raise Refused(403, "the form was sent by another site")

"""Templates: escaped always, strict about names, told who is looking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from terrine import __version__
from terrine.gateway.pages import wording
from terrine.gateway.tokens import ALL

HERE = Path(__file__).parents[1]
DONE = {
    "lent": "Lent.",
    "revoked": "Taken back: the tokens count no more.",
    "token-revoked": "The token is revoked; logins made with it are ended.",
    "registered": "The data set is registered, with its one budget.",
    "closed": "The data set is closed for ever. What was spent stays on record.",
    "approved": "Approved: it was charged to the data set's budget.",
    "denied": "Denied. Nothing was charged.",
    "cancelled": "Taken back.",
    "resumed": "It goes on, at no new cost.",
    "waiting": "It is beyond your allowance, so it waits for a decision. Nothing was charged.",
    "answered": "Charged, then answered.",
    "archive": "You asked just this before: this is the answer you paid for then. Nothing was charged now.",
    "queued": "The training is queued. It is charged when it starts.",
}
"""What pages say after something was done: the address carries the key, never the words."""
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters.update(
    epsilon=wording.epsilon,
    left=wording.left,
    percent=wording.percent,
    surest=wording.surest,
    signs=wording.signs,
    moment=wording.moment,
    machine=wording.machine_moment,
    visible=wording.visible,
    cell=wording.cell,
    answer_table=wording.table,
    pretty=lambda value: json.dumps(value, indent=1, ensure_ascii=False),
)
_TEMPLATES.globals.update(STATES=wording.STATES, ALL=ALL, version=__version__)


def render(request: Request, template: str, *, status: int = 200, **told: Any) -> HTMLResponse:
    """A page; templates know the caller (`me`), their CSRF token, and what was just done."""
    caller = getattr(request.state, "caller", None)
    told = {"done": DONE.get(request.query_params.get("done", "")), "said": ""} | told
    text = _TEMPLATES.get_template(template).render(
        me=caller, csrf="" if caller is None else caller.csrf, path=request.url.path, **told
    )
    return HTMLResponse(text, status_code=status)


def see(path: str, done: str = "") -> RedirectResponse:
    """Go to a page of ours after a form, so that to load it again does not do it again."""
    assert path.startswith("/")
    assert not path.startswith("//")
    return RedirectResponse(f"{path}?done={done}" if done else path, status_code=303)


def problem(request: Request, status: int, said: str) -> Response | None:
    """A refusal as a page, where a page was asked for."""
    policy = getattr(request.scope.get("endpoint"), "policy", None)
    if policy is None or not policy.page:
        return None
    if status == 401 and request.url.path != "/login":
        return RedirectResponse("/login", status_code=303)
    return render(request, "problem.html", status=status, number=status, problem=said)


def unknown_address(request: Request, status: int, said: str) -> Response | None:
    """The same for an address that is none, where a browser asks."""
    if "text/html" not in request.headers.get("accept", ""):
        return None
    return render(request, "problem.html", status=status, number=status, problem=said)

"""The analyst's playground: a question, its price as one types, its answer on made-up rows, and the question itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from terrine.errors import TerrineError
from terrine.gateway.api import questions
from terrine.gateway.api.door import Asker
from terrine.gateway.bodies import DatasetName
from terrine.gateway.pages import forms
from terrine.gateway.pages.forms import Form, Tried
from terrine.gateway.pages.rendering import render, see
from terrine.gateway.policy import GuardedRoute, Where, allow
from terrine.gateway.refusals import answer_to

router = APIRouter(route_class=GuardedRoute)
_FRAGMENT = "x-fragment"
"""The script asks for a part of the page by this header."""


@router.get("/pages/datasets/{name}/ask", include_in_schema=False)
@allow("analyst", where=Where.DATASET, page=True)
def empty(request: Request, caller: Asker, name: DatasetName) -> Response:
    """The playground, with a question to begin with."""
    described = request.app.state.gateway.described(name)
    return _page(request, caller, name, _first(described), described=described)


@router.post("/pages/datasets/{name}/price", include_in_schema=False)
@allow("analyst", where=Where.DATASET, page=True)
def price(request: Request, caller: Asker, name: DatasetName, form: Form) -> Response:
    """What a question would cost and how good its answer would be: free."""
    asking = request.app.state.gateway.asking
    return _shown(request, caller, name, form, "quote", lambda: asking.price(caller, name, forms.question(form)))


@router.post("/pages/datasets/{name}/mock", include_in_schema=False)
@allow("analyst", where=Where.DATASET, page=True)
def mock(request: Request, caller: Asker, name: DatasetName, form: Form) -> Response:
    """The answer on made-up rows: free, and about nobody."""
    asking = request.app.state.gateway.asking
    return _shown(request, caller, name, form, "mock", lambda: asking.mock(name, forms.question(form)))


@router.post("/pages/datasets/{name}/ask", include_in_schema=False)
@allow("analyst", where=Where.DATASET, page=True)
async def ask(request: Request, caller: Asker, name: DatasetName, form: Form) -> Response:
    """Charge a question and answer it, as the API does; or it waits for approval."""
    parsed = forms.tried(lambda: forms.question(form))
    if not parsed.failed:
        try:
            found = await questions.ask(request, caller, name, parsed.value)
        except TerrineError as error:
            status, told = answer_to(error)
            if status in (401, 404):
                raise
            parsed = Tried(status=status, said=str(told["error"]), told=told)
        else:
            waits = isinstance(found, JSONResponse)
            done = "waiting" if waits else "archive" if found["from_archive"] else "answered"
            return see(f"/pages/requests/{request.state.subject}", done)
    return await run_in_threadpool(_page, request, caller, name, form, status=parsed.status, asked=parsed)


def _shown(
    request: Request, caller: Any, name: str, form: dict[str, str], part: str, act: Callable[[], Any]
) -> Response:
    tried = forms.tried(act)
    if request.headers.get(_FRAGMENT) == part:
        found = render(request, f"parts/{part}.html", name=name, **{part: tried.value, "problem": tried.said})
        found.headers["x-part"] = part
        return found
    return _page(
        request,
        caller,
        name,
        form,
        status=tried.status,
        quote=tried if part == "quote" else None,
        mock=tried if part == "mock" else None,
    )


def _page(
    request: Request,
    caller: Any,
    name: str,
    form: dict[str, str],
    *,
    status: int = 200,
    described: dict[str, Any] | None = None,
    quote: Tried | None = None,
    mock: Tried | None = None,
    asked: Tried | None = None,
) -> Response:
    gateway = request.app.state.gateway
    return render(
        request,
        "playground.html",
        status=status,
        name=name,
        form=form,
        one=described or gateway.described(name),
        balance=gateway.balance(caller, name),
        quote=quote,
        mock=mock,
        asked=asked,
    )


def _first(described: dict[str, Any]) -> dict[str, str]:
    private = [one["table"] for one in described["schemas"] if not one["public"]]
    table = private[0] if private else described["schemas"][0]["table"]
    quoted = table if table.isidentifier() else '"' + table.replace('"', '""') + '"'
    return {"sql": f"SELECT COUNT(*) AS n FROM {quoted}", "epsilon": "0.1"}

"""Trainings: their price as one types, submitting them, and the report of a run for the owner and the officer."""

from __future__ import annotations

import base64
import hashlib
import html
import re
import threading
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from terrine.gateway.api import jobs
from terrine.gateway.api.door import Asker
from terrine.gateway.bodies import DatasetName, Identifier
from terrine.gateway.pages import forms
from terrine.gateway.pages.forms import Form, Tried
from terrine.gateway.pages.rendering import render, see
from terrine.gateway.policy import GuardedRoute, Where, allow
from terrine.gateway.refusals import missing

router = APIRouter(route_class=GuardedRoute)
_WRITING = threading.Lock()
_STYLE = re.compile(r"<style[^>]*>(.*?)</style>", re.DOTALL)
_STYLE_ATTRIBUTE = re.compile(r'\sstyle="([^"]*)"')


@router.get("/pages/datasets/{name}/train", include_in_schema=False)
@allow("analyst", where=Where.DATASET, page=True)
def empty(request: Request, caller: Asker, name: DatasetName) -> Response:
    """The form for a training."""
    return _page(request, caller, name, {"epsilon": "1"})


@router.post("/pages/datasets/{name}/train/price", include_in_schema=False)
@allow("analyst", where=Where.DATASET, page=True)
def price(request: Request, caller: Asker, name: DatasetName, form: Form) -> Response:
    """What a training would cost: free."""
    tried = forms.tried(lambda: jobs.price(request, caller, name, forms.training(form)))
    if request.headers.get("x-fragment") == "quote":
        found = render(request, "parts/quote.html", name=name, quote=tried.value, problem=tried.said)
        found.headers["x-part"] = "quote"
        return found
    return _page(request, caller, name, form, status=tried.status, quote=tried)


@router.post("/pages/datasets/{name}/train", include_in_schema=False)
@allow("analyst", where=Where.DATASET, page=True)
def submit(request: Request, caller: Asker, name: DatasetName, form: Form) -> Response:
    """Take a training in: it is charged when it starts, or waits for approval."""
    tried = forms.tried(lambda: jobs.submit(request, caller, name, forms.training(form)))
    if tried.failed:
        return _page(request, caller, name, form, status=tried.status, asked=tried)
    done = "waiting" if tried.value["state"] == "waiting" else "queued"
    return see(f"/pages/requests/{tried.value['request']}", done)


@router.get("/pages/requests/{request}/report", include_in_schema=False)
@allow("owner", "officer", where=Where.REQUEST, page=True, logged=True)
def report(http: Request, caller: Asker, request: Identifier) -> Response:
    """A run's report, which also says what an audit found: for the owner and the officer."""
    gateway = http.app.state.gateway
    one = gateway.request(caller, request)
    folder = gateway.trainings.folder / request
    if one["kind"] != "training" or one["state"] != "answered" or not folder.is_dir():
        raise missing("report")
    text = _written(folder)
    rule = f"default-src 'none'; style-src {_styles(text)}; img-src data:; base-uri 'none'; frame-ancestors 'none'"
    rule = f"{rule}; form-action 'none'; sandbox"
    return HTMLResponse(text, headers={"content-security-policy": rule})


def _written(path: Path) -> str:
    """The report, written on first reading, as `terrine report` does."""
    from terrine import verify
    from terrine.pipeline import pages
    from terrine.pipeline.folder import REPORT, Folder

    folder = Folder(path)
    verify.refuse_lies(path)
    with _WRITING:
        if not folder.has(REPORT):
            pages.write(folder)
    return (path / REPORT).read_text(encoding="utf-8")


def _styles(text: str) -> str:
    """Just the styles that stand in the report, by their hashes: whatever else gets into it is not applied."""
    found = [*_STYLE.findall(text), *(html.unescape(one) for one in _STYLE_ATTRIBUTE.findall(text))]
    hashes = {base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found}
    return " ".join(["'unsafe-hashes'", *(f"'sha256-{one}'" for one in sorted(hashes))])


def _page(
    request: Request,
    caller: Any,
    name: str,
    form: dict[str, str],
    *,
    status: int = 200,
    quote: Tried | None = None,
    asked: Tried | None = None,
) -> Response:
    gateway = request.app.state.gateway
    one, balance = gateway.described(name), gateway.balance(caller, name)
    if one["training"] is None:
        raise missing("training")
    told = {"name": name, "form": form, "one": one, "balance": balance, "quote": quote, "asked": asked}
    return render(request, "train.html", status=status, **told)

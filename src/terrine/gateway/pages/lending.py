"""The owner's forms: register a data set, lend it, take it back, issue and revoke tokens, close it."""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from terrine.gateway import members, tokens
from terrine.gateway.api import lending
from terrine.gateway.api.door import Asker
from terrine.gateway.bodies import DatasetName, Identifier, MemberName
from terrine.gateway.pages import forms
from terrine.gateway.pages.forms import Form, Tried
from terrine.gateway.pages.rendering import render, see
from terrine.gateway.policy import GuardedRoute, Where, allow
from terrine.gateway.refusals import Refused
from terrine.gateway.tokens import ALL

router = APIRouter(route_class=GuardedRoute)
_TABLES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.(parquet|csv|duckdb|db|tsv)")


@router.get("/pages/register", include_in_schema=False)
@allow("owner", where=Where.WHOLE, page=True)
def register_form(request: Request, caller: Asker) -> Response:
    """The form for a new data set."""
    return _register(request, {"epsilon": "1", "delta": "1e-6", "rows1": "1"})


@router.post("/pages/register", include_in_schema=False)
@allow("owner", where=Where.WHOLE, page=True)
def register(request: Request, caller: Asker, form: Form) -> Response:
    """Register a data set, with its one budget."""

    def act() -> str:
        name = forms.dataset_name(form)
        lending.register(request, caller, name, forms.dataset(form))
        return name

    tried = forms.tried(act)
    if tried.failed:
        return _register(request, form, tried)
    return see(f"/pages/datasets/{tried.value}", "registered")


@router.get("/pages/datasets/{name}/members", include_in_schema=False)
@allow("owner", "officer", where=Where.DATASET, page=True)
def member_list(request: Request, caller: Asker, name: DatasetName) -> Response:
    """Who has, or had, a role for a data set, and their tokens."""
    return _members(request, caller, name)


@router.post("/pages/datasets/{name}/members", include_in_schema=False)
@allow("owner", where=Where.DATASET, page=True)
def lend(request: Request, caller: Asker, name: DatasetName, form: Form) -> Response:
    """Lend the data set to somebody, or change their allowance."""

    def act() -> None:
        member = forms.member_name(form)
        lending.lend(request, caller, name, member, forms.loan(form))

    tried = forms.tried(act)
    if tried.failed:
        return _members(request, caller, name, form=form, tried=tried)
    return see(f"/pages/datasets/{name}/members", "lent")


@router.post("/pages/datasets/{name}/members/{member}/revoke", include_in_schema=False)
@allow("owner", where=Where.DATASET, page=True)
def take_back(request: Request, caller: Asker, name: DatasetName, member: MemberName, form: Form) -> Response:
    """Take a loan back."""
    lending.take_back(request, caller, name, member)
    return see(f"/pages/datasets/{name}/members", "revoked")


@router.post("/pages/datasets/{name}/tokens", include_in_schema=False)
@allow("owner", where=Where.DATASET, page=True)
def issue(request: Request, caller: Asker, name: DatasetName, form: Form) -> Response:
    """Issue a token; its secret is on this one page and nowhere else."""
    tried = forms.tried(lambda: lending.issue(request, caller, forms.token(form, name)))
    if tried.failed:
        return _members(request, caller, name, form=form, tried=tried)
    return render(request, "token.html", name=name, token=tried.value)


@router.post("/pages/datasets/{name}/tokens/{token}/revoke", include_in_schema=False)
@allow("owner", where=Where.DATASET, page=True)
def revoke(request: Request, caller: Asker, name: DatasetName, token: Identifier, form: Form) -> Response:
    """Revoke a token, and the logins made with it."""
    lending.revoke(request, caller, token)
    return see(f"/pages/datasets/{name}/members", "token-revoked")


@router.post("/pages/datasets/{name}/close", include_in_schema=False)
@allow("owner", where=Where.DATASET, page=True)
def close(request: Request, caller: Asker, name: DatasetName, form: Form) -> Response:
    """Close a data set for ever, once its name was typed."""

    def act() -> None:
        if form.get("confirm", "").strip() != name:
            raise Refused(422, f"want the data set's name, {name}, typed out: closing cannot be undone")
        lending.close(request, caller, name)

    tried = forms.tried(act)
    if tried.failed:
        return _members(request, caller, name, form=form, tried=tried)
    return see("/", "closed")


def _register(request: Request, form: dict[str, str], tried: Tried | None = None) -> Response:
    configuration = request.app.state.gateway.configuration
    folder = configuration.path(configuration.data)
    found = sorted(configuration.sources)
    if folder.is_dir():
        found += sorted(one.name for one in folder.iterdir() if _TABLES.fullmatch(one.name) and one.is_file())
    told: dict[str, Any] = {} if tried is None else {"said": tried.said, "status": tried.status}
    return render(request, "register.html", form=form, sources=found, tables=forms.TABLES, **told)


def _members(
    request: Request, caller: Any, name: str, *, form: dict[str, str] | None = None, tried: Tried | None = None
) -> Response:
    gateway = request.app.state.gateway
    with gateway.database.read() as session:
        found = members.listed(session, name)
        everywhere = members.listed(session, ALL) if caller.dataset == ALL else []
        mine = [one for one in tokens.listed(session, caller) if one["dataset"] == name]
    told: dict[str, Any] = {} if tried is None else {"said": tried.said, "status": tried.status}
    return render(
        request,
        "members.html",
        name=name,
        members=found,
        everywhere=everywhere,
        tokens=mine,
        now=gateway.database.now(),
        form=form or {},
        **told,
    )

"""Who may use a route: said on the route itself, and enforced before its body is read.

    @router.post("/datasets/{name}/ask")
    @allow("analyst", where=Where.DATASET)
    def ask(...): ...

A route of this class without a policy cannot be made. The guard goes: caller, rate, CSRF, scope, role, body, handler,
log. What is out of a caller's scope answers exactly as what does not exist.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qs

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute

from terrine.gateway import requests, tokens
from terrine.gateway.refusals import Refused, answer_to, missing
from terrine.gateway.tokens import ALL, Caller

COOKIE = "terrine_session"
CSRF_HEADER, CSRF_FIELD = "x-csrf-token", "csrf"
ROLES = ("owner", "analyst", "officer")
_SAFE = ("GET", "HEAD", "OPTIONS")
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])
_FORM = "application/x-www-form-urlencoded"


class Where(enum.Enum):
    """What the caller's scope is compared with."""

    OPEN = "nobody has to say who they are"
    ANY = "any token that counts; the handler shows what is in its scope"
    WHOLE = "a token for all data sets"
    DATASET = "the data set {name} is in the token's scope"
    REQUEST = "the request {request} is of a data set in the token's scope; an analyst's own"


@dataclass(frozen=True)
class Policy:
    """Who may use a route."""

    where: Where
    roles: frozenset[str]
    page: bool = False
    """Whether it answers people, in HTML."""
    logged: bool = False
    """Whether reading it goes into the access log; changes always do."""


def allow(
    *roles: str, where: Where = Where.ANY, page: bool = False, logged: bool = False
) -> Callable[[_Endpoint], _Endpoint]:
    """Say who may use a route: these roles; every role if none is named."""
    assert set(roles) <= set(ROLES), roles
    policy = Policy(where, frozenset(roles or ROLES), page, logged)

    def declared(endpoint: _Endpoint) -> _Endpoint:
        endpoint.policy = policy  # type: ignore[attr-defined]
        return endpoint

    return declared


class GuardedRoute(APIRoute):
    """A route that says who may use it, and lets nobody else in."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.policy: Policy = getattr(endpoint, "policy", None)  # type: ignore[assignment]
        if self.policy is None:
            raise TypeError(f"{path}: no policy; want @allow(...) under the route's decorator")
        if options.get("include_in_schema", True):
            options["responses"] = _declared(self.policy, options.get("responses") or {})
            if self.policy.where is not Where.OPEN:
                options["openapi_extra"] = {"security": [{"token": []}], "x-roles": sorted(self.policy.roles)}
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler, policy, path = super().get_route_handler(), self.policy, self.path

        async def guarded(request: Request) -> Response:
            gateway = request.app.state.gateway
            request.state.caller, status = None, 500
            try:
                await _let_in(request, policy)
                response = await handler(request)
                status = response.status_code
            except Exception as error:
                status = 422 if not isinstance(error, Refused) and hasattr(error, "errors") else answer_to(error)[0]
                if _is_logged(request, policy, status):
                    with contextlib.suppress(Exception):
                        await run_in_threadpool(_log, gateway, request, path, status)
                raise
            if _is_logged(request, policy, status):
                await run_in_threadpool(_log, gateway, request, path, status)
            return response

        return guarded


def caller_of(request: Request) -> Caller:
    """Who is asking; a dependency of handlers."""
    caller = request.state.caller
    if caller is None:
        raise Refused(401, "want a token: Authorization: Bearer terrine_...")
    return caller  # type: ignore[no-any-return]


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form, each once.

    Raises:
        Refused: it is no form, or a field stands twice.
    """
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != _FORM:
        raise Refused(415, f"want {_FORM}")
    try:
        found = parse_qs((await request.body()).decode(), keep_blank_values=True, max_num_fields=100)
    except ValueError:
        raise Refused(422, "the form is not what a form sends") from None
    if any(len(values) > 1 for values in found.values()):
        raise Refused(422, "a field of the form stands twice")
    return {name: values[0] for name, values in found.items()}


async def _let_in(request: Request, policy: Policy) -> None:
    gateway = request.app.state.gateway
    address = request.client.host if request.client else ""
    if policy.where is Where.OPEN:
        gateway.rates.count(f"address {address}", gateway.limits.per_minute)
        return await _bounded(request, gateway.limits.depth)
    try:
        caller = await run_in_threadpool(_authenticated, gateway, request)
    except Refused as error:
        if error.status == 401:  # a token that counts is let in whatever others do from its address
            gateway.rates.count(f"failures {address}", gateway.limits.failures_per_minute)
        raise
    request.state.caller = caller
    gateway.rates.count(f"token {caller.token}", gateway.limits.per_minute)
    if caller.cookie and request.method not in _SAFE:
        await _meant(request, caller)
    await run_in_threadpool(_in_scope, gateway, request, policy, caller)
    if caller.role not in policy.roles:
        raise Refused(
            403, f"a token of role {caller.role} may not do this; want one of {', '.join(sorted(policy.roles))}"
        )
    return await _bounded(request, gateway.limits.depth)


def _authenticated(gateway: Any, request: Request) -> Caller:
    """Whoever the header says, and only without one whoever the cookie says."""
    headers = request.headers.getlist("authorization")
    if headers:
        kind, _, secret = headers[0].partition(" ")
        if len(headers) > 1 or kind.lower() != "bearer" or not secret.strip():
            raise Refused(401, "want one header Authorization: Bearer terrine_...")
        return tokens.caller_of(gateway.database, secret.strip())
    if (cookie := request.cookies.get(COOKIE)) is not None:
        return tokens.caller_of(gateway.database, cookie, cookie=True)
    raise Refused(401, "want a token: Authorization: Bearer terrine_...")


async def _meant(request: Request, caller: Caller) -> None:
    """Refuse what another site made a browser send."""
    given = request.headers.get(CSRF_HEADER)
    if given is None and request.headers.get("content-type", "").startswith(_FORM):
        given = (await form_of(request)).get(CSRF_FIELD)
    if given is None or not hmac.compare_digest(given.encode(), caller.csrf.encode()):
        raise Refused(403, "the form is not one of this login's: open the page again")


def _in_scope(gateway: Any, request: Request, policy: Policy, caller: Caller) -> None:
    if policy.where is Where.WHOLE and caller.dataset != ALL:
        raise Refused(403, "want a token for all data sets")
    if policy.where is Where.DATASET:
        name = str(request.path_params["name"])
        with gateway.database.read() as session:
            found = gateway.datasets.find(session, name) if caller.may_see(name) else None
        if found is None:
            raise missing("data set")
        request.state.dataset = name
    if policy.where is Where.REQUEST:
        with gateway.database.read() as session:
            row = requests.find(session, str(request.path_params["request"]))
        if not caller.may_see(row["dataset"]) or (caller.role == "analyst" and row["member"] != caller.member):
            raise missing("request")
        request.state.dataset, request.state.subject = row["dataset"], row["request"]


async def _bounded(request: Request, depth: int) -> None:
    """Refuse JSON that nests too deeply, before anything parses it."""
    if request.method in _SAFE or request.headers.get("content-type", "").startswith(_FORM):
        return
    level, quoted, escaped = 0, False, False
    body = await request.body()
    if b"\0" in body:
        raise Refused(422, "the body is not JSON in UTF-8")
    for character in body:
        if quoted:
            quoted, escaped = escaped or character != 0x22, character == 0x5C and not escaped
        elif character == 0x22:
            quoted = True
        elif character in b"[{":
            level += 1
            if level > depth:
                raise Refused(422, f"the body nests deeper than {depth}")
        elif character in b"]}":
            level -= 1


def _is_logged(request: Request, policy: Policy, status: int) -> bool:
    if status == 429 or (status == 401 and request.state.caller is None and policy.page):
        return False
    return request.method not in _SAFE or policy.logged or status in (401, 403, 404)


def _log(gateway: Any, request: Request, path: str, status: int) -> None:
    gateway.log.append(
        f"{request.method} {path}",
        status,
        request.state.caller,
        dataset=getattr(request.state, "dataset", ""),
        subject=getattr(request.state, "subject", ""),
        detail=json.dumps({"from": request.client.host if request.client else ""}),
    )


_SAID = {"model": None, "description": ""}
_STATUSES = {
    400: "not HTTP or JSON as it should be",
    401: "no token that counts",
    403: "not for this role, or beyond an allowance",
    404: "not there, or not in the token's scope",
    413: "too large",
    415: "of another type",
    422: "refused, with the reason; nothing was charged",
    429: "too many",
    500: "failed after the charge: it stays charged",
    503: "the database or an engine is away",
}


def _declared(policy: Policy, own: dict[int | str, Any]) -> dict[int | str, Any]:
    from terrine.gateway.answers import Problem

    known = {400, 413, 415, 422, 429, 503} if policy.where is Where.OPEN else set(_STATUSES) - {500}
    found: dict[int | str, Any] = {
        status: {"model": Problem, "description": _STATUSES[status]} for status in sorted(known)
    }
    return found | own

"""The server: an ASGI application over one database, and `terrine serve`."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from terrine import __version__
from terrine.errors import TerrineError
from terrine.gateway import pages
from terrine.gateway.api import door, jobs, lending, questions, watching
from terrine.gateway.configuration import Configuration, problems
from terrine.gateway.limits import RequestBounds
from terrine.gateway.policy import GuardedRoute
from terrine.gateway.refusals import answer_to
from terrine.gateway.services import Services

ROUTERS = (door.router, lending.router, questions.router, jobs.router, watching.router, pages.router)


def create_app(
    configuration: Configuration, *, create: bool = False, clock: Callable[[], float] = time.time
) -> FastAPI:
    """The application; its state holds the open gateway.

    Raises:
        InvalidArgument: the configuration does not fit what is there.
        LedgerUnavailable: the database cannot be used.
    """
    gateway = Services(configuration, create=create, clock=clock)

    @contextlib.asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = configuration.limits.threads
        gateway.start()
        try:
            yield
        finally:
            await anyio.to_thread.run_sync(gateway.stop)

    app = FastAPI(
        title="Terrine gateway",
        version=__version__,
        description=(
            "Questions about private data, answered with noise and charged first. "
            "Every route but a few wants a token: Authorization: Bearer terrine_..."
        ),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=life,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    app.openapi = functools.cache(lambda: _document(app))  # type: ignore[method-assign]
    app.router.routes.clear()
    for router in ROUTERS:
        for route in router.routes:
            assert isinstance(route, GuardedRoute), route
            app.router.routes.append(route)
    app.add_exception_handler(TerrineError, _refused)
    app.add_exception_handler(Exception, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(configuration.hosts))
    app.add_middleware(RequestBounds, body=configuration.limits.body, encrypted=configuration.encrypted)
    return app


def serve(configuration: Configuration, *, app: FastAPI | None = None, port: int | None = None) -> None:
    """Serve until interrupted; a second interrupt ends the process without waiting for what is being answered."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit and sig == signal.SIGINT:  # uvicorn would cancel everything, by traceback
                os.write(2, b"terrine: ended without waiting; the next start settles what was being answered\n")
                os._exit(130)
            super().handle_exit(sig, frame)

    told: dict[str, Any] = {}
    if configuration.tls_key is not None and configuration.tls_certificate is not None:
        told["ssl_keyfile"] = str(configuration.path(configuration.tls_key))
        told["ssl_certfile"] = str(configuration.path(configuration.tls_certificate))
    server = Server(
        uvicorn.Config(
            app or create_app(configuration),
            host=configuration.host,
            port=configuration.port if port is None else port,
            proxy_headers=configuration.behind_proxy,
            forwarded_allow_ips="127.0.0.1" if configuration.behind_proxy else "",
            server_header=False,
            access_log=False,  # the gateway keeps its own
            ws="none",
            log_level="warning",
            timeout_keep_alive=30,
            **told,
        )
    )
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        sys.exit(3)


def _document(app: FastAPI) -> dict[str, Any]:
    found = FastAPI.openapi(app)
    schemes = found.setdefault("components", {}).setdefault("securitySchemes", {})
    schemes["token"] = {"type": "http", "scheme": "bearer"}
    return found


def _refused(request: Request, error: Exception) -> Response:
    status, told = answer_to(error)
    if (page := pages.problem(request, status, str(told["error"]))) is not None:
        return page
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(told, status_code=status, headers=headers)


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    said = problems(error.errors())
    return pages.problem(request, 422, said) or JSONResponse({"error": said}, status_code=422)


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "no such address", 405: "not by this method"}.get(error.status_code, "not as it should be")
    if (page := pages.unknown_address(request, error.status_code, said)) is not None:
        return page
    return JSONResponse({"error": said}, status_code=error.status_code, headers=error.headers)

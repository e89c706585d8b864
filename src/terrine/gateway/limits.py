"""Bounds on what arrives, and the headers of what leaves: before any handler, for every route.

RateLimits are kept in this process: a second server counts for itself. Nothing but politeness rests on them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from terrine.gateway.refusals import Refused

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
_MOST_NAMES = 10_000


class RateLimits:
    """How often something happened within the last minute, by name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._turn = clock, threading.Lock()
        self._seen: dict[str, tuple[int, int]] = {}

    def count(self, name: str, most: int) -> None:
        """Count one more.

        Raises:
            Refused: it was too often.
        """
        self.peek(name, most)
        self.add(name)

    def peek(self, name: str, most: int) -> None:
        """Refuse if it was too often already."""
        minute, times = self._seen.get(name, (0, 0))
        if minute == int(self._clock() // 60) and times >= most:
            raise Refused(429, "too many requests within a minute; wait a moment")

    def add(self, name: str) -> None:
        """Count one more."""
        now = int(self._clock() // 60)
        with self._turn:
            if len(self._seen) >= _MOST_NAMES:
                self._seen = {one: value for one, value in self._seen.items() if value[0] == now}
            minute, times = self._seen.get(name, (now, 0))
            self._seen[name] = (now, times + 1 if minute == now else 1)


class RequestBounds:
    """ASGI: refuses bodies that are too large, and sets every answer's headers."""

    def __init__(self, app: Any, *, body: int, encrypted: bool) -> None:
        self._app, self._body = app, body
        extra = {"strict-transport-security": "max-age=31536000"} if encrypted else {}
        self._headers = [(name.encode(), value.encode()) for name, value in (_HEADERS | extra).items()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not told.isdigit() or int(told) > self._body:
            await self._refuse(send)
            return
        begun = False

        async def headed(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                own = {name.lower() for name, _ in message["headers"]}
                more = [(name, value) for name, value in self._headers if name not in own]
                message = message | {"headers": [*message["headers"], *more]}
            await send(message)

        try:
            await self._app(scope, _Arriving(scope, receive, self._body), headed)
        except _TooLarge:
            if begun:
                raise
            await self._refuse(send)
        except _Gone:
            pass  # nobody is there to be answered, and nothing was asked

    async def _refuse(self, send: Any) -> None:
        body = json.dumps({"error": f"the body is larger than {self._body} bytes"}).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close"), *self._headers]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class _Arriving:
    """What arrives of one request, as long as it is not too large and its sender stays."""

    def __init__(self, scope: Any, receive: Any, most: int) -> None:
        self._receive, self._left = receive, most
        told = dict(scope["headers"])
        self._whole = told.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in told

    async def __call__(self) -> Any:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._whole:
            raise _Gone
        self._left -= len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._left < 0:
            raise _TooLarge
        return message


class _TooLarge(BaseException):
    """Passes by every handler: a body that is too large is nobody's to answer."""


class _Gone(BaseException):
    """Passes by every handler: whoever sent half a body has left."""

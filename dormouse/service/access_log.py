"""A line for each request: method, path, status, rows, milliseconds; no query, no header, no secret."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dormouse.service.metrics import Metrics

logger = logging.getLogger("dormouse.service.access")
PATH_LENGTH_MAX = 200
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Which metrics name: anybody can invent more."""


class AccessLog:
    """Logs and counts what the app within answers."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})
        started, status = time.monotonic(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            status = status or 500  # which is sent outside of this
            raise
        finally:
            self._note(scope, status, time.monotonic() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if route != "other" and scope["method"] in METHODS else "other"
        self._metrics.requests.labels(method, route, str(status or "none")).inc()
        self._metrics.refresh()
        # as it came: printable ASCII, with everything else percent-encoded
        path = scope.get("raw_path", b"").decode("ascii", "backslashreplace").partition("?")[0]
        logger.info(
            "%s %s %s rows=%d ms=%.1f",
            scope["method"][:20],
            path[:PATH_LENGTH_MAX],
            status or "none",
            scope["state"].get("rows", 0),
            seconds * 1000,
        )

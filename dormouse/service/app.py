"""The service's app (its middlewares, error handlers and API description), and the server that runs it."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

import fastapi_offline
import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dormouse.api.instance import Instance
from dormouse.errors import VERSION, DormouseError
from dormouse.objects.names import hiding
from dormouse.reading.sql.workers import WorkerLimits, Workers
from dormouse.service.declared import Served
from dormouse.service.jobs import JobWorker, jobs
from dormouse.service.metrics import Metrics
from dormouse.service.payloads import payload_writes, payloads
from dormouse.service.problems import ProblemDocument, problem_of
from dormouse.service.protocol import (
    CONNECTIONS_WAITING_MAX,
    Connections,
    Protocol,
    connections_possible,
    listening,
)
from dormouse.service.routes import Readiness, Service, health, routes_of, tables
from dormouse.service.rows import row_files, rows
from dormouse.service.running import Runner
from dormouse.service.security import (
    RIGHTS,
    Guard,
    Place,
    Right,
    open_paths,
    served,
    shown_host,
    tls_context,
)
from dormouse.service.supervisor import stopped_by_signals
from dormouse.service.work import Limits
from dormouse.settings.service import ServiceSettings, read_holders
from dormouse.verbs.jobs import VERBS, kinds

# HEAD is answered like GET. The server's protocol leaves out the body.


class Heads:
    """A middleware that handles HEAD like GET, but sets `is_head` in the state, so that no body is made."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        scope["state"]["is_head"] = True
        within = {**scope, "method": "GET"}
        try:
            await self._app(within, receive, send)
        finally:
            scope["route"] = within.get("route")


def methods_of(routers: Iterable[APIRouter], scope: Scope) -> list[str]:
    """Returns the methods that a request's path allows, sorted: one for each route of the path."""
    routes = (route for router in routers for route in router.routes if isinstance(route, APIRoute))
    methods = {
        method for route in routes if route.matches(scope)[0] != Match.NONE for method in route.methods or ()
    }
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


# /docs is Swagger UI. Its scripts are served from here, as a page that takes a token must load no others.

_FOLDER = Path(fastapi_offline.__file__).parent / "static"
_HEADERS = {
    # Swagger UI needs inline styles, and has its images as data: URLs
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>Dormouse</title><link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css"></head>
<body><div id="form"></div>
<script src="docs/swagger-ui-bundle.js"></script><script src="docs/begin.js"></script></body>
</html>
"""
_BEGIN = (
    'SwaggerUIBundle({url: "openapi.json", dom_id: "#form", deepLinking: true, validatorUrl: null, '
    "queryConfigEnabled: false});"
)


docs = APIRouter(include_in_schema=False, route_class=Served)


@docs.get("/openapi.json")
@served(Right.PUBLIC, Place.LOOP)
async def description(request: Request) -> Response:
    """Returns the API's OpenAPI description."""
    return JSONResponse(request.app.openapi())


@docs.get("/docs")
@served(Right.PUBLIC, Place.LOOP)
async def page() -> Response:
    return HTMLResponse(_PAGE, headers=_HEADERS)


@docs.get("/docs/begin.js")
@served(Right.PUBLIC, Place.LOOP)
async def begin() -> Response:
    return Response(_BEGIN, media_type="text/javascript", headers=_HEADERS)


def _file(name: str, media_type: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    @served(Right.PUBLIC, Place.LOOP)
    async def file() -> Response:
        return Response(_bytes(name), media_type=media_type, headers=_HEADERS)

    return file


@cache
def _bytes(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()


docs.add_api_route("/docs/swagger-ui.css", _file("swagger-ui.css", "text/css"))
docs.add_api_route("/docs/swagger-ui-bundle.js", _file("swagger-ui-bundle.js", "text/javascript"))


# The access log has a line for each request: method, path, status, rows, milliseconds. It leaves out queries
# and headers, which may have secrets.

PATH_LENGTH_MAX = 200
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""The HTTP methods that metrics name. Metrics count all others as "other": a client could invent many."""


class AccessLog:
    """A middleware that logs and counts the answers of the app."""

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
            status = status or 500  # an outer middleware sends it
            raise
        finally:
            self._note(scope, status, time.monotonic() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if route != "other" and scope["method"] in METHODS else "other"
        self._metrics.requests.labels(method, route, str(status or "none")).inc()
        self._metrics.refresh()
        # the raw path is printable ASCII, with all other characters percent-encoded
        path = scope.get("raw_path", b"").decode("ascii", "backslashreplace").partition("?")[0]
        access_logger.info(
            "%s %s %s rows=%d ms=%.1f",
            scope["method"][:20],
            path[:PATH_LENGTH_MAX],
            status or "none",
            scope["state"].get("rows", 0),
            seconds * 1000,
        )


logger = logging.getLogger("dormouse.service")
access_logger = logging.getLogger("dormouse.service.access")
"""The logger that writes one line for each request. Its level and target can differ from those of errors."""
LOOKUPS_MAX = 16
"""The largest number of short requests (for tables, partitions, jobs) that use the database at once."""

_EXPECTED = (DormouseError, RequestValidationError, HTTPException)
_DESCRIPTION = (
    "Queries over the tables of a Dormouse instance. A query sees all commits from before its start. Rows "
    "are streamed as JSON lines, Arrow or CSV; errors are problem documents (RFC 9457)."
)


def create_app(instance: Instance, settings: ServiceSettings) -> FastAPI:
    """Returns an app that answers queries of an instance. The caller keeps the instance open while it runs.

    With `job_threads` in the settings, the app also writes and runs jobs: the instance must be writable.
    """
    metrics = Metrics()
    holders = read_holders(settings.job_tokens_file, (*kinds(), *RIGHTS)) if settings.job_tokens_file else {}
    workers = _workers(instance, settings, metrics) if settings.statements_max else None
    runners = _runners(settings, metrics)
    may_write = settings.job_threads is not None
    verbs = (verb for verb in VERBS.values() if may_write or not verb.changes)
    routers = [routes_of(verbs), tables, health, rows, payloads, docs]
    routers += [jobs, row_files, payload_writes] if may_write else []
    here = Service(
        instance,
        runners,
        workers.session if workers else None,
        Readiness(instance.check_reachable),
        metrics,
        Limits(settings.rows_max, settings.bytes_max),
        hiding(instance.objects.url),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if workers:
            workers.start()
        worker: JobWorker | None = None
        if settings.job_threads:
            worker = await asyncio.to_thread(JobWorker, instance, here.sessions, settings.job_threads)
            worker.start()
        yield
        if worker:
            await asyncio.to_thread(worker.close, settings.shutdown_seconds_max)
        here.readiness.close()
        for runner in set(runners.values()):
            await runner.close()
        if workers:
            await asyncio.to_thread(workers.close)

    app = FastAPI(
        title="Dormouse",
        version=VERSION,
        description=_DESCRIPTION,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(AccessLog, metrics=metrics),
            Middleware(
                Guard,
                token=settings.secret,
                host=settings.host,
                holders=holders,
                open_paths=open_paths(routers),
            ),
            Middleware(Heads),
        ],
    )
    app.state.service, app.state.settings, app.state.routers = here, settings, routers
    # routes are tried in this order, so the most frequent come first
    app.router.route_class = Served
    for router in routers:
        app.include_router(router)
    for kind in (*_EXPECTED, Exception):
        app.add_exception_handler(kind, _problem)
    app.openapi = lambda: _described(app, secured=settings.secret is not None or bool(holders))  # type: ignore[method-assign]
    return app


def _runners(settings: ServiceSettings, metrics: Metrics) -> dict[Place, Runner]:
    """Returns the runner of each place. Without SQL processes, statements share the runner of queries."""
    queries_here = Runner(settings, metrics, settings.queries_here)
    count = settings.statements_max
    statements = Runner(settings, metrics, count) if count else queries_here
    asking = {queries_here, statements}
    metrics.follow(metrics.running, lambda: sum(runner.slots.taken for runner in asking))
    metrics.follow(metrics.waiting, lambda: sum(runner.slots.waiting for runner in asking))
    return {
        Place.LOOKUPS: Runner(settings, metrics, LOOKUPS_MAX),
        Place.QUERIES: queries_here,
        Place.STATEMENTS: statements,
        Place.FILES: Runner(settings, metrics, settings.files_here, settings.file_seconds_max),
    }


def _workers(instance: Instance, settings: ServiceSettings, metrics: Metrics) -> Workers:
    sql_workers = instance.sql_workers(
        WorkerLimits(
            settings.statements_max,
            settings.sql_memory_bytes_max,
            settings.sql_spill_bytes_max,
            settings.sql_threads,
            share=settings.workers,
        ),
        lambda why: metrics.workers_ended.labels(why).inc(),
    )
    metrics.follow(metrics.workers, lambda: len(sql_workers.process_ids))
    return sql_workers


async def _problem(request: Request, error: Exception) -> Response:
    if not isinstance(error, _EXPECTED):
        logger.error("a request failed", exc_info=error)
    if isinstance(error, HTTPException) and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        error.headers = {"Allow": ", ".join(methods_of(request.app.state.routers, request.scope))}
    return problem_of(error, request.app.state.service.hide).response()


def _described(app: FastAPI, *, secured: bool) -> dict[str, Any]:
    """Returns FastAPI's OpenAPI description, with problem documents instead of FastAPI's status 422.

    If `secured`, it also describes the token.
    """
    if app.openapi_schema is None:
        description = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        components = description.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas[ProblemDocument.__name__] = ProblemDocument.model_json_schema()
        for path, operations in description["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if secured and path != "/health":
                    operation["security"] = [{"token": []}]
        if secured:
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = description
    return app.openapi_schema


# The server is one process, which may share its address with other ones. It runs until SIGTERM or Ctrl-C.


def check(settings: ServiceSettings) -> None:
    """Checks the files that the settings name. Raises `InvalidInput`, with the name of an unusable file."""
    _ = settings.secret
    if settings.job_tokens_file is not None:
        read_holders(settings.job_tokens_file, (*kinds(), *RIGHTS))
    if settings.tls_certificate and settings.tls_key:
        tls_context(settings.tls_certificate, settings.tls_key)


class Server:
    """A server of an instance. `run` serves until a signal or another thread calls `stop`."""

    def __init__(self, instance: Instance, settings: ServiceSettings) -> None:
        """Reserves the address.

        Raises `InvalidInput` for unusable TLS files, and `InstanceError` if the address is not available.
        """
        certificate, key = settings.tls_certificate, settings.tls_key
        tls = tls_context(certificate, key) if certificate and key else None
        connections_max = connections_possible(-(-settings.connections_max // settings.workers))
        self._socket = listening(settings.host, settings.port, shared=settings.workers > 1)
        self._socket.listen(min(connections_max, CONNECTIONS_WAITING_MAX))
        # asyncio sets it only on sockets that name their protocol; without it, answers wait for an ACK
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = self._socket.getsockname()[1]
        self.url = url_of(settings, port)
        config = uvicorn.Config(
            create_app(instance, settings),
            http=type(
                "_Protocol",
                (Protocol,),
                {
                    "request_seconds_max": settings.client_stall_seconds_max,
                    "among": Connections(connections_max),
                },
            ),
            loop="uvloop",
            backlog=min(connections_max, CONNECTIONS_WAITING_MAX),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=settings.shutdown_seconds_max,
        )
        config.load()
        config.ssl = tls
        self._server = _Uvicorn(config)
        # uvicorn logs an error for each answer that breaks off, which the service logs already
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    def run(self, started: Callable[[str], object] = lambda url: None) -> None:
        """Serves until `stop` is called. Calls `started` with the URL when the server is ready."""
        with self._socket, stopped_by_signals(self.stop):
            self._server.on_start = lambda: started(self.url)
            self._server.run([self._socket])

    def stop(self) -> None:
        """Refuses new requests, and waits some time for running ones. A second call ends them at once."""
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True


def url_of(settings: ServiceSettings, port: int) -> str:
    """Returns the URL of a service."""
    return f"{'https' if settings.tls_certificate else 'http'}://{shown_host(settings.host)}:{port}"


class _Uvicorn(uvicorn.Server):
    """A uvicorn server without uvicorn's signal handlers, which would end the process by the same signal."""

    on_start: Callable[[], object] = staticmethod(lambda: None)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()

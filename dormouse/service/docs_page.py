"""/docs: a form for the API. Its scripts come from here: a page that takes a token has no others."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any

import fastapi_offline
from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from dormouse.service.declared import Served
from dormouse.service.terms import Place, Right, served

_FOLDER = Path(fastapi_offline.__file__).parent / "static"
_HEADERS = {
    # Swagger UI sets the style of elements that it makes, and has pictures of its own
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
    """Returns the API's description."""
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

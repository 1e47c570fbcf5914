"""/docs: a form for the API. Its scripts come from here: a page that takes a token has no others."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import fastapi_offline
from fastapi import APIRouter, FastAPI, Response
from starlette.responses import FileResponse, HTMLResponse

PATHS = ("/docs", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js", "/docs/begin.js")
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


def add_docs(app: FastAPI) -> None:
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def page() -> Response:
        return HTMLResponse(_PAGE, headers=_HEADERS)

    @router.get("/docs/begin.js")
    async def begin() -> Response:
        return Response(_BEGIN, media_type="text/javascript", headers=_HEADERS)

    for path in PATHS[1:3]:
        router.add_api_route(path, _file(path.rpartition("/")[2]), include_in_schema=False)
    app.include_router(router)


def _file(name: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def file() -> Response:
        return FileResponse(_FOLDER / name, headers=_HEADERS)

    return file

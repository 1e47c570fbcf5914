"""Bodies of requests: bounded while they are read, and JSON that means one thing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from dormouse.errors import DormouseError, InvalidInput
from dormouse.model.types import parse_json as exact_json
from dormouse.service.declared import Served
from dormouse.service.problems import Refused


class JsonRequest(Request):
    """A request whose body is JSON."""

    async def body(self) -> bytes:
        """The body, if it is of JSON, small and quick enough."""
        if not hasattr(self, "_body"):
            self._body = await self._bounded()
        return self._body

    async def json(self) -> Any:
        return parse_json(await self.body())

    async def _bounded(self) -> bytes:
        settings = self.app.state.settings
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise _unsupported("the body must be JSON, with content-type: application/json")
        if self.headers.get("content-encoding", "").strip().lower() not in {"", "identity"}:
            raise _unsupported("the body must come as it is, without content-encoding")
        too_large = Refused(
            "body-too-large",
            f"the body is larger than the {settings.body_bytes_max:,} bytes that are allowed",
        )
        if int(self.headers.get("content-length", 0)) > settings.body_bytes_max:
            raise too_large
        found = bytearray()
        seconds = settings.client_stall_seconds_max
        try:
            async with asyncio.timeout(seconds):
                async for chunk in self.stream():
                    found += chunk
                    if len(found) > settings.body_bytes_max:
                        raise too_large
        except TimeoutError:
            raise Refused("body-too-slow", f"the body did not come within {seconds:g} s") from None
        return bytes(found)


def _unsupported(detail: str) -> Refused:
    return Refused("unsupported-media-type", detail)


class JsonRoute(Served):
    """A route whose requests are `JsonRequest`s."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(JsonRequest(request.scope, request.receive))
            except HTTPException as error:
                # FastAPI takes an error of the body for one of its own
                if isinstance(error.__cause__, DormouseError):
                    raise error.__cause__ from None
                raise

        return handler


def parse_json(body: bytes, what: str = "the body") -> Any:
    """JSON as RFC 8259 has it: no NaN, no name twice, only texts that UTF-8 can have, exact numbers."""
    try:
        found = exact_json(body.decode("utf-8"), _refuse_constant)
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise InvalidInput(f"{what} is not valid Unicode") from None
    except RecursionError:
        raise InvalidInput(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise InvalidInput(f"{what} is not valid JSON: {error}") from None
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(
        f'JSON has no {name}; write "{name}" in a condition, {{"double": "{name}"}} as a parameter'
    )

"""Routes that enforce their terms: a right, a limit of concurrent requests, and a time limit.

A route without terms cannot be made.

Request bodies are limited in size and time while they are read, and must be unambiguous JSON.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping
from itertools import chain
from typing import Any, get_origin

from fastapi import Request, Response
from fastapi._compat import ModelField
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from dormouse.errors import DormouseError, InvalidInput
from dormouse.model.json_values import parse_json as exact_json
from dormouse.model.text import did_you_mean
from dormouse.service.problems import Refused, problems
from dormouse.service.running import Answer
from dormouse.service.security import LOOP_SECONDS_MAX, Place, Terms
from dormouse.service.work import ReplyWork


class Served(APIRoute):
    """A route whose endpoint was declared with `served`, which names its places.

    - If the endpoint is a plain function, it runs in a thread of its first place.
    - If it is a coroutine, it returns an `Answer`, which takes a slot of its place and has a time limit.
    - Only a coroutine of the place LOOP may return another response.
    """

    terms: Terms

    def __init__(self, path: str, endpoint: Callable[..., Any], **described: Any) -> None:
        terms = getattr(endpoint, "terms", None)
        if not isinstance(terms, Terms) or not terms.places:
            raise TypeError(f"the route of {path} has no terms: give its endpoint @served(right, place)")
        is_in_thread = not inspect.iscoroutinefunction(endpoint)
        if is_in_thread and Place.LOOP in terms.places:
            raise TypeError(f"the route of {path}: only a coroutine runs in the event loop")
        self.terms = terms
        called = _in_thread(endpoint, terms.places[0]) if is_in_thread else endpoint
        if Place.LOOP not in terms.places:
            described["responses"] = {**problems(400, 429, 504), **(described.get("responses") or {})}
        super().__init__(path, called, **described)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, terms = super().get_route_handler(), self.terms

        known = {parameter.alias: parameter for parameter in _query_parameters(self.dependant)}
        is_of_api = self.path.startswith("/v1/")

        async def handler(request: Request) -> Response:
            terms.check(request.state.holder)
            if is_of_api:
                _check_query(request, known)
            if terms.places == (Place.LOOP,):
                try:
                    async with asyncio.timeout(LOOP_SECONDS_MAX):
                        return await handle(request)
                except TimeoutError:
                    raise Refused(
                        "query-time-over", f"there was no answer within {LOOP_SECONDS_MAX:g} s"
                    ) from None
            response = await handle(request)
            if not isinstance(response, Answer) or response.place not in terms.places:
                raise TypeError(
                    f"{self.path} must return an Answer of {terms.places}, but returned {response!r}"
                )
            return response

        return handler


def _query_parameters(needed: Dependant) -> list[ModelField]:
    """Returns the query parameters of an endpoint and of its dependencies."""
    return [*needed.query_params, *chain.from_iterable(map(_query_parameters, needed.dependencies))]


def _check_query(request: Request, known: Mapping[str, ModelField]) -> None:
    """Raises `InvalidInput` for an unknown parameter, or a repeated one that is not a list."""
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there is {', '.join(sorted(known)) or 'none'}"
            raise InvalidInput(f"the path has no query parameter {name[:100]!r}{hint}")
        if given.count(name) > 1 and get_origin(known[name].field_info.annotation) is not list:
            raise InvalidInput(f"query parameter {name!r} is given twice")


def _in_thread(endpoint: Callable[..., Response], place: Place) -> Callable[..., Any]:
    @functools.wraps(endpoint)
    async def answered(**given: Any) -> Response:
        return Answer(place, None, ReplyWork(functools.partial(endpoint, **given)))

    return answered


SHORT_BYTES_MAX = 512
"""The most bytes of a body that cannot be nested so deeply that writing it as JSON fails."""


class JsonRequest(Request):
    """A request whose body is JSON."""

    async def body(self) -> bytes:
        """Returns the body. Raises `Refused` if it is not JSON by its media type, or too large or slow."""
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
            raise _unsupported("the body must not have a content-encoding")
        if int(self.headers.get("content-length", 0)) > settings.body_bytes_max:
            raise _too_large(settings.body_bytes_max)
        found = bytearray()
        seconds = settings.client_stall_seconds_max
        try:
            async with asyncio.timeout(seconds):
                async for chunk in self.stream():
                    found += chunk
                    if len(found) > settings.body_bytes_max:
                        raise _too_large(settings.body_bytes_max)
        except TimeoutError:
            raise Refused("body-too-slow", f"the body did not come within {seconds:g} s") from None
        return bytes(found)


def _too_large(bytes_max: int) -> Refused:
    return Refused("body-too-large", f"the body is larger than the {bytes_max:,} bytes that are allowed")


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
                # FastAPI wraps an error of the body in an HTTPException
                if isinstance(error.__cause__, DormouseError):
                    raise error.__cause__ from None
                raise

        return handler


def parse_json(body: bytes, what: str = "the body") -> Any:
    """Parses JSON strictly (RFC 8259). Raises `InvalidInput` otherwise.

    Refuses NaN and infinities, repeated names, and texts that UTF-8 cannot encode. Numbers stay exact.
    """
    try:
        found = exact_json(body.decode("utf-8"), _refuse_constant)
        # a short text without these has no lone surrogate, and is not nested deeply
        if len(body) > SHORT_BYTES_MAX or not body.isascii() or b"\\" in body:
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

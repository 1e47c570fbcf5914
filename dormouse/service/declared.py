"""Routes that keep their terms: a right, slots and a deadline each; one without them cannot be made."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from itertools import chain
from typing import Any, get_origin

from fastapi import Request, Response
from fastapi._compat import ModelField
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from dormouse.errors import InvalidInput
from dormouse.model.text import did_you_mean
from dormouse.service.documents import problems
from dormouse.service.problems import Refused
from dormouse.service.running import Answer
from dormouse.service.terms import LOOP_SECONDS_MAX, Place, Terms
from dormouse.service.work import ReplyWork


class Served(APIRoute):
    """A route of an endpoint that `served` declares.

    An endpoint that is no coroutine runs in a thread of its place. A coroutine gives an `Answer` of its
    place, which takes a slot and has a deadline; only that of the event loop gives another response.
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

        known = {one.alias: one for one in _query_parameters(self.dependant)}
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
            found = await handle(request)
            if not isinstance(found, Answer) or found.place not in terms.places:
                raise TypeError(f"{self.path} was to answer in {terms.places}, and gave {found!r}")
            return found

        return handler


def _query_parameters(needed: Dependant) -> list[ModelField]:
    """Returns the query parameters of an endpoint and of what it depends on."""
    return [*needed.query_params, *chain.from_iterable(map(_query_parameters, needed.dependencies))]


def _check_query(request: Request, known: Mapping[str, ModelField]) -> None:
    """Raises `InvalidInput` for a parameter that the path lacks, or that comes twice and is no list."""
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

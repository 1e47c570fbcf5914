"""The paths of the verbs: each takes what its request has, and answers with rows or a document."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, create_model

from dormouse.reading.streams import Interruption
from dormouse.service.declared import JsonRoute
from dormouse.service.documents import DOCUMENTS, STREAMS
from dormouse.service.formats import preferred_format
from dormouse.service.routes import Here
from dormouse.service.running import Answer
from dormouse.service.security import SEGMENT, Place, Right, served
from dormouse.service.work import DocumentWork, QueryWork
from dormouse.verbs.verb import Call, Http, Verb, parse
from dormouse.verbs.verb import Request as Asked

_STREAMED = """

Streamed in the format that `Accept` likes best. An answer that fails on its way breaks off: its connection is
closed without the end of the stream. In Arrow an empty batch then has the problem as metadata, under
`dormouse.problem`."""


def routes_of(verbs: Iterable[Verb]) -> APIRouter:
    """Returns the routes of the verbs that have a path."""
    router = APIRouter(route_class=JsonRoute)
    for verb in verbs:
        if (http := verb.http) is None:
            continue
        summary, _, more = inspect.getdoc(verb.request).partition("\n")  # type: ignore[union-attr]
        router.add_api_route(
            http.path,
            served(Right.HOLDER, *(Place[one.upper()] for one in http.places))(_endpoint(verb, http)),
            methods=["POST"],
            name="_".join(reversed(verb.name.split())),
            tags=["row tables" if http.path.startswith("/v1/rows") else "queries"],
            summary=summary.removesuffix("."),
            description=more.strip() + ("" if http.answer else _STREAMED),
            response_model=http.answer,
            response_class=JSONResponse if http.answer else Response,
            responses=DOCUMENTS if http.answer else STREAMS,
        )
    return router


def _endpoint(verb: Verb, http: Http) -> Callable[..., Any]:
    """Returns a function with the fields of the path as arguments, and the others as the body."""
    model, handler = verb.request, http.handler or verb.handler
    named = re.findall(r"{(\w+)}", http.path)

    async def answer(here: Here, request: Request, body: BaseModel, **path: str) -> Response:
        asked = parse(model, {**dict(body), **path}, "the request")
        interruption = Interruption()
        limits = here.limits
        call = Call(
            interruption,
            here.sessions,
            rows_max=limits.rows_max,
            check_rows=lambda rows: limits.check(rows, 0),
        )
        place = Place[http.place(asked).upper()]

        def do() -> Any:
            return handler(here.instance, asked, call)

        if http.answer is not None:
            return Answer(place, http.kind, DocumentWork(do, interruption.set, limits))
        wanted = preferred_format(",".join(request.headers.getlist("accept")))
        work = QueryWork(do, wanted, limits, interruption.set)
        work.headers = {"vary": "accept"}
        return Answer(place, http.kind, work)

    given: dict[str, Any] = {"here": Here, "request": Request, "body": _body(model, named)}
    for name in named:
        field = model.model_fields[name]
        given[name] = Annotated[str, Path(description=field.description, examples=field.examples), SEGMENT]
    answer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
            for name, kind in given.items()
        ]
    )
    return answer


def _body(model: type[Asked], without: Iterable[str]) -> type[Asked]:
    """Returns a model of the fields that a body has: a request without those of the path."""
    fields: dict[str, Any] = {
        name: (Annotated[field.annotation, field], field)
        for name, field in model.model_fields.items()
        if name not in without
    }
    return create_model(model.__name__, __base__=Asked, __doc__=inspect.getdoc(model), **fields)

"""The paths of the verbs: each takes what its request has, and answers with rows or a document."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, create_model

from dormouse.errors import InvalidInput
from dormouse.model.text import listed
from dormouse.reading.streams import Interruption
from dormouse.service.declared import JsonRoute, parse_json
from dormouse.service.documents import DOCUMENTS, STREAMS, Body
from dormouse.service.formats import preferred_format
from dormouse.service.routes import Here
from dormouse.service.running import Answer
from dormouse.service.security import SEGMENT, Place, Right, served
from dormouse.service.work import DocumentWork, QueryWork
from dormouse.verbs.verb import Call, Form, Http, Verb, fields_of, parse
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


def query_fields(model: type[BaseModel], *without: str, **defaults: Any) -> Any:
    """Returns a dependency on query parameters: the fields of a model but for those `without`.

    It gives the fields that a request has. A list of names is a text with commas, any other list or object is
    JSON. `defaults` are those of the service, where the model has others.
    """
    fields = {name: model.model_fields[name] for name in fields_of(model, *without)}

    async def given(request: Request, **values: Any) -> dict[str, Any]:
        return {
            name: _value_of(fields[name].annotation, value)
            for name, value in values.items()
            if name in request.query_params
        }

    parameters = [inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY, annotation=Request)]
    for name, field in fields.items():
        bounds = [one for one in field.metadata if not isinstance(one, Form)]
        described = f"{field.description}{_HINTS.get(field.annotation, '')}"
        query = Query(description=described, examples=field.examples)
        kind: Any = _KINDS.get(field.annotation, field.annotation)
        default = defaults.get(name, field.default or None if field.annotation in _KINDS else field.default)
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, *bounds, query],
            )
        )
    given.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return Depends(given)


_NAMES, _JSON = list[str] | None, list[Any] | dict[str, Any] | None
_KINDS: dict[Any, Any] = {_NAMES: str | None, _JSON: str | None, tuple[str, ...]: list[str] | None}
"""As what the query of a URL has a field of a type."""
_HINTS: dict[Any, str] = {_NAMES: " Names with commas.", _JSON: " As JSON."}


def _value_of(kind: Any, value: Any) -> Any:
    """Returns what a query parameter says, as JSON has a field of this type."""
    if kind == _NAMES:
        return listed(value)
    if kind != _JSON:
        return value
    found = parse_json(value.encode(), "a query parameter")
    if not isinstance(found, list | dict):
        raise InvalidInput("a query parameter must be a list or an object of JSON")
    return found


def _body(model: type[Asked], without: Iterable[str]) -> type[Asked]:
    """Returns a model of the fields that a body has: a request without those of the path."""
    fields: dict[str, Any] = {
        name: (Annotated[field.annotation, field], field)
        for name, field in model.model_fields.items()
        if name not in without
    }
    return create_model(model.__name__, __base__=Body, __doc__=inspect.getdoc(model), **fields)

"""The HTTP paths of tables, health and verbs. Each parses the request, makes one call and answers."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from dataclasses import field as new
from typing import Annotated, Any, TypeVar, cast

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, create_model

from dormouse.api.instance import Instance
from dormouse.api.table import Table
from dormouse.errors import DormouseError, InstanceError, InvalidInput
from dormouse.jobs.job import Job
from dormouse.model.cut import when_of_text
from dormouse.model.json_values import json_value
from dormouse.model.text import path_segment, split_names
from dormouse.objects.names import hiding, without_paths
from dormouse.reading.sql.engine import Sessions
from dormouse.reading.streams import Interruption
from dormouse.service import documents
from dormouse.service import documents as wire
from dormouse.service.declared import JsonRoute, Served, parse_json
from dormouse.service.documents import ANSWERS, DOCUMENTS, READS, STREAMS
from dormouse.service.formats import preferred_format
from dormouse.service.metrics import CONTENT_TYPE, Metrics
from dormouse.service.problems import problems
from dormouse.service.running import Answer, Runner
from dormouse.service.security import SEGMENT, Place, Right, served
from dormouse.service.work import DocumentWork, Limits, QueryWork
from dormouse.settings.service import Holder
from dormouse.verbs.reading import schema_of
from dormouse.verbs.verb import Call, Form, Http, Verb, fields_of, parse
from dormouse.verbs.verb import Request as Asked

T = TypeVar("T")
PAGE_ROWS, PAGE_ROWS_MAX = 100, 10_000

SECONDS_MAX = 5.0

logger = logging.getLogger("dormouse.service")


@dataclass(frozen=True)
class Service:
    """An instance, and the parts that all paths use to serve it."""

    instance: Instance
    runners: Mapping[Place, Runner]
    sessions: Sessions | None
    """The processes that run SQL statements; None if they run in this process."""
    readiness: Readiness
    metrics: Metrics
    limits: Limits
    hide: Callable[[str], str]
    """A function that removes local paths from a text for clients."""
    remembered: dict[str, Table] = new(default_factory=dict)
    """The tables of earlier queries, by name."""


async def service(request: Request) -> Service:
    """Returns the app's service. It is async because FastAPI runs plain functions in threads."""
    return cast(Service, request.app.state.service)


def _holder(request: Request) -> Holder:
    return cast(Holder, request.state.holder)


Here = Annotated[Service, Depends(service)]
By = Annotated[Holder, Depends(_holder)]
IdempotencyKey = Annotated[
    str | None, Header(alias="Idempotency-Key", description="the id of the job, like job_id")
]


TableNamed = Annotated[str, Path(description="the name of a table", examples=["flights"]), SEGMENT]


After = Annotated[str | None, Query(description="the `next` of the previous page")]


Limit = Annotated[int, Query(ge=1, le=PAGE_ROWS_MAX, description="the largest size of a page")]


MaybeLimit = Annotated[
    int | None, Query(ge=1, le=PAGE_ROWS_MAX, description="the largest size of a page; unlimited if left out")
]


health = APIRouter(tags=["health"], route_class=Served)


tables = APIRouter(prefix="/v1/tables", tags=["tables"], route_class=Served)


@health.get("/health", response_model=documents.Health, summary="Whether the process answers")
@served(Right.PUBLIC, Place.LOOP)
async def alive() -> Response:
    """Answers if the process runs. Needs no token. Never uses the database, so as not to wake it."""
    return JSONResponse({"status": "ok"})


@health.get(
    "/health/ready",
    response_model=documents.Health,
    responses=problems(401, 503),
    summary="Whether queries can be answered",
)
@served(Right.HOLDER, Place.LOOP)
async def ready(here: Here) -> Response:
    """Checks that the database and the object store answer. Wakes a sleeping database."""
    await here.readiness.check()
    return JSONResponse({"status": "ready"})


@health.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {CONTENT_TYPE: {"schema": {"type": "string"}}}}, **problems(401)},
    summary="Metrics for Prometheus",
)
@served(Right.HOLDER, Place.LOOP)
async def metrics(here: Here) -> Response:
    """Returns the metrics in the text format of Prometheus."""
    return Response(here.metrics.text(), headers={"content-type": CONTENT_TYPE})


@tables.get("", response_model=documents.TableList, responses=READS, summary="All tables")
@served(Right.HOLDER, Place.LOOKUPS)
def list_tables(here: Here, after: After = None, limit: MaybeLimit = None) -> Response:
    """Lists the tables in the order of their names: all of them, or a page if `limit` is given."""
    by_name = {table.known_name: table for table in here.instance.tables()}
    page, following = page_by_name(by_name, after, limit)
    listed = [
        {"name": table.known_name, "layout": table.layout, "row_table": table.is_row_table} for table in page
    ]
    return JSONResponse({"tables": listed, "next": following})


@tables.get("/{table}", response_model=documents.TableDescription, responses=ANSWERS, summary="One table")
@served(Right.HOLDER, Place.LOOKUPS)
def describe_table(
    here: Here,
    table: TableNamed,
    counts: Annotated[
        bool, Query(description="also count files and rows, which is slow for a large table")
    ] = False,
    as_of: Annotated[
        str | None, Query(description="a time or a cut's name, to get the schema of then")
    ] = None,
    cut: Annotated[int | None, Query(description="a cut's number, to get the schema of then")] = None,
) -> Response:
    """Returns a table's schema, properties and layout; with `counts`, also its current counts."""
    found = here.instance.table(table)
    moment = cut if as_of is None else when_of_text(as_of)
    schema = schema_of(found, moment)
    status = found.status() if counts else None
    if status is not None:
        here.metrics.tell_consumers(table, status.consumers)
    described = wire.table(found, schema, status)
    if status is not None:  # the errors of failed rounds may have local paths
        described["counts"] = without_paths(described["counts"], here.hide)
    return JSONResponse(described)


@tables.get(
    "/{table}/partitions",
    response_model=documents.PartitionPage,
    responses=ANSWERS,
    summary="Partitions of a table",
)
@served(Right.HOLDER, Place.LOOKUPS)
def list_partitions(
    here: Here,
    table: TableNamed,
    after: After = None,
    limit: Limit = PAGE_ROWS,
    leaves: Annotated[bool, Query(description="only leaves")] = False,
) -> Response:
    """Lists a page of partitions in the order of their ids. May miss changes made between two pages."""
    partitions = here.instance.table(table).partition_page(after or "", limit + 1, leaves=leaves)
    page, last = page_of(partitions, limit)
    following = last and last.partition_id
    return JSONResponse({"partitions": [wire.partition(node) for node in page], "next": following})


@tables.get(
    "/{table}/files", response_model=documents.FilePage, responses=ANSWERS, summary="Files of a table"
)
@served(Right.HOLDER, Place.LOOKUPS)
def list_files(here: Here, table: TableNamed, after: After = None, limit: Limit = PAGE_ROWS) -> Response:
    """Lists a page of files with their facts. May miss changes made between two pages."""
    found = here.instance.table(table)
    page, last = page_of(found.file_page(after, limit + 1), limit)
    following = last and last.filename
    return JSONResponse({"files": [wire.file(found.schema, one) for one in page], "next": following})


def page_by_name(named: Mapping[str, T], after: str | None, limit: int | None) -> tuple[list[T], str | None]:
    """Returns a page of values in the order of their names, and the last name of the page.

    The name is the `after` of the next page, or None if no page follows.
    """
    names = sorted(name for name in named if after is None or name > after)
    page = names if limit is None else names[:limit]
    return [named[name] for name in page], page[-1] if len(page) < len(names) else None


def page_of(rows: Sequence[T], limit: int) -> tuple[Sequence[T], T | None]:
    """Returns the first `limit` rows, and the last of them, or None if no more rows follow.

    The caller fetches `limit + 1` rows, so that this function sees whether more follow.
    """
    page = rows[:limit]
    return page, page[-1] if len(page) < len(rows) else None


class Readiness:
    """A check of the database and the object store, in a thread. Concurrent requests share one check."""

    def __init__(self, check: Callable[[], None], seconds_max: float = SECONDS_MAX) -> None:
        self._check = check
        self._seconds_max = seconds_max
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dormouse-ready")
        self._pending: asyncio.Future[None] | None = None

    async def check(self) -> None:
        """Raises `InstanceError` on a timeout or unexpected error, and any `DormouseError` of the check."""
        if self._pending is None or self._pending.done():
            self._pending = asyncio.get_running_loop().run_in_executor(self._thread, self._check)
            self._pending.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait_for(asyncio.shield(self._pending), self._seconds_max)
        except TimeoutError:
            raise InstanceError(
                f"the database or the object store did not answer within {self._seconds_max:g} s"
            ) from None
        except DormouseError:
            raise
        except Exception:
            logger.exception("the readiness check failed")
            raise InstanceError("the database or the object store did not answer as expected") from None

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def chosen_id(job_id: str | None, key: str | None) -> str | None:
    """Returns the job id that the client chose, or None.

    It is `job_id`, or `key`, the value of the header, with or without quotes. Raises `InvalidInput` if both
    are given and differ.
    """
    if key is None:
        return job_id
    unquoted = key[1:-1] if len(key) > 1 and key[0] == key[-1] == '"' else key
    if job_id not in (None, unquoted):
        raise InvalidInput("Idempotency-Key and job_id name two ids: give one of them")
    return unquoted


def job_answer(instance: Instance, job: Job, status: int = 200) -> Response:
    """Returns an answer with the state of a job, and its URL as `Location`."""
    location = f"/v1/jobs/{path_segment(job.job_id)}"
    document = job_document(job, hiding(instance.objects.url))
    return JSONResponse(document, status, headers={"location": location})


def job_document(job: Job, hide: Callable[[str], str]) -> Any:
    texts = {"message": job.message, "error": job.error, "traceback": job.traceback}
    hidden = {name: None if text is None else hide(text) for name, text in texts.items()}
    return json_value(asdict(job) | hidden | {"is_waiting": job.is_waiting})


# The paths of the verbs. Each takes the fields of the verb's request, and answers with rows or a document.

_STREAMED = """

The answer is streamed in the format that `Accept` prefers. If it fails after its start, the connection is
closed before the end of the stream. An Arrow stream then ends with an empty batch, whose metadata has the
problem under `dormouse.problem`."""


def routes_of(verbs: Iterable[Verb]) -> APIRouter:
    """Returns a router with a route for each verb that has a path."""
    router = APIRouter(route_class=JsonRoute)
    for verb in verbs:
        if (http := verb.http) is None:
            continue
        summary, _, more = inspect.getdoc(verb.request).partition("\n")  # type: ignore[union-attr]
        router.add_api_route(
            http.path,
            served(Right[http.right.upper()], *(Place[one.upper()] for one in http.places))(
                _endpoint(verb, http)
            ),
            methods=["POST"],
            name="_".join(reversed(verb.name.split())),
            tags=[_tag(verb, http)],
            summary=summary.removesuffix("."),
            description=more.strip() + ("" if http.answer else _STREAMED),
            response_model=http.answer,
            response_class=JSONResponse if http.answer else Response,
            responses=(DOCUMENTS if http.answer else STREAMS) | (problems(409) if verb.changes else {}),
        )
    return router


def _tag(verb: Verb, http: Http) -> str:
    """Returns the group of a path in the API's description."""
    if verb.changes:
        return "edits"
    return "row tables" if http.path.startswith("/v1/rows") else "queries"


def _endpoint(verb: Verb, http: Http) -> Callable[..., Any]:
    """Returns an endpoint whose arguments are the fields of the path, and a body with the other fields."""
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
            remembered=here.remembered,
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
    """Returns a FastAPI dependency with a query parameter for each field of a model, except `without`.

    Its value is a dict of the fields that the request has. In a URL, a list of names is separated by commas,
    and any other list or object is JSON. `defaults` replace the model's defaults in the API's description.
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
"""The type of a query parameter in a URL, by the type of its field."""
_HINTS: dict[Any, str] = {_NAMES: " Names with commas.", _JSON: " As JSON."}


def _value_of(kind: Any, value: Any) -> Any:
    """Parses the value of a query parameter for a field of type `kind`.

    Raises `InvalidInput` if a list or an object is not valid JSON.
    """
    if kind == _NAMES:
        return split_names(value)
    if kind != _JSON:
        return value
    found = parse_json(value.encode(), "a query parameter")
    if not isinstance(found, list | dict):
        raise InvalidInput("a query parameter must be a list or an object of JSON")
    return found


def _body(model: type[Asked], without: Iterable[str]) -> type[Asked]:
    """Returns a model of the body: the request's fields except those in `without`, which are in the path."""
    fields: dict[str, Any] = {
        name: (Annotated[field.annotation, field], field)
        for name, field in model.model_fields.items()
        if name not in without
    }
    return create_model(
        model.__name__, __base__=documents.BodyOfVerb, __doc__=inspect.getdoc(model), **fields
    )

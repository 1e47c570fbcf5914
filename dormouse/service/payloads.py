"""The HTTP paths of payloads: one payload by its key, or many.

These paths refuse the kinds of payloads in which Dormouse keeps documents of its jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from dormouse.errors import DormouseError, InvalidPayload, PayloadCorrupt
from dormouse.payloads.keys import PayloadKey, check_application_kind, checked
from dormouse.service.declared import JsonRoute
from dormouse.service.documents import Body
from dormouse.service.problems import problem_of, problems
from dormouse.service.routes import Here, Service
from dormouse.service.running import Answer
from dormouse.service.security import SEGMENT, Place, Right, served
from dormouse.service.work import ReplyWork
from dormouse.verbs.verb import Document

MANY_MAX = 1_000
"""The largest number of payloads that a request may name."""

_ONE = "/{tenant}/{id}/{inserted_at}/{kind}"
_JSON: dict[str, Any] = {"content": {"application/json": {"schema": {}}}}
_READS = problems(400, 401, 404, 410, 413, 503)
_WRITES = problems(400, 401, 408, 410, 413, 415, 503)

Tenant = Annotated[str, Path(description="the tenant that owns the payload"), SEGMENT]
Id = Annotated[str, Path(description="the payload's id"), SEGMENT]
At = Annotated[str, Path(description="the time of its insertion", examples=["2026-03-05T12:00:00Z"]), SEGMENT]
Kind = Annotated[str, Path(description="the payload's kind", examples=["request"]), SEGMENT]

payloads = APIRouter(prefix="/v1/payloads", tags=["payloads"], route_class=JsonRoute)
payload_writes = APIRouter(prefix="/v1/payloads", tags=["payloads"], route_class=JsonRoute)


class KeyDocument(Body):
    """The key of a payload."""

    tenant: str = Field(description="the tenant that owns the payload")
    id: str = Field(description="the payload's id")
    inserted_at: str = Field(
        description="a time in ISO 8601 with its offset", examples=["2026-03-05T12:00:00Z"]
    )
    kind: str = Field(description="the payload's kind", examples=["request"])


class PutDocument(KeyDocument):
    """A payload: its key and its content."""

    content: Any = Field(description="any JSON value, including null")


class PutManyRequest(Body):
    """Payloads to write in one step: all or none. If several have the same key, the last one wins."""

    payloads: list[PutDocument] = Field(max_length=MANY_MAX)


class GetManyRequest(Body):
    """The keys of payloads."""

    keys: list[KeyDocument] = Field(max_length=MANY_MAX)


class Kept(Document):
    """The number of payloads that were sent and are now stored."""

    kept: int


class PayloadList(Document):
    """The payloads in the order of the requested keys: each has its `content`, or a `problem` instead."""

    payloads: list[dict[str, Any]]


@payloads.get(_ONE, responses={200: _JSON, **_READS}, response_class=Response, summary="One payload")
@served(Right.PAYLOADS, Place.LOOKUPS)
def get_payload(here: Here, tenant: Tenant, id: Id, inserted_at: At, kind: Kind) -> Response:
    """Returns a payload's content, from PostgreSQL or the object store.

    Answers 404 if the payload does not exist, and 410 if its day was dropped.
    """
    [content] = _contents(here, [_key(tenant, id, inserted_at, kind)])
    if isinstance(content, DormouseError):
        raise content
    return _answer(here, content)


@payloads.post(
    "/get", responses=_READS | problems(408, 415), response_model=PayloadList, summary="Many payloads"
)
@served(Right.PAYLOADS, Place.LOOKUPS)
def get_payloads(here: Here, body: GetManyRequest) -> Response:
    """Returns many payloads with one lookup.

    Payloads that are stored next to each other are read with one request to the object store.
    """
    keys = [_key(key.tenant, key.id, key.inserted_at, key.kind) for key in body.keys]
    listed = [
        key.model_dump() | _content_or_problem(here, content)
        for key, content in zip(body.keys, _contents(here, keys), strict=True)
    ]
    return _answer(here, {"payloads": listed})


@payload_writes.put(_ONE, responses={204: {}, **_WRITES}, status_code=204, summary="Write a payload")
@served(Right.PAYLOADS, Place.LOOKUPS)
async def put_payload(
    here: Here, tenant: Tenant, id: Id, inserted_at: At, kind: Kind, request: Request
) -> Response:
    """Writes a payload, and replaces the one with the same key. The body is its content: any JSON value."""
    content = await request.json()
    key = _key(tenant, id, inserted_at, kind)
    return Answer(Place.LOOKUPS, None, ReplyWork(partial(_put, here, [(*key, content)], Response(None, 204))))


@payload_writes.post("", responses=_WRITES, response_model=Kept, summary="Write many payloads")
@served(Right.PAYLOADS, Place.LOOKUPS)
def put_payloads(here: Here, body: PutManyRequest) -> Response:
    """Writes all payloads or none. Each replaces the one with the same key."""
    rows = [(*_key(row.tenant, row.id, row.inserted_at, row.kind), row.content) for row in body.payloads]
    return _put(here, rows, JSONResponse({"kept": len(rows)}))


@payload_writes.delete(_ONE, responses={204: {}, **_WRITES}, status_code=204, summary="Delete a payload")
@served(Right.PAYLOADS, Place.LOOKUPS)
def delete_payload(here: Here, tenant: Tenant, id: Id, inserted_at: At, kind: Kind) -> Response:
    """Deletes a payload. Does nothing if it does not exist."""
    here.instance.payloads.delete(*_key(tenant, id, inserted_at, kind))
    return Response(None, 204)


def _put(here: Service, rows: Iterable[tuple[str, str, datetime, str, Any]], answer: Response) -> Response:
    here.instance.payloads.put_many(rows)
    return answer


def _key(tenant: str, id_: str, inserted_at: str, kind: str) -> PayloadKey:
    try:
        at = datetime.fromisoformat(inserted_at)
    except ValueError:
        raise InvalidPayload(f"inserted_at {inserted_at!r}: write it like 2026-03-05T12:00:00Z") from None
    check_application_kind(kind)
    return checked((tenant, id_, at, kind))


def _contents(here: Service, keys: list[PayloadKey]) -> list[Any]:
    """Returns for each key, in order, its content or the error that occurred while reading it."""
    by_key = here.instance.payloads.get_many(keys)
    here.metrics.mismatches.inc(sum(isinstance(content, PayloadCorrupt) for content in by_key.values()))
    return [by_key[key] for key in keys]


def _content_or_problem(here: Service, content: Any) -> dict[str, Any]:
    if not isinstance(content, DormouseError):
        return {"content": content}
    return {"problem": problem_of(content, here.hide).document}


def _answer(here: Service, document: Any) -> Response:
    answer = JSONResponse(document)
    here.limits.check(0, len(answer.body))
    return answer

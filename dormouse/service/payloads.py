"""The paths of payloads: one at a time by its key, or many. The documents of jobs are not among them."""

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
from dormouse.service.documents import problems
from dormouse.service.problems import problem_of
from dormouse.service.routes import Here, Service
from dormouse.service.running import Answer
from dormouse.service.security import SEGMENT, Place, Right, served
from dormouse.service.work import ReplyWork
from dormouse.verbs.verb import Document
from dormouse.verbs.verb import Request as RequestDocument

MANY_MAX = 1_000
"""How many payloads a request may name."""

_ONE = "/{tenant}/{id}/{inserted_at}/{kind}"
_JSON: dict[str, Any] = {"content": {"application/json": {"schema": {}}}}
_READS = problems(400, 401, 404, 410, 413, 503)
_WRITES = problems(400, 401, 408, 410, 413, 415, 503)

Tenant = Annotated[str, Path(description="whose it is"), SEGMENT]
Id = Annotated[str, Path(description="its id"), SEGMENT]
At = Annotated[str, Path(description="when it was inserted", examples=["2026-03-05T12:00:00Z"]), SEGMENT]
Kind = Annotated[str, Path(description="its kind", examples=["request"]), SEGMENT]

payloads = APIRouter(prefix="/v1/payloads", tags=["payloads"], route_class=JsonRoute)
payload_writes = APIRouter(prefix="/v1/payloads", tags=["payloads"], route_class=JsonRoute)


class KeyDocument(RequestDocument):
    """The key of a payload."""

    tenant: str = Field(description="whose it is")
    id: str = Field(description="its id")
    inserted_at: str = Field(
        description="a time in ISO 8601 with its offset", examples=["2026-03-05T12:00:00Z"]
    )
    kind: str = Field(description="its kind", examples=["request"])


class PutDocument(KeyDocument):
    """A payload."""

    content: Any = Field(description="any JSON value, null too")


class PutManyRequest(RequestDocument):
    """Payloads, of which all are kept or none; of one key, the last."""

    payloads: list[PutDocument] = Field(max_length=MANY_MAX)


class GetManyRequest(RequestDocument):
    """The keys of payloads."""

    keys: list[KeyDocument] = Field(max_length=MANY_MAX)


class Kept(Document):
    """How many payloads were sent, and are kept."""

    kept: int


class PayloadList(Document):
    """For each key, in order, its `content`, or the `problem` in place of it."""

    payloads: list[dict[str, Any]]


@payloads.get(_ONE, responses={200: _JSON, **_READS}, response_class=Response, summary="One payload")
@served(Right.PAYLOADS, Place.LOOKUPS)
def get_payload(here: Here, tenant: Tenant, id: Id, inserted_at: At, kind: Kind) -> Response:
    """Its content, wherever it is kept. 404: there is none; 410: its day was dropped."""
    [found] = _found(here, [_key(tenant, id, inserted_at, kind)])
    if isinstance(found, DormouseError):
        raise found
    return _answer(here, found)


@payloads.post(
    "/get", responses=_READS | problems(408, 415), response_model=PayloadList, summary="Many payloads"
)
@served(Right.PAYLOADS, Place.LOOKUPS)
def get_payloads(here: Here, body: GetManyRequest) -> Response:
    """In one look-up, which reads what lies together in one request to the store."""
    keys = [_key(one.tenant, one.id, one.inserted_at, one.kind) for one in body.keys]
    listed = [
        one.model_dump() | _content(here, found)
        for one, found in zip(body.keys, _found(here, keys), strict=True)
    ]
    return _answer(here, {"payloads": listed})


@payload_writes.put(_ONE, responses={204: {}, **_WRITES}, status_code=204, summary="Keep a payload")
@served(Right.PAYLOADS, Place.LOOKUPS)
async def put_payload(
    here: Here, tenant: Tenant, id: Id, inserted_at: At, kind: Kind, request: Request
) -> Response:
    """In place of the one of the same key. The body is its content, any JSON value."""
    content = await request.json()
    key = _key(tenant, id, inserted_at, kind)
    return Answer(Place.LOOKUPS, None, ReplyWork(partial(_put, here, [(*key, content)], Response(None, 204))))


@payload_writes.post("", responses=_WRITES, response_model=Kept, summary="Keep many payloads")
@served(Right.PAYLOADS, Place.LOOKUPS)
def put_payloads(here: Here, body: PutManyRequest) -> Response:
    """All or none, each in place of the one of the same key."""
    given = [(*_key(one.tenant, one.id, one.inserted_at, one.kind), one.content) for one in body.payloads]
    return _put(here, given, JSONResponse({"kept": len(given)}))


@payload_writes.delete(_ONE, responses={204: {}, **_WRITES}, status_code=204, summary="Delete a payload")
@served(Right.PAYLOADS, Place.LOOKUPS)
def delete_payload(here: Here, tenant: Tenant, id: Id, inserted_at: At, kind: Kind) -> Response:
    """If it is there."""
    here.instance.payloads.delete(*_key(tenant, id, inserted_at, kind))
    return Response(None, 204)


def _put(here: Service, given: Iterable[tuple[str, str, datetime, str, Any]], answer: Response) -> Response:
    here.instance.payloads.put_many(given)
    return answer


def _key(tenant: str, id_: str, inserted_at: str, kind: str) -> PayloadKey:
    try:
        at = datetime.fromisoformat(inserted_at)
    except ValueError:
        raise InvalidPayload(f"inserted_at {inserted_at!r}: write it like 2026-03-05T12:00:00Z") from None
    check_application_kind(kind)
    return checked((tenant, id_, at, kind))


def _found(here: Service, keys: list[PayloadKey]) -> list[Any]:
    found = here.instance.payloads.get_many(keys)
    here.metrics.mismatches.inc(sum(isinstance(one, PayloadCorrupt) for one in found.values()))
    return [found[key] for key in keys]


def _content(here: Service, found: Any) -> dict[str, Any]:
    if not isinstance(found, DormouseError):
        return {"content": found}
    return {"problem": problem_of(found, here.hide).document}


def _answer(here: Service, found: Any) -> Response:
    answer = JSONResponse(found)
    here.limits.check(0, len(answer.body))
    return answer

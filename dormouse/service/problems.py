"""Errors as problem documents (RFC 9457): what each kind of error is called, and its status."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from dormouse.errors import (
    CommitOutcomeUnknown,
    ConnectionsExhausted,
    DormouseError,
    InstanceError,
    InvalidInput,
    ObjectStoreError,
    PartitionNotFound,
    TableNotFound,
    TooManyRetries,
)

MEDIA_TYPE = "application/problem+json"
DETAIL_LENGTH_MAX = 2_000
NAME_LENGTH_MAX = 200
RETRY_AFTER_SECONDS = 1
_LONG_NAME = re.compile(rf"\S{{{NAME_LENGTH_MAX + 1},}}")
_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")

_STATUSES: tuple[tuple[type[DormouseError], int], ...] = (
    (InvalidInput, 400),
    (TableNotFound, 404),
    (PartitionNotFound, 404),
    (InstanceError, 503),
    (ConnectionsExhausted, 503),
    (TooManyRetries, 503),
    (CommitOutcomeUnknown, 503),
    (ObjectStoreError, 503),
)


class Refused(DormouseError):
    """What the service refuses by itself."""

    status = 400


class TooManyQueries(Refused):
    """Too many queries run at once."""

    status = 429


class QueryTimeOver(Refused):
    """The query took too long."""

    status = 504


class ServiceEnds(Refused):
    """The service is being stopped."""

    status = 503


class AnswerTooLarge(Refused):
    """The answer has more rows or bytes than are allowed."""

    status = 413


class BodyTooLarge(Refused):
    """The body of the request is larger than is allowed."""

    status = 413


class BodyTooSlow(Refused):
    """The body of the request did not come in time."""

    status = 408


class NotAcceptable(Refused):
    """There is no answer in any of the media types that are accepted."""

    status = 406


class UnsupportedMediaType(Refused):
    """The body of the request is not JSON."""

    status = 415


class Unauthorized(Refused):
    """The request has no valid token."""

    status = 401


class MisdirectedRequest(Refused):
    """The request is for another host."""

    status = 421


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem document: `kind` is the error's class in kebab case."""

    status: int
    kind: str
    title: str
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def document(self) -> dict[str, Any]:
        return {
            "type": f"urn:dormouse:{self.kind}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }

    @property
    def text(self) -> str:
        return json.dumps(self.document)  # ASCII: also lone surrogates of the input can be told

    def response(self) -> Response:
        return Response(self.text, self.status, headers=dict(self.headers), media_type=MEDIA_TYPE)


def problem_of(error: BaseException) -> Problem:
    """What a client is told of an error; of one that is not ours, nothing but that there was one."""
    if not isinstance(error, DormouseError):
        return Problem(500, "internal-error", "The service failed.", "the service's log says why")
    status = _status(error)
    return Problem(
        status,
        _CAPITAL.sub("-", type(error).__name__).lower(),
        (type(error).__doc__ or "").splitlines()[0],
        shortened(str(error)),
        _headers(status),
    )


def http_problem(status: int, detail: str | None = None, headers: Mapping[str, str] | None = None) -> Problem:
    """Of a status that HTTP itself asks for, such as 404 for a path that leads nowhere."""
    phrase = HTTPStatus(status).phrase
    kind = phrase.lower().replace(" ", "-")
    return Problem(status, kind, f"{phrase}.", shortened(detail or phrase), headers or {})


def invalid_request(errors: list[Any]) -> Problem:
    """Of a request that does not fit its description: where, and what is wrong there."""
    details = [f"{_place(error['loc'])}: {error['msg']}" for error in errors[:5]]
    if len(errors) > len(details):
        details.append(f"and {len(errors) - len(details)} more")
    return problem_of(InvalidInput("; ".join(details)))


def shortened(text: str) -> str:
    line = _LONG_NAME.sub(_cut, " ".join(text.split()))
    return line if len(line) <= DETAIL_LENGTH_MAX else f"{line[:DETAIL_LENGTH_MAX]}…"


def _cut(name: re.Match[str]) -> str:
    quote = name[0][-1] if name[0][-1] in "'\"" else ""
    return f"{name[0][:NAME_LENGTH_MAX]}…{quote}"


def _status(error: DormouseError) -> int:
    if isinstance(error, Refused):
        return error.status
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def _headers(status: int) -> dict[str, str]:
    if status == 401:
        return {"WWW-Authenticate": 'Bearer realm="dormouse"'}
    return {"Retry-After": str(RETRY_AFTER_SECONDS)} if status in {429, 503} else {}


def _place(location: tuple[Any, ...]) -> str:
    return ".".join(str(part)[:80] for part in location)

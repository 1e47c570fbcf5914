"""The problem documents (RFC 9457) that report errors: the name and the HTTP status of each kind of error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dormouse.errors import (
    CommitIdReused,
    CommitOutcomeUnknown,
    ConnectionsExhausted,
    CutExpired,
    DormouseError,
    EditConflict,
    IndexNotReady,
    InstanceError,
    InvalidInput,
    JobError,
    JobFailed,
    JobForbidden,
    JobNotFound,
    ObjectDamaged,
    ObjectStoreError,
    PageExpired,
    PartitionNotFound,
    PayloadExpired,
    PayloadNotFound,
    PayloadUnavailable,
    QueryTooLarge,
    RowConflict,
    RowError,
    RowLockHeld,
    RowLockLost,
    RowNotFound,
    SnapshotExists,
    SnapshotNotFound,
    TableAlreadyExists,
    TableNotFound,
    TooManyRetries,
)
from dormouse.objects.names import without_paths
from dormouse.verbs.verb import Document

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
    (JobNotFound, 404),
    (RowNotFound, 404),
    (SnapshotNotFound, 404),
    (IndexNotReady, 503),
    (RowLockHeld, 503),
    (RowLockLost, 503),
    (PageExpired, 410),
    (CommitIdReused, 409),
    (RowConflict, 409),
    (EditConflict, 409),
    (SnapshotExists, 409),
    (TableAlreadyExists, 409),
    (RowError, 400),
    (JobForbidden, 403),
    (JobError, 409),
    (JobFailed, 409),
    (CutExpired, 410),
    (PayloadNotFound, 404),
    (PayloadExpired, 410),
    (PayloadUnavailable, 503),
    (QueryTooLarge, 413),
    (InstanceError, 503),
    (ConnectionsExhausted, 503),
    (TooManyRetries, 503),
    (CommitOutcomeUnknown, 503),
    (ObjectDamaged, 500),  # not 503: the damage is permanent, so a retry gets the same answer
    (ObjectStoreError, 503),
)


REFUSALS = {
    "answer-too-large": (413, "The answer has more rows or bytes than are allowed."),
    "body-broken-off": (400, "The body of the request ended too early."),
    "body-too-large": (413, "The body of the request is larger than is allowed."),
    "body-too-slow": (408, "The body of the request did not come in time."),
    "cross-site-request": (403, "The request comes from a page of another site."),
    "misdirected-request": (421, "The request is for another host."),
    "not-acceptable": (406, "The answer is not available in any of the accepted media types."),
    "query-time-over": (504, "The query took too long."),
    "range-not-satisfiable": (416, "The answer does not have the requested range of bytes."),
    "service-ends": (503, "The service is stopping."),
    "too-many-queries": (429, "Too many queries run at once."),
    "unauthorized": (401, "The request has no valid token."),
    "unsupported-media-type": (415, "The body of the request does not have the required media type."),
}


class Refused(DormouseError):
    """A request that the service itself refuses. `kind` is a key of `REFUSALS`."""

    def __init__(self, kind: str, detail: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.kind = kind
        self.headers = headers
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class ProblemDetails:
    """A problem document. Its `kind` is the name of the error's class in kebab case."""

    status: int
    kind: str
    title: str
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def document(self) -> dict[str, Any]:
        standard = {"title": self.title, "status": self.status, "detail": self.detail}
        return {**self.data, "type": f"urn:dormouse:{self.kind}", **standard}

    @property
    def text(self) -> str:
        # ASCII, because the detail may quote lone surrogates, which UTF-8 cannot encode
        return json.dumps(self.document)

    def response(self) -> Response:
        return Response(self.text, self.status, headers=dict(self.headers), media_type=MEDIA_TYPE)


def problem_of(error: BaseException, hide: Callable[[str], str] = lambda text: text) -> ProblemDetails:
    """Returns the problem document that reports an error to a client.

    The document of an unexpected error has no details; only the service's log has them. `hide` removes
    from the detail any text that the client must not read, such as local paths.
    """
    headers: Mapping[str, str] = {}
    match error:
        case HTTPException():
            return http_problem(error.status_code, headers=error.headers)
        case RequestValidationError():
            return problem_of(InvalidInput(_unfit(error.errors())))
        case Refused():
            kind, (status, title), headers = error.kind, REFUSALS[error.kind], error.headers
        case DormouseError():
            kind = _CAPITAL.sub("-", type(error).__name__).lower()
            status = next((status for known, status in _STATUSES if isinstance(error, known)), 500)
            title = (type(error).__doc__ or "").splitlines()[0]
        case _:
            return ProblemDetails(500, "internal-error", "The service failed.", "the service's log says why")
    headers = {**_headers(status), **headers}
    data = without_paths(error.data, lambda text: shortened(hide(text)))
    return ProblemDetails(status, kind, title, shortened(hide(str(error))), headers, data)


def http_problem(
    status: int, detail: str | None = None, headers: Mapping[str, str] | None = None
) -> ProblemDetails:
    """Returns the problem document of a status that HTTP itself requires, such as 404 for an unknown path."""
    phrase = HTTPStatus(status).phrase
    kind = phrase.lower().replace(" ", "-")
    return ProblemDetails(status, kind, f"{phrase}.", shortened(detail or phrase), headers or {})


def _unfit(errors: Sequence[Any]) -> str:
    """Describes the first five faults of a request that does not fit its schema, each with its place."""
    details = [f"{'.'.join(str(part)[:80] for part in error['loc'])}: {error['msg']}" for error in errors[:5]]
    return "; ".join(details + ([f"and {len(errors) - 5} more"] if len(errors) > 5 else []))


def shortened(text: str) -> str:
    line = _LONG_NAME.sub(_cut, " ".join(text.split()))
    return line if len(line) <= DETAIL_LENGTH_MAX else f"{line[:DETAIL_LENGTH_MAX]}…"


def _cut(name: re.Match[str]) -> str:
    quote = name[0][-1] if name[0][-1] in "'\"" else ""
    return f"{name[0][:NAME_LENGTH_MAX]}…{quote}"


def _headers(status: int) -> dict[str, str]:
    if status == 401:
        return {"WWW-Authenticate": 'Bearer realm="dormouse"'}
    return {"Retry-After": str(RETRY_AFTER_SECONDS)} if status in {429, 503} else {}


# The problem documents in the API's OpenAPI description.


class ProblemDocument(Document):
    """An error (RFC 9457)."""

    type: str = Field(examples=["urn:dormouse:invalid-query"])
    title: str = Field(examples=["The query does not fit the table's schema."])
    status: int = Field(examples=[400])
    detail: str = Field(examples=["unknown column 'carier'; did you mean 'carrier'?"])


_WHEN = dict(REFUSALS.values()) | {
    400: "The request is not valid; `detail` says what to change.",
    403: "The token's holder may not start this kind of job; or, without tokens, the request comes from a "
    "page of another site.",
    404: "The table or job does not exist.",
    409: "The job has no result: it runs, has failed or was cancelled; or its id is that of another job "
    "or request. Or other commits changed the rows of a statement each time before it could commit.",
    410: "The job's result, the page of a query, or the requested moment is past its retention.",
    413: "The body or the answer is larger than allowed.",
    429: "Too many queries run at once; try again later.",
    503: "The database or the object store cannot be reached, or a file was deleted meanwhile; try again.",
    504: "The query reached its time limit before its first row.",
}
_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}}},
    429: {"Retry-After": {"schema": {"type": "integer"}, "description": "in seconds"}},
    503: {"Retry-After": {"schema": {"type": "integer"}, "description": "in seconds"}},
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the OpenAPI responses of these statuses, and of 403 and 421, which every path can answer."""
    return {status: _problem(status) for status in (*statuses, 403, 421)}


def _problem(status: int) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{ProblemDocument.__name__}"}
    found: dict[str, Any] = {"description": _WHEN[status], "content": {MEDIA_TYPE: {"schema": schema}}}
    return {**found, "headers": _HEADERS[status]} if status in _HEADERS else found

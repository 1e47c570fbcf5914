"""The answers of each kind of path, for the API's description."""

from __future__ import annotations

from typing import Any

from dormouse.service.documents import ProblemDocument
from dormouse.service.formats import ARROW, CSV, JSON_LINES
from dormouse.service.problems import MEDIA_TYPE

_WHEN = {
    400: "The request is not valid; `detail` says what to change.",
    401: "The request has no valid token.",
    404: "There is no such table.",
    406: "There is no answer in a format that is accepted.",
    408: "The body did not come in time.",
    413: "The body, or the answer, is larger than is allowed.",
    415: "The body is not JSON.",
    421: "The request is for another host.",
    429: "Too many queries run at once; try again later.",
    503: "The database or the object store cannot be reached, or a file was collected meanwhile; try again.",
    504: "The query took longer than is allowed, before its first row.",
}
_EXAMPLES = {
    JSON_LINES: '{"carrier":"AA","flight":7,"delay":null}\n{"carrier":"AA","flight":8,"delay":2.5}\n',
    CSV: '"carrier","flight","delay"\n"AA",7,\n"AA",8,2.5\n',
}
_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}}},
    429: {"Retry-After": {"schema": {"type": "integer"}, "description": "in seconds"}},
    503: {"Retry-After": {"schema": {"type": "integer"}, "description": "in seconds"}},
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Problem documents of these statuses."""
    return {status: _problem(status) for status in (*statuses, 421)}


def _problem(status: int) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{ProblemDocument.__name__}"}
    found: dict[str, Any] = {"description": _WHEN[status], "content": {MEDIA_TYPE: {"schema": schema}}}
    return {**found, "headers": _HEADERS[status]} if status in _HEADERS else found


READS = problems(401, 503)
ANSWERS = problems(400, 401, 404, 503)
PLANS = problems(400, 401, 404, 408, 413, 415, 429, 503, 504)
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The rows.",
        "content": {
            JSON_LINES: {"schema": {"type": "string"}, "example": _EXAMPLES[JSON_LINES]},
            ARROW: {"schema": {"type": "string", "format": "binary"}},
            CSV: {"schema": {"type": "string"}, "example": _EXAMPLES[CSV]},
        },
    },
    **problems(400, 401, 404, 406, 408, 413, 415, 429, 503, 504),
}

"""The formats of answers (JSON lines, Arrow IPC stream, CSV, JSON), chosen by `Accept` and `Range`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import pyarrow as pa

from dormouse.model.text import narrow_id
from dormouse.service.problems import Refused
from dormouse.sources.export import ArrowStream, Csv, JsonArray, JsonLines, Writer, WriterOfArrow

# A request can ask for a whole object, for one range of its bytes, or only for an object that it has not yet.

_RANGE = re.compile(r"bytes=\s*(\d*)-(\d*)\s*", re.IGNORECASE)
_DIGITS_MAX = 19


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an object, from byte `start` to before byte `end`, with the answer's status and headers."""

    start: int
    end: int
    status: int
    headers: Mapping[str, str]


def entity_tag(name: str) -> str:
    """Returns the ETag of an object. The name alone determines it, because objects never change."""
    return f'"{narrow_id(name).hex}"'


def wanted_part(request_headers: Mapping[str, str], tag: str, size: int) -> Part:
    """Returns the part of an object that a request's headers ask for, or the whole for several ranges.

    Raises `Refused` for a range that begins after the object's last byte.
    """
    headers = {"etag": tag, "accept-ranges": "bytes"}
    known = [
        tag_text.strip().removeprefix("W/")
        for tag_text in request_headers.get("if-none-match", "").split(",")
    ]
    if tag in known or known == ["*"]:
        return Part(0, 0, 304, headers)
    match = _RANGE.fullmatch(request_headers.get("range", ""))
    if match is None or not any(match.groups()) or request_headers.get("if-range", tag) != tag:
        return Part(0, size, 200, headers | {"content-length": str(size)})
    first, last = (int(digits[:_DIGITS_MAX]) if digits else None for digits in match.groups())
    if first is not None and last is not None and last < first:
        return Part(0, size, 200, headers | {"content-length": str(size)})
    start = max(0, size - (last or 0)) if first is None else first
    end = size if first is None or last is None else min(size, last + 1)
    if start >= size:
        raise Refused(
            "range-not-satisfiable", f"the answer has {size:,} bytes", {"content-range": f"bytes */{size}"}
        )
    range_headers = {"content-length": str(end - start), "content-range": f"bytes {start}-{end - 1}/{size}"}
    return Part(start, end, 206, headers | range_headers)


JSON = "application/json"
JSON_LINES = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"
CSV = "text/csv"

PROBLEM_KEY = b"dormouse.problem"
"""The metadata key of a problem document in an Arrow stream.

If an error ends an answer early, the last batch of the stream is empty and contains the document.
"""

PIECE_BYTES_MAX = 1024 * 1024


class Format(Writer, Protocol):
    """A writer of one answer."""

    content_type: str

    def broken_off(self, problem: str) -> bytes:
        """Returns the bytes to send instead of the missing rows."""
        ...


def pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yields slices of a batch of about PIECE_BYTES_MAX each, so that a slow client holds little memory."""
    rows = max(batch.num_rows * PIECE_BYTES_MAX // max(batch.nbytes, 1), 1)
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


class _JsonLines(JsonLines):
    content_type = JSON_LINES

    def broken_off(self, problem: str) -> bytes:
        return b""


class CsvAnswer(Csv):
    content_type = f"{CSV}; charset=utf-8; header=present"

    def broken_off(self, problem: str) -> bytes:
        return b""


class _Arrow(ArrowStream):
    content_type = ARROW

    def broken_off(self, problem: str) -> bytes:
        # uses a second writer, since the first may be in use in its thread; the first batch that the second
        # writes comes with the schema, which the client has already, so only the second batch is returned
        nothing = pa.RecordBatch.from_pylist([], schema=self._schema)
        ending = WriterOfArrow(lambda file: pa.ipc.new_stream(file, self._schema))
        ending.write_batch(nothing)
        return ending.write_batch(nothing, custom_metadata={PROBLEM_KEY: problem.encode()})


class _Json(JsonArray):
    content_type = JSON

    def broken_off(self, problem: str) -> bytes:
        return b""  # an array without its end is invalid JSON, so the client notices


# the first is the default
_FORMATS: dict[str, Callable[[], Format]] = {
    JSON_LINES: _JsonLines,
    ARROW: _Arrow,
    CSV: CsvAnswer,
    JSON: _Json,
}


def preferred_format(accept: str) -> Format:
    """Returns a writer of the media type that has the most weight in the header `Accept`.

    If several have the same weight, it is the first that the service knows. Raises `Refused` if the client
    accepts none. See RFC 9110, section 12.5.1.
    """
    best = _preferred(accept)
    if best is None:
        offered = ", ".join(_FORMATS)
        raise Refused("not-acceptable", f"available are {offered}; {accept[:200]!r} accepts none of them")
    return _FORMATS[best]()


@lru_cache(maxsize=64)
def _preferred(accept: str) -> str | None:
    ranges = [_parsed(item) for item in accept.split(",") if item.strip()] or [("*/*", 1.0)]
    best = max(_FORMATS, key=lambda media_type: _weight(media_type, ranges))
    return best if _weight(best, ranges) else None


def _parsed(item: str) -> tuple[str, float]:
    media_range, *parameters = (part.strip().lower() for part in item.split(";"))
    weight = 1.0
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            weight = _number(value.strip())
    return media_range, weight


def _number(text: str) -> float:
    """Parses the weight of a media type, from 0 to 1. Returns 0 for invalid text."""
    try:
        return min(max(float(text), 0.0), 1.0) if text not in {"nan", "inf"} else 0.0
    except ValueError:
        return 0.0


def _weight(media_type: str, ranges: Sequence[tuple[str, float]]) -> float:
    """Returns the weight of the most specific media range that contains the media type, or 0."""
    group = media_type.partition("/")[0]
    for pattern in (media_type, f"{group}/*", "*/*"):
        weights = [weight for media_range, weight in ranges if media_range == pattern]
        if weights:
            return max(weights)
    return 0.0

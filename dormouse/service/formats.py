"""Answers as they are sent: Arrow IPC stream, JSON lines, CSV; and which of them a client likes best."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from dormouse.model.text import narrow_id
from dormouse.service.problems import Refused
from dormouse.sources.export import ArrowStream, Csv, JsonArray, JsonLines, Writer, WriterOfArrow

# Which part of an object a request wants: all of it, one range of its bytes, or nothing that it has already.

_RANGE = re.compile(r"bytes=\s*(\d*)-(\d*)\s*", re.IGNORECASE)
_DIGITS_MAX = 19


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes from `start` to before `end`, and how the answer begins."""

    start: int
    end: int
    status: int
    headers: Mapping[str, str]


def entity_tag(name: str) -> str:
    """Returns the ETag of an object, which is never overwritten."""
    return f'"{narrow_id(name).hex}"'


def wanted_part(asked: Mapping[str, str], tag: str, size: int) -> Part:
    """Returns what the headers of a request ask of an object; several ranges are answered with all of it.

    Raises `Refused` for a range that begins behind its end.
    """
    headers = {"etag": tag, "accept-ranges": "bytes"}
    known = [one.strip().removeprefix("W/") for one in asked.get("if-none-match", "").split(",")]
    if tag in known or known == ["*"]:
        return Part(0, 0, 304, headers)
    found = _RANGE.fullmatch(asked.get("range", ""))
    if found is None or not any(found.groups()) or asked.get("if-range", tag) != tag:
        return Part(0, size, 200, headers | {"content-length": str(size)})
    first, last = (int(digits[:_DIGITS_MAX]) if digits else None for digits in found.groups())
    if first is not None and last is not None and last < first:
        return Part(0, size, 200, headers | {"content-length": str(size)})
    start = max(0, size - (last or 0)) if first is None else first
    end = size if first is None or last is None else min(size, last + 1)
    if start >= size:
        raise Refused(
            "range-not-satisfiable", f"the answer has {size:,} bytes", {"content-range": f"bytes */{size}"}
        )
    told = {"content-length": str(end - start), "content-range": f"bytes {start}-{end - 1}/{size}"}
    return Part(start, end, 206, headers | told)


JSON = "application/json"
JSON_LINES = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"
CSV = "text/csv"

PROBLEM_KEY = b"dormouse.problem"
"""Under it, an Arrow stream that breaks off has the problem, as metadata of its last, empty batch."""

PIECE_BYTES_MAX = 1024 * 1024


class Format(Writer, Protocol):
    """Writes one answer."""

    content_type: str

    def broken_off(self, problem: str) -> bytes:
        """What comes in place of the rows that are missing."""
        ...


def pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in slices of about a megabyte, so that little has to be held while a client is slow."""
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
        # by a writer of its own, since the other may be in use; it begins with the schema, which is there
        nothing = pa.RecordBatch.from_pylist([], schema=self._schema)
        ending = WriterOfArrow(lambda file: pa.ipc.new_stream(file, self._schema))
        ending.write_batch(nothing)
        return ending.write_batch(nothing, custom_metadata={PROBLEM_KEY: problem.encode()})


class _Json(JsonArray):
    content_type = JSON

    def broken_off(self, problem: str) -> bytes:
        return b""  # an array without its end is no JSON


# the first is the default
_FORMATS: dict[str, Callable[[], Format]] = {
    JSON_LINES: _JsonLines,
    ARROW: _Arrow,
    CSV: CsvAnswer,
    JSON: _Json,
}


def preferred_format(accept: str) -> Format:
    """Writes the media type that `Accept` gives the most weight, the first of equals; `Refused`.

    RFC 9110, section 12.5.1.
    """
    ranges = [_parsed(item) for item in accept.split(",") if item.strip()] or [("*/*", 1.0)]
    best = max(_FORMATS, key=lambda media_type: _weight(media_type, ranges))
    if not _weight(best, ranges):
        offered = ", ".join(_FORMATS)
        raise Refused("not-acceptable", f"there is {offered}; none of them is accepted by {accept[:200]!r}")
    return _FORMATS[best]()


def _parsed(item: str) -> tuple[str, float]:
    media_range, *parameters = (part.strip().lower() for part in item.split(";"))
    weight = 1.0
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            weight = _number(value.strip())
    return media_range, weight


def _number(text: str) -> float:
    """A weight that is none counts as none."""
    try:
        return min(max(float(text), 0.0), 1.0) if text not in {"nan", "inf"} else 0.0
    except ValueError:
        return 0.0


def _weight(media_type: str, ranges: Sequence[tuple[str, float]]) -> float:
    """That of the most specific range which has it."""
    group = media_type.partition("/")[0]
    for pattern in (media_type, f"{group}/*", "*/*"):
        found = [weight for media_range, weight in ranges if media_range == pattern]
        if found:
            return max(found)
    return 0.0

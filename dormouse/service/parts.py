"""Which part of an object a request wants: all of it, one range of its bytes, or nothing that it has already.

RFC 9110, sections 8.8.3, 13.1 and 14.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dormouse.model.text import narrow_id
from dormouse.service.problems import Refused

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

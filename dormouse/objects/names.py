"""What an object may be called: relative, plain, and the same in a folder, in S3 and in a URL."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from dormouse.errors import InvalidName

STAGING = ".staging"
SKETCHES_SUFFIX = ".sketches"
"""Of the object beside a file that has its sketches."""

PARQUET_SUFFIX = ".v2.parquet"
"""Of files whose DOUBLE columns have no minimum and maximum, as those of before have: NaN is in neither."""

ROW_FILES = "row_files"
"""Where the files are that cells of row tables refer to, each table's by its UUID."""

ANSWERS = "answers"
"""Where the objects of jobs are, each job's by its key."""

INCOMING = "incoming"
"""Where others put objects that are to be ingested."""
_VERSIONED = re.compile(r"\.s(\d+)" + re.escape(PARQUET_SUFFIX) + "$")

RECORDS = frozenset(
    {
        STAGING,
        "instance.json",
        "owner",
        "commits",
        "payloads",
        ANSWERS,
        INCOMING,
        ROW_FILES,
        "backups",
        "runs",
        "work",
        "activity",
    }
)
"""What is beside them, and no table's, by the first segment."""

NAME_BYTES_MAX = 900
SEGMENT_BYTES_MAX = 255
_TABLES_OWN = re.compile(r"data/(t\d+|[0-9a-f]{32})(/|$)")  # `TableRecord.object_prefixes`
_LEAVING = frozenset({"", ".", ".."})
_SEGMENT = re.compile(r"[A-Za-z0-9._=-]+")


def parquet_suffix(schema_version: int) -> str:
    """What the names of files end with whose columns are those of a version of their table's schema."""
    return PARQUET_SUFFIX if schema_version == 1 else f".s{schema_version}{PARQUET_SUFFIX}"


def schema_version_of(filename: str) -> int:
    """The version of its table's schema that a file was written with, by its name; 1 where it says none."""
    found = _VERSIONED.search(filename)
    return 1 if found is None else int(found[1])


def check_name(name: str) -> str:
    """Return `name` when it can be an object's name, else raise `InvalidName`.

    Segments are letters, digits and `. _ = -` (nothing that a URL, a shell or S3 encodes), joined by `/`.
    """
    reason = _fault(name)
    if reason:
        raise InvalidName(f"Object name {name!r} {reason}")
    return name


def check_file_name(name: str, own_prefixes: tuple[str, ...]) -> str:
    """Return `name` when a table can have a file of it, else raise `InvalidName`.

    Refused is what would leave the store, another table's object, and the instance's own records: a file is
    deleted when nothing refers to it any more. `own_prefixes` are what the table's own objects begin with.
    """
    segments = name.split("/")
    first = segments[0]
    if not _LEAVING.isdisjoint(segments):
        raise InvalidName(f"File name {name!r} would leave the object store: give it relative to the store")
    if first in RECORDS:
        raise InvalidName(f"File name {name!r} is of the instance's own records, and no table's")
    if _TABLES_OWN.match(name) and not name.startswith(own_prefixes):
        raise InvalidName(f"File name {name!r} is not in {own_prefixes[0]!r}: it would be another table's")
    return name


def pinned_name(number: int, name: str) -> str:
    """Returns what the file of an object is called while it is pinned: the suffixes say how it is read."""
    return f"{number}{''.join(PurePosixPath(name).suffixes[-2:])}"


def check_prefix(prefix: str) -> str:
    """Return a folder-like prefix without its last slash; empty means everything."""
    stripped = prefix.removesuffix("/")
    return check_name(stripped) if prefix else ""


def _fault(name: str) -> str | None:
    if not isinstance(name, str) or not name:
        return "is empty: give a relative name, like 'data/t1/0-root.parquet'"
    if name.startswith("/"):
        return "is absolute: give it relative to the store"
    if len(name) > NAME_BYTES_MAX:
        return f"is longer than {NAME_BYTES_MAX} bytes"
    segments = name.split("/")
    if segments[0] == STAGING:
        return f"is in {STAGING}/, which the store keeps for itself"
    return next((fault for fault in map(_segment_fault, segments) if fault), None)


def _segment_fault(segment: str) -> str | None:
    if not segment:
        return "has an empty segment"
    if segment in {".", ".."}:
        return f"has the segment {segment!r}, which would leave its folder"
    if len(segment) > SEGMENT_BYTES_MAX:
        return f"has a segment longer than {SEGMENT_BYTES_MAX} bytes"
    if not _SEGMENT.fullmatch(segment):
        return "has characters other than letters, digits and . _ = -"
    return None

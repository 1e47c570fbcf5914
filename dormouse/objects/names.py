"""Names of objects, which are valid in a folder, in S3 and in a URL; and errors that name an object."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from dormouse.errors import InvalidName, ObjectAlreadyExists, ObjectNotFound, ObjectStoreError

# Texts without paths of this machine, for readers that only know the names of objects.

STORE = "the object store"
_REST = r"""(?:/[^\s'"]*)?"""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
"""Arrow's names of compressions, by the suffix of a file's name."""

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@lru_cache(maxsize=16)
def hiding(url: str) -> Callable[[str], str]:
    """Returns a function that removes the paths of this machine from a text.

    `url` is that of the object store. If the store is a folder, a path in it is replaced by the object's
    name.
    """
    folders: list[tuple[re.Pattern[str], str]] = []
    if url.startswith("file:"):
        root = Path(unquote(urlsplit(url).path))
        for text in dict.fromkeys((root.as_uri(), str(root), str(root.resolve()))):
            folders.append((re.compile(re.escape(text) + r"/(?=[\w.])"), ""))
            folders.append((re.compile(re.escape(text) + r"(?![\w.-])/?"), STORE))
        if len(root.parts) > 2:  # the database of a local instance is beside its objects
            folders.append((re.compile(re.escape(str(root.parent)) + _REST), "a folder of the service"))
    for folder in dict.fromkeys((tempfile.gettempdir(), str(Path(tempfile.gettempdir()).resolve()))):
        folders.append((re.compile(r"(?<![\w/])" + re.escape(folder) + _REST), "a temporary file"))

    for folder in _code_folders():
        folders.append((re.compile(r"(?<![\w/])" + re.escape(folder) + "/"), ""))

    def hide(text: str) -> str:
        for pattern, instead in folders:
            text = pattern.sub(instead, text)
        return text

    return hide


def _code_folders() -> list[str]:
    """Returns the folders in which tracebacks find code, inner folders first."""
    package = Path(__file__).parents[2]
    found = {str(package), sys.prefix, sys.base_prefix, *filter(os.path.isabs, sys.path)}
    return sorted((one.rstrip("/") for one in found if len(Path(one).parts) > 2), key=len, reverse=True)


def without_paths(value: Any, hide: Callable[[str], str]) -> Any:
    """Returns a JSON value in which `hide` has removed the paths of this machine from all texts."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {name: without_paths(item, hide) for name, item in value.items()}
    return [without_paths(item, hide) for item in value] if isinstance(value, list | tuple) else value


STAGING = ".staging"
SKETCHES_SUFFIX = ".sketches"
"""The suffix of the object beside a file that holds its sketches."""

PARQUET_SUFFIX = ".v2.parquet"
"""The suffix of files that have no minimum and maximum for DOUBLE columns. Older files have them, without
NaN.
"""

ROW_FILES = "row_files"
"""The folder of the files that cells of row tables refer to, by the table's UUID."""

PAYLOADS = "payloads"
"""The folder of the objects of payloads, by day."""

ANSWERS = "answers"
"""The folder of the objects of jobs, by the job's key."""

INCOMING = "incoming"
"""The folder into which other programs put objects to be ingested."""
_VERSIONED = re.compile(r"\.s(\d+)" + re.escape(PARQUET_SUFFIX) + "$")

RECORDS = frozenset(
    {
        STAGING,
        "instance.json",
        "owner",
        "commits",
        PAYLOADS,
        ANSWERS,
        INCOMING,
        ROW_FILES,
        "backups",
        "runs",
        "work",
        "activity",
    }
)
"""The first segments of names that belong to no table."""

NAME_BYTES_MAX = 900
SEGMENT_BYTES_MAX = 255
_TABLES_OWN = re.compile(r"data/(t\d+|[0-9a-f]{32})(/|$)")  # `TableRecord.object_prefixes`
_LEAVING = frozenset({"", ".", ".."})
_SEGMENT = re.compile(r"[A-Za-z0-9._=-]+")


def parquet_suffix(schema_version: int) -> str:
    """Returns the suffix of files that are written with a version of their table's schema."""
    return PARQUET_SUFFIX if schema_version == 1 else f".s{schema_version}{PARQUET_SUFFIX}"


def schema_version_of(filename: str) -> int:
    """Returns the schema version in a file's name; 1 if it has none."""
    found = _VERSIONED.search(filename)
    return 1 if found is None else int(found[1])


def check_name(name: str) -> str:
    """Returns the name if it can be an object's name. Raises `InvalidName`.

    Segments are letters, digits and `. _ = -` (no character that a URL, a shell or S3 encodes), joined by
    `/`.
    """
    is_short = isinstance(name, str) and len(name) <= NAME_BYTES_MAX
    reason = _known_fault(name) if is_short else _fault(name)
    if reason:
        raise InvalidName(f"Object name {name!r} {reason}")
    return name


def check_file_name(name: str, own_prefixes: tuple[str, ...]) -> str:
    """Returns the name if a table can have a file of that name. Raises `InvalidName`.

    The names refused are those that leave the store, those of another table's objects, and those of the
    instance's own records. A file is deleted once nothing refers to it, so such a name would be dangerous.
    `own_prefixes` are the prefixes of the table's own objects.
    """
    segments = name.split("/")
    first = segments[0]
    if not _LEAVING.isdisjoint(segments):
        raise InvalidName(f"File name {name!r} would leave the object store: give it relative to the store")
    if first in RECORDS:
        raise InvalidName(f"File name {name!r} is one of the instance's own records, not a table's file")
    if _TABLES_OWN.match(name) and not name.startswith(own_prefixes):
        raise InvalidName(f"File name {name!r} is not in {own_prefixes[0]!r}: it is another table's")
    return name


def pinned_name(number: int, name: str) -> str:
    """Returns the local name for a pinned object's file. Its suffixes are kept, because they determine how it
    is read.
    """
    return f"{number}{''.join(PurePosixPath(name).suffixes[-2:])}"


def check_prefix(prefix: str) -> str:
    """Returns a folder-like prefix without its last slash; an empty prefix stands for the whole store."""
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


_known_fault = lru_cache(maxsize=10_000)(_fault)


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


def taken(name: str, store: str) -> ObjectAlreadyExists:
    return ObjectAlreadyExists(f"Object {name!r} exists already in {store}")


def missing(name: str, store: str) -> ObjectNotFound:
    return ObjectNotFound(f"Object {name!r} does not exist in {store}", filename=name)


def failed(verb: str, name: str, store: str, cause: str) -> ObjectStoreError:
    what = f"objects below {name!r}" if verb == "list" else f"object {name!r}"
    return ObjectStoreError(f"Cannot {verb} {what} in {store}: {cause}")


def whole_range(data: bytes, length: int, name: str, store: str) -> bytes:
    """Returns the bytes of a range. Raises `ObjectStoreError` if there are fewer than `length`."""
    if len(data) < length:
        raise failed("read", name, store, "it ends before the requested bytes")
    return data


@contextmanager
def reporting_full_disk(name: str, store: str) -> Iterator[None]:
    """Reports a full disk as an error of the store. Other errors of the block propagate unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise failed("write", name, store, os.strerror(error.errno)) from error

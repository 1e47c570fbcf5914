"""Names of objects: relative, plain, the same in a folder, in S3 and in a URL; errors that name an object."""

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

# Texts without the paths of this machine, for readers who only know the names of objects.

STORE = "the object store"
_REST = r"""(?:/[^\s'"]*)?"""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
"""Arrow's names of compressions, by the end of a file's name."""

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@lru_cache(maxsize=16)
def hiding(url: str) -> Callable[[str], str]:
    """Returns a function that takes the paths of this machine out of a text.

    `url` is that of the object store. Of a path in a store that is a folder, the object's name is left.
    """
    folders: list[tuple[re.Pattern[str], str]] = []
    if url.startswith("file:"):
        root = Path(unquote(urlsplit(url).path))
        for text in dict.fromkeys((root.as_uri(), str(root), str(root.resolve()))):
            folders.append((re.compile(re.escape(text) + r"/(?=[\w.])"), ""))
            folders.append((re.compile(re.escape(text) + r"(?![\w.-])/?"), STORE))
        if len(root.parts) > 2:  # beside the objects of a local instance is its database
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
    """Returns the folders in which tracebacks find code, those within others first."""
    package = Path(__file__).parents[2]
    found = {str(package), sys.prefix, sys.base_prefix, *filter(os.path.isabs, sys.path)}
    return sorted((one.rstrip("/") for one in found if len(Path(one).parts) > 2), key=len, reverse=True)


def without_paths(found: Any, hide: Callable[[str], str]) -> Any:
    """Returns a JSON value whose texts name no path of this machine."""
    if isinstance(found, str):
        return hide(found)
    if isinstance(found, Mapping):
        return {name: without_paths(value, hide) for name, value in found.items()}
    return [without_paths(one, hide) for one in found] if isinstance(found, list | tuple) else found


STAGING = ".staging"
SKETCHES_SUFFIX = ".sketches"
"""Of the object beside a file that has its sketches."""

PARQUET_SUFFIX = ".v2.parquet"
"""Of files whose DOUBLE columns have no minimum and maximum, as those of before have: NaN is in neither."""

ROW_FILES = "row_files"
"""Where the files are that cells of row tables refer to, each table's by its UUID."""

PAYLOADS = "payloads"
"""Where the objects of payloads are, each day's by its date."""

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


def taken(name: str, store: str) -> ObjectAlreadyExists:
    return ObjectAlreadyExists(f"Object {name!r} exists already in {store}")


def missing(name: str, store: str) -> ObjectNotFound:
    return ObjectNotFound(f"Object {name!r} does not exist in {store}", filename=name)


def failed(verb: str, name: str, store: str, cause: str) -> ObjectStoreError:
    what = f"objects below {name!r}" if verb == "list" else f"object {name!r}"
    return ObjectStoreError(f"Cannot {verb} {what} in {store}: {cause}")


def whole_range(found: bytes, length: int, name: str, store: str) -> bytes:
    """The bytes of a range, if it is whole."""
    if len(found) < length:
        raise failed("read", name, store, "it ends before the bytes that were asked for")
    return found


@contextmanager
def reporting_full_disk(name: str, store: str) -> Iterator[None]:
    """Report a full disk as the store's failure; what else goes wrong while writing is the writer's own."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise failed("write", name, store, os.strerror(error.errno)) from error

"""The interface of object stores: whole objects under relative names, which are never overwritten.

Activity: a process notes changes in the store, so that schedules need not wake the database to look for
changes. A note is an empty object whose name is its minute: `activity/20261121/1542`. A process writes a note
after its first change is visible, and none for the next minute. So a note stands for all changes of its
process up to two minutes after the beginning of the minute in its name.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

from dormouse.errors import DormouseError, InvalidInput, ObjectAlreadyExists
from dormouse.objects.staging import StagingArea

ASKED_EVERY = 1_000
"""The number of objects deleted between two checks that the process may still delete."""

Deleting = Callable[[], AbstractContextManager[object]]
"""A context that is entered for each deletion of at most `ASKED_EVERY` objects.

It raises an error if nothing may be deleted.
"""

NOTE_SECONDS = 60.0
NOTE_COVERS_SECONDS = 2 * NOTE_SECONDS
"""The time, from the beginning of the minute in its name, in which a note of activity stands for changes."""

_ACTIVITY = "activity"
_DAY, _MINUTE = "%Y%m%d", "%H%M"

logger = logging.getLogger(__name__)
_noted: dict[str, float] = {}  # a race of threads here only costs a second note


class ObjectStore(Protocol):
    """Whole objects under relative names, like "data/t1/ab12/0-root.parquet".

    An object becomes visible when it is complete, and its name is never used again. Stores can be pickled,
    and `open_store(store.url, **store.options)` opens the same store in another process. Every failure is an
    `ObjectStoreError` that names the object and the cause. A bad name raises `InvalidName`.
    """

    @property
    def url(self) -> str:
        """The root: "file:///path" or "s3://bucket/prefix"."""

    @property
    def options(self) -> dict[str, str]:
        """The keyword options with which `open_store` opens this store again; they may hold credentials."""

    def put(self, name: str, data: bytes) -> None:
        """Writes an object, whole or not at all. Raises `ObjectAlreadyExists` if the name is taken."""

    def staged(self, name: str) -> AbstractContextManager[Path]:
        """Yields a local path to write to, which is published under `name` on a clean exit.

        On an exception, the file is deleted. The path does not exist yet. The writer may replace it by a
        rename within its folder.
        """

    def copy(self, source: str, name: str) -> None:
        """Copies an object to another name. Raises `ObjectNotFound` or `ObjectAlreadyExists`."""

    def get(self, name: str) -> bytes:
        """Returns the object's bytes. Raises `ObjectNotFound`."""

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Returns `length` bytes, beginning at byte `start`.

        Raises `ObjectNotFound`, or another error if the object is too short.
        """

    def size(self, name: str) -> int:
        """Returns the object's size in bytes. Raises `ObjectNotFound`."""

    def reader(self, name: str) -> BinaryIO:
        """Returns a seekable file that fetches only the bytes that are read. Raises `ObjectNotFound`."""

    def delete(self, names: Iterable[str]) -> list[tuple[str, Exception]]:
        """Deletes objects; missing ones are no error. Returns the names that failed, each with its error."""

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yields (name, bytes) of the objects below a folder-like prefix, in no order.

        "data/t1" lists "data/t1/a" and not "data/t10/a"; "" lists everything.
        """

    def list_dated(self, prefix: str = "") -> Iterator[tuple[str, int, datetime]]:
        """Yields the objects as `list` does, with the time at which each was written, in UTC."""

    def local_path(self, name: str) -> Path | None:
        """Returns the path of the object's file, for readers that map it into memory; None if the store is no
        folder.
        """

    def pinned(self, names: Iterable[str]) -> AbstractContextManager[dict[str, Path]]:
        """Yields local files of objects, by name. The files stay the same while the context lasts.

        It is for objects that other programs write and may replace. A file keeps the suffixes of its object's
        name. No link is followed below the first folder of a name: a link raises `ObjectStoreError`. A
        missing object raises `ObjectNotFound`.
        """

    def uri(self, name: str) -> str:
        """Returns the address of the object for DataFusion and Spark: "/abs/path" or
        "s3://bucket/prefix/name".
        """

    def staging_area(self) -> StagingArea:
        """Returns the area for local files of this process. A sweep deletes those of dead processes."""

    def sweep_staging(self) -> int:
        """Deletes the unfinished files of dead processes and returns their number."""


def open_store(
    url: str | os.PathLike[str],
    *,
    staging_dir: str | os.PathLike[str] | None = None,
    endpoint: str | None = None,
    region: str | None = None,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    session_token: str | None = None,
) -> ObjectStore:
    """Returns the store at a folder's path, "file:///path" or "s3://bucket/prefix", without accessing it yet.

    Missing options for S3 come from the usual AWS variables (AWS_REGION, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID,
    …), or from the machine's role. `staging_dir` is the folder for S3 objects before their upload; a store in
    a folder ignores it. Raises `InvalidInput` for a URL of another kind.
    """
    text = os.fspath(url)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme in {"", "file"}:
        from dormouse.objects.folder import FolderStore

        return FolderStore(_folder(text))
    if scheme != "s3":
        raise InvalidInput(f"Object store {text!r}: use a folder's path, file:///path or s3://bucket/prefix")
    from dormouse.objects.s3 import S3Store

    given = {
        "staging_dir": os.fspath(staging_dir) if staging_dir else None,
        "endpoint": endpoint,
        "region": region,
        "access_key_id": access_key_id,
        "secret_access_key": secret_access_key,
        "session_token": session_token,
    }
    return S3Store.at(text, {key: value for key, value in given.items() if value is not None})


def _folder(text: str) -> Path:
    """Returns the absolute folder that a path or file URL names. Raises `InvalidInput`."""
    path = text
    if "://" in text:
        parts = urlsplit(text)
        if parts.netloc not in {"", "localhost"} or parts.query or parts.fragment or len(parts.path) < 2:
            raise InvalidInput(f"Object store {text!r}: a file URL has three slashes, like file:///path")
        path = unquote(parts.path)
    if not path.strip() or "\0" in path:
        raise InvalidInput(f"Object store {text!r}: give a folder's path, file:///path or s3://bucket/prefix")
    folder = Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100  # resolve() would follow links
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"Object store {text!r}: there is a file where the folder should be")
    return folder


@dataclass(frozen=True)
class WrappedStore:
    """An `ObjectStore` that passes each call to another one. Subclasses change some of the calls.

    Each method is delegated by name. So a method that stores get later is missing here until it is added, and
    cannot bypass a check. When pickled, it becomes the plain store, because other processes wrap it for
    themselves.
    """

    store: ObjectStore

    def __reduce__(self) -> Any:
        return _alone, (self.store,)

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def options(self) -> dict[str, str]:
        return self.store.options

    def put(self, name: str, data: bytes) -> None:
        self.store.put(name, data)

    def staged(self, name: str) -> AbstractContextManager[Path]:
        return self.store.staged(name)

    def copy(self, source: str, name: str) -> None:
        self.store.copy(source, name)

    def get(self, name: str) -> bytes:
        return self.store.get(name)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        return self.store.get_range(name, start, length)

    def size(self, name: str) -> int:
        return self.store.size(name)

    def reader(self, name: str) -> BinaryIO:
        return self.store.reader(name)

    def delete(self, names: Iterable[str]) -> list[tuple[str, Exception]]:
        return self.store.delete(names)

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        return self.store.list(prefix)

    def list_dated(self, prefix: str = "") -> Iterator[tuple[str, int, datetime]]:
        return self.store.list_dated(prefix)

    def local_path(self, name: str) -> Path | None:
        return self.store.local_path(name)

    def pinned(self, names: Iterable[str]) -> AbstractContextManager[dict[str, Path]]:
        return self.store.pinned(names)

    def uri(self, name: str) -> str:
        return self.store.uri(name)

    def staging_area(self) -> StagingArea:
        return self.store.staging_area()

    def sweep_staging(self) -> int:
        return self.store.sweep_staging()


@dataclass(frozen=True)
class GuardedStore(WrappedStore):
    """An `ObjectStore` that enters `deleting` for each deletion, and deletes nothing more once that raises.

    When pickled, it becomes the plain store, because other processes have their own checks.
    """

    deleting: Deleting = field(repr=False, compare=False)

    def delete(self, names: Iterable[str]) -> list[tuple[str, Exception]]:
        failed: list[tuple[str, Exception]] = []
        pending = iter(names)
        while batch := list(islice(pending, ASKED_EVERY)):
            with self.deleting():
                failed += self.store.delete(batch)
        return failed


def _alone(store: ObjectStore) -> ObjectStore:
    return store


def note_activity(objects: ObjectStore) -> None:
    """Writes a note of activity, at most once a minute. If that fails, the error is only logged."""
    now = time.monotonic()
    if now - _noted.get(objects.url, float("-inf")) < NOTE_SECONDS:
        return
    _noted[objects.url] = now
    try:
        objects.put(f"{_ACTIVITY}/{datetime.now(UTC):{_DAY}/{_MINUTE}}", b"")
    except ObjectAlreadyExists:
        return
    except DormouseError as error:
        _noted.pop(objects.url, None)
        logger.warning("the note of activity could not be written, so schedules may start late: %s", error)


def note_if_shared(objects: ObjectStore) -> None:
    """Writes a note of activity if the store is in S3, where the schedules of a deployed instance look."""
    if is_shared(objects):
        note_activity(objects)


def is_shared(objects: ObjectStore) -> bool:
    """Returns whether a store is in S3. Then other hosts may use it, and its database may pause."""
    return objects.url.startswith("s3://")


def is_noted_since(objects: ObjectStore, moment: datetime) -> bool:
    """Returns whether a note of activity shows that something may have changed since a moment."""
    earliest = moment.astimezone(UTC) - timedelta(seconds=NOTE_COVERS_SECONDS)
    days = (datetime.now(UTC).date() - earliest.date()).days
    # tomorrow too, because clocks differ
    dates = [earliest.date() + timedelta(days=day) for day in range(days + 2)]
    first = f"{_ACTIVITY}/{earliest:{_DAY}/{_MINUTE}}"
    return any(name >= first for day in dates for name, _ in objects.list(f"{_ACTIVITY}/{day:{_DAY}}"))


def forget_activity(objects: ObjectStore, moment: datetime) -> None:
    """Deletes the notes of activity of days before a moment."""
    first = f"{_ACTIVITY}/{moment.astimezone(UTC):{_DAY}}"
    objects.delete([name for name, _ in objects.list(_ACTIVITY) if name < first])

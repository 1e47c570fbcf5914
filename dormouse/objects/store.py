"""The object store seam: whole objects under relative names, never overwritten.

Activity: changes are noted beside the tables, so that schedules need not wake a database to ask. A note is an
empty object named after its minute: `activity/20261121/1542`. A process makes one a minute at most, after
what it did is visible; so one tells of all that its process did within two minutes from its name.
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
from typing import Any, BinaryIO, Protocol, cast
from urllib.parse import unquote, urlsplit

from dormouse.errors import DormouseError, InvalidInput, ObjectAlreadyExists

ASKED_EVERY = 1_000
"""Objects: a long deletion must not outlive the right to it."""

Deleting = Callable[[], AbstractContextManager[object]]
"""Entered for each deletion, of so many objects at most; raises when nothing may be deleted."""

NOTE_SECONDS = 60.0
TOLD_SECONDS = 2 * NOTE_SECONDS
"""What happened so long after the minute that a note is named after is told by that note."""

_ACTIVITY = "activity"
_DAY, _MINUTE = "%Y%m%d", "%H%M"

logger = logging.getLogger(__name__)
_noted: dict[str, float] = {}  # that threads meet in it costs a note more


class ObjectStore(Protocol):
    """Whole objects under relative names, like "data/t1/ab12/0-root.parquet".

    An object is visible when it is whole and not before, and its name is never given to another.
    Stores can be pickled, and `open_store(store.url, **store.options)` opens the same one in another process.
    Every failure is an `ObjectStoreError` that names the object and the cause; a bad name is `InvalidName`.
    """

    @property
    def url(self) -> str:
        """The root: "file:///path" or "s3://bucket/prefix"."""

    @property
    def options(self) -> dict[str, str]:
        """The keyword options with which `open_store` opens this store again (may hold credentials)."""

    def put(self, name: str, data: bytes) -> None:
        """Write an object, whole or not at all; `ObjectAlreadyExists` when the name is taken."""

    def staged(self, name: str) -> AbstractContextManager[Path]:
        """Give a local path to write to; published under `name` on a clean exit, gone on an exception.

        The path does not exist yet; the writer may replace it by renaming within its folder.
        """

    def copy(self, source: str, name: str) -> None:
        """Give an object's bytes another name, too; `ObjectNotFound`, or `ObjectAlreadyExists`."""

    def get(self, name: str) -> bytes:
        """The object's bytes; `ObjectNotFound`."""

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """So many bytes of the object, from `start` on; an error where it ends before, `ObjectNotFound`."""

    def size(self, name: str) -> int:
        """The object's size in bytes; `ObjectNotFound`."""

    def reader(self, name: str) -> BinaryIO:
        """A file to read and seek in, which fetches only what is read; `ObjectNotFound`."""

    def delete(self, names: Iterable[str]) -> list[tuple[str, Exception]]:
        """Delete every object that is there; return the names that failed, each with its error."""

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Stream (name, bytes) of the whole objects below a folder-like prefix, in no order.

        "data/t1" lists "data/t1/a" and not "data/t10/a"; "" lists everything.
        """

    def list_dated(self, prefix: str = "") -> Iterator[tuple[str, int, datetime]]:
        """As `list`, with the time at which each was written, in UTC."""

    def local_path(self, name: str) -> Path | None:
        """The object's file, for readers that map it; None when the store is not a folder."""

    def pinned(self, names: Iterable[str]) -> AbstractContextManager[dict[str, Path]]:
        """Gives objects as files of this machine that stay the same files while the context lasts.

        It is for objects that other programs put there. Of a name, the file keeps the suffixes. No link is
        followed below the first folder of a name: one is an `ObjectStoreError`. `ObjectNotFound`.
        """

    def uri(self, name: str) -> str:
        """What DataFusion and Spark call the object: "/abs/path" or "s3://bucket/prefix/name"."""

    def sweep_staging(self) -> int:
        """Remove what dead processes left half-written; return how many. Live ones are not touched."""


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
    """Open the store at a folder's path, "file:///path" or "s3://bucket/prefix"; nothing is touched yet.

    What is not given for S3 comes from the usual AWS variables (AWS_REGION, AWS_ENDPOINT_URL,
    AWS_ACCESS_KEY_ID, …), or the machine's role. `staging_dir` is where S3 objects are written before their
    upload; a folder stages within itself and ignores it. A URL of another kind is `InvalidInput`.
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
    """The absolute folder that a path or file URL names."""
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
class GuardedStore:
    """An `ObjectStore` that enters `deleting` for each deletion, and deletes nothing more when that raises.

    When pickled, it is the store alone: other processes have their own questions.
    """

    store: ObjectStore
    deleting: Deleting = field(repr=False, compare=False)

    def __reduce__(self) -> Any:
        return _alone, (self.store,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def delete(self, names: Iterable[str]) -> list[tuple[str, Exception]]:
        failed: list[tuple[str, Exception]] = []
        pending = iter(names)
        while batch := list(islice(pending, ASKED_EVERY)):
            with self.deleting():
                failed += self.store.delete(batch)
        return failed


def guarded(store: ObjectStore, deleting: Deleting) -> ObjectStore:
    """Returns a store that asks before it deletes, which has by delegation all that an `ObjectStore` has."""
    return cast("ObjectStore", GuardedStore(store, deleting))


def _alone(store: ObjectStore) -> ObjectStore:
    return store


def note_activity(objects: ObjectStore) -> None:
    """Tells that something has changed; a store that cannot be written to is only logged."""
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
        logger.warning("activity is not noted, so schedules may come late: %s", error)


def note_if_shared(objects: ObjectStore) -> None:
    """Notes activity in a store in S3, where schedules of a deployed instance work; none do in a folder."""
    if is_shared(objects):
        note_activity(objects)


def is_shared(objects: ObjectStore) -> bool:
    """Returns whether a store is in S3, so that other hosts see it and its database may pause itself."""
    return objects.url.startswith("s3://")


def is_noted_since(objects: ObjectStore, moment: datetime) -> bool:
    """Whether something may have changed since then."""
    earliest = moment.astimezone(UTC) - timedelta(seconds=TOLD_SECONDS)
    days = (datetime.now(UTC).date() - earliest.date()).days
    # tomorrow too, as clocks differ
    dates = [earliest.date() + timedelta(days=day) for day in range(days + 2)]
    first = f"{_ACTIVITY}/{earliest:{_DAY}/{_MINUTE}}"
    return any(name >= first for day in dates for name, _ in objects.list(f"{_ACTIVITY}/{day:{_DAY}}"))


def forget_activity(objects: ObjectStore, moment: datetime) -> None:
    """Deletes the notes of earlier days."""
    first = f"{_ACTIVITY}/{moment.astimezone(UTC):{_DAY}}"
    objects.delete([name for name, _ in objects.list(_ACTIVITY) if name < first])

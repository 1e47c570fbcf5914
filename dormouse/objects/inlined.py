"""Inlined files, whose bytes are in the database, as local files that every reader can open.

Readers find files through `InlinedFiles`, an object store. For it, an inlined file is an object on this
machine: a file in a folder of this process, written when the file is first read. Its content never changes,
so the file is used by all later reads of the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from dormouse.model.file_reference import is_inlined
from dormouse.model.text import narrow_id
from dormouse.objects.names import failed, missing, parquet_suffix, schema_version_of, whole_range
from dormouse.objects.staging import Slot, StagingArea, private_folder
from dormouse.objects.store import ObjectStore, WrappedStore

KEPT_BYTES_MAX = 256 * 1024 * 1024
"""The bytes of local files above which the least recently used ones are deleted."""
KEPT_SECONDS = 900
"""The least time that a local file stays after its last use, as an engine opens it after the plan."""
ITEM_BYTES = 4_096
"""The bytes that a file of any size takes on the disk."""

_PRIVATE = "dormouse-inlined"
BUNDLE = "bundle"
"""The beginning of the last part of the name of a local file with the rows of many inlined files."""

Contents = Callable[[Sequence[str]], Mapping[str, bytes]]
"""A function that returns the content of inlined files by name. Files without content are left out."""


class _LocalFiles:
    """The local files of inlined files of one store in this process. Threads may share them."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._slot = _claimed(store)
        self._process_id = os.getpid()
        self._used: OrderedDict[str, tuple[Path, int, float]] = OrderedDict()
        self._byte_count = 0
        self._lock = threading.Lock()
        atexit.register(self._close)

    @property
    def is_own(self) -> bool:
        """True unless a parent process made the folder, which it deletes when it ends."""
        return self._process_id == os.getpid()

    def path(self, name: str) -> Path | None:
        """Returns the local file of an inlined file; None if there is none."""
        with self._lock:
            if (known := self._used.get(name)) is None:
                return None
            path, size, _ = known
            if not path.exists():  # an erasure deleted it
                del self._used[name]
                self._byte_count -= size
                return None
            self._used[name] = path, size, time.monotonic()
            self._used.move_to_end(name)
            return path

    def add(self, name: str, content: bytes) -> Path:
        """Writes a local file unless there is one; returns its path."""
        if (known := self.path(name)) is not None:
            return known
        try:
            path = self._written(local_name(name), content)
        except OSError as error:
            raise failed("write", name, "a local file", error.strerror or str(error)) from error
        with self._lock:
            if name not in self._used:
                size = max(len(content), ITEM_BYTES)
                self._used[name] = path, size, time.monotonic()
                self._byte_count += size
            self._forget_old()
        return path

    def _written(self, local: str, content: bytes) -> Path:
        """Writes a local file whole, as another thread may read the same file; returns its path."""
        with self._lock:
            if not self._slot.folder.exists():  # a cleaner of temporary files deleted it
                os.close(self._slot.lock)
                self._slot = _claimed(self._store)
            path = self._slot.path(local)
        written = path.with_suffix(f".{threading.get_ident()}")
        try:
            written.write_bytes(content)
            return written.replace(path)
        finally:
            written.unlink(missing_ok=True)

    def _forget_old(self) -> None:
        since = time.monotonic() - KEPT_SECONDS
        while self._byte_count > KEPT_BYTES_MAX:
            name, (path, size, used_at) = next(iter(self._used.items()))
            if used_at > since:
                return
            del self._used[name]
            self._byte_count -= size
            path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self.is_own:
            self._slot.close()


def _claimed(store: ObjectStore) -> Slot:
    area = _area(store)
    if area != store.staging_area():
        area.sweep()  # nothing else does
    return area.claim()


def _area(store: ObjectStore) -> StagingArea:
    """Returns the area for local files: the store's, or a private one if this user may not write there."""
    area = store.staging_area()
    there = next(folder for folder in (area.folder, *area.folder.parents) if folder.exists())
    return area if os.access(there, os.W_OK) else StagingArea(private_folder(_PRIVATE))


_files: dict[tuple[object, ...], _LocalFiles] = {}
_files_lock = threading.Lock()


def _local_files(store: ObjectStore) -> _LocalFiles:
    key = (store.url, *sorted(store.options.items()))
    with _files_lock:
        if (known := _files.get(key)) is None or not known.is_own:
            known = _files[key] = _LocalFiles(store)
        return known


def local_name(name: str) -> str:
    """Returns the name of the local file of an inlined file; it ends with the version of the schema.

    The name of a bundle begins with the id of the folder of its table.
    """
    folder, _, last = name.rsplit("/", 2)
    first = f"{narrow_id(folder).hex}-" if last.startswith(BUNDLE) else ""
    return f"{first}{narrow_id(name).hex}{parquet_suffix(schema_version_of(name))}"


@dataclass(frozen=True)
class InlinedFiles(WrappedStore):
    """The object store of one table, in which inlined files are files on this machine.

    A file without content in the database is looked for in the store below, like any other.
    """

    contents: Contents = field(repr=False, compare=False)

    def fetch(self, names: Iterable[str]) -> None:
        """Reads from the database, in one round trip, the content of those inlined files that need it."""
        wanted = [name for name in dict.fromkeys(names) if is_inlined(name)]
        if not wanted:
            return
        local = _local_files(self.store)
        if unknown := [name for name in wanted if local.path(name) is None]:
            for name, content in self.contents(unknown).items():
                local.add(name, content)

    def add(self, name: str, content: bytes) -> None:
        """Adds a local file that readers find by a name like that of an inlined file."""
        _local_files(self.store).add(name, content)

    def has(self, name: str) -> bool:
        """Returns whether this process has the local file of a name."""
        return _local_files(self.store).path(name) is not None

    def delete(self, names: Iterable[str]) -> list[tuple[str, Exception]]:
        """Deletes objects, and the local files of inlined ones that processes of this machine have."""
        deleted = list(names)
        if local := [local_name(name) for name in deleted if is_inlined(name)]:
            for slot in _area(self.store).folder.glob("*"):
                for one in local:
                    with suppress(OSError):
                        (slot / one).unlink(missing_ok=True)
        return self.store.delete(deleted)

    def forget_bundles(self, names: Iterable[str]) -> None:
        """Deletes the bundles of the table of inlined files that processes of this machine have.

        Call it after `delete`, so that no new bundle has rows of these files. Plans that read a bundle are
        made again.
        """
        area = _area(self.store).folder
        for folder in {name.rsplit("/", 2)[0] for name in names if is_inlined(name)}:
            for path in area.glob(f"*/{narrow_id(folder).hex}-*"):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def get(self, name: str) -> bytes:
        path = self._inlined(name)
        return self.store.get(name) if path is None else _read(path, name)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        if (path := self._inlined(name)) is None:
            return self.store.get_range(name, start, length)
        return whole_range(_read(path, name)[start : start + length], length, name, self.url)

    def size(self, name: str) -> int:
        if (path := self._inlined(name)) is None:
            return self.store.size(name)
        try:
            return path.stat().st_size
        except OSError as error:
            raise failed("read", name, self.url, str(error)) from error

    def reader(self, name: str) -> BinaryIO:
        path = self._inlined(name)
        return self.store.reader(name) if path is None else BytesIO(_read(path, name))

    def local_path(self, name: str) -> Path | None:
        return self._inlined(name) or self.store.local_path(name)

    def _inlined(self, name: str) -> Path | None:
        """Returns the local file of an inlined file; None for other files, and without its content."""
        if not is_inlined(name):
            return None
        if (path := _local_files(self.store).path(name)) is not None:
            return path
        self.fetch([name])
        return _local_files(self.store).path(name)


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise missing(name, "the database") from error


def inlining(store: ObjectStore, contents: Contents) -> InlinedFiles:
    """Returns the store with the inlined files of one table, whose content `contents` returns."""
    return InlinedFiles(store.store if isinstance(store, InlinedFiles) else store, contents)


def inlined_folder(store: ObjectStore) -> str:
    """Returns the folder below which all processes have the local files of a store's inlined files."""
    return f"{_area(store).folder}/"


def place_of(store: ObjectStore, name: str) -> str:
    """Returns the path of a file on this machine, or else its URI, for an engine in this process."""
    path = store.local_path(name)
    return store.uri(name) if path is None else str(path)

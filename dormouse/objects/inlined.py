"""Inlined files, whose bytes are in the database, as files that every reader can open.

Readers find files through `InlinedFiles`, an object store. For it, an inlined file is an object on this
machine. Its content never changes, so a process keeps it in memory, in which look-ups read it. It is written
to a file in a folder of this process when an engine asks for a path.
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

from dormouse.errors import ObjectStoreError
from dormouse.model.file_reference import is_inlined
from dormouse.model.locks import process_lock
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
MEMORY_BYTES_MAX = 64 * 1024 * 1024
"""The bytes of content in memory above which the least recently used content is dropped."""
ITEM_MEMORY_BYTES = 500
"""The approximate bytes of memory that content takes in addition to its own."""

_PRIVATE = "dormouse-inlined"
BUNDLE = "bundle"
"""The beginning of the last part of the name of a local file with the rows of many inlined files."""

Contents = Callable[[Sequence[str]], Mapping[str, bytes]]
"""A function that returns the content of inlined files by name. Files without content are left out."""


class _LocalFiles:
    """The local files of inlined files of one store in this process. Threads may share them."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._slot: Slot | None = None
        self._used: OrderedDict[str, tuple[Path, int, float]] = OrderedDict()
        self._byte_count = 0
        self._lock = threading.Lock()

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
            if self._slot is None:
                self._slot = claimed_folder(self._store)
                atexit.register(self._close, os.getpid())
            elif not self._slot.folder.exists():  # a cleaner of temporary files deleted it
                os.close(self._slot.lock)
                self._slot = claimed_folder(self._store)
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

    def _close(self, process_id: int) -> None:
        # a parent process deletes the folder that it made when it ends, not its forked children
        if self._slot is not None and process_id == os.getpid():
            self._slot.close()


class _Contents:
    """The content of inlined files of one store that this process has. Threads may share it.

    It is in memory, up to a number of bytes, and in the local files that engines asked for. Content that
    leaves the memory within KEPT_SECONDS becomes a local file, as an engine may still open it after the plan.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._process_id = os.getpid()
        self._files = _LocalFiles(store)
        self._memory: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._byte_count = 0
        self._lock = threading.Lock()

    @property
    def is_own(self) -> bool:
        """True unless a parent process made the object, whose locks a thread of the parent may hold."""
        return self._process_id == os.getpid()

    def add(self, name: str, content: bytes) -> None:
        """Keeps the content of a file in memory."""
        dropped = []
        with self._lock:
            self._drop(name)
            self._memory[name] = content, time.monotonic()
            self._byte_count += len(content) + ITEM_MEMORY_BYTES
            while self._byte_count > MEMORY_BYTES_MAX:
                oldest = next(iter(self._memory))
                dropped.append((oldest, *self._drop(oldest)))
        since = time.monotonic() - KEPT_SECONDS
        for oldest, data, used_at in dropped:
            if used_at > since:
                with suppress(ObjectStoreError):  # it comes from the database again
                    self._files.add(oldest, data)

    def get(self, name: str) -> bytes | None:
        """Returns the content of a file that is in memory."""
        with self._lock:
            if (known := self._memory.get(name)) is None:
                return None
            self._memory[name] = known[0], time.monotonic()
            self._memory.move_to_end(name)
            return known[0]

    def lacking(self, names: Iterable[str]) -> list[str]:
        """Returns those of some files that have no content here."""
        with self._lock:
            others = [name for name in names if name not in self._memory]
        return [name for name in others if self._files.path(name) is None]

    def path(self, name: str) -> Path | None:
        """Returns the local file of an inlined file, which is written if its content is in memory."""
        path = self._files.path(name)
        if path is None and (content := self.get(name)) is not None:
            path = self._files.add(name, content)
        return path

    def place(self, name: str) -> Path | bytes | None:
        """Returns the local file of an inlined file if there is one, or else its content in memory."""
        return self._files.path(name) or self.get(name)

    def forget(self, names: Iterable[str]) -> None:
        """Removes files from the memory."""
        with self._lock:
            for name in names:
                self._drop(name)

    def forget_bundles(self, folder: str) -> None:
        """Removes the bundles of a table from the memory."""
        with self._lock:
            for name in [one for one in self._memory if one.startswith(f"{folder}/") and _is_bundle(one)]:
                self._drop(name)

    def _drop(self, name: str) -> tuple[bytes, float]:
        if (known := self._memory.pop(name, None)) is None:
            return b"", 0.0
        self._byte_count -= len(known[0]) + ITEM_MEMORY_BYTES
        return known


def claimed_folder(store: ObjectStore) -> Slot:
    """Returns a new folder for files of this process that engines which read the store may read, too."""
    area = _area(store)
    if area != store.staging_area():
        area.sweep()  # nothing else does
    return area.claim()


def _area(store: ObjectStore) -> StagingArea:
    """Returns the area for local files: the store's, or a private one if this user may not write there."""
    area = store.staging_area()
    there = next(folder for folder in (area.folder, *area.folder.parents) if folder.exists())
    return area if os.access(there, os.W_OK) else StagingArea(private_folder(_PRIVATE))


_contents: dict[tuple[object, ...], _Contents] = {}
_contents_lock = process_lock()


def _contents_of(store: ObjectStore) -> _Contents:
    key = (store.url, *sorted(store.options.items()))
    with _contents_lock:
        if (known := _contents.get(key)) is None or not known.is_own:
            known = _contents[key] = _Contents(store)
        return known


def _is_bundle(name: str) -> bool:
    return name.rpartition("/")[2].startswith(BUNDLE)


def local_name(name: str) -> str:
    """Returns the name of the local file of an inlined file; it ends with the version of the schema.

    The name of a bundle begins with the id of the folder of its table.
    """
    folder = name.rsplit("/", 2)[0]
    first = f"{narrow_id(folder).hex}-" if _is_bundle(name) else ""
    return f"{first}{narrow_id(name).hex}{parquet_suffix(schema_version_of(name))}"


@dataclass(frozen=True)
class InlinedFiles(WrappedStore):
    """The object store of one table, in which inlined files are files on this machine.

    A file without content in the database is looked for in the store below, like any other.
    """

    contents: Contents = field(repr=False, compare=False)

    @property
    def _known(self) -> _Contents:
        known: _Contents | None = self.__dict__.get("_of_process")
        if known is None or not known.is_own:
            known = self.__dict__["_of_process"] = _contents_of(self.store)
        return known

    def fetch(self, names: Iterable[str]) -> None:
        """Reads from the database, in one round trip, the content of those inlined files that need it."""
        wanted = [name for name in dict.fromkeys(names) if is_inlined(name)]
        if wanted and (unknown := self._known.lacking(wanted)):
            for name, content in self.contents(unknown).items():
                self._known.add(name, content)

    def add(self, name: str, content: bytes) -> None:
        """Keeps content that readers find by a name like that of an inlined file."""
        self._known.add(name, content)

    def lacking(self, names: Iterable[str]) -> list[str]:
        """Returns those of some inlined files whose content this process does not have."""
        return self._known.lacking(names)

    def in_memory(self, name: str) -> bytes | None:
        """Returns the content of an inlined file if it is in memory."""
        return self._known.get(name) if is_inlined(name) else None

    def delete(self, names: Iterable[str]) -> list[tuple[str, Exception]]:
        """Deletes objects, and the local files of inlined ones that processes of this machine have.

        Removes the content from the memory of this process. Others keep it until it is dropped.
        """
        deleted = list(names)
        if inlined := [name for name in deleted if is_inlined(name)]:
            self._known.forget(inlined)
            local = [local_name(name) for name in inlined]
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
            self._known.forget_bundles(folder)
            for path in area.glob(f"*/{narrow_id(folder).hex}-*"):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def get(self, name: str) -> bytes:
        place = self._place(name)
        return self.store.get(name) if place is None else _bytes(place, name)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        if (place := self._place(name)) is None:
            return self.store.get_range(name, start, length)
        return whole_range(_bytes(place, name)[start : start + length], length, name, self.url)

    def size(self, name: str) -> int:
        if (place := self._place(name)) is None:
            return self.store.size(name)
        try:
            return len(place) if isinstance(place, bytes) else place.stat().st_size
        except OSError as error:
            raise failed("read", name, self.url, str(error)) from error

    def reader(self, name: str) -> BinaryIO:
        place = self._place(name)
        return self.store.reader(name) if place is None else BytesIO(_bytes(place, name))

    def local_path(self, name: str) -> Path | None:
        if not is_inlined(name):
            return self.store.local_path(name)
        if (path := self._known.path(name)) is None:
            self.fetch([name])
            path = self._known.path(name)
        return self.store.local_path(name) if path is None else path

    def _place(self, name: str) -> Path | bytes | None:
        """Returns the local file of an inlined file, which engines read, or else its content.

        Returns None for other files, and without content.
        """
        if not is_inlined(name):
            return None
        if (place := self._known.place(name)) is None:
            self.fetch([name])
            place = self._known.place(name)
        return place


def _bytes(place: Path | bytes, name: str) -> bytes:
    try:
        return place if isinstance(place, bytes) else place.read_bytes()
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

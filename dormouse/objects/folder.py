"""Objects as files in a folder: written in a staging area, made durable, then linked under their name."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from dormouse.errors import InvalidName, ObjectStoreError
from dormouse.model.loops import tries
from dormouse.objects.names import (
    STAGING,
    check_name,
    check_prefix,
    failed,
    missing,
    pinned_name,
    reporting_full_disk,
    taken,
    whole_range,
)
from dormouse.objects.staging import StagingArea, sync

# Files below a folder in which other users write: opened without following links, and pinned while in use.

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""The flags for opening a file; with `O_NONBLOCK`, the open of a FIFO does not wait for a writer."""

LINK = "it is a link, or reached by one, or no regular file: put the file itself there"
_REFUSALS = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.ENODEV})
"""The kernel's errors for opening a link, a FIFO, a socket or a device."""


def pin_beneath(folder: Path, name: str, target: Path) -> None:
    """Makes `target` the regular file that a relative name below a folder leads to.

    No link is followed in any part of the name, even one that is made meanwhile. `target` is a hard link to
    the file that was opened, or a copy of its bytes if the file system allows no such link. So a user with
    write access below the folder cannot substitute another file. Raises `FileNotFoundError`, or `OSError`
    with the text `LINK`.
    """
    parts = PurePosixPath(name).parts
    try:
        with _opened(os.open(folder, _FOLDER & ~os.O_NOFOLLOW), parts[:-1]) as at:
            file = os.open(parts[-1], _FILE, dir_fd=at)
            try:
                _pin(file, at, parts[-1], target)
            finally:
                os.close(file)
    except OSError as error:
        if error.errno in _REFUSALS:
            raise OSError(errno.ELOOP, LINK) from None
        raise


@contextmanager
def _opened(folder: int, parts: tuple[str, ...]) -> Iterator[int]:
    """Yields a descriptor of the folder at `parts` below an open folder; closes the folders afterwards."""
    try:
        for part in parts:
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _pin(file: int, at: int, name: str, target: Path) -> None:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ELOOP, LINK)
    with suppress(OSError):  # another file system, or another user's file
        os.link(name, target, src_dir_fd=at, follow_symlinks=False)
        if os.path.samestat(target.lstat(), status):
            return
        target.unlink()  # the name was replaced meanwhile: it is another file
    with os.fdopen(os.dup(file), "rb") as source, target.open("xb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)


PUBLISH_ATTEMPTS_MAX = 1_000
SETTLED_NS = 1_000_000_000
FOLDERS_KNOWN_MAX = 1_000
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_durable: dict[Path, tuple[int, int, int]] = {}
"""The states of folders at the time when all their entries were made durable."""


@dataclass(frozen=True)
class FolderStore:
    """An `ObjectStore` in a folder of one file system that has hard links.

    Objects are published by a hard link: it is atomic and, unlike a rename, refuses a name that is taken.
    """

    root: Path

    @cached_property
    def url(self) -> str:
        return self.root.as_uri()

    @property
    def options(self) -> dict[str, str]:
        return {}

    def put(self, name: str, data: bytes) -> None:
        with self.staged(name) as path, _errors("write", name, self.root):
            path.write_bytes(data)

    @contextmanager
    def staged(self, name: str) -> Iterator[Path]:
        """Yields a path within the store's own file system, so that publishing copies nothing."""
        target = self._path(name)
        with _errors("write", name, self.root):
            if target.exists():
                raise taken(name, str(self.root))
            slot = self.staging_area().claim()
        with closing(slot):
            with reporting_full_disk(name, str(self.root)):
                yield slot.path(target.name)
            with _errors("write", name, self.root):
                self._publish(slot.written(target.name), name)

    def copy(self, source: str, name: str) -> None:
        """Links the same file under both names."""
        with self.staged(name) as path, _errors("read", source, self.root):
            path.hardlink_to(self._path(source))

    def get(self, name: str) -> bytes:
        with _errors("read", name, self.root):
            return self._path(name).read_bytes()

    def get_range(self, name: str, start: int, length: int) -> bytes:
        with _errors("read", name, self.root), self._path(name).open("rb") as file:
            found = os.pread(file.fileno(), length, start)
        return whole_range(found, length, name, str(self.root))

    def size(self, name: str) -> int:
        with _errors("read", name, self.root):
            status = self._path(name).stat()
            if not stat.S_ISREG(status.st_mode):
                raise IsADirectoryError(name)
            return status.st_size

    def reader(self, name: str) -> BinaryIO:
        with _errors("read", name, self.root):
            return self._path(name).open("rb")

    def delete(self, names: Iterable[str]) -> list[tuple[str, Exception]]:
        failures: list[tuple[str, Exception]] = []
        parents: set[Path] = set()
        for name in names:
            try:
                parents.add(self._unlink(name))
            except (ObjectStoreError, InvalidName) as error:
                failures.append((name, error))
        for parent in parents:
            self._tidy(parent)
        return failures

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        yield from ((name, size) for name, size, _ in self.list_dated(prefix))

    def list_dated(self, prefix: str = "") -> Iterator[tuple[str, int, datetime]]:
        folder = check_prefix(prefix)
        with _errors("list", prefix, self.root):
            for name, status in _walk(self.root / folder, f"{folder}/" if folder else ""):
                yield name, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC)

    def local_path(self, name: str) -> Path | None:
        return self._path(name)

    @contextmanager
    def pinned(self, names: Iterable[str]) -> Iterator[dict[str, Path]]:
        """Yields files within the store's own file system, so that pinning copies nothing."""
        with _errors("write", STAGING, self.root):
            slot = self.staging_area().claim()
        with closing(slot):
            found: dict[str, Path] = {}
            for number, name in enumerate(names):
                first, _, rest = check_name(name).partition("/")
                found[name] = slot.path(pinned_name(number, name))
                with _errors("read", name, self.root):
                    pin_beneath(self.root / first, rest, found[name])
            yield found

    def uri(self, name: str) -> str:
        return str(self._path(name))

    def sweep_staging(self) -> int:
        return self.staging_area().sweep()

    def staging_area(self) -> StagingArea:
        return StagingArea(self.root / STAGING)

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    def _publish(self, path: Path, name: str) -> None:
        """Links the file under its name, durably."""
        target = self._path(name)
        sync(path)
        try:
            _link(path, target)
        except FileExistsError as error:
            raise taken(name, str(self.root)) from error
        try:
            self._sync_folders(target.parent)
        except OSError:
            target.unlink(missing_ok=True)
            raise

    def _sync_folders(self, folder: Path) -> None:
        """Makes durable the entries from the root down to `folder`, even those that another process made."""
        while True:
            with suppress(FileNotFoundError):
                _sync_entries(folder)
            if folder == self.root:
                return
            folder = folder.parent

    def _unlink(self, name: str) -> Path:
        """Deletes one file if it exists; returns the folder that it was in."""
        path = self._path(name)
        with _errors("delete", name, self.root), suppress(*_ABSENT):
            path.unlink()
        return path.parent

    def _tidy(self, folder: Path) -> None:
        """Deletes the folders that a deletion left empty, and makes the deletion durable."""
        with suppress(OSError):
            while folder != self.root:
                folder.rmdir()
                folder = folder.parent
        with suppress(OSError):
            self._sync_folders(folder)


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yields the files below a folder, with their state; keeps at most one open folder for each level.

    Skips files that vanish meanwhile.
    """
    try:
        entries = os.scandir(folder)
    except _ABSENT:
        return
    with entries:
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                if name != STAGING:
                    yield from _walk(Path(entry.path), f"{name}/")
                continue
            with suppress(FileNotFoundError):
                yield name, entry.stat()


def _link(path: Path, target: Path) -> None:
    """Links a file and makes its folders; retries because a deletion may remove them meanwhile."""
    for _ in tries(tries_max=PUBLISH_ATTEMPTS_MAX, pause=0):
        _make_folders(target.parent)
        with suppress(FileNotFoundError):
            return target.hardlink_to(path)
    raise OSError(errno.EBUSY, "its folder was deleted each time that it was made")


def _make_folders(folder: Path) -> None:
    """Makes a folder and its parents. Raises OSError if a file is in the way."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        if folder.is_symlink() or folder.is_file():
            raise OSError(errno.ENOTDIR, f"there is an object at {folder}") from error
    except FileNotFoundError:
        pass
    # a deletion may have removed a parent meanwhile: the link fails, and the caller retries


def _sync_entries(folder: Path) -> None:
    """Makes the entries of a folder durable, unless they are durable and have not changed since."""
    found = folder.stat()
    state = found.st_dev, found.st_ino, found.st_mtime_ns
    if _durable.get(folder) == state:
        return
    sync(folder)
    # another change within the same tick of the clock would not show in the time
    if time.time_ns() - found.st_mtime_ns > SETTLED_NS:
        if len(_durable) >= FOLDERS_KNOWN_MAX:
            _durable.clear()
        _durable[folder] = state


@contextmanager
def _errors(verb: str, name: str, root: Path) -> Iterator[None]:
    """Turns an error of the operating system into an error of one line that names the object."""
    try:
        yield
    except _ABSENT as error:
        if verb == "read":
            raise missing(name, str(root)) from error
        raise failed(verb, name, str(root), error.strerror or str(error)) from error
    except OSError as error:
        raise failed(verb, name, str(root), error.strerror or str(error)) from error

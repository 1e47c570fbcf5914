"""The area where objects are written before they are published, and private folders for temporary files."""

from __future__ import annotations

import atexit
import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from dormouse.errors import DormouseError, InstanceError, InvalidInput
from dormouse.model.locks import process_lock

# Files of this machine that exist complete or not at all, even after a crash.


@contextmanager
def whole_file(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """Yields a file to write, which replaces the file at `path` at the end of the block.

    If the block raises, nothing changes. If `path` is a link, the file that it leads to is replaced. An
    existing file keeps its mode. Raises `InvalidInput` if it cannot be written.
    """
    target = Path(os.path.realpath(fspath(path)))
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("xb") as file:
            with suppress(FileNotFoundError):  # a private file stays private
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
        with suppress(OSError):  # the file is in place; not every folder may be read or synced
            sync(target.parent)
    except OSError as error:
        raise InvalidInput(f"cannot write {fspath(path)!r}: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Makes a file's bytes, or a folder's entries, durable against a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Folders for temporary files that only their owner can use, even if another user made a folder of that name
# before.

OTHERS = stat.S_IRWXG | stat.S_IRWXO

logger = logging.getLogger(__name__)


def private_folder(name: str, owner: os.stat_result | None = None, above: Path | None = None) -> Path:
    """Returns a user's private folder for temporary files of one kind; makes it if there is none.

    The folder is `<above>/<name>-<user id>`. If another user made a folder of that name, the result is a
    folder with a random suffix, which later calls find again. The user is the owner of the file with the
    state `owner`, or else the caller. `above` defaults to the folder for temporary files. Raises `OSError`
    and `InstanceError`.
    """
    above = Path(tempfile.gettempdir()) if above is None else above
    _warn_of_others(above)
    for folder in private_folders(name, owner, above):
        return folder
    own = above / f"{name}-{_uid(owner)}"
    folder = Path(tempfile.mkdtemp(prefix=f"{own.name}-", dir=above))
    logger.warning("%s is not a private folder of user %d: %s is used", own, _uid(owner), folder.name)
    if not make_private(folder, owner):
        raise InstanceError(f"{folder} belongs to another user; remove it")
    return folder


def private_folders(
    name: str, owner: os.stat_result | None = None, above: Path | None = None
) -> Iterator[Path]:
    """Yields the private folders of a user that are of one kind. Makes the first one if its name is free."""
    own = (Path(tempfile.gettempdir()) if above is None else above) / f"{name}-{_uid(owner)}"
    if make_private(own, owner):
        yield own
    for folder in sorted(own.parent.glob(f"{own.name}-*")):
        if is_private(folder, owner):
            yield folder


def make_private(folder: Path, owner: os.stat_result | None = None) -> bool:
    """Makes a folder, or accepts an existing one; returns whether only its owner can use it.

    If the caller made the folder, ownership passes to `owner`. A link is not followed.
    """
    with suppress(OSError):
        folder.mkdir(mode=stat.S_IRWXU)
    return is_private(folder, owner)


def is_private(folder: Path, owner: os.stat_result | None = None) -> bool:
    """Returns whether a path is a folder that no other user can use; a link is not. Gives the folder to
    `owner`.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        state = os.fstat(descriptor)
        if state.st_uid not in {os.geteuid(), _uid(owner)} or state.st_mode & OTHERS:
            return False
        if owner is not None and state.st_uid != owner.st_uid:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        return True
    finally:
        os.close(descriptor)


def shut_out_others(path: Path) -> None:
    """Removes the rights of other users from a new file, if the umask lets all users read it.

    A stricter umask was chosen by the user, so the rights that it leaves to the group stay.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IRWXO:
        path.chmod(mode & ~OTHERS)


def _uid(owner: os.stat_result | None) -> int:
    return os.geteuid() if owner is None else owner.st_uid


@cache
def _warn_of_others(above: Path) -> None:
    """Warns if another user can replace a private folder in `above`."""
    state = above.stat()
    of_another = state.st_uid not in {0, os.geteuid()}
    if of_another or (state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX):
        logger.warning("another user can replace folders in %s: set TMPDIR to one with the sticky bit", above)


_LOCK = "owner.lock"


@dataclass(frozen=True)
class Slot:
    """One object's folder in the staging area, locked until it is closed."""

    folder: Path
    lock: int
    state: os.stat_result
    """The folder's state when it was locked; a folder that replaced it has another inode."""

    def path(self, name: str) -> Path:
        return self.folder / name

    def written(self, name: str) -> Path:
        """Returns the written file. Raises FileNotFoundError if there is none."""
        path = self.path(name)
        if not os.path.samestat(self.folder.lstat(), self.state):
            raise FileNotFoundError(errno.ENOENT, f"{self.folder} was replaced by another folder")
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "nothing was written to its staged path")
        return path

    def close(self) -> None:
        """Deletes the folder with its files."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


@dataclass(frozen=True)
class StagingArea:
    """A folder that has one folder for each object being written, with a lock file that its writer holds.

    The kernel drops the lock when the writer dies in any way. So a folder whose lock is free has no writer.
    (A process number would not prove that, because another process could have the same number by now.)
    """

    folder: Path

    def claim(self) -> Slot:
        """Makes a folder and locks it; tries another name if a sweep removed the folder first."""
        while True:
            folder = self.folder / uuid4().hex
            folder.mkdir(mode=0o700, parents=True)  # the object may be written for a private folder
            try:
                lock = _lock(folder)
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            if lock is not None:
                return Slot(folder, lock, folder.lstat())  # a sweep does not remove a locked folder

    def sweep(self) -> int:
        """Deletes the folders whose writers are dead; returns their number."""
        try:
            slots = list(self.folder.iterdir())
        except FileNotFoundError:
            return 0
        return sum(map(_sweep, slots))


def _sweep(slot: Path) -> bool:
    try:
        lock = _lock(slot)
    except OSError:
        return False
    if lock is None:
        return False
    shutil.rmtree(slot, ignore_errors=True)
    os.close(lock)
    return not slot.exists()


def _lock(slot: Path) -> int | None:
    """Locks a folder without waiting; returns None if another process has the lock or has just removed it."""
    try:
        folder = os.open(slot, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return _locked_in(folder)
    finally:
        os.close(folder)


def _locked_in(folder: int) -> int | None:
    """Locks a folder by its descriptor. A link is not followed, because it may lead to any file."""
    try:
        lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(_LOCK, dir_fd=folder, follow_symlinks=False)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


_TEMPORARY = "dormouse-temporary"
_opening = process_lock()
_temporary: dict[tuple[int, str], Slot] = {}


def temporary_folder() -> Path:
    """Returns a folder for temporary files of this process. The caller deletes its files.

    It is deleted at the end of the process. If the process is killed, the user's next process that calls this
    deletes it. Raises `OSError` and `InstanceError`.
    """
    mine = (os.getpid(), tempfile.gettempdir())
    with _opening:
        known = _temporary.get(mine)
        if known is not None and known.path(_LOCK).is_file():
            return known.folder
        # some machines delete old files, also the lock alone, without which others delete the folder
        lock = None if known is None else _lock(known.folder)
        if known is not None and lock is not None:
            slot = replace(known, lock=lock)
        else:
            for folder in private_folders(_TEMPORARY):
                StagingArea(folder).sweep()
            slot = StagingArea(private_folder(_TEMPORARY)).claim()
        _temporary[mine] = slot
        atexit.register(_close, mine, slot)
    return slot.folder


def _close(of: tuple[int, str], slot: Slot) -> None:
    if of[0] == os.getpid():  # a forked child does not delete the folder of its parent
        slot.close()


def spill_folder(part: str) -> str:
    """Returns the path to which DuckDB in this process may spill rows. DuckDB makes and deletes the folder.

    The path is empty if no folder for temporary files can be made; DuckDB then spills nothing.
    """
    try:
        return str(temporary_folder() / part)
    except (OSError, InstanceError) as error:
        logger.warning("nothing can be spilled: %s", error)
        return ""


class ForkGuard:
    """A guard that refuses to use a library in a child that was forked after its parent had used it.

    A library with its own threads does not survive a fork: the child would wait for them forever.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._used = False
        self._lost = False
        os.register_at_fork(after_in_child=self._after_fork_in_child)

    def check(self) -> None:
        """Raises DormouseError in such a child; otherwise records that the library is used."""
        if self._lost:
            raise DormouseError(
                f"this process was forked after its parent had used {self._what}, which does not survive a "
                "fork; start it with the spawn start method: multiprocessing.get_context('spawn')"
            )
        self._used = True

    def _after_fork_in_child(self) -> None:
        self._lost = self._used

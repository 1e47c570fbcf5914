"""Where objects are written before they are published; what the dead leave behind can be told and swept."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

_LOCK = "owner.lock"


@dataclass(frozen=True)
class Slot:
    """One object's folder in the staging area, locked until it is released."""

    folder: Path
    lock: int
    state: os.stat_result
    """The folder's state when it was locked: another folder in its place has another inode."""

    def path(self, name: str) -> Path:
        return self.folder / name

    def written(self, name: str) -> Path:
        """The file that was written; an error when there is none."""
        path = self.path(name)
        if not os.path.samestat(self.folder.lstat(), self.state):
            raise FileNotFoundError(errno.ENOENT, f"{self.folder} was replaced by another folder")
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "nothing was written to its staged path")
        return path

    def release(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


@dataclass(frozen=True)
class StagingArea:
    """A folder with one folder per object being written, each with a lock file that its writer holds.

    The kernel drops the lock when the writer dies, whatever killed it, so a folder whose lock is free has no
    owner. (A process number could belong to somebody else by now.)
    """

    folder: Path

    def claim(self) -> Slot:
        """Make a folder and lock it; again under another name when a sweep was faster."""
        while True:
            folder = self.folder / uuid4().hex
            folder.mkdir(mode=0o700, parents=True)  # what is written may be for a private folder
            try:
                lock = _lock(folder)
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            if lock is not None:
                return Slot(folder, lock, folder.lstat())  # while it is locked, no sweep removes it

    def sweep(self) -> int:
        """Remove the folders that have no owner; return how many."""
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
    """Lock a folder without waiting: None when another has it, or has just removed it."""
    try:
        folder = os.open(slot, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return _locked_in(folder)
    finally:
        os.close(folder)


def _locked_in(folder: int) -> int | None:
    """Locks a folder by its descriptor: a link, which may lead to any file, is not followed."""
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

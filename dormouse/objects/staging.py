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

    def path(self, name: str) -> Path:
        return self.folder / name

    def written(self, name: str) -> Path:
        """The file that was written; an error when there is none."""
        path = self.path(name)
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
                return Slot(folder, lock)

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
    path = slot / _LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None

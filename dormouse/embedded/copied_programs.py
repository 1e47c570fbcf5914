"""A copy of PostgreSQL's programs for a server whose user may not reach the installed ones.

The copy is below `PLACE`. Only root can write to that folder and to those above it. All instances of the
machine share the copy. Its name is the digest of its files, so that each version of PostgreSQL has its own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dormouse.embedded.locks import close_lock, open_lock, try_lock
from dormouse.errors import InstanceError

PLACE = Path("/var/cache/dormouse")
MODE = 0o755
LOCK_SECONDS_MAX, POLL_SECONDS = 60.0, 0.05
_PROGRAMS = ("initdb", "postgres")
_STAGED = "new-"


def copied_programs(binaries: Path) -> Path:
    """Returns the folder of the programs in a copy; makes the copy if there is none, or if it is damaged.

    Only root may call this. Raises `InstanceError`, and `OSError` where nothing can be written.
    """
    installed = binaries.parents[2]  # it holds the package, and beside it the package's libraries
    within = binaries.relative_to(installed)
    digest = _digest(installed, within)
    place = _own_place()
    copy = place / f"postgresql-{digest}"
    if _digest(copy, within) != digest:
        with _locked(place):
            if _digest(copy, within) != digest:  # another process may have made it meanwhile
                _make(copy, installed, within, digest)
    return copy / within


def _make(copy: Path, installed: Path, within: Path, digest: str) -> None:
    for left in copy.parent.glob(f"{_STAGED}*"):  # by a process that was killed
        shutil.rmtree(left)
    staged = Path(tempfile.mkdtemp(prefix=_STAGED, dir=copy.parent))
    try:
        for file in _files(installed, within):
            target = staged / file.relative_to(installed)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        for path in (staged, *staged.rglob("*")):
            path.chmod(MODE)  # whatever the umask is
        if _digest(staged, within) != digest:
            raise InstanceError(f"{installed / within} was changed while it was copied; try again")
        if copy.exists():
            shutil.rmtree(copy)
        staged.rename(copy)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _own_place() -> Path:
    """Returns the folder for copies, which it makes if need be. Raises `InstanceError` if it is not safe.

    No other user may be able to replace the folder, a folder above it, or anything in it.
    """
    place = PLACE.parent.resolve() / PLACE.name
    place.parent.mkdir(parents=True, exist_ok=True)
    for folder in place.parents:
        _check_safe(folder, may_be_sticky=folder != place.parent)
    if not place.exists():
        place.mkdir(exist_ok=True)
        place.chmod(MODE)
    _check_safe(place)
    if os.statvfs(place).f_flag & os.ST_NOEXEC:
        raise InstanceError(f"no program may run in {place}, which is mounted with noexec")
    return place


def _check_safe(folder: Path, *, may_be_sticky: bool = False) -> None:
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != 0:
        raise InstanceError(f"{folder} is not a folder of root")
    # in a folder with the sticky bit, only root can replace what is root's
    is_sticky = may_be_sticky and state.st_mode & stat.S_ISVTX
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        raise InstanceError(f"users other than root may write to {folder}")


def _digest(root: Path, within: Path) -> str:
    """Returns the digest of the names and the contents of all files that a copy has."""
    digest = hashlib.sha256()
    for path in _files(root, within):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        digest.update(os.fsencode(path.relative_to(root)) + b"\0" + content)
    return digest.hexdigest()[:32]


def _files(root: Path, within: Path) -> list[Path]:
    """Returns what `initdb` and `postgres` need, in order: no clients, headers or static libraries."""
    installation = root / within.parent
    libraries = root / f"{within.parts[0]}.libs"
    folders = (installation / "lib", installation / "share", libraries)
    found = [
        path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".a"
    ]
    programs = (root / within / name for name in _PROGRAMS)
    return sorted([*found, *(path for path in programs if path.is_file())])


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Keeps other processes from making a copy at the same time."""
    lock = open_lock(place / "lock")
    try:
        deadline = time.monotonic() + LOCK_SECONDS_MAX
        while not try_lock(lock):
            if time.monotonic() > deadline:
                raise InstanceError(f"another process has held {place / 'lock'} for {LOCK_SECONDS_MAX:g} s")
            time.sleep(POLL_SECONDS)
        yield
    finally:
        close_lock(lock)

"""The user that runs an embedded PostgreSQL, which is not root, and the access that this user needs."""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dormouse.embedded.running import PROGRAM, close_lock, open_lock, try_lock
from dormouse.errors import InstanceError
from dormouse.model.loops import tries

# A copy of PostgreSQL's programs, for a server whose user cannot reach the installed ones.

PLACE = Path("/var/cache/dormouse")
MODE = 0o755
LOCK_SECONDS_MAX, POLL_SECONDS = 60.0, 0.05
_PROGRAMS = ("initdb", "postgres")
_STAGED = "new-"


def copied_programs(binaries: Path) -> Path:
    """Returns the folder of the programs in a copy of `binaries`; makes the copy if it is missing or damaged.

    Only root may call this. Raises `InstanceError`, and `OSError` if nothing can be written.
    """
    installed = binaries.parents[2]  # it has the package, and next to it the package's libraries
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
    for left in copy.parent.glob(f"{_STAGED}*"):  # left by a process that was killed
        shutil.rmtree(left)
    staged = Path(tempfile.mkdtemp(prefix=_STAGED, dir=copy.parent))
    try:
        for file in _files(installed, within):
            target = staged / file.relative_to(installed)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        for path in (staged, *staged.rglob("*")):
            path.chmod(MODE)  # independent of the umask
        if _digest(staged, within) != digest:
            raise InstanceError(f"{installed / within} was changed while it was copied; try again")
        if copy.exists():
            shutil.rmtree(copy)
        staged.rename(copy)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _own_place() -> Path:
    """Returns the folder in which copies are made, and makes that folder if necessary.

    Raises `InstanceError` if another user can replace the folder, a folder above it, or anything in it.
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
    # in a folder with the sticky bit, only root can replace root's files
    is_sticky = may_be_sticky and state.st_mode & stat.S_ISVTX
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        raise InstanceError(f"users other than root may write to {folder}")


def _digest(root: Path, within: Path) -> str:
    """Returns the digest of the names and contents of all files of a copy."""
    digest = hashlib.sha256()
    for path in _files(root, within):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        digest.update(os.fsencode(path.relative_to(root)) + b"\0" + content)
    return digest.hexdigest()[:32]


def _files(root: Path, within: Path) -> list[Path]:
    """Returns the sorted files that `initdb` and `postgres` need, without clients and static libraries."""
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
    """Prevents other processes from making a copy at the same time."""
    lock = open_lock(place / "lock")
    try:
        if not any(try_lock(lock) for _ in tries(LOCK_SECONDS_MAX, pause=POLL_SECONDS)):
            raise InstanceError(f"another process has held {place / 'lock'} for {LOCK_SECONDS_MAX:g} s")
        yield
    finally:
        close_lock(lock)


WORKING_FOLDER = Path("/proc/self/cwd")
_SYSTEM_USER = "pgserver"


def as_owner_of(data: Path) -> dict[str, Any]:
    """Returns options to start a process as the owner of a data directory, which PostgreSQL requires.

    Raises `InstanceError`.
    """
    if os.geteuid() != 0:
        return {"cwd": data}
    owner = data.stat()
    if seen_by_owner(data) == data and (folder := barrier(data, owner)) is not None:
        raise _unreachable(folder, data, owner)
    return {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": [], "cwd": data}


def runnable_programs(binaries: Path, data: Path) -> Path:
    """Returns a folder of programs that the owner of a data directory can run.

    It is the installed folder, or a copy if that folder is below one that only root can enter. Raises
    `InstanceError` if no copy can be made.
    """
    if os.geteuid() != 0:
        return binaries
    owner = data.stat()
    # an installer may have linked each file to its cache
    folder = barrier(binaries / PROGRAM, owner) or barrier((binaries / PROGRAM).resolve(), owner)
    if folder is None:
        _let_run(binaries.parent)
        return binaries
    try:
        copy = copied_programs(binaries)
    except (OSError, InstanceError) as error:
        raise _unreachable(folder, binaries, owner, f"; no copy could be made: {error}") from None
    if (above := barrier(copy, owner)) is not None:
        raise _unreachable(above, copy, owner)
    return copy


def seen_by_owner(data: Path) -> Path:
    """Returns the path by which a server refers to its data directory.

    Under root, the server runs as another user and refers to its working directory. So that user needs no
    access to the folders above, which stay private.
    """
    return WORKING_FOLDER if os.geteuid() == 0 and WORKING_FOLDER.exists() else data


def barrier(path: Path, owner: os.stat_result) -> Path | None:
    """Returns the first folder above a path that a user may not enter, or None."""
    for folder in reversed(path.resolve().parents):
        state = folder.stat()
        bit = stat.S_IXGRP if state.st_gid == owner.st_gid else stat.S_IXOTH
        if owner.st_uid not in {0, state.st_uid} and not state.st_mode & bit:
            return folder
    return None


def system_user() -> pwd.struct_passwd:
    """Returns a system user for the server of a root process: a new one if it can be made, else `nobody`."""
    try:
        return pwd.getpwnam(_SYSTEM_USER)
    except KeyError:
        command = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", _SYSTEM_USER]
        made = shutil.which("useradd") and subprocess.run(command, check=False, capture_output=True)
        return pwd.getpwnam(_SYSTEM_USER if made and made.returncode == 0 else "nobody")


def _unreachable(folder: Path, path: Path, owner: os.stat_result, why: str = "") -> InstanceError:
    user = pwd.getpwuid(owner.st_uid).pw_name
    return InstanceError(
        f"{folder} is private, and PostgreSQL, which runs as user {user} under root, must reach {path}: "
        f"use another user, run 'chmod o+x {folder}', or move it{why}"
    )


def _let_run(installation: Path) -> None:
    """Allows all users to run the programs, because a strict umask may have made them private."""
    readable = stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH
    if installation.stat().st_mode & readable == readable:
        return
    for path in (*installation.rglob("*"), installation):
        path.chmod(path.stat().st_mode | readable)

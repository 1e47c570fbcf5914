"""The user that an embedded PostgreSQL runs as, which is not root, and what that user may reach."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

from dormouse.embedded.copied_programs import copied_programs
from dormouse.embedded.orphans import PROGRAM
from dormouse.errors import InstanceError

WORKING_FOLDER = Path("/proc/self/cwd")
_SYSTEM_USER = "pgserver"


def as_owner_of(data: Path) -> dict[str, Any]:
    """Returns how to start a process that PostgreSQL accepts, in a data directory. Raises `InstanceError`."""
    if os.geteuid() != 0:
        return {"cwd": data}
    owner = data.stat()
    if seen_by_owner(data) == data and (folder := barrier(data, owner)) is not None:
        raise _unreachable(folder, data, owner)
    return {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": [], "cwd": data}


def runnable_programs(binaries: Path, data: Path) -> Path:
    """Returns the folder of the programs that the owner of a data directory can run.

    These are the installed ones, or a copy where a folder above them is private to root. Raises
    `InstanceError` when no copy can be made.
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
    """What a server calls the data directory that it is started in.

    Under root it is another user's, which so needs no right to pass the folders above: they stay private.
    """
    return WORKING_FOLDER if os.geteuid() == 0 and WORKING_FOLDER.exists() else data


def barrier(path: Path, owner: os.stat_result) -> Path | None:
    """The folder above a path that a user may not pass."""
    for folder in reversed(path.resolve().parents):
        state = folder.stat()
        bit = stat.S_IXGRP if state.st_gid == owner.st_gid else stat.S_IXOTH
        if owner.st_uid not in {0, state.st_uid} and not state.st_mode & bit:
            return folder
    return None


def system_user() -> pwd.struct_passwd:
    """A system user for the server when we are root: made if it can be, else `nobody`."""
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
        f"use another user, or say 'chmod o+x {folder}', or move it{why}"
    )


def _let_run(installation: Path) -> None:
    """Lets everybody run the binaries, which a strict umask may have kept for their installer."""
    readable = stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH
    if installation.stat().st_mode & readable == readable:
        return
    for path in (*installation.rglob("*"), installation):
        path.chmod(path.stat().st_mode | readable)

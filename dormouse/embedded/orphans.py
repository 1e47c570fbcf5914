"""Processes that hold the lease of a folder's PostgreSQL, and orphans: those whose postmaster is dead.

A backend that waits for a lock of a dead backend never notices that its postmaster died. It keeps the lease,
so that no server can start. Its shared memory is dead, too, so that killing it loses nothing.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from dormouse.durability.incarnations import namespace

PROGRAM = "postgres"
_TITLE_OF_A_BACKEND = "postgres: "
"""PostgreSQL names each process that the postmaster forked, and never the postmaster itself."""
_PROC = Path("/proc")

logger = logging.getLogger(__name__)


def end_orphans(data: Path, lease: int) -> None:
    """Kills backends that hold a lease, if their postmaster is proved to be dead.

    All of this must be seen in this PID namespace:

    - The process works in the data directory, and has the lease open.
    - Its title is that of a backend, and its parent is no PostgreSQL.
    - No process that works in the data directory may be a postmaster.
    """
    folder = data.stat()
    with _as_the_server(folder):
        here = [process for process in _postgres() if is_alive(process) and _works_in(process, folder)]
    if not all(_is_backend(process) for process in here):
        return
    holding = holders(data, lease)
    for process in here:
        with suppress(psutil.Error):
            if process in holding and _has_lost_its_parent(process):
                what = described(process)
                process.kill()
                logger.warning("killed %s, which outlived the PostgreSQL of %s", what, data.parent)


def holders(data: Path, lease: int) -> list[psutil.Process]:
    """Returns the PostgreSQL processes that are seen to have a lease open."""
    state = os.fstat(lease)
    with _as_the_server(data.stat()):
        return [process for process in _postgres() if is_alive(process) and _holds(process, state)]


def described(process: psutil.Process) -> str:
    """Returns a process's id and command for a message."""
    with suppress(psutil.Error):
        return f"process {process.pid} ({' '.join(process.cmdline()).strip()})"
    return f"process {process.pid}"


def is_alive(process: psutil.Process) -> bool:
    """Returns whether a process runs, or may run; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _postgres() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["name"]) if process.info["name"] == PROGRAM]


def _is_backend(process: psutil.Process) -> bool:
    try:
        return " ".join(process.cmdline()).startswith(_TITLE_OF_A_BACKEND)
    except psutil.Error:
        return False


def _has_lost_its_parent(process: psutil.Process) -> bool:
    parent = process.ppid()  # 0: it is of another namespace
    return parent != 0 and bool(psutil.Process(parent).name() != PROGRAM)


@contextmanager
def _as_the_server(data: os.stat_result) -> Iterator[None]:
    """Lets this thread read what the owner of the data directory may read in /proc.

    In a container root may lack the right to look at other users' processes. Source: setfsuid(2), ptrace(2).
    """
    if os.geteuid() != 0 or not _PROC.is_dir():
        yield
        return
    libc = ctypes.CDLL(None)
    libc.setfsgid(data.st_gid)
    libc.setfsuid(data.st_uid)
    try:
        yield
    finally:
        libc.setfsuid(0)
        libc.setfsgid(os.getegid())


def _works_in(process: psutil.Process, folder: os.stat_result) -> bool:
    """Returns whether a process of this namespace works in a folder, by the folder's device and inode."""
    try:
        if not _PROC.is_dir():
            return _is(Path(process.cwd()), folder)
        own = _PROC / str(process.pid)
        return str((own / "ns/pid").readlink()) == namespace() and _is(own / "cwd", folder)
    except (OSError, psutil.Error):  # it has ended, or may not be looked at
        return False


def _holds(process: psutil.Process, lease: os.stat_result) -> bool:
    try:
        files = (_PROC / str(process.pid) / "fd").iterdir() if _PROC.is_dir() else _open_files(process)
        return any(_is(file, lease) for file in files)
    except (OSError, psutil.Error):
        return False


def _open_files(process: psutil.Process) -> list[Path]:
    return [Path(file.path) for file in process.open_files()]


def _is(file: Path, state: os.stat_result) -> bool:
    try:
        return os.path.samestat(file.stat(), state)
    except OSError:
        return False

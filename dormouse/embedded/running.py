"""The lease of a folder's PostgreSQL: a lock that each process of the server holds as long as it lives.

The lease works across PID namespaces, containers and hosts, where processes cannot see each other. Its file
records where the server runs.

Orphans, which are processes whose postmaster is dead, also hold the lease. A backend that waits for a lock of
a dead backend never notices that its postmaster died, and then no server can start. The backend's shared
memory is of no use any more, so killing the backend loses nothing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from dormouse.durability.incarnations import Process, boot, namespace, process_here
from dormouse.errors import InstanceError, InstanceLocked, InstanceReadOnly

PROGRAM = "postgres"
_TITLE_OF_A_BACKEND = "postgres: "
"""The prefix of the titles of processes that the postmaster forked; the postmaster's own title has none."""
_PROC = Path("/proc")

logger = logging.getLogger(__name__)

# Locks (flock) on an instance's files: the kernel drops them when the process dies, however it dies.

MOUNTS = Path("/proc/self/mountinfo")
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_LOCKS_OF_THIS_HOST_ALONE = ("nolock", "local_lock=all", "local_lock=flock")
_NOT_HONOURED = (
    "the file system does not honour locks, so two servers could write to the folder: "
    "use a local disk, or mount it with locks"
)
_descriptors: set[int] = set()


def end_orphans(data: Path, lease: int) -> None:
    """Kills backends that hold a lease, if their postmaster is certainly dead.

    A backend is killed only if all of this is true in this PID namespace:

    - The process works in the data directory, and has the lease open.
    - Its title is that of a backend, and its parent is not a PostgreSQL process.
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
    """Returns the visible PostgreSQL processes that have a lease open."""
    state = os.fstat(lease)
    with _as_the_server(data.stat()):
        return [process for process in _postgres() if is_alive(process) and _holds(process, state)]


def described(process: psutil.Process) -> str:
    """Returns a process's id and command for a message."""
    with suppress(psutil.Error):
        return f"process {process.pid} ({' '.join(process.cmdline()).strip()})"
    return f"process {process.pid}"


def is_alive(process: psutil.Process) -> bool:
    """Returns whether a process runs, or may run; False for a zombie."""
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
    parent = process.ppid()  # 0: it is in another namespace
    return parent != 0 and bool(psutil.Process(parent).name() != PROGRAM)


@contextmanager
def _as_the_server(data: os.stat_result) -> Iterator[None]:
    """Gives this thread the rights of the data directory's owner to read /proc.

    In a container, root may lack the right to look at other users' processes. Source: setfsuid(2), ptrace(2).
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
    except (OSError, psutil.Error):  # it has ended, or this user may not look at it
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


def open_lock(path: Path) -> int:
    """Returns a descriptor of a lock file. A forked child closes its copy, so only this process holds the
    lock.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise unwritable(path.parent, error) from None
    _descriptors.add(descriptor)
    return descriptor


def try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # ENOLCK, ENOTSUP, ENOSYS: the file system has no locks
        raise InstanceError(f"{_NOT_HONOURED} ({error.strerror})") from None
    return True


def close_lock(descriptor: int) -> None:
    # Unlocked explicitly: a child that is about to exec may have a copy, so closing is not enough.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    hand_over(descriptor)


def hand_over(descriptor: int) -> None:
    """Closes the descriptor in this process. The lock remains until all processes that inherited it have
    ended.
    """
    _descriptors.discard(descriptor)
    os.close(descriptor)


def check_honoured(path: Path) -> None:
    """Raises `InstanceError` if the file system does not honour locks.

    The caller holds the file's lock, so a second descriptor must not get it.
    """
    second = open_lock(path)
    try:
        honoured = not try_lock(second) and not _of_this_host_alone(path)
    finally:
        close_lock(second)
    if not honoured:
        raise InstanceError(f"{path.parent}: {_NOT_HONOURED}")


def _of_this_host_alone(path: Path) -> bool:
    """Returns whether the mount keeps locks on this host (NFS with nolock or local_lock)."""
    device = path.stat().st_dev
    of_path = f" {os.major(device)}:{os.minor(device)} "
    try:
        mounts = [line for line in MOUNTS.read_text(errors="replace").splitlines() if of_path in line]
    except OSError:
        return False
    return any(
        option in mount.split()[-1].split(",") for mount in mounts for option in _LOCKS_OF_THIS_HOST_ALONE
    )


def unwritable(folder: Path, error: OSError) -> InstanceError:
    if error.errno in _READ_ONLY:
        return InstanceReadOnly(f"cannot write to {folder}: {error.strerror}")
    return InstanceError(f"cannot use {folder}: {error.strerror}")


def _close_in_child() -> None:
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


NAME = "postgres.running"
POLL_SECONDS = 0.02
ORPHAN_SECONDS = 1.0
"""The time in which backends should notice that their postmaster died.

It is also the pause between two searches for orphans.
"""

ANSWER_SECONDS_MAX = 1
CONTENT_BYTES_MAX = 4096
_SOCKETS = ".s.PGSQL.*[0-9]"


class HeldElsewhere(InstanceLocked):
    """An error: the server runs in another namespace or on another host, where it may be stopping."""


@dataclass(frozen=True)
class Holder(Process):
    """The server that holds a lease, and the time of its start; fields are empty if unknown."""

    since: str = ""


def take(data: Path, deadline: float, in_sight: Callable[[], bool]) -> int | None:
    """Takes the lease and returns its locked descriptor, for the server to inherit; None if a server is
    visible.

    Waits for processes of a server that is stopping, and kills orphans. Raises `HeldElsewhere` if the server
    runs where it cannot be seen, and `InstanceLocked` if a process keeps the lease too long.
    """
    folder = data.parent
    lease = open_lock(folder / NAME)
    won = False
    looks_again = time.monotonic() + ORPHAN_SECONDS
    try:
        while not (won := try_lock(lease)):
            holder = _read(lease)
            elsewhere = _is_elsewhere(holder)
            if not elsewhere and in_sight():
                return None
            if elsewhere:
                raise HeldElsewhere(str(_locked(folder, holder)))
            if time.monotonic() > looks_again:
                end_orphans(data, lease)
                looks_again = time.monotonic() + ORPHAN_SECONDS
            if time.monotonic() > deadline:
                raise _kept(data, lease, holder)
            time.sleep(POLL_SECONDS)
        os.ftruncate(lease, 0)  # the holder is unknown until it signs
        return lease
    finally:
        if not won:
            close_lock(lease)


def is_held_elsewhere(folder: Path) -> bool:
    """Returns whether the lease's holder is in another namespace.

    Then the process id in postmaster.pid means nothing here.
    """
    lease = open_lock(folder / NAME)
    try:
        return not try_lock(lease) and _is_elsewhere(_read(lease))
    finally:
        close_lock(lease)


def is_held_by(folder: Path, pid: int) -> bool:
    """Returns whether the server that holds the lease has this process id in this namespace."""
    lease = open_lock(folder / NAME)
    try:
        holder = _read(lease)
        signed = (holder.boot, holder.namespace, holder.pid) == (boot(), namespace(), pid)
        return signed and not holder.is_gone() and not try_lock(lease)
    finally:
        close_lock(lease)


def sign(lease: int, pid: int) -> None:
    """Records the server with this process id as the holder."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    holder = Holder(**asdict(process_here(pid)), since=since)
    os.pwrite(lease, json.dumps(asdict(holder)).encode(), 0)


def check_silent(data: Path, sockets: Path) -> None:
    """Raises `InstanceLocked` if a server answers that holds no lease and cannot be seen.

    Servers of an older Dormouse have no lease.
    """
    for listening in {*data.glob(_SOCKETS), *sockets.glob(_SOCKETS)}:
        with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
            client.settimeout(ANSWER_SECONDS_MAX)
            client.connect(str(listening))
            raise _locked(data.parent, Holder())


def _read(lease: int) -> Holder:
    try:
        return Holder(**json.loads(os.pread(lease, CONTENT_BYTES_MAX, 0)))
    except (ValueError, TypeError):  # its starter was killed before it signed
        return Holder()


def _is_elsewhere(holder: Holder) -> bool:
    return (holder.boot, holder.namespace) not in {("", ""), (boot(), namespace())}


def _kept(data: Path, lease: int, holder: Holder) -> InstanceLocked:
    """Returns the error that names the processes that hold the lease although no server is visible."""
    folder = data.parent
    if seen := holders(data, lease):
        more = f" and {len(seen) - 1} more" if len(seen) > 1 else ""
        return InstanceLocked(
            f"{folder} is locked by {described(seen[0])}{more}, and cannot be joined: end what locks it"
        )
    if holder.pid and holder.is_gone():
        return InstanceLocked(
            f"{folder} is locked by a process that cannot be seen from here; its PostgreSQL, process "
            f"{holder.pid}, has ended: end the process where it can be seen"
        )
    return HeldElsewhere(str(_locked(folder, holder)))


def _locked(folder: Path, holder: Holder) -> InstanceLocked:
    where = "where it cannot be seen from here"
    if holder.host:
        where = (
            f"on host {holder.host}, as process {holder.pid} of namespace {holder.namespace or '?'} "
            f"(boot {holder.boot or '?'}), since {holder.since}"
        )
    return InstanceLocked(f"{folder} is open elsewhere: its PostgreSQL runs {where}; use it there, or end it")

"""Locks (flock) on an instance's files: the kernel drops them when the process dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from dormouse.errors import InstanceError, InstanceReadOnly

MOUNTS = Path("/proc/self/mountinfo")
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_LOCKS_OF_THIS_HOST_ALONE = ("nolock", "local_lock=all", "local_lock=flock")
_NOT_HONOURED = (
    "the file system does not honour locks, so two servers could write to the folder: "
    "use a local disk, or mount it with locks"
)
_descriptors: set[int] = set()


def open_lock(path: Path) -> int:
    """A descriptor to lock; a forked child closes its copy, so that only this process holds the lock."""
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
    except OSError as error:  # ENOLCK, ENOTSUP, ENOSYS: it has none
        raise InstanceError(f"{_NOT_HONOURED} ({error.strerror})") from None
    return True


def close_lock(descriptor: int) -> None:
    # Unlocked by name: closing would not do while a child that is about to exec has a copy.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    hand_over(descriptor)


def hand_over(descriptor: int) -> None:
    """Closes it here; the lock stays with the processes that inherited it, until the last of them ends."""
    _descriptors.discard(descriptor)
    os.close(descriptor)


def check_honoured(path: Path) -> None:
    """Refuses a file system that gives a file's lock, which the caller holds, to a second descriptor.

    Raises `InstanceError`.
    """
    second = open_lock(path)
    try:
        honoured = not try_lock(second) and not _of_this_host_alone(path)
    finally:
        close_lock(second)
    if not honoured:
        raise InstanceError(f"{path.parent}: {_NOT_HONOURED}")


def _of_this_host_alone(path: Path) -> bool:
    """Whether it is mounted from a server that is not told of locks (NFS with nolock or local_lock)."""
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

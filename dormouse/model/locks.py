"""Locks of objects that a forked process goes on to use."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


class ProcessLock:
    """A lock between threads of one process. It is free in a forked child, where its holder does not run.

    A thread of the parent may have been in the middle of a change, so use it only where half a change does no
    harm, as in a cache.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._renew()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _renew(self) -> None:
        self._lock = threading.Lock()


_locks: WeakSet[ProcessLock] = WeakSet()


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        lock._renew()


os.register_at_fork(after_in_child=_after_fork_in_child)

"""Locks of objects that a forked process goes on to use."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet

_locks: WeakSet[threading.Lock] = WeakSet()


def process_lock() -> threading.Lock:
    """Returns a lock between threads of one process. It is free in a forked child, which lacks these threads.

    A thread of the parent may have been in the middle of a change, so use it only where half a change does no
    harm, as in a cache.

    It is a lock of Python itself. If `__enter__` were a method in Python, an interrupt (Ctrl-C) could end it
    after it took the lock, which would stay taken.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        if lock.locked():
            lock.release()


os.register_at_fork(after_in_child=_after_fork_in_child)

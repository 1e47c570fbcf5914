"""Locks of caches that a forked process goes on to use."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet

_locks: WeakSet[threading.Lock] = WeakSet()


def process_lock() -> threading.Lock:
    """Returns a lock between threads, which is free in a forked child, where its holder does not run.

    A thread of the parent may have been in the middle of a change, so use it only where half a change does no
    harm, as in a cache.
    """
    lock = threading.Lock()  # a class around it would let Ctrl-C come between its acquisition and `with`
    _locks.add(lock)
    return lock


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_after_fork_in_child)

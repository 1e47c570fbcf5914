"""The trees that a process remembers: the least recently used go when they take more than is allowed."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakSet, WeakValueDictionary

from dormouse.model.tree_arrays import TreeArrays

OWN_BYTES_MAX = 64 * 1024 * 1024
"""Of a cache that one store has for itself."""

ASKED_MAX = 10_000
"""Tables of which is remembered that their tree was asked for."""


@dataclass(frozen=True, slots=True)
class _Entry:
    arrays: TreeArrays
    byte_size: int


Key = int | tuple[int, int]
"""Of a table's tree of now; with an epoch, of an older one."""


class TreeCache:
    """Trees by table id, of at most `bytes_max` in all. Safe to share between threads; a fork begins anew."""

    def __init__(self, bytes_max: int = OWN_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._begin()
        _caches.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._byte_size = 0
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._too_large: set[int] = set()
        self._loading: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()

    @property
    def byte_size(self) -> int:
        """What its trees take in memory, as of when each was last put."""
        return self._byte_size

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> TreeArrays | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry.arrays

    def is_asked_again(self, table_id: int) -> bool:
        """Whether a tree that is not here was asked for before and would be kept: it pays to read it."""
        with self._lock:
            if table_id in self._too_large:
                return False
            again = table_id in self._asked
            self._asked[table_id] = None
            while len(self._asked) > ASKED_MAX:
                self._asked.popitem(last=False)
            return again

    def put(self, key: Key, arrays: TreeArrays) -> None:
        """Remembers a table's tree, or how large it is now; one larger than the cache is not kept."""
        with self._lock:
            self._remove(key)
            entry = _Entry(arrays, arrays.byte_size)
            if entry.byte_size > self.bytes_max:
                if isinstance(key, int):
                    self._too_large.add(key)
                return
            self._entries[key] = entry
            self._byte_size += entry.byte_size
            while self._byte_size > self.bytes_max:
                self._remove(next(iter(self._entries)))

    def drop(self, table_id: int) -> None:
        """Forgets a table."""
        with self._lock:
            self._remove(table_id)

    def loading(self, table_id: int) -> threading.Lock:
        """To be held while a table's tree is read, so that of all that need it one reads.

        Wait for it with the connection in hand: the thread that holds it must not wait for one.
        """
        with self._lock:
            return self._loading.setdefault(table_id, threading.Lock())

    def _remove(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._byte_size -= entry.byte_size


_caches: WeakSet[TreeCache] = WeakSet()


def _after_fork_in_child() -> None:
    """Other threads of the parent may have held a lock, or been in the middle of a change."""
    for cache in list(_caches):
        cache._begin()


os.register_at_fork(after_in_child=_after_fork_in_child)

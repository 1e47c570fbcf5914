"""How many connections there are at once, of whom; within the file descriptors that the process may have."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Protocol

FILES_OF_OTHERS = 128
"""File descriptors that queries need: of files, of the database, of processes that run SQL."""


class Connection(Protocol):
    """What can be dropped."""

    def abort(self) -> None: ...


class Connections:
    """Those of a server. When there are too many, the oldest goes that was not let in yet, or the newest."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._all: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}

    def add(self, connection: Connection) -> None:
        self._all.add(connection)
        self._strangers[connection] = None
        if len(self._all) > self._count_max:
            oldest = next(iter(self._strangers))
            self.discard(oldest)
            oldest.abort()

    def let_in(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)

    def discard(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._strangers.pop(connection, None)


def connections_possible(wanted: int) -> int:
    """So many, or as many as the process may have files, whose limit is raised as far as it may be.

    As many again may have come and not been counted yet.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + FILES_OF_OTHERS
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(min(wanted, (soft - FILES_OF_OTHERS) // 2), 1)

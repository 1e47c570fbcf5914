"""How a wait for a server that does not answer is ended: another thread shuts the socket down."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet

import psycopg

from dormouse.errors import InstanceError
from dormouse.postgres.session import Connection

END_SECONDS_MAX = 10.0
"""How long what is to end waits for a server that does not answer one statement."""

CLOSE_SECONDS = 30.0
"""How long work has to end by itself when what it belongs to is closed: a batch takes a second or two."""

AGAIN_SECONDS = 0.5
"""How often a thread that waits on after that is cut again, as it may try its statement again."""


class Lines:
    """The connections that a supplier opened, and those of suppliers that were made of it."""

    def __init__(self, above: Lines | None = None) -> None:
        self._above = above
        self._lock = threading.Lock()
        self._opened: WeakSet[Connection] = WeakSet()
        self._is_over = False

    @property
    def top(self) -> Lines:
        """Those of the supplier that all were made of; a thread may use connections of several."""
        return self if self._above is None else self._above.top

    def add(self, conn: Connection) -> None:
        """Notes a connection that was opened just now. Raises InstanceError when they are to end."""
        with self._lock:
            self._opened.add(conn)
        if self._above is not None:
            self._above.add(conn)
        self.check()

    def check(self) -> None:
        """Raises InstanceError after `end`."""
        if self._is_over:
            raise InstanceError("the instance is closed, and its database did not answer until then")
        if self._above is not None:
            self._above.check()

    def cut(self, threads: Collection[int] | None = None) -> bool:
        """Cuts what is lent to threads, named by their ids, or to any; returns whether something is."""
        lent = self._lent(threads)
        for conn in lent:
            conn.cut()
        return bool(lent)

    def end(self, seconds: float) -> None:
        """Gives what is lent so many seconds to come back; then cuts it, and opens no more.

        Returns at once: a thread of its own waits, where something is lent.
        """
        if not self._lent():
            return
        with suppress(RuntimeError):  # no thread starts while the program ends
            threading.Thread(target=self._end, args=(seconds,), name="dormouse-cut", daemon=True).start()

    def forget(self) -> None:
        """For a forked child, which leaves its parent's connections alone."""
        self._lock, self._opened = threading.Lock(), WeakSet()

    def _end(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._lent():
            if time.monotonic() >= until:
                self._is_over = True  # what is being opened now is closed
                self.cut()
                return
            time.sleep(min(AGAIN_SECONDS, seconds))

    def _lent(self, threads: Collection[int] | None = None) -> list[Connection]:
        with self._lock:
            opened = list(self._opened)
        return [
            conn
            for conn in opened
            if (thread := conn.lent_to) is not None
            and (threads is None or thread in threads)
            and not conn.closed
        ]


class Cuts(Protocol):
    """Connections that can be cut: those of `Lines`, or of a supplier."""

    def cut(self, threads: Collection[int]) -> bool:
        """Cuts what is lent to threads, which are named by their ids; returns whether something is."""
        ...


class Grace:
    """A context, in which the connections of some threads are cut when a time from `begin` on is over."""

    def __init__(self, lines: Cuts, seconds: float, threads: Collection[int]) -> None:
        self._lines = lines
        self._seconds = seconds
        self._threads = threads
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.has_cut = False
        """Whether the server did not answer in time."""

    def begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="dormouse-cut", daemon=True)
            with suppress(RuntimeError):  # no thread starts while the program ends
                self._thread.start()

    def __enter__(self) -> Grace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _watch(self) -> None:
        seconds = self._seconds
        while not self._over.wait(seconds):
            self.has_cut |= self._lines.cut(self._threads)
            seconds = AGAIN_SECONDS


@contextmanager
def cut_in_time(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Cuts a connection of a supplier when the block takes longer than `END_SECONDS_MAX`."""
    if not isinstance(conn, Connection):
        yield
        return
    timer = threading.Timer(END_SECONDS_MAX, conn.cut)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread starts while the program ends
        timer.start()
    try:
        yield
    finally:
        timer.cancel()

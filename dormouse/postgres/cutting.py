"""Connections, what bounds their sessions, and how a wait for a server that does not answer is ended.

PostgreSQL itself keeps the limits of a session. Where it does not answer, another thread shuts its socket.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet

import psycopg
from psycopg.rows import TupleRow

from dormouse.postgres.queries import PREPARED_MAX

Limits = Mapping[str, int]
"""Settings of PostgreSQL that limit how long something may take, in milliseconds; 0 is none."""

END_SECONDS_MAX = 10.0
"""How long what is to end waits for a server that does not answer one statement."""

CLOSE_SECONDS = 30.0
"""How long work has to end by itself when what it belongs to is closed: a batch takes a second or two."""

AGAIN_SECONDS = 0.5
"""How often a thread that waits on after that is cut again, as it may try its statement again."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The limits of one session."""

    usual: Limits = field(default_factory=dict)
    """The limits of a transaction that names no kind of work."""
    highest: Limits = field(default_factory=dict)
    """The limits that no kind of work exceeds: of the role, the server or the supplier; 0 is no limit.

    It has every limit that the server knows, and no other.
    """
    in_force: Limits = field(default_factory=dict)
    """The limits that the session has outside of a transaction."""
    given: frozenset[str] = frozenset()
    """The limits that the supplier was given, whose errors the caller handles."""

    def local(self, kind: Limits) -> str:
        """Returns what follows BEGIN to have the limits of a kind; nothing where the session has them."""
        wanted = {**self.usual, **kind}
        limits = {name: lower(wanted.get(name, 0), highest) for name, highest in self.highest.items()}
        differing = {name: limit for name, limit in limits.items() if limit != self.in_force[name]}
        return "".join(f"; set local {name} = {limit}" for name, limit in differing.items())


def lower(one: int, other: int) -> int:
    """Returns the lower of two limits, of which 0 is none."""
    return min(one, other) or max(one, other)


class Connection(psycopg.Connection[TupleRow]):
    """A connection that knows whose it is, and since when it is open and rests (`time.monotonic`)."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.prepared_max = PREPARED_MAX
        self.open_since = time.monotonic()
        self.rested_since = float("inf")
        self.is_spare = True
        """Whether the server has so many more that this one may be kept for later."""
        self.is_pooled = False
        """Whether each transaction may be another session's, as a pooler gives them out."""
        self.is_direct = False
        """Whether the server's process answers itself: the connection ends with the server."""
        self.limits = SessionLimits()
        self.lent_to: int | None = threading.get_ident()
        """The thread that opened or borrowed it, by its id; None while it rests."""

    def cut(self) -> None:
        """Shuts the socket down, from any thread: the one that waits for an answer gets an error.

        That thread may close the connection at any time, so this one has a descriptor of its own.
        """
        with suppress(OSError, psycopg.Error):
            number = self.fileno()
            with socket.socket(fileno=os.dup(number)) as same:
                if self.fileno() == number:  # it was not closed meanwhile, and its number given to another
                    same.shutdown(socket.SHUT_RDWR)

    def __del__(self, *_: Any) -> None:
        """A pooled connection ends with the program, which is nothing to warn of."""


def limits_of(conn: psycopg.Connection[Any]) -> SessionLimits:
    """Returns the limits of a session; none for a connection that no supplier opened."""
    return conn.limits if isinstance(conn, Connection) else SessionLimits()


def was_open_at(conn: psycopg.Connection[Any], since: float) -> bool:
    """Returns whether the session was open at `since` (`time.monotonic`): no crash of its server came later.

    Returns False behind a pooler or an RDS Proxy, whose connections outlive the server.
    """
    return isinstance(conn, Connection) and conn.is_direct and conn.open_since < since


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
        """Notes a connection that was opened just now."""
        with self._lock:
            self._opened.add(conn)
        if self._above is not None:
            self._above.add(conn)

    @property
    def is_over(self) -> bool:
        """Whether what was lent has been cut, and no more may be opened."""
        return self._is_over or (self._above is not None and self._above.is_over)

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

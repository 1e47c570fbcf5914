"""A connection that receives notifications, and a wait for these or for other threads of the process."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

from dormouse.errors import InstanceError
from dormouse.postgres.connection import Supplier
from dormouse.postgres.session import END_SECONDS_MAX, is_alive


class Listening:
    """A `Supplier` of one connection that listens on a channel, borrowed when it is needed. For one thread.

    Other threads may call `wake`. A dead connection is replaced; notifications sent meanwhile are lost.
    """

    def __init__(self, supplier: Supplier, channel: str) -> None:
        self._supplier = supplier
        self._channel = channel
        self._lent = ExitStack()
        self._conn: psycopg.Connection[TupleRow] | None = None
        self._asking_since: float | None = None
        self._asked_by: int | None = None
        self._is_cut = False
        self._ending: threading.Thread | None = None
        self._closed = threading.Event()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[TupleRow]]:
        """Lends the connection, and keeps it open for the next borrower.

        Raises InstanceError if the connection was cut, and the errors of `Supplier.connection`.
        """
        self._asking_since, self._asked_by = time.monotonic(), threading.get_ident()
        try:
            conn = self._conn
            if conn is None or not is_alive(conn):
                self.disconnect()
                self._check()
                conn = self._lent.enter_context(self._supplier.connection())
                self._conn = conn
                try:
                    self._check()
                    conn.execute(sql.SQL("listen {}").format(sql.Identifier(self._channel)))
                except BaseException:
                    self.disconnect()
                    raise
            yield conn
        finally:
            self._asking_since = None

    def end_soon(self) -> None:
        """Limits each wait for the server, from now on, to `END_SECONDS_MAX`.

        After a longer wait, the waiting thread gets an error, and no other connection is lent.
        """
        if self._ending is None:
            self._ending = threading.Thread(target=self._watch, name="dormouse-line", daemon=True)
            self._ending.start()

    @property
    def is_cut(self) -> bool:
        """True if the server did not answer in time, after `end_soon`. No connection is lent any more."""
        return self._is_cut

    def _watch(self) -> None:
        while not self._closed.wait(END_SECONDS_MAX / 10):
            since = self._asking_since
            if since is not None and time.monotonic() - since > END_SECONDS_MAX:
                self._cut()  # and again, if the thread tries another connection

    def _cut(self) -> None:
        self._is_cut = True
        # this also cuts a connection that is being opened
        self._supplier.cut([] if self._asked_by is None else [self._asked_by])

    def _check(self) -> None:
        if self._is_cut:
            raise InstanceError("the database does not answer, and this worker is being stopped")

    def wait(self, seconds: float) -> list[str]:
        """Waits for a notification, for `wake` or for the connection's end, at most so many seconds.

        Returns the payloads of the notifications that arrived.
        """
        if heard := self._heard():
            return heard
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if (conn := self._conn) is not None and not conn.closed:
            poll.register(conn.fileno(), select.POLLIN)
        poll.poll(max(seconds, 0) * 1_000)
        with suppress(BlockingIOError):
            while self._woken.recv(4_096):
                pass
        return self._heard()

    def wake(self) -> None:
        """Ends the present `wait`, or the next one if no thread waits now."""
        with suppress(OSError):  # it is full of wake-ups, or closed
            self._waker.send(b"w")

    def disconnect(self) -> None:
        """Closes the connection, so that a database without connections may pause."""
        if self._conn is not None:
            self._conn.close()
        self._conn = None
        self._lent.close()

    def cut(self, threads: Collection[int]) -> bool:
        return self._supplier.cut(threads)

    def close(self) -> None:
        self._closed.set()
        self.disconnect()
        self._waker.close()
        self._woken.close()

    def _heard(self) -> list[str]:
        if self._conn is None or self._conn.closed:
            return []
        try:
            return [notify.payload for notify in self._conn.notifies(timeout=0)]
        except psycopg.OperationalError:
            return []  # the next statement notices that it is dead

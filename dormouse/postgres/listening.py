"""A connection that is notified, and waits for that and for threads of its process at once."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

from dormouse.postgres.connection import Supplier
from dormouse.postgres.opening import is_alive


class Listening:
    """A `Supplier` of one connection, borrowed when it is needed, that listens on a channel. For one thread.

    `wake` may be called by others. A connection that died is replaced: what was notified meanwhile is lost.
    """

    def __init__(self, supplier: Supplier, channel: str) -> None:
        self._supplier = supplier
        self._channel = channel
        self._lent = ExitStack()
        self._conn: psycopg.Connection[TupleRow] | None = None
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[TupleRow]]:
        """As `Supplier.connection`; it is kept for later."""
        conn = self._conn
        if conn is None or not is_alive(conn):
            self.let_go()
            conn = self._lent.enter_context(self._supplier.connection())
            conn.execute(sql.SQL("listen {}").format(sql.Identifier(self._channel)))
            self._conn = conn
        yield conn

    def wait(self, seconds: float) -> list[str]:
        """Waits to be notified or woken; gives what the notifications say. A dead connection ends it, too."""
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
        """Ends `wait`, or the next one."""
        with suppress(OSError):  # it is full of these, or closed
            self._waker.send(b"w")

    def let_go(self) -> None:
        """Closes the connection, so that a database without any may pause itself."""
        if self._conn is not None:
            self._conn.close()
        self._conn = None
        self._lent.close()

    def close(self) -> None:
        self.let_go()
        self._waker.close()
        self._woken.close()

    def _heard(self) -> list[str]:
        if self._conn is None or self._conn.closed:
            return []
        try:
            return [notify.payload for notify in self._conn.notifies(timeout=0)]
        except psycopg.OperationalError:
            return []  # the next statement finds it dead

"""An advisory lock for work that takes longer than a transaction may, and a way to notice its loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import psycopg
from psycopg.rows import TupleRow

from dormouse.postgres.connection import Supplier
from dormouse.postgres.opening import is_alive
from dormouse.postgres.queries import Query, load

_QUERIES = load(__package__ or "", "session_lock")


class SessionLock:
    """A lock that `query` takes for a transaction, which stays open and idle for as long as the work goes on.

    A transaction keeps its session through a pooler, too, and while it is idle it keeps no snapshot. The lock
    ends with the session, for example when the server restarts. So the holder asks `is_held` before each unit
    of its work. For one thread.
    """

    def __init__(self, supplier: Supplier, query: Query, values: Mapping[str, Any] | None = None) -> None:
        self._supplier = supplier
        self._query = query
        self._values = values
        self._lent = ExitStack()
        self._conn: psycopg.Connection[TupleRow] | None = None
        self._session: Mapping[str, Any] | None = None
        self._is_taken = False

    def take(self) -> bool:
        """Tries once to take the lock, and returns whether this process has it now.

        Raises what `Supplier.connection` raises, and `psycopg.Error` when the session ends meanwhile.
        """
        if self._conn is not None and not is_alive(self._conn):
            self.release()
        if self._conn is None:
            self._conn = self._lent.enter_context(self._supplier.connection())
            if self._session is not None:  # a server may keep a lost session, and its lock, for a minute
                self._conn.execute(_QUERIES["end_session"].on(), self._session)
            self._conn.execute("begin", prepare=False)
            pid, began = self._conn.execute(_QUERIES["own_session"].on()).fetchall()[0]
            self._session = {"pid": pid, "began": began}
        self._is_taken = bool(self._conn.execute(self._query.on(), self._values).fetchall()[0][0])
        return self._is_taken

    def is_held(self) -> bool:
        """Returns whether the session that took the lock still lives; this takes a round trip."""
        return self._is_taken and self._conn is not None and is_alive(self._conn, ask=True)

    def release(self) -> None:
        """Ends the session's transaction, and with it the lock. A session that is lost is no error."""
        conn, self._conn, self._is_taken = self._conn, None, False
        with self._lent, suppress(psycopg.Error):
            if conn is not None:
                conn.execute("rollback", prepare=False)

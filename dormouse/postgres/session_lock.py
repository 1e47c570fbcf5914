"""An advisory lock for work that takes longer than a transaction may, and a way to notice its loss."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psycopg
from psycopg.rows import TupleRow

from dormouse.errors import one_line
from dormouse.postgres import limits
from dormouse.postgres.connection import Supplier
from dormouse.postgres.opening import limits_of
from dormouse.postgres.queries import Query, load
from dormouse.postgres.transaction import bounded

PULSES_A_LIMIT = 3
"""How often a holder says that it lives, within the time after which PostgreSQL would end its session."""

logger = logging.getLogger(__name__)
_QUERIES = load(__package__ or "", "session_lock")


class SessionLock:
    """A lock that `query` takes for a transaction, which stays open for as long as the work goes on.

    A transaction keeps its session through a pooler, too, and between statements it keeps no snapshot. The
    lock ends with the session, for example when the server restarts. So the holder asks `is_held` before each
    unit of its work. A thread asks the server something every `KEPT_PULSE_SECONDS`, or sooner where the role
    has a lower limit: a process that is frozen does not, so PostgreSQL ends its session.
    """

    def __init__(
        self,
        supplier: Supplier,
        query: Query,
        values: Mapping[str, Any] | None = None,
    ) -> None:
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
        if self._conn is not None and not _answers(self._conn):
            self.release()
        if self._conn is None:
            conn = self._lent.enter_context(self._supplier.connection())
            if self._session is not None:  # a server may keep a lost session, and its lock, for a minute
                conn.execute(_QUERIES["end_session"].on(), self._session)
            self._lent.enter_context(_kept(conn))
            self._conn = conn
            pid, began = conn.execute(_QUERIES["own_session"].on(), prepare=False).fetchall()[0]
            self._session = {"pid": pid, "began": began}
        # a prepared statement would keep its snapshot until the end, for which the offload of payloads waits
        found = self._conn.execute(self._query.on(), self._values, prepare=False).fetchall()
        self._is_taken = bool(found[0][0])
        return self._is_taken

    @property
    def session(self) -> Mapping[str, Any] | None:
        """The session that has the lock, or had it: `pid`, and when it `began`."""
        return self._session

    def is_held(self) -> bool:
        """Returns whether the session that took the lock still lives; this takes a round trip."""
        return self._is_taken and self._conn is not None and _answers(self._conn)

    def release(self) -> None:
        """Ends the session's transaction, and with it the lock. A session that is lost is no error."""
        self._conn, self._is_taken = None, False
        with suppress(psycopg.Error):
            self._lent.close()


def _answers(conn: psycopg.Connection[Any]) -> bool:
    """Returns whether the session answers, by a statement: another thread may use the connection just now."""
    try:
        conn.execute("", prepare=False)
    except psycopg.Error:
        return False
    return True


@contextmanager
def _kept(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Keeps a transaction open until the context ends."""
    with bounded(conn, limits.KEPT):
        ended = threading.Event()
        idle_ms = limits.lower(limits.KEPT[limits.IDLE], limits_of(conn).highest.get(limits.IDLE, 0))
        seconds = min(limits.KEPT_PULSE_SECONDS, idle_ms / 1_000 / PULSES_A_LIMIT)
        beating = threading.Thread(
            target=_beat, args=(conn, ended, seconds), name="session lock", daemon=True
        )
        beating.start()
        try:
            yield
        finally:
            ended.set()
            beating.join()


def _beat(conn: psycopg.Connection[Any], ended: threading.Event, seconds: float) -> None:
    while not ended.wait(seconds):
        try:
            conn.execute("", prepare=False)
        except psycopg.Error as error:
            logger.warning("a session that keeps a lock was lost: %s", one_line(error))
            return

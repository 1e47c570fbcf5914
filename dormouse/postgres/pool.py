"""A bounded pool of connections, which are handed over in the order in which they were asked for."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import psycopg
from psycopg.pq import TransactionStatus

from dormouse.model.ahead import backoff_seconds
from dormouse.postgres.cutting import cut_in_time
from dormouse.postgres.opening import Connection, Unavailable

logger = logging.getLogger(__name__)

OPEN_SECONDS_MAX = 3600.0
"""A backend's caches grow with every table it meets; an older connection is not kept."""


class PoolClosed(Exception):
    """The pool lends no more."""


class PoolTimeout(Exception):
    """All connections stayed lent."""


class _Waiter:
    def __init__(self, *, has_slot: bool) -> None:
        self.has_slot = has_slot
        self.called = threading.Event()
        self.conn: Connection | None = None


class Pool:
    """At most `size_max` connections, opened by the borrower, closed after `idle_seconds_max` of rest.

    A slot is a connection, lent or idle, or the right to open one. While the server has none to spare, the
    borrower that has that right tries again and again, and meanwhile takes one that comes back.
    """

    def __init__(
        self, open_connection: Callable[[], Connection], *, size_max: int, idle_seconds_max: float
    ) -> None:
        self._open_connection = open_connection
        self._size_max = size_max
        self._idle_seconds_max = idle_seconds_max
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._slots = 0
        self._idle: deque[Connection] = deque()  # the one that has rested longest is the first
        self._waiters: deque[_Waiter] = deque()
        self._closed = threading.Event()
        self._closes_idle_ones = False

    def take(self, deadline: float) -> Connection:
        """A connection, by a time of the monotonic clock; one that rested may have died.

        Raises PoolTimeout, PoolClosed, and what `open_connection` does (Unavailable after the deadline).
        """
        conn = self._take(deadline)
        conn.lent_to = threading.get_ident()
        return conn

    def _take(self, deadline: float) -> Connection:
        with self._lock:
            self._check_open()
            if self._idle:
                return self._idle.pop()
            has_slot = self._slots < self._size_max
            if has_slot:
                self._slots += 1
            else:
                waiter = self._queue(has_slot=False)
        if not has_slot:
            if not self._wait(waiter, deadline):
                raise PoolTimeout
            if waiter.conn is not None:
                return waiter.conn
        return self._open(deadline)

    def replace(self, conn: Connection, deadline: float) -> Connection:
        """Another connection for a lent one that is dead."""
        conn.close()
        return self._open(deadline)

    def give_back(self, conn: Connection) -> None:
        """Ends the transaction that is left open, if any."""
        if self._process != os.getpid():
            return  # a forked child leaves its parent's alone
        _end_transaction(conn)
        conn.lent_to, conn.rested_since = None, time.monotonic()
        if conn.closed or conn.rested_since - conn.open_since > OPEN_SECONDS_MAX or not self._keep(conn):
            conn.close()
            self._free_slot()

    def close(self) -> None:
        """Closes what is idle now, and what is lent when it comes back."""
        with self._lock:
            self._closed.set()
            idle, waiters = list(self._idle), list(self._waiters)
            self._idle.clear()
        for conn in idle:
            conn.close()
        for waiter in waiters:
            waiter.called.set()

    def _keep(self, conn: Connection) -> bool:
        with self._lock:
            if self._closed.is_set():
                return False
            if self._waiters:
                self._call(self._waiters.popleft(), conn)
                return True
            if not conn.is_spare:
                return False
            self._idle.append(conn)
            if not self._closes_idle_ones:
                with suppress(RuntimeError):  # no thread starts while the program ends
                    threading.Thread(
                        target=self._close_idle_ones, name="idle connections", daemon=True
                    ).start()
                    self._closes_idle_ones = True
            return True

    def _open(self, deadline: float) -> Connection:
        """Opens a connection in a slot that the caller has; the slot is free again when that fails."""
        try:
            attempt = 0
            while True:
                attempt += 1
                try:
                    return self._open_connection()
                except Unavailable as error:
                    if (now := time.monotonic()) >= deadline:
                        raise
                    logger.info("attempt %d: %s", attempt, error)
                with self._lock:
                    self._check_open()
                    waiter = self._queue(has_slot=True)
                self._wait(waiter, min(now + backoff_seconds(attempt), deadline))
                if waiter.conn is not None:
                    self._free_slot()
                    return waiter.conn
        except BaseException:
            self._free_slot()
            raise

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise PoolClosed

    def _queue(self, *, has_slot: bool) -> _Waiter:
        waiter = _Waiter(has_slot=has_slot)
        if has_slot:
            self._waiters.appendleft(waiter)
        else:
            self._waiters.append(waiter)
        return waiter

    def _wait(self, waiter: _Waiter, until: float) -> bool:
        """Waits to be called with a connection or a slot; whether it was."""
        try:
            waiter.called.wait(max(until - time.monotonic(), 0))
        except BaseException:
            if self._was_called(waiter):
                self._pass_on(waiter)
            raise
        if self._was_called(waiter):
            return True
        self._check_open()
        return False

    def _was_called(self, waiter: _Waiter) -> bool:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                return False
        return True

    def _pass_on(self, waiter: _Waiter) -> None:
        if waiter.conn is not None:
            self.give_back(waiter.conn)
        else:
            self._free_slot()

    @staticmethod
    def _call(waiter: _Waiter, conn: Connection | None) -> None:
        waiter.conn = conn
        waiter.called.set()

    def _free_slot(self) -> None:
        """Gives a slot without a connection to the first borrower that waits and has none."""
        with self._lock:
            waiter = next((w for w in self._waiters if not w.has_slot), None)
            if waiter is None or self._closed.is_set():
                self._slots -= 1
                return
            self._waiters.remove(waiter)
            self._call(waiter, None)

    def _close_idle_ones(self) -> None:
        seconds = 0.0
        while not self._closed.wait(seconds):
            expired = []
            with self._lock:
                now = time.monotonic()
                while self._idle and self._idle[0].rested_since + self._idle_seconds_max <= now:
                    expired.append(self._idle.popleft())
                self._slots -= len(expired)
                self._closes_idle_ones = remain = bool(self._idle)
                if remain:
                    seconds = self._idle[0].rested_since + self._idle_seconds_max - now
            for conn in expired:
                conn.close()
            if not remain:
                return


def _end_transaction(conn: Connection) -> None:
    status = conn.pgconn.transaction_status
    if conn.closed or status == TransactionStatus.IDLE:
        return
    logger.warning("a connection came back in the middle of a transaction, which is rolled back")
    if status == TransactionStatus.ACTIVE:
        conn.close()
        return
    try:
        with cut_in_time(conn):
            conn.rollback()
    except psycopg.Error:
        conn.close()

"""Connections to PostgreSQL: borrowed from a bounded pool, opened on demand and closed when idle."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from functools import partial
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from dormouse.errors import ConnectionsExhausted, InstanceError, one_line
from dormouse.model.loops import backoff_seconds
from dormouse.postgres.queries import load
from dormouse.postgres.session import (
    AGAIN_SECONDS,
    CLOSE_SECONDS,
    END_SECONDS_MAX,
    SCAN_SETTINGS,
    SESSION_SETTINGS,
    SHORT,
    Connection,
    Isolation,
    Limits,
    Lines,
    SessionLimits,
    Unavailable,
    connect,
    cut_in_time,
    describe,
    is_alive,
    is_by_rds_proxy,
    lower,
    session_conninfo,
)

logger = logging.getLogger(__name__)

OPEN_SECONDS_MAX = 3600.0
"""The age after which a connection is closed, because a backend's caches grow with each table it uses."""

CHECK_AFTER_IDLE_SECONDS = 1.0
"""The idle time after which a connection is checked by a round trip before it is lent again."""

DAMAGES = (errors.DataCorrupted, errors.IndexCorrupted, errors.IoError, errors.UndefinedFile)
"""The errors that report damaged storage: a page that is corrupt or cannot be read, or a missing file."""

_QUERIES = load(__package__, "connection")

DURABLY = _QUERIES["durably"]
"""A statement that makes its transaction's COMMIT wait until this and all earlier commits are on disk."""


class Cuts(Protocol):
    """An object whose connections can be cut: `Lines` or a supplier."""

    def cut(self, threads: Collection[int]) -> bool:
        """Cuts the connections that are lent to these threads (by id); returns whether there were any."""
        ...


class Grace:
    """A context that cuts the connections of some threads, so many seconds after `begin`."""

    def __init__(self, lines: Cuts, seconds: float, threads: Collection[int]) -> None:
        self._lines = lines
        self._seconds = seconds
        self._threads = threads
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.has_cut = False
        """True if the server did not answer in time."""

    def begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="dormouse-cut", daemon=True)
            with suppress(RuntimeError):  # no thread can start while the program ends
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


class PoolClosed(Exception):
    """The pool is closed and lends no connection."""


class PoolTimeout(Exception):
    """No connection came back in time."""


class _Waiter:
    def __init__(self, *, has_slot: bool) -> None:
        self.has_slot = has_slot
        self.called = threading.Event()
        self.conn: Connection | None = None


class Pool:
    """A pool of at most `size_max` connections, which are closed after `idle_seconds_max` without use.

    The pool has `size_max` slots. A slot holds a connection, lent or idle, or the right to open one.
    Borrowers open connections themselves. While the server accepts no more connections, the borrower tries
    again, or takes a connection that another borrower gives back.
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
        self._idle: deque[Connection] = deque()  # the longest-idle connection is the first
        self._waiters: deque[_Waiter] = deque()
        self._closed = threading.Event()
        self._closes_idle_ones = False

    def take(self, deadline: float) -> Connection:
        """Returns a connection before `deadline` (of the monotonic clock); an idle one may have died.

        Raises PoolTimeout, PoolClosed, and the errors of `open_connection` (Unavailable after the deadline).
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
        """Closes a dead connection and returns another one in its place."""
        conn.close()
        return self._open(deadline)

    def give_back(self, conn: Connection) -> None:
        """Takes a connection back and rolls back its open transaction, if any."""
        if self._process != os.getpid():
            return  # a forked child does not touch its parent's connections
        _end_transaction(conn)
        conn.lent_to, conn.rested_since = None, time.monotonic()
        if conn.closed or conn.rested_since - conn.open_since > OPEN_SECONDS_MAX or not self._keep(conn):
            conn.close()
            self._free_slot()

    def close(self) -> None:
        """Closes idle connections now, and lent connections when they come back."""
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
                with suppress(RuntimeError):  # no thread can start while the program ends
                    threading.Thread(
                        target=self._close_idle_ones, name="idle connections", daemon=True
                    ).start()
                    self._closes_idle_ones = True
            return True

    def _open(self, deadline: float) -> Connection:
        """Opens a connection in a slot that the caller has; frees the slot if that fails."""
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
        """Waits for a connection or a slot; returns whether one came."""
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
        """Gives a slot without a connection to the first waiting borrower that has none."""
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
    logger.warning("a connection was returned in the middle of a transaction, which is rolled back")
    if status == TransactionStatus.ACTIVE:
        conn.close()
        return
    try:
        with cut_in_time(conn):
            conn.rollback()
    except psycopg.Error:
        conn.close()


class Supplier(Protocol):
    """A lender of connections in autocommit mode, with time zone UTC and search path `dormouse`."""

    def connection(self) -> AbstractContextManager[psycopg.Connection[TupleRow]]:
        """Lends a connection until the context ends.

        Raises InstanceError if the server cannot be reached, and ConnectionsExhausted if no connection became
        free within `wait_seconds_max`.
        """
        ...

    def cut(self, threads: Collection[int]) -> bool:
        """Ends the waits of these threads (by id) for the server, with an error.

        Returns whether one of them has a connection.
        """
        ...

    def close(self) -> None:
        """Closes the open connections; the supplier lends no more."""
        ...


class ConnectionSupplier:
    """A lender of pooled connections: at most `connections_max`, closed after `idle_seconds_max` without use.

    Borrowers are served in the order in which they came. They also wait while the server has too many
    connections or restarts. A connection that died in the pool is replaced before it is lent. A forked child
    gets its own pool. `revive` is called when the server does not answer: it may start the server again, and
    returns whether it did.
    """

    def __init__(
        self,
        dsn: str,
        *,
        connections_max: int = 8,
        idle_seconds_max: float = 60,
        wait_seconds_max: float = 30,
        application_name: str = "dormouse",
        read_only: bool = False,
        isolation: Isolation = Isolation.READ_COMMITTED,
        search_path: str = SESSION_SETTINGS["search_path"],
        revive: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings = {**SESSION_SETTINGS, "search_path": search_path}
        self._conninfo_of = partial(
            session_conninfo,
            dsn,
            application_name=application_name,
            isolation=isolation,
            search_path=search_path,
        )
        self._conninfo = self._conninfo_of(read_only=read_only)
        self._connections_max = connections_max
        self._idle_seconds_max = idle_seconds_max
        self._wait_seconds_max = wait_seconds_max
        self._revive = revive
        self._limits_ms: Limits = {}
        self._waits_for_disk = True
        self._scans = False
        self._reached_before = False
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._lines = Lines()
        self._closed = False
        _suppliers.add(self)

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[TupleRow]]:
        pool = self._open_pool()
        conn = self._borrow(pool)
        try:
            yield conn
        except DAMAGES as error:
            raise InstanceError(
                f"{describe(self._conninfo)} is damaged: {one_line(error)}; 'dormouse check' lists the "
                "lost data, 'dormouse restore' brings it back from a backup"
            ) from error
        finally:
            pool.give_back(conn)

    def close(self) -> None:
        """Closes the supplier.

        Connections still lent after `CLOSE_SECONDS` are cut, so that the program can end.
        """
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        self._lines.end(CLOSE_SECONDS)

    def cut(self, threads: Collection[int]) -> bool:
        return self._lines.top.cut(threads)

    def limited(self, **limits_ms: int) -> ConnectionSupplier:
        """Returns another supplier, whose sessions have these limits in milliseconds, such as `lock_timeout`.

        No transaction exceeds them, whatever its kind. A lower limit of the server or the role stays in
        force. When a limit ends a statement, psycopg's error is raised for the caller to handle.
        """
        made = self._another()
        made._limits_ms = limits_ms
        return made

    def hurried(self) -> ConnectionSupplier:
        """Returns a similar supplier whose sessions do not wait for the disk when they commit.

        Their commits are visible before they are safe from a crash. Transactions that must wait use
        `DURABLY`.
        """
        made = self._another()
        made._waits_for_disk = False
        return made

    def scanning(self) -> ConnectionSupplier:
        """Returns a similar supplier, in whose sessions the planner may scan, hash and merge.

        Sessions of a pooler stay unchanged.
        """
        made = self._another()
        made._scans = True
        return made

    def is_standby(self) -> bool:
        """Returns whether the server reports that it is a standby, which accepts only reads."""
        with self.connection() as conn:
            return conn.info.parameter_status("in_hot_standby") == "on"

    def forbid_writes(self, *, forbidden: bool = True) -> None:
        """Makes the sessions read-only from now on, or lets them write again."""
        with self._lock:
            self._conninfo = self._conninfo_of(read_only=forbidden)
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Prepares to close the supplier: from now on, no borrower waits for a server or starts one.

        Within the block, this thread waits at most `END_SECONDS_MAX` for the server's answers.
        """
        self._wait_seconds_max, self._revive = 0.0, lambda: False
        with Grace(self, END_SECONDS_MAX, [threading.get_ident()]) as grace:
            grace.begin()
            yield

    def _another(self) -> ConnectionSupplier:
        made = copy(self)
        made._lock, made._pool, made._closed = threading.Lock(), None, False
        made._lines = Lines(self._lines)
        _suppliers.add(made)
        return made

    def _open_pool(self) -> Pool:
        if (pool := self._pool) is not None:
            return pool
        with self._lock:
            if self._closed:
                raise InstanceError("the instance is closed")
            if self._pool is None:
                self._pool = Pool(
                    self._connect, size_max=self._connections_max, idle_seconds_max=self._idle_seconds_max
                )
            return self._pool

    def _connect(self) -> Connection:
        self._lines.check()
        try:
            conn = connect(self._conninfo, reached_before=self._reached_before)
        except InstanceError:
            if not self._revive():
                raise
            conn = connect(self._conninfo, reached_before=True)
        try:
            self._lines.add(conn)
            self._look(conn)
            if not self._waits_for_disk and not conn.is_pooled:
                conn.execute(_QUERIES["hurry"].on())
            if self._scans and not conn.is_pooled:
                conn.execute(_QUERIES["scan"].on(), {"names": list(SCAN_SETTINGS)})
        except BaseException as error:
            conn.close()
            if isinstance(error, psycopg.OperationalError):
                raise Unavailable(f"{describe(self._conninfo)} ended the connection at once") from error
            raise
        self._reached_before = True
        return conn

    def _look(self, conn: Connection) -> None:
        """Checks the settings and limits of a new session, and detects a pooler.

        Raises InstanceError if a pooler drops the session's settings.
        """
        usual = {**SHORT, **self._limits_ms}
        values = {
            "names": list(self._settings),
            "values": list(self._settings.values()),
            "limits": list(usual),
            "milliseconds": list(usual.values()),
            "process_id": conn.info.backend_pid,
        }
        found = conn.execute(_QUERIES["look"].on(), values, prepare=False).fetchone()
        assert found is not None  # noqa: S101 it is one row
        conn.is_spare, process_id, lost, limits = found
        if lost:
            raise InstanceError(
                f"{describe(self._conninfo)}: a pooler drops the settings of sessions; connect "
                f"directly to PostgreSQL, or give each to the role by ALTER ROLE … SET: {', '.join(lost)}"
            )
        conn.is_direct = is_own = process_id == conn.info.backend_pid
        if not is_own and not is_by_rds_proxy(self._conninfo):
            # the next statement may run in another session, where our names mean other statements
            conn.is_pooled = True
            conn.prepare_threshold = None
        conn.limits = self._limits_of(dict(zip(usual, limits, strict=True)), usual, is_own=is_own)

    def _limits_of(self, set_by: Mapping[str, int | None], usual: Limits, *, is_own: bool) -> SessionLimits:
        """Returns the limits of a session.

        `set_by` has the limits that the role or the server set, or None. `is_own` is false behind a pooler
        or an RDS Proxy.
        """
        own = {name: limit for name, limit in set_by.items() if limit is not None}
        # `roles.make_roles` gives roles the limits of SHORT, which must not bound other kinds
        highest = {name: 0 if limit == SHORT[name] else limit for name, limit in own.items()}
        return SessionLimits(
            usual,
            {name: lower(limit, self._limits_ms.get(name, 0)) for name, limit in highest.items()},
            {name: lower(limit, usual[name]) for name, limit in own.items()} if is_own else own,
            frozenset(self._limits_ms),
        )

    def _borrow(self, pool: Pool) -> Connection:
        deadline = time.monotonic() + self._wait_seconds_max
        try:
            conn = pool.take(deadline)
            while not is_alive(conn, ask=time.monotonic() - conn.rested_since > CHECK_AFTER_IDLE_SECONDS):
                conn = pool.replace(conn, deadline)
        except PoolTimeout:
            raise self._exhausted() from None
        except PoolClosed:
            raise InstanceError("the instance is closed") from None
        except Unavailable as error:
            raise error.after(self._wait_seconds_max) from None
        return conn

    def _exhausted(self) -> ConnectionsExhausted:
        with suppress(Unavailable):
            connect(self._conninfo).close()  # raises if the server itself does not answer
        return ConnectionsExhausted(
            f"none of the {self._connections_max} connections to {describe(self._conninfo)} became free "
            f"within {self._wait_seconds_max:g} s; raise connections_max or run fewer operations at once"
        )

    def _forget_inherited_pool(self) -> None:
        if self._pool is not None:
            _inherited.append(self._pool)
        self._pool, self._lock = None, threading.Lock()
        self._lines.forget()


_suppliers: WeakSet[ConnectionSupplier] = WeakSet()
_inherited: list[Any] = []  # the parent's pools: a forked child neither uses nor closes them


def _after_fork_in_child() -> None:
    forget: Callable[[ConnectionSupplier], None] = ConnectionSupplier._forget_inherited_pool
    for supplier in list(_suppliers):
        forget(supplier)


os.register_at_fork(after_in_child=_after_fork_in_child)

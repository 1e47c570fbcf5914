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
"""A backend's caches grow with every table it meets; an older connection is not kept."""

CHECK_AFTER_IDLE_SECONDS = 1.0
"""A connection that rested longer is asked whether it is alive before it is lent again."""

DAMAGES = (errors.DataCorrupted, errors.IndexCorrupted, errors.IoError, errors.UndefinedFile)
"""A page that is not what was written, or that cannot be read; a file that is gone."""

_QUERIES = load(__package__, "connection")

DURABLY = _QUERIES["durably"]
"""Within a transaction: it waits for the disk, and so is what was committed before it."""


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


class Supplier(Protocol):
    """Lends connections. Each is in autocommit mode, in UTC, and sees the schema `dormouse`."""

    def connection(self) -> AbstractContextManager[psycopg.Connection[TupleRow]]:
        """Lends a connection until the context ends.

        Raises InstanceError when the server cannot be reached, ConnectionsExhausted when none became free
        within `wait_seconds_max`.
        """
        ...

    def cut(self, threads: Collection[int]) -> bool:
        """Has threads, which are named by their ids, get an error where they wait for the server.

        Returns whether one of them has a connection.
        """
        ...

    def close(self) -> None:
        """Closes what is open; the supplier lends no more."""
        ...


class ConnectionSupplier:
    """Lends pooled connections: at most `connections_max`, closed after `idle_seconds_max` without use.

    Borrowers wait in the order in which they came. They also wait while the server has too many connections
    or restarts. A connection that died in the pool is replaced before it is lent. A forked child gets a pool
    of its own. `revive` is asked to start the server again when it does not answer, and tells whether it did.
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
                f"{describe(self._conninfo)} is damaged: {one_line(error)}; 'dormouse check' lists what is "
                "lost, 'dormouse restore' brings it back from a backup"
            ) from error
        finally:
            pool.give_back(conn)

    def close(self) -> None:
        """As of every supplier. What is lent after `CLOSE_SECONDS` is cut, so that the program can end."""
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

        No transaction of theirs exceeds them, whatever its kind. A limit of the server's or the role's own is
        kept when it is lower. What they end raises psycopg's error, for the caller to handle.
        """
        made = self._another()
        made._limits_ms = limits_ms
        return made

    def hurried(self) -> ConnectionSupplier:
        """Another supplier alike, whose sessions do not wait for the disk when they commit.

        What they commit is seen before it is safe from a crash. `DURABLY` is for transactions that must wait.
        """
        made = self._another()
        made._waits_for_disk = False
        return made

    def scanning(self) -> ConnectionSupplier:
        """Another supplier alike, in whose sessions also a lone statement may scan, as with `scans`.

        Sessions of a pooler stay as they are.
        """
        made = self._another()
        made._scans = True
        return made

    def is_standby(self) -> bool:
        """Whether the server replays what another does, as far as it tells; only reads can be asked of it."""
        with self.connection() as conn:
            return conn.info.parameter_status("in_hot_standby") == "on"

    def forbid_writes(self, *, forbidden: bool = True) -> None:
        """From here on the sessions read only, or may write again."""
        with self._lock:
            self._conninfo = self._conninfo_of(read_only=forbidden)
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """From here on nothing waits for a server, nor starts one: the supplier is about to be closed.

        A server that this thread asks within, and that does not answer, is waited for in bounded time.
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
        """Sees what is between, and bounds the session.

        Raises InstanceError when the session is not as it was asked for.
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
                f"{describe(self._conninfo)}: a pooler takes the settings of sessions away; connect "
                f"to PostgreSQL itself, or give the role each by ALTER ROLE … SET: {', '.join(lost)}"
            )
        conn.is_direct = is_own = process_id == conn.info.backend_pid
        if not is_own and not is_by_rds_proxy(self._conninfo):
            # the next statement may be another session's, in which names of ours mean statements of others
            conn.is_pooled = True
            conn.prepare_threshold = None
        conn.limits = self._limits_of(dict(zip(usual, limits, strict=True)), usual, is_own=is_own)

    def _limits_of(self, found: Mapping[str, int | None], usual: Limits, *, is_own: bool) -> SessionLimits:
        """Returns the limits of a session from those that the role and the server gave it."""
        own = {name: limit for name, limit in found.items() if limit is not None}
        # `roles.make_roles` gives roles those of SHORT, which bound no other kind
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
            connect(self._conninfo).close()  # raises when it is the server that is gone
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
_inherited: list[Any] = []  # pools of the parent: never used, and never closed, by a forked child


def _after_fork_in_child() -> None:
    forget: Callable[[ConnectionSupplier], None] = ConnectionSupplier._forget_inherited_pool
    for supplier in list(_suppliers):
        forget(supplier)


os.register_at_fork(after_in_child=_after_fork_in_child)

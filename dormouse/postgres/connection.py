"""Connections to PostgreSQL: borrowed, bounded, opened on demand and closed when idle."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from enum import StrEnum
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import psycopg
from psycopg import errors
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from dormouse.errors import ConnectionsExhausted, InstanceError, one_line
from dormouse.postgres.cutting import CLOSE_SECONDS, END_SECONDS_MAX, Grace, Lines
from dormouse.postgres.limits import (
    SHORT,
    Limits,
    SessionLimits,
    lower,
    peer_parameters,
    peer_settings,
)
from dormouse.postgres.opening import (
    Connection,
    Unavailable,
    connect,
    describe,
    is_alive,
    is_by_rds_proxy,
    parameters,
)
from dormouse.postgres.pool import Pool, PoolClosed, PoolTimeout
from dormouse.postgres.queries import load

logger = logging.getLogger(__name__)

SCAN_SETTINGS = ("enable_seqscan", "enable_hashjoin", "enable_mergejoin")
"""What sessions do without, as all that runs often looks rows up by keys."""

SESSION_SETTINGS = {
    "search_path": "dormouse",  # pg_catalog is searched first, without being named
    "timezone": "UTC",
    "datestyle": "ISO, MDY",  # the only one whose dates psycopg reads
    "jit": "off",  # compiling costs more than our short statements
    # Plans of statements over arrays must not depend on the arrays that came first.
    "plan_cache_mode": "force_generic_plan",
    # Nor on how small a table was when they were made: see `scans` of run_transaction.
    **dict.fromkeys(SCAN_SETTINGS, "off"),
}
"""Of every session of ours; those through an RDS Proxy have them from their role."""

GUARDED_PATH = "pg_catalog, pg_temp"
"""The search path of an administrator, whose statements name the schema `dormouse` where they need it.

With the schema in the path, a function or an operator that its owner made there is called instead of
PostgreSQL's own when its types fit better, and with the administrator's rights.
"""

CHECK_AFTER_IDLE_SECONDS = 1.0
"""A connection that rested longer is asked whether it is alive before it is lent again."""

DAMAGES = (errors.DataCorrupted, errors.IndexCorrupted, errors.IoError, errors.UndefinedFile)
"""A page that is not what was written, or that cannot be read; a file that is gone."""

_QUERIES = load(__package__, "connection")

DURABLY = _QUERIES["durably"]
"""Within a transaction: it waits for the disk, and so is what was committed before it."""

_CONNECT_SECONDS_MAX = 10


class Isolation(StrEnum):
    """The isolation level of a transaction, as PostgreSQL spells it."""

    READ_COMMITTED = "read committed"
    REPEATABLE_READ = "repeatable read"
    SERIALIZABLE = "serializable"


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
        self._conninfo_of = partial(_conninfo_of, dsn, application_name, isolation, search_path)
        self._conninfo = self._conninfo_of(read_only)
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
            self._conninfo = self._conninfo_of(forbidden)
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


def _conninfo_of(
    dsn: str, application_name: str, isolation: Isolation, search_path: str, read_only: bool
) -> str:
    return session_conninfo(
        dsn,
        application_name=application_name,
        read_only=read_only,
        isolation=isolation,
        search_path=search_path,
    )


def session_conninfo(
    dsn: str,
    *,
    application_name: str,
    read_only: bool,
    isolation: Isolation,
    search_path: str = SESSION_SETTINGS["search_path"],
) -> str:
    """The DSN with the session's settings, which take no round trip when they travel with the connection."""
    given = parameters(dsn)
    settings = {
        **SESSION_SETTINGS,
        "search_path": search_path,
        "default_transaction_isolation": isolation.value,
        "default_transaction_read_only": "on" if read_only else "off",
    }
    options = [
        *(f"-c {name}={value}" for name, value in peer_settings().items()),  # the DSN may say otherwise
        str(given.get("options") or ""),
        *(f"-c {name}={_escaped(value)}" for name, value in settings.items()),
    ]
    defaults = {
        "application_name": application_name,
        "connect_timeout": _CONNECT_SECONDS_MAX,
        **peer_parameters(),
    }
    return make_conninfo("", **{**defaults, **given, "options": " ".join(filter(None, options))})


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


_suppliers: WeakSet[ConnectionSupplier] = WeakSet()
_inherited: list[Any] = []  # pools of the parent: never used, and never closed, by a forked child


def _after_fork_in_child() -> None:
    forget: Callable[[ConnectionSupplier], None] = ConnectionSupplier._forget_inherited_pool
    for supplier in list(_suppliers):
        forget(supplier)


os.register_at_fork(after_in_child=_after_fork_in_child)

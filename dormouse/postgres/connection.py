"""Connections to PostgreSQL: borrowed, bounded, opened on demand and closed when idle."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import Any, Protocol
from weakref import WeakSet

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from dormouse.errors import ConnectionsExhausted, InstanceError, InvalidInput

POSTGRES_VERSION_MIN = 150000
"""PostgreSQL 15, as `server_version_num` writes it."""

CHECK_AFTER_IDLE_SECONDS = 1.0
"""A connection that rested longer is asked whether it is alive before it is lent again."""

PREPARED_MAX = 500
"""A table has about twenty statements, and a committer meets many tables."""

_CONNECT: dict[str, Any] = {"autocommit": True, "prepare_threshold": 2}
_DEFAULTS = {
    "connect_timeout": 10,
    # A peer that vanished without a word is noticed within about a minute.
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}


class Isolation(StrEnum):
    """The isolation level of a transaction, as PostgreSQL spells it."""

    READ_COMMITTED = "read committed"
    REPEATABLE_READ = "repeatable read"
    SERIALIZABLE = "serializable"


class Supplier(Protocol):
    """Lends connections. Each is in autocommit mode, in UTC, and sees the schema `dormouse`."""

    def connection(self) -> AbstractContextManager[psycopg.Connection[TupleRow]]:
        """Lends a connection until the context ends.

        Raises InstanceError when the server cannot be reached, ConnectionsExhausted when none became free.
        """
        ...

    def close(self) -> None:
        """Closes what is open; the supplier lends no more."""
        ...


class _Connection(psycopg.Connection[TupleRow]):
    """A connection that knows since when it has rested in the pool."""

    rested_since: float = float("inf")

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.prepared_max = PREPARED_MAX


class ConnectionSupplier:
    """Lends pooled connections: at most `connections_max`, closed after `idle_seconds_max` without use.

    A connection that died in the pool is replaced before it is lent. A forked child gets a pool of its own.
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
    ) -> None:
        self._conninfo = session_conninfo(
            dsn, application_name=application_name, read_only=read_only, isolation=isolation
        )
        self._connections_max = connections_max
        self._idle_seconds_max = idle_seconds_max
        self._wait_seconds_max = wait_seconds_max
        self._lock = threading.Lock()
        self._pool: ConnectionPool[_Connection] | None = None
        self._closed = False
        _suppliers.add(self)

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[TupleRow]]:
        pool = self._open_pool()
        conn = self._borrow(pool)
        try:
            yield conn
        finally:
            conn.rested_since = time.monotonic()
            pool.putconn(conn)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _open_pool(self) -> ConnectionPool[_Connection]:
        if (pool := self._pool) is not None:
            return pool
        with self._lock:
            if self._closed:
                raise InstanceError("the instance is closed")
            if self._pool is None:
                # The pool would try for wait_seconds_max; a wrong address should be reported at once.
                connect(self._conninfo).close()
                self._pool = self._new_pool()
            return self._pool

    def _new_pool(self) -> ConnectionPool[_Connection]:
        return ConnectionPool(
            self._conninfo,
            connection_class=_Connection,
            kwargs=_CONNECT,
            min_size=0,
            max_size=self._connections_max,
            timeout=self._wait_seconds_max,
            # The pool closes one unused connection per max_idle; so all are gone after idle_seconds_max.
            max_idle=self._idle_seconds_max / self._connections_max,
            reconnect_timeout=self._wait_seconds_max,
            open=True,
        )

    def _borrow(self, pool: ConnectionPool[_Connection]) -> _Connection:
        deadline = time.monotonic() + self._wait_seconds_max
        while True:
            try:
                conn = pool.getconn(timeout=max(deadline - time.monotonic(), 0.001))
            except PoolTimeout:
                raise self._exhausted() from None
            except PoolClosed:
                raise InstanceError("the instance is closed") from None
            if is_alive(conn, ask=time.monotonic() - conn.rested_since > CHECK_AFTER_IDLE_SECONDS):
                return conn
            conn.close()
            pool.putconn(conn)

    def _exhausted(self) -> ConnectionsExhausted:
        connect(self._conninfo).close()  # raises when it is the server that is gone
        return ConnectionsExhausted(
            f"none of the {self._connections_max} connections to {describe(self._conninfo)} became free "
            f"within {self._wait_seconds_max:g} s; raise connections_max or run fewer operations at once"
        )

    def _forget_inherited_pool(self) -> None:
        if self._pool is not None:
            _inherited.append(self._pool)
        self._pool, self._lock = None, threading.Lock()


class OneShotConnectionSupplier:
    """Opens a connection per call and keeps nothing, so that an idle database can pause itself."""

    def __init__(
        self,
        dsn: str,
        *,
        application_name: str = "dormouse",
        read_only: bool = False,
        isolation: Isolation = Isolation.READ_COMMITTED,
    ) -> None:
        self._conninfo = session_conninfo(
            dsn, application_name=application_name, read_only=read_only, isolation=isolation
        )
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[TupleRow]]:
        if self._closed:
            raise InstanceError("the instance is closed")
        conn = connect(self._conninfo)
        try:
            yield conn
        finally:
            conn.close()

    def close(self) -> None:
        self._closed = True


def connect(conninfo: str) -> psycopg.Connection[TupleRow]:
    """A connection in autocommit mode, or InstanceError in one line that never has the password."""
    try:
        conn = _Connection.connect(conninfo, **_CONNECT)
    except psycopg.OperationalError as error:
        reason = " ".join(str(error).split())
        raise InstanceError(f"cannot connect to {describe(conninfo)}: {reason}") from None
    if conn.info.server_version < POSTGRES_VERSION_MIN:
        version = conn.info.server_version // 10000
        conn.close()
        raise InstanceError(f"{describe(conninfo)} is version {version}; Dormouse needs 15 or later")
    return conn


def session_conninfo(dsn: str, *, application_name: str, read_only: bool, isolation: Isolation) -> str:
    """The DSN with the session's settings, which take no round trip when they travel with the connection."""
    given = _parameters(dsn)
    settings = {
        "search_path": "dormouse",  # pg_catalog is searched first, without being named
        "timezone": "UTC",
        "default_transaction_isolation": isolation.value,
        "default_transaction_read_only": "on" if read_only else "off",
        "jit": "off",  # compiling costs more than our short statements
        # Plans of statements over arrays must not depend on the arrays that came first.
        "plan_cache_mode": "force_generic_plan",
    }
    options = [f"-c {name}={_escaped(value)}" for name, value in settings.items()]
    options.insert(0, str(given.get("options") or ""))
    defaults = {"application_name": application_name, **_DEFAULTS}
    return make_conninfo("", **{**defaults, **given, "options": " ".join(options).strip()})


def describe(conninfo: str) -> str:
    """The server and the database that a connection string means; never its password."""
    given = _parameters(conninfo)
    host = given.get("host") or given.get("hostaddr") or "the local socket"
    port = f":{given['port']}" if given.get("port") else ""
    database = given.get("dbname") or given.get("user") or "of the user's name"
    return f"PostgreSQL at {host}{port}, database {database!r}"


def is_alive(conn: psycopg.Connection[Any], *, ask: bool = False) -> bool:
    """Whether the connection works as far as this side can see; `ask` takes a round trip to be sure."""
    if conn.closed:
        return False
    try:
        if _has_something_to_read(conn):
            conn.pgconn.consume_input()
            ask = True  # a farewell, or only a notice: one question tells them apart
        if ask:
            conn.execute("")
    except psycopg.OperationalError:
        return False
    return not conn.closed


def _has_something_to_read(conn: psycopg.Connection[Any]) -> bool:
    """An idle server says nothing, unless it is going away."""
    poll = select.poll()
    poll.register(conn.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _parameters(dsn: str) -> dict[str, Any]:
    try:
        return conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # The reason would quote the text, and the text may hold a password.
        raise InvalidInput(
            "the DSN is not a PostgreSQL connection string; write postgresql://user@host:port/database"
        ) from None


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


_suppliers: WeakSet[ConnectionSupplier] = WeakSet()
_inherited: list[Any] = []  # pools of the parent: never used, and never closed, by a forked child


def _after_fork_in_child() -> None:
    forget: Callable[[ConnectionSupplier], None] = ConnectionSupplier._forget_inherited_pool
    for supplier in list(_suppliers):
        forget(supplier)


os.register_at_fork(after_in_child=_after_fork_in_child)

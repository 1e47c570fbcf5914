"""Sessions of PostgreSQL: how they are opened, their settings, and the time limits of transactions.

The limits are listed here, by kind of work, in milliseconds; 0 means no limit. PostgreSQL itself enforces
them, so a process that is frozen or cut off cannot hold up another process for longer. A session has the
limits of SHORT, or those of its supplier. A longer transaction names its kind. A lower limit of the role or
of the server stays in force. A failed connection is diagnosed by SQLSTATE, because texts are in the server's
language.
"""

from __future__ import annotations

import os
import re
import select
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit
from weakref import WeakSet

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow

from dormouse.errors import ConnectionsExhausted, DormouseError, InstanceError, InvalidInput, one_line
from dormouse.postgres.queries import PREPARED_MAX, Uuids, UuidsDumper, UuidsTextDumper
from dormouse.settings.section import CA_BUNDLE, CONNECT_SECONDS_MAX

Limits = Mapping[str, int]

_SECOND = 1_000
_MINUTE = 60 * _SECOND
_HOUR = 60 * _MINUTE

IDLE = "idle_in_transaction_session_timeout"
LOCK = "lock_timeout"
STATEMENT = "statement_timeout"
TRANSACTION = "transaction_timeout"
"""The limit of the whole transaction, even while a statement arrives in parts; since PostgreSQL 17."""

# fmt: off
SHORT = {IDLE: 15 * _SECOND, LOCK: 10 * _MINUTE, STATEMENT: 15 * _MINUTE, TRANSACTION: 30 * _MINUTE}
"""The limits for commits, row changes, cuts, claims and leases: statements that find rows by keys."""

COMMIT = {IDLE: 15 * _SECOND, LOCK: 3 * _SECOND, TRANSACTION: 5 * _MINUTE}
"""The limits for a committer's batch, with short waits for locks: one busy table stops no others."""

ALONE = {IDLE: 15 * _SECOND, LOCK: 10 * _MINUTE, STATEMENT: 6 * _HOUR, TRANSACTION: 12 * _HOUR}
"""The limits for deletions, conversions, drops and migrations: one statement may rewrite a whole table."""

LONG = {IDLE: 60 * _SECOND, LOCK: 10 * _MINUTE, STATEMENT: 6 * _HOUR, TRANSACTION: 12 * _HOUR}
"""The limits for splits, restores and scans: the process computes with rows between its statements."""

PAGED = {IDLE: 10 * _MINUTE, LOCK: 10 * _MINUTE, STATEMENT: 6 * _HOUR, TRANSACTION: 24 * _HOUR}
"""The limits for reads page by page, which lock no rows. The reader may do other work between pages."""

KEPT = {IDLE: 60 * _SECOND, LOCK: 10 * _MINUTE, STATEMENT: 15 * _MINUTE, TRANSACTION: 0}
"""The limits for a lock that a process keeps, with a statement every `KEPT_PULSE_SECONDS`."""
# fmt: on

KEPT_PULSE_SECONDS = 10.0
MIGRATING_IDLE_MS_MAX = 15 * _MINUTE
"""The limit of idle time for a process that holds the lock of migrations."""

PEER_SECONDS_MAX = 60
"""The time that either side of a connection waits for an acknowledgement of what it sent.

The server waits just as long for a client that reads nothing of a large answer.
"""

PEER_OF_PAGES = "tcp_user_timeout"
"""The setting that is raised while the server copies rows out, because their reader may pause for long."""

SCAN_SETTINGS = ("enable_seqscan", "enable_hashjoin", "enable_mergejoin")
"""The planner settings that sessions switch off, because the usual statements look rows up by keys."""

SESSION_SETTINGS = {
    "search_path": "dormouse",  # pg_catalog is searched first, without being named
    "timezone": "UTC",
    "datestyle": "ISO, MDY",  # the only one whose dates psycopg reads
    "jit": "off",  # compiling costs more than our short statements
    # the plan of a statement over arrays must not depend on the arrays that came first
    "plan_cache_mode": "force_generic_plan",
    # nor on how small a table was when the plan was made: see `scans` of run_transaction
    **dict.fromkeys(SCAN_SETTINGS, "off"),
}
"""The settings of every session. Through an RDS Proxy, sessions have them from their role."""

GUARDED_PATH = "pg_catalog, pg_temp"
"""The search path of an administrator, whose statements name the schema `dormouse` where they need it.

With the schema in the path, PostgreSQL would prefer a better-fitting function or operator made there, and run
it with the administrator's rights.
"""

_CONNECT_SECONDS_MAX = 10

POSTGRES_VERSION_MIN = 150000
"""PostgreSQL 15, as `server_version_num` writes it."""

PREPARE_THRESHOLD = 2

_DIAGNOSIS_SECONDS_MAX = 5.0
_CONNECTED = "00000"
_CROWDED = ("53300", _CONNECTED)
_RESTARTING = ("57P01", "57P02", "57P03")
_INVALID_AUTHORIZATION = "28"
"""The class of the SQLSTATEs of a refused login, by pg_hba.conf, password or PAM."""

_ERROR_RESPONSE = re.compile(
    rb'^B\t[^\t]*\tErrorResponse\t S "[^"]*" V "[^"]*" C "([0-9A-Z]{5})"', re.MULTILINE
)

SCHEME = "rds-iam"
"""The scheme of a DSN for IAM authentication: `rds-iam://user@host:5432/database?region=eu-west-1`."""

TOKEN_SECONDS = 900
_PLACEHOLDER = "rds-iam in "
_BY_PROXY = " by proxy"
_DEFAULT_PORT = "5432"

for _dumper in (UuidsTextDumper, UuidsDumper):  # the last is preferred
    psycopg.adapters.register_dumper(Uuids, _dumper)


class Isolation(StrEnum):
    """The isolation level of a transaction, as PostgreSQL spells it."""

    READ_COMMITTED = "read committed"
    REPEATABLE_READ = "repeatable read"
    SERIALIZABLE = "serializable"


PEER_PARAMETERS = {
    "tcp_user_timeout": PEER_SECONDS_MAX * _SECOND,
    "keepalives_idle": PEER_SECONDS_MAX // 2,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}
"""The libpq parameters by which a client notices that its server vanished."""

PEER_SETTINGS = {
    "tcp_user_timeout": str(PEER_SECONDS_MAX * _SECOND),
    "tcp_keepalives_idle": str(PEER_SECONDS_MAX // 2),
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "client_connection_check_interval": str(10 * _SECOND),
}
"""The session settings by which the server notices that its client vanished.

Over a Unix socket, only the last has an effect.
"""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The limits of one session."""

    usual: Limits = field(default_factory=dict)
    """The limits of a transaction that names no kind of work."""
    highest: Limits = field(default_factory=dict)
    """The limits that no kind of work may exceed, set by the role, the server or the supplier; 0 is no limit.

    It has an entry for every limit that the server knows, and no other.
    """
    in_force: Limits = field(default_factory=dict)
    """The limits that the session has outside of a transaction."""
    given: frozenset[str] = frozenset()
    """The names of the limits that the caller gave to the supplier. The caller handles their errors."""

    def local(self, kind: Limits | None = None, *, lock_ms: int | None = None) -> str:
        """Returns the SQL after BEGIN that sets a kind's limits; empty if the session has them already."""
        wanted = self.usual if kind is None else {**self.usual, **kind}
        if lock_ms is not None:
            wanted = {**wanted, LOCK: lock_ms}
        return "".join(f"; set local {name} = {limit}" for name, limit in self._differing(wanted))

    def _differing(self, wanted: Limits) -> Iterator[tuple[str, int]]:
        for name, highest in self.highest.items():
            limit = lower(wanted.get(name, 0), highest)
            if limit != self.in_force[name]:
                yield name, limit


def lower(first: int, second: int) -> int:
    """Returns the lower of two limits, where 0 means no limit."""
    return min(first, second) or max(first, second)


def to_conninfo(dsn: str) -> str:
    """Returns the DSN as a connection string of libpq.

    An `rds-iam` DSN gets the region in place of a password; `with_token` then replaces it by a token.
    Raises InvalidInput for an incomplete `rds-iam` DSN.
    """
    if not dsn.startswith(f"{SCHEME}://"):
        return dsn
    parts = urlsplit(dsn)
    query = dict(parse_qsl(parts.query))
    region, by_proxy = query.pop("region", ""), query.pop("proxy", "false") == "true"
    if not (region and parts.username and parts.hostname and not parts.password):
        raise InvalidInput(f"the DSN must be like {SCHEME}://user@host:5432/database?region=eu-west-1")
    defaults = {
        "sslmode": "verify-full",
        "sslrootcert": str(CA_BUNDLE),
        "connect_timeout": str(CONNECT_SECONDS_MAX),
    }
    plain = urlunsplit(("postgresql", parts.netloc, parts.path, urlencode({**defaults, **query}), ""))
    return make_conninfo(plain, password=_PLACEHOLDER + region + _BY_PROXY * by_proxy)


def by_token(conninfo: str, region: str) -> str:
    """Returns the connection string, marked so that each login uses an IAM token instead of a password."""
    return make_conninfo(conninfo, password=_PLACEHOLDER + region)


def with_token(conninfo: str) -> str:
    """Returns the connection string, with a fresh token if it is for IAM. Raises InstanceError."""
    if _PLACEHOLDER not in conninfo:
        return conninfo
    given = conninfo_to_dict(conninfo)
    password = str(given.get("password") or "")
    if not password.startswith(_PLACEHOLDER):
        return conninfo
    host, port, user = given["host"], given.get("port") or _DEFAULT_PORT, given["user"]
    region = password.removeprefix(_PLACEHOLDER).removesuffix(_BY_PROXY)
    given["password"] = _token(str(host), str(port), str(user), region)
    if password.endswith(_BY_PROXY):
        given.pop("options", None)
    return make_conninfo("", **given)


def is_by_rds_proxy(conninfo: str) -> bool:
    """Returns whether the connection leads through an RDS Proxy, which keeps prepared statements apart."""
    return _PLACEHOLDER in conninfo and _BY_PROXY in conninfo


def _token(host: str, port: str, user: str, region: str) -> str:
    from botocore.model import ServiceId
    from botocore.signers import RequestSigner

    session = _session()
    credentials = session.get_credentials()
    if credentials is None:
        raise InstanceError(
            f"there are no AWS credentials to connect to {host} with: set AWS_PROFILE, or log in"
        )
    emitter = session.get_component("event_emitter")
    signer = RequestSigner(ServiceId("RDS"), region, "rds-db", "v4", credentials, emitter)
    request = {
        "method": "GET",
        "url": f"https://{host}:{port}/?{urlencode({'Action': 'connect', 'DBUser': user})}",
        "body": {},
        "headers": {},
        "context": {},
    }
    url = signer.generate_presigned_url(request, operation_name="connect", expires_in=TOKEN_SECONDS)
    return str(url).removeprefix("https://")


@cache
def _session() -> Any:
    """Returns a session of botocore, which caches and refreshes the AWS credentials."""
    import botocore.session

    return botocore.session.get_session()


class Connection(psycopg.Connection[TupleRow]):
    """A connection with its thread, and the times (`time.monotonic`) of its opening and last return."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.prepared_max = PREPARED_MAX
        self.open_since = time.monotonic()
        self.rested_since = float("inf")
        self.is_spare = True
        """True if the server has enough free connections that the pool may keep this one."""
        self.is_pooled = False
        """True if the connection leads to a pooler, so that each transaction may run in another session."""
        self.is_direct = False
        """True if the server answers without a proxy or pooler: the connection then ends with the server."""
        self.limits = SessionLimits()
        self.lent_to: int | None = threading.get_ident()
        """The id of the thread that opened or borrowed the connection; None while it rests in the pool."""

    def cut(self) -> None:
        """Shuts the socket down, from any thread, so that the thread that waits for an answer gets an error.

        The waiting thread may close the connection at any time, so this method uses a duplicate descriptor.
        """
        with suppress(OSError, psycopg.Error):
            number = self.fileno()
            with socket.socket(fileno=os.dup(number)) as same:
                if self.fileno() == number:  # the connection is still open, so the number was not reused
                    same.shutdown(socket.SHUT_RDWR)

    def __del__(self, *_: Any) -> None:
        """Does nothing, because a pooled connection that ends with the program is no reason for a warning."""


class Unavailable(InstanceError):
    """The server accepts no connection now, but may accept one soon."""

    def __init__(self, message: str, conninfo: str = "", *, crowded: bool = False) -> None:
        super().__init__(message)
        self._conninfo = conninfo
        self._crowded = crowded

    def after(self, seconds: float) -> DormouseError:
        """Returns the error to raise if the server has accepted no connection for so many seconds."""
        if self._crowded:
            return ConnectionsExhausted(
                f"{describe(self._conninfo)} had no connection to spare for {seconds:g} s; raise its "
                "max_connections, or run fewer processes at once"
            )
        return InstanceError(f"{self} (for {seconds:g} s)")


class LoginRefused(InstanceError):
    """The server refuses this user and password."""


def connect(conninfo: str, *, reached_before: bool = False) -> Connection:
    """Opens a connection in autocommit mode. Each error is one line that never contains the password.

    Raises Unavailable if the server has too many connections, starts or stops, or does not answer although it
    was reached before. Raises LoginRefused, or else InstanceError.
    """
    conninfo = with_token(conninfo)
    try:
        conn = Connection.connect(conninfo, autocommit=True, prepare_threshold=PREPARE_THRESHOLD)
    except psycopg.OperationalError as error:
        message = f"cannot connect to {describe(conninfo)}: {one_line(error)}"
        is_silent = isinstance(error, psycopg.errors.ConnectionTimeout)
        state = None if is_silent else _sqlstate(conninfo)
        if state in _CROWDED:
            raise Unavailable(message, conninfo, crowded=True) from None
        if is_backlog_full := (state is None and _is_backlog_full(conninfo)):
            message = (
                f"{describe(conninfo)} accepts no connection: it is frozen, or too many processes connect "
                "at once; look at the server's process"
            )
        elif is_silent:
            message = (
                f"{describe(conninfo)} does not answer: it is frozen or overloaded, or the network to it is "
                "interrupted; look at the server"
            )
        if is_backlog_full:
            raise Unavailable(message, conninfo) from None
        if state in _RESTARTING or (state is None and reached_before):
            raise Unavailable(message, conninfo) from None
        refused = state is not None and state.startswith(_INVALID_AUTHORIZATION)
        raise (LoginRefused if refused else InstanceError)(message) from None
    if conn.info.server_version < POSTGRES_VERSION_MIN:
        version = conn.info.server_version // 10000
        conn.close()
        raise InstanceError(f"{describe(conninfo)} is version {version}; Dormouse needs 15 or later")
    return conn


def session_conninfo(
    dsn: str,
    *,
    application_name: str,
    read_only: bool,
    isolation: Isolation,
    search_path: str = SESSION_SETTINGS["search_path"],
) -> str:
    """Returns the DSN with the session's settings, so that they need no statement after the login."""
    given = parameters(dsn)
    settings = {
        **SESSION_SETTINGS,
        "search_path": search_path,
        "default_transaction_isolation": isolation.value,
        "default_transaction_read_only": "on" if read_only else "off",
    }
    options = [
        *(f"-c {name}={value}" for name, value in PEER_SETTINGS.items()),  # the DSN may override these
        str(given.get("options") or ""),
        *(f"-c {name}={_escaped(value)}" for name, value in settings.items()),
    ]
    defaults = {
        "application_name": application_name,
        "connect_timeout": _CONNECT_SECONDS_MAX,
        **PEER_PARAMETERS,
    }
    return make_conninfo("", **{**defaults, **given, "options": " ".join(filter(None, options))})


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


def describe(conninfo: str) -> str:
    """Returns the server and database of a connection string, for messages, without the password."""
    given = parameters(conninfo)
    host = given.get("host") or given.get("hostaddr") or "the local socket"
    port = f":{given['port']}" if given.get("port") else ""
    database = given.get("dbname") or given.get("user") or "of the user's name"
    return f"PostgreSQL at {host}{port}, database {database!r}"


def parameters(dsn: str) -> dict[str, Any]:
    """Returns the parts of a connection string. Raises InvalidInput."""
    try:
        return conninfo_to_dict(to_conninfo(dsn))
    except psycopg.ProgrammingError:
        # the reason would quote the text, which may hold a password
        raise InvalidInput(
            "the DSN is not a PostgreSQL connection string; write postgresql://user@host:port/database"
        ) from None


def is_alive(conn: psycopg.Connection[Any], *, ask: bool = False) -> bool:
    """Returns whether the connection seems to work. With `ask`, it makes sure by a round trip."""
    if conn.closed:
        return False
    try:
        if _has_something_to_read(conn):
            conn.pgconn.consume_input()
            ask = True  # a farewell or only a notice: a round trip shows which
        if ask:
            conn.execute("")
    except (psycopg.OperationalError, psycopg.InternalError):  # InternalError if it was idle for too long
        return False
    return not conn.closed


def limits_of(conn: psycopg.Connection[Any]) -> SessionLimits:
    """Returns the limits of a session; no limits for a connection that no supplier opened."""
    return conn.limits if isinstance(conn, Connection) else SessionLimits()


def was_open_at(conn: psycopg.Connection[Any], since: float) -> bool:
    """Returns whether the session was open at `since` (`time.monotonic`), so that no crash came after that.

    Returns False behind a pooler or an RDS Proxy, whose connections outlive the server.
    """
    return isinstance(conn, Connection) and conn.is_direct and conn.open_since < since


def _has_something_to_read(conn: psycopg.Connection[Any]) -> bool:
    """Returns whether the server has sent data to an idle session, which it only does when it is stopping."""
    poll = select.poll()
    poll.register(conn.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _sqlstate(conninfo: str) -> str | None:
    """Tries to connect, and returns the SQLSTATE: 00000 if the server accepts; None if it does not answer.

    libpq does not report the SQLSTATE of a failed connection, but (since 18) writes it to its trace.
    """
    trace = os.memfd_create("libpq-trace")
    try:
        if _connects(conninfo, trace):
            return _CONNECTED
        found = _ERROR_RESPONSE.findall(os.pread(trace, 1_000_000, 0))
        return found[-1].decode() if found else None
    finally:
        os.close(trace)


def _connects(conninfo: str, trace: int) -> bool:
    deadline = time.monotonic() + _DIAGNOSIS_SECONDS_MAX
    conn = pq.PGconn.connect_start(conninfo.encode())
    try:
        conn.trace(os.dup(trace))
        conn.set_trace_flags(pq.Trace.SUPPRESS_TIMESTAMPS)
        while conn.status != pq.ConnStatus.BAD and time.monotonic() < deadline:
            status = conn.connect_poll()
            if status not in (pq.PollingStatus.READING, pq.PollingStatus.WRITING):
                return bool(status == pq.PollingStatus.OK)
            poll = select.poll()
            poll.register(
                conn.socket, select.POLLIN if status == pq.PollingStatus.READING else select.POLLOUT
            )
            poll.poll(max(deadline - time.monotonic(), 0) * 1000)
        return False
    finally:
        conn.untrace()  # writes the rest of the trace
        conn.finish()


def _is_backlog_full(conninfo: str) -> bool:
    """Returns whether the server's Unix socket accepts no more connections. Over TCP this cannot be seen."""
    given = parameters(conninfo)
    folder = str(given.get("host") or "")
    if not folder.startswith("/"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"{folder}/.s.PGSQL.{given.get('port') or 5432}")
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


# How to end a wait for a server that does not answer: another thread shuts the socket down.

END_SECONDS_MAX = 10.0
"""The time that a closing process waits for the server's answer to one statement."""
CLOSE_SECONDS = 30.0
"""The time that running work has to finish after its supplier was closed. A batch takes a second or two."""
AGAIN_SECONDS = 0.5
"""The pause between cuts of the connections of a waiting thread, which may retry its statement."""


class Lines:
    """The connections of a supplier and of the suppliers that were derived from it."""

    def __init__(self, above: Lines | None = None) -> None:
        self._above = above
        self._lock = threading.Lock()
        self._opened: WeakSet[Connection] = WeakSet()
        self._is_over = False

    @property
    def top(self) -> Lines:
        """The lines of the supplier from which the others derive, with all connections of each thread."""
        return self if self._above is None else self._above.top

    def add(self, conn: Connection) -> None:
        """Records a new connection. Raises InstanceError if connections are being ended."""
        with self._lock:
            self._opened.add(conn)
        if self._above is not None:
            self._above.add(conn)
        self.check()

    def check(self) -> None:
        """Raises InstanceError if the time that was given to `end` is over."""
        if self._is_over:
            raise InstanceError("the instance was closed before its database answered")
        if self._above is not None:
            self._above.check()

    def cut(self, threads: Collection[int] | None = None) -> bool:
        """Cuts connections lent to these threads (by id), or to any; returns whether there were some."""
        lent = self._lent(threads)
        for conn in lent:
            conn.cut()
        return bool(lent)

    def end(self, seconds: float) -> None:
        """Waits so many seconds for lent connections to come back, then cuts them and allows no new ones.

        Returns at once: a background thread waits, if any connection is lent.
        """
        if not self._lent():
            return
        with suppress(RuntimeError):  # no thread can start while the program ends
            threading.Thread(target=self._end, args=(seconds,), name="dormouse-cut", daemon=True).start()

    def forget(self) -> None:
        """Forgets the connections without closing them, in a forked child: they belong to the parent."""
        self._lock, self._opened = threading.Lock(), WeakSet()

    def _end(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._lent():
            if time.monotonic() >= until:
                self._is_over = True  # connections that are being opened are then closed
                self.cut()
                return
            time.sleep(min(AGAIN_SECONDS, seconds))

    def _lent(self, threads: Collection[int] | None = None) -> list[Connection]:
        with self._lock:
            opened = list(self._opened)
        lent = [conn for conn in opened if conn.lent_to is not None and not conn.closed]
        return lent if threads is None else [conn for conn in lent if conn.lent_to in threads]


@contextmanager
def cut_in_time(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Cuts the connection if the block of `with` takes longer than `END_SECONDS_MAX`."""
    if not isinstance(conn, Connection):
        yield
        return
    timer = threading.Timer(END_SECONDS_MAX, conn.cut)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can start while the program ends
        timer.start()
    try:
        yield
    finally:
        timer.cancel()

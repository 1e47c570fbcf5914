"""The only place where transactions begin, end and are retried."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeVar, get_args

import psycopg
from psycopg import errors, sql
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from dormouse.errors import (
    CommitFailed,
    CommitOutcomeUnknown,
    InstanceError,
    InstanceForbidden,
    InstanceReadOnly,
    TableBusy,
    TooManyRetries,
)
from dormouse.model.locks import process_lock
from dormouse.model.loops import backoff_seconds
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Call, Query
from dormouse.postgres.session import (
    ALONE,
    LOCK,
    LONG,
    SCAN_SETTINGS,
    STATEMENT,
    Isolation,
    Limits,
    cut_in_time,
    is_alive,
    limits_of,
)

# Counts of the transactions that were retried, given up, or ended with an unknown outcome.

RetryEvent = Literal["retries", "exhausted", "unknown"]
RETRY_EVENTS: tuple[RetryEvent, ...] = get_args(RetryEvent)
"""The counted events.

- `retries`: an attempt failed and was repeated.
- `exhausted`: the last attempt failed.
- `unknown`: the connection died between the COMMIT and its answer.
"""


class Retries:
    """Counts of retries, failures and unknown outcomes, by operation. Threads may share one object."""

    def __init__(self) -> None:
        self._lock = process_lock()
        self._counts: dict[str, Counter[str]] = {}

    def add(self, operation: str, event: RetryEvent = "retries") -> None:
        with self._lock:
            self._counts.setdefault(operation, Counter())[event] += 1

    def count(self, operation: str | None = None, event: RetryEvent = "retries") -> int:
        """Returns the number of retries, or of another event, for one operation or for all."""
        with self._lock:
            counts = self._counts.values() if operation is None else [self._counts.get(operation, Counter())]
            return sum(counter[event] for counter in counts)

    def by_operation(self) -> dict[str, int]:
        """Returns the number of retries of each operation that was retried."""
        return {name: events["retries"] for name, events in self.snapshot().items() if events["retries"]}

    def snapshot(self) -> dict[str, dict[RetryEvent, int]]:
        """Returns, for metrics, the count of each event by operation."""
        with self._lock:
            return {name: {e: counter[e] for e in RETRY_EVENTS} for name, counter in self._counts.items()}


RETRIES = Retries()
"""The retries of this process."""


logger = logging.getLogger(__name__)

T = TypeVar("T")

CONFLICTS = (errors.SerializationFailure, errors.DeadlockDetected)
"""The errors after which the server rolled back, and a retry may succeed (SQLSTATE 40001 and 40P01)."""

ALONE_SECONDS_MAX = 600.0
ALONE_LOCK_SECONDS_MIN, ALONE_LOCK_SECONDS_MAX = 0.05, 1.5
"""The first and the longest time that a try waits for a lock, in seconds. The time doubles with each try.

While a try waits, later transactions wait behind it. The longest time exceeds `deadlock_timeout`, after which
PostgreSQL cancels an autovacuum that holds the lock."""

_BEGIN = {
    (isolation, read_only): f"begin isolation level {isolation.value}{' read only' if read_only else ''}"
    for isolation in Isolation
    for read_only in (False, True)
}
_WITH_SCANS = "".join(f"; set local {name} = on" for name in SCAN_SETTINGS) + (
    # planned anew for the present sizes: repeated scans are fast only while a table is small
    "; set local work_mem = '64MB'; set local plan_cache_mode = force_custom_plan"
)


def run_transaction(
    supplier: Supplier,
    work: Callable[[psycopg.Connection[TupleRow]], T],
    *,
    isolation: Isolation = Isolation.READ_COMMITTED,
    attempts_max: int = 10,
    read_only: bool = False,
    scans: bool = False,
    limits: Limits | None = None,
    lock_ms: int | None = None,
    operation: str = "transaction",
) -> T:
    """Runs `work` in a transaction and commits; returns the result of the run that was committed.

    `work` may run several times, so all its effects must be in the database. The whole transaction is retried
    after a serialization failure, a deadlock, a connection that died before COMMIT was sent, or one that
    leads to a standby. An error that `work` raises rolls back and propagates unchanged.

    - `scans`: the statements read much of a table, so the planner may scan, hash and merge. Without it,
      statements look rows up by keys whatever the statistics say, because a plan outlives the time when its
      table was small.
    - `limits`: the kind of work, by which PostgreSQL bounds the transaction (`dormouse.postgres.session`).
      The default is LONG for work that `scans` or is `read_only`, and otherwise the supplier's limits.
      TableBusy is raised when a limit ends the transaction.
    - `lock_ms`: the limit of a wait for a lock. It then raises psycopg's LockNotAvailable, which the caller
      handles.

    Raises, besides the errors of `Supplier.connection`:

    - TooManyRetries after `attempts_max` attempts,
    - CommitOutcomeUnknown if the connection died between COMMIT and its answer; `read_only` work is retried,
    - CommitFailed if `work` hid a failed statement or ended the transaction itself,
    - InstanceReadOnly if the database only accepts reads,
    - InstanceForbidden if its role lacks a right,
    - InstanceError if the database's disk is full.
    """
    begin, more = _BEGIN[isolation, read_only], _WITH_SCANS if scans else ""
    kind = LONG if limits is None and (scans or read_only) else limits

    def once(conn: psycopg.Connection[TupleRow]) -> T:
        try:
            bounds = limits_of(conn).local(kind, lock_ms=lock_ms)
            return _run_once(conn, work, begin + bounds + more, operation)
        except CommitOutcomeUnknown as error:
            if not read_only:
                raise
            raise _ConnectionLost from error

    return _try_until_done(supplier, once, attempts_max, operation, waits=lock_ms is None)


@contextmanager
def bounded(conn: psycopg.Connection[Any], limits: Limits, *, lock_ms: int | None = None) -> Iterator[None]:
    """Opens a transaction with the limits of a kind of work, and commits at the end. Nothing is retried."""
    with ExitStack() as ending, conn.transaction():
        if bounds := limits_of(conn).local(limits, lock_ms=lock_ms):
            conn.execute(bounds.removeprefix("; "), prepare=False)
        try:
            yield
        except BaseException:
            ending.enter_context(cut_in_time(conn))
            raise


def run_alone(
    supplier: Supplier,
    work: Callable[[psycopg.Connection[TupleRow]], T],
    *,
    seconds_max: float = ALONE_SECONDS_MAX,
    limits: Limits = ALONE,
    operation: str,
    **options: Any,
) -> T:
    """Runs a transaction that locks a whole table, even if other transactions use the table most of the time.

    A transaction that waits for a lock holds up all that come later. So each try waits only briefly, and the
    whole work is retried. Raises `TableBusy` after `seconds_max`, and the errors of `run_transaction`.
    """
    refusal: errors.LockNotAvailable | None = None
    for lock_ms in impatiently(seconds_max):
        try:
            return run_transaction(
                supplier, work, limits=limits, lock_ms=lock_ms, operation=operation, **options
            )
        except errors.LockNotAvailable as error:
            refusal = error
    raise TableBusy(
        f"{operation}: it got no exclusive lock within {seconds_max:g} s, because other transactions use "
        f"the data (a long query, a backup, a process that hangs); nothing was changed, try again later"
    ) from refusal


def impatiently(seconds_max: float) -> Iterator[int]:
    """Yields, for each try, the longest time that it may wait for a lock, in milliseconds.

    It pauses between the tries, and ends after `seconds_max`.
    """
    deadline = time.monotonic() + seconds_max
    seconds = ALONE_LOCK_SECONDS_MIN
    while True:
        yield round(1_000 * seconds)
        if time.monotonic() >= deadline:
            return
        time.sleep(seconds)
        seconds = min(2 * seconds, ALONE_LOCK_SECONDS_MAX)


def allow_scans(conn: psycopg.Connection[TupleRow]) -> None:
    """Allows the planner to scan, hash and merge in the rest of a transaction."""
    conn.execute(_WITH_SCANS.removeprefix("; "))


def run_statement(
    supplier: Supplier,
    work: Callable[[psycopg.Connection[TupleRow]], T],
    *,
    isolation: Isolation = Isolation.READ_COMMITTED,
    attempts_max: int = 10,
    lock_ms: int | None = None,
    operation: str = "statement",
) -> T:
    """Runs `work`, which executes exactly one statement, in one round trip; returns its result.

    At read committed, the statement is its own transaction, without BEGIN and COMMIT. At other levels, and
    with `lock_ms`, this calls `run_transaction`. It retries after conflicts, and after a connection that was
    dead before the statement was sent. It raises the same errors as `run_transaction`. If the connection dies
    later, it raises CommitOutcomeUnknown, because the server reports a statement as complete before it
    commits the statement.
    """
    if isolation is not Isolation.READ_COMMITTED or lock_ms is not None:
        return run_transaction(
            supplier,
            work,
            isolation=isolation,
            attempts_max=attempts_max,
            lock_ms=lock_ms,
            operation=operation,
        )

    def once(conn: psycopg.Connection[TupleRow]) -> T:
        return _run_statement_once(conn, work, operation)

    return _try_until_done(supplier, once, attempts_max, operation)


def run_lookup(
    supplier: Supplier, work: Callable[[psycopg.Connection[TupleRow]], T], *, operation: str = "look-up"
) -> T:
    """Runs `work` like `run_statement`, for one statement that only reads. It also retries a lost answer."""
    try:
        return run_statement(supplier, work, operation=operation)
    except CommitOutcomeUnknown:
        return run_transaction(supplier, work, read_only=True, operation=operation)


def run_lookups(supplier: Supplier, calls: Sequence[Call]) -> list[list[Any]] | None:
    """Returns the rows of statements that only read, all as of one snapshot, in one round trip.

    Returns None if one of them fails or the connection dies. The caller then runs them by `run_transaction`,
    which retries, and raises the error.
    """
    with supplier.connection() as conn:
        failed = False
        try:
            with conn.pipeline():
                try:
                    conn.execute(_BEGIN[Isolation.REPEATABLE_READ, True], prepare=False)
                    cursors = [statement.execute(conn, values) for statement, values in calls]
                    conn.execute("commit", prepare=False)
                except psycopg.Error:
                    failed = True  # outside of the block, psycopg would log a second error
            if not failed:
                return [fetched(cursor) for cursor in cursors]
        except psycopg.Error:
            pass
        _roll_back(conn)
        return None


def rows_of(
    query: Query | sql.Composed, values: Mapping[str, Any] | None = None
) -> Callable[[psycopg.Connection[Any]], list[Any]]:
    """Returns a function of a connection that runs the query and returns its rows, if any."""

    def work(conn: psycopg.Connection[Any]) -> list[Any]:
        return fetched(conn.execute(query.on() if isinstance(query, Query) else query, values))

    return work


def fetched(cursor: psycopg.Cursor[Any]) -> list[Any]:
    """Returns the rows of a statement; an empty list if it has none."""
    result = cursor.pgresult  # `description` makes an object of each column
    return cursor.fetchall() if result is not None and result.nfields else []


def _try_until_done(
    supplier: Supplier,
    once: Callable[[psycopg.Connection[TupleRow]], T],
    attempts_max: int,
    operation: str,
    *,
    waits: bool = True,
) -> T:
    """Calls `once`, at most `attempts_max` times, until it succeeds, and returns its result.

    Raises TooManyRetries after the last attempt. If `waits` is false, psycopg's LockNotAvailable propagates.
    """
    for attempt in range(1, attempts_max + 1):
        try:
            with supplier.connection() as conn:
                try:
                    return once(conn)
                except errors.ReadOnlySqlTransaction as error:
                    if not _was_demoted(conn):
                        raise
                    conn.close()  # else the pool would lend it again, though another server accepts writes
                    if attempt == attempts_max:
                        raise
                    raise _ConnectionLost from error
                except (errors.LockNotAvailable, errors.QueryCanceled) as error:
                    is_lock = isinstance(error, errors.LockNotAvailable)
                    name = LOCK if is_lock else STATEMENT
                    if name in limits_of(conn).given or (is_lock and not waits):
                        raise
                    raise _over_limit(operation, name, error) from error
        except (*CONFLICTS, _ConnectionLost) as error:
            reason = error.__cause__ or error if isinstance(error, _ConnectionLost) else error
            logger.info(
                "%s: attempt %d of %d failed: %s", operation, attempt, attempts_max, _first_line(reason)
            )
            if attempt == attempts_max:
                RETRIES.add(operation, "exhausted")
                raise TooManyRetries(
                    f"{operation} was tried {attempts_max} times; nothing was applied; the last failure: "
                    f"{_first_line(reason)}"
                ) from reason
            RETRIES.add(operation)
        except CommitOutcomeUnknown as error:
            logger.warning("%s: attempt %d of %d: %s", operation, attempt, attempts_max, _first_line(error))
            RETRIES.add(operation, "unknown")
            raise
        except errors.ReadOnlySqlTransaction as error:
            raise InstanceReadOnly(
                f"{operation}: the instance was opened read-only, or its database only takes reads"
            ) from error
        except errors.DiskFull as error:
            raise InstanceError(
                f"{operation}: the disk of the database is full; nothing was applied: make room, and try "
                f"again ({_first_line(error)})"
            ) from error
        except errors.InsufficientPrivilege as error:
            raise InstanceForbidden(
                f"{operation}: the database role lacks a permission ({_first_line(error)}); log in as the "
                f"owner, which a deployment calls dormouse_owner"
            ) from error
        # outside the handler, so that the connection is back with its supplier during the pause
        time.sleep(backoff_seconds(attempt))
    raise ValueError("attempts_max must be at least 1")


def _over_limit(operation: str, name: str, error: psycopg.Error) -> TableBusy:
    if name == LOCK:
        return TableBusy(
            f"{operation}: it waited too long for another transaction ({_first_line(error)}); nothing was "
            "changed, try again later"
        )
    return TableBusy(
        f"{operation}: a statement took longer than statement_timeout allows, or was cancelled "
        f"({_first_line(error)}); nothing was changed, try again later"
    )


_NEVER_RAN = (errors.IdleInTransactionSessionTimeout, errors.IdleSessionTimeout)
"""The errors that end a session before the server begins to run the command that was sent last."""


class _ConnectionLost(Exception):
    """The connection died, but nothing was applied.

    It died before a COMMIT or a single statement was sent, or the transaction only read.
    """


def _was_demoted(conn: psycopg.Connection[Any]) -> bool:
    """Returns whether a session that should write leads to a standby, for example after a failover."""
    status = conn.info.parameter_status
    return status("in_hot_standby") == "on" and status("default_transaction_read_only") != "on"


def _run_once(
    conn: psycopg.Connection[TupleRow],
    work: Callable[[psycopg.Connection[TupleRow]], T],
    begin: str,
    operation: str,
) -> T:
    try:
        conn.execute(begin, prepare=False)
        result = work(conn)
    except BaseException as error:
        if _is_lost(conn, error):
            raise _ConnectionLost from error
        _roll_back(conn)
        raise
    _commit(conn, operation)
    return result


def _run_statement_once(
    conn: psycopg.Connection[TupleRow], work: Callable[[psycopg.Connection[TupleRow]], T], operation: str
) -> T:
    if not is_alive(conn):
        raise _ConnectionLost("the connection died before the statement")
    try:
        return work(conn)
    except BaseException as error:
        if conn.pgconn.transaction_status == TransactionStatus.IDLE:
            raise  # the server is ready again: it rolled back, or the error has another cause
        raise _unknown_outcome(conn, error, operation, "the statement") from error


def _commit(conn: psycopg.Connection[TupleRow], operation: str) -> None:
    if not is_alive(conn):
        raise _ConnectionLost("the connection died before COMMIT")
    status = conn.pgconn.transaction_status
    if status != TransactionStatus.INTRANS:
        _roll_back(conn)
        ended = (
            "ended its transaction itself" if status == TransactionStatus.IDLE else "hid a failed statement"
        )
        raise CommitFailed(
            f"the work of {operation} {ended}; only run_transaction may end or undo a transaction"
        )
    try:
        conn.execute("commit", prepare=False)
    except BaseException as error:
        if _answered(conn, error):
            raise
        raise _unknown_outcome(conn, error, operation, "COMMIT") from error


def _unknown_outcome(
    conn: psycopg.Connection[Any], error: BaseException, operation: str, sent: str
) -> CommitOutcomeUnknown:
    conn.close()
    if isinstance(error, _NEVER_RAN):
        raise _ConnectionLost from error
    if not isinstance(error, Exception):
        raise error  # Ctrl-C goes on to the user
    return CommitOutcomeUnknown(
        f"the connection died between {sent} and its answer: whether {operation} was applied is unknown"
    )


def _answered(conn: psycopg.Connection[Any], error: BaseException) -> bool:
    """Returns whether the server answered with a rollback: the statement failed, but not the session."""
    if not isinstance(error, psycopg.Error) or error.sqlstate is None:
        return False
    # a session that ends sends a reason, too, but never becomes ready for another query
    return bool(conn.pgconn.transaction_status == TransactionStatus.IDLE)


def _is_lost(conn: psycopg.Connection[Any], error: BaseException) -> bool:
    """Returns whether the error ended the session, and not only the statement."""
    # a session that was idle for too long ends with an InternalError
    return isinstance(error, psycopg.DatabaseError) and (
        conn.closed or error.diag.severity_nonlocalized in ("FATAL", "PANIC")
    )


def _roll_back(conn: psycopg.Connection[Any]) -> None:
    """Rolls the transaction back, or closes the connection if that fails.

    Raises nothing, because the caller raises the first error.
    """
    if conn.pgconn.transaction_status == TransactionStatus.IDLE:
        return
    try:
        with cut_in_time(conn):
            conn.execute("rollback", prepare=False)
    except psycopg.Error:
        conn.close()


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

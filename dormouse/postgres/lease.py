"""Leases: rights that a process has for a limited time, and keeps by renewing them in the database.

The module that uses a lease has the SQL that takes, renews, releases and fences it. The rest is here:

- `Pulse`: the thread that renews. Only the database ends a lease. While it does not answer, it gives the
  lease to no other process, so an outage loses nothing.
- `wait_for`: a function that waits for a lease that another process has.
- `Lease`: a row with a token. Each transaction of the work checks the token. A holder that was frozen for
  longer than the lease finds another token and commits nothing.
- `SessionLock`: a lock that ends with a session of the database.
- `restart_leases`: shortens leases after the database's clock went back. A lease ends at a time of that
  clock. Leases written while the clock was ahead end too late once it is right again. Clocks of clients
  decide nothing.

Source: https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import psycopg
from psycopg.rows import TupleRow

from dormouse.errors import CommitOutcomeUnknown, DormouseError, InstanceError, one_line
from dormouse.model.loops import backoff_seconds, tries
from dormouse.postgres import session
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Queries, Query, load
from dormouse.postgres.session import END_SECONDS_MAX, limits_of
from dormouse.postgres.transaction import (
    bounded,
    fetched,
    rows_of,
    run_lookup,
    run_statement,
    run_transaction,
)

T = TypeVar("T")
PULSES = 4
"""The number of renewals of a lease within its duration."""

PULSES_A_LIMIT = 3
"""The number of statements that a `SessionLock` sends within the session's limit of idle time."""

POLL_SECONDS_MIN, POLL_SECONDS_MAX = 0.002, 0.25
logger = logging.getLogger(__name__)


class Pulse(threading.Thread):
    """A thread that repeats some work, such as a renewal, every `seconds` while the block of `with` runs.

    If the work returns False, the lease is lost: `is_lost` is set, `lost` is called, and the thread ends. If
    the work raises, the error is logged, and the work is retried after the next pause.
    """

    def __init__(
        self, work: Callable[[], object], seconds: float, name: str, lost: Callable[[], object] | None = None
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.seconds = seconds
        """The pause between two runs of the work, in seconds. If it is infinite, only `now` starts a run."""
        self.is_lost = False
        self._work = work
        self._lost = lost
        self._is_closed = False
        self._woken = threading.Event()
        self._working = threading.Lock()

    def run(self) -> None:
        while not self.is_lost:
            self._woken.wait(None if math.isinf(self.seconds) else self.seconds)
            self._woken.clear()
            with self._working:
                if self._is_closed:
                    return
                try:
                    self.is_lost = self._work() is False
                except Exception as error:
                    is_known = isinstance(error, (DormouseError, psycopg.Error))
                    logger.warning(
                        "%s failed and is retried: %s", self.name, one_line(error), exc_info=not is_known
                    )
        if self._lost is not None:
            self._lost()

    def now(self) -> None:
        """Makes the thread do the work at once."""
        self._woken.set()

    def close(self) -> None:
        """Ends the thread before its next run of the work; a run under way goes on."""
        self._is_closed = True
        self._woken.set()

    def __enter__(self) -> Pulse:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the pulse, and waits for a run under way, at most `END_SECONDS_MAX`."""
        self.close()
        if self._working.acquire(timeout=END_SECONDS_MAX):
            self._working.release()


def wait_for(take: Callable[[float], T | Exception], wait_seconds: float) -> T:
    """Calls `take`, with the seconds that are left, until it returns a lease.

    After `wait_seconds`, raises the last error that `take` returned instead of a lease.
    """
    pause = partial(backoff_seconds, seconds_min=POLL_SECONDS_MIN, seconds_max=POLL_SECONDS_MAX)
    for this in tries(wait_seconds, pause=pause):
        taken = take(this.seconds_left)
        if not isinstance(taken, Exception):
            return taken
        refusal = taken
    raise refusal


def this_holder() -> str:
    """Returns the name of this process as a holder of leases, for messages."""
    return f"{socket.gethostname()}:{os.getpid()}"


def held_by(holder: str, does: str, until: datetime) -> str:
    """Returns an error message: `holder` has the lease until a time, or longer if it renews the lease."""
    return f"worker {holder} {does}, until {until:%H:%M:%S} UTC or longer; try again later"


@dataclass(eq=False)
class Lease:
    """A lease that is a row of the database, with a token that identifies the holder.

    The queries `renew` and `fence`, and any queries used instead, must return no row if another holder has
    the lease.
    """

    supplier: Supplier
    kind: str
    name: str
    """The name of the leased thing, for logs. `kind` is the kind of thing, for errors and metrics."""
    queries: Queries
    values: Mapping[str, Any]
    """The values for each query: the leased thing, the token and `lease_seconds`."""
    lost: Callable[[], DormouseError]
    """A function that makes the error to raise when another holder has the lease."""

    def execute(self, query: str, *, lock_ms: int | None = None, **values: Any) -> list[Any]:
        """Runs one of the queries as its own transaction, and returns its rows."""
        work = rows_of(self.queries[query], {**self.values, **values})
        return run_statement(self.supplier, work, lock_ms=lock_ms, operation=f"{self.kind} {query}")

    def pulse(self) -> Pulse:
        """Returns a thread that renews the lease while the block of `with` runs."""
        seconds = self.values["lease_seconds"] / PULSES
        return Pulse(lambda: bool(self.execute("renew")), seconds, f"{self.kind} {self.name}")

    def fence(self, conn: psycopg.Connection[Any], query: str = "fence", **values: Any) -> list[Any]:
        """Checks, within a transaction of the work, that this holder has the lease. Raises `lost()`."""
        return self.must(conn.execute(self.queries[query].on(), {**self.values, **values}).fetchall())

    def must(self, rows: list[Any]) -> list[Any]:
        """Returns the rows of a query that returns rows only to the holder. Raises `lost()` if none came."""
        if not rows:
            raise self.lost()
        return rows

    def release(self, **values: Any) -> None:
        """Releases the lease; if the database does not answer, the lease ends by its time."""
        try:
            try:
                self.execute("release", **values)
            except CommitOutcomeUnknown:  # a second release does no harm
                self.execute("release", **values)
        except (DormouseError, psycopg.Error) as error:
            logger.warning("%s %s ends by itself: %s", self.kind, self.name, one_line(error))


class SessionLock:
    """A lock that `query` takes in a transaction, which stays open until the end of a `with` block.

    Even a pooler keeps a transaction in one session. Between its statements, the transaction has no snapshot.
    The lock ends with the session, for example when the server restarts, so the holder calls `check` before
    each unit of work. A thread sends a statement every `KEPT_PULSE_SECONDS`, or more often if the role has a
    low limit of idle time. A frozen process sends nothing, so PostgreSQL ends its session.

    `lost` makes the error to raise when another session may have the lock.
    """

    def __init__(
        self,
        supplier: Supplier,
        query: Query,
        values: Mapping[str, Any] | None = None,
        *,
        lost: Callable[[], DormouseError],
    ) -> None:
        self._supplier = supplier
        self._query = query
        self._values = values
        self._lost = lost
        self._lent = ExitStack()
        self._conn: psycopg.Connection[TupleRow] | None = None
        self._session: Mapping[str, Any] | None = None
        self._is_taken = False

    def take(self) -> bool:
        """Tries once to take the lock, and returns whether this process has it now.

        Raises the errors of `Supplier.connection`, and `InstanceError` if the session ends meanwhile.
        """
        try:
            return self._take()
        except (psycopg.OperationalError, psycopg.InternalError) as error:
            raise InstanceError(f"the database ended the session: {one_line(error)}") from error

    def _take(self) -> bool:
        if self._conn is not None and not _answers(self._conn):
            self.release()
        if self._conn is None:
            conn = self._lent.enter_context(self._supplier.connection())
            if self._session is not None:  # the server may keep a lost session, and its lock, for a minute
                conn.execute(_QUERIES["end_session"].on(), self._session)
            self._lent.enter_context(_kept(conn))
            self._conn = conn
            pid, began = conn.execute(_QUERIES["own_session"].on(), prepare=False).fetchall()[0]
            self._session = {"pid": pid, "began": began}
        # a prepared statement would keep its snapshot until the end, and the offload of payloads would wait
        # for it
        found = self._conn.execute(self._query.on(), self._values, prepare=False).fetchall()
        self._is_taken = bool(found[0][0])
        return self._is_taken

    def is_held(self) -> bool:
        """Asks the server, and returns whether the session that took the lock still exists."""
        return self._is_taken and self._conn is not None and _answers(self._conn)

    def check(self) -> None:
        """Takes the lock again if the session that had it was lost.

        Raises `lost()` if another session has the lock now, and the errors of `take`.
        """
        if not self.is_held() and not self.take():
            raise self._lost()

    def fence(self, conn: psycopg.Connection[Any], query: Query) -> None:
        """Checks, within a transaction of the work, that the session that took the lock still has it.

        The query gets the values of the lock, and `pid` and `began` (its start) of the session. It returns
        true if the session has the lock. Raises `lost()` otherwise.
        """
        values = {**(self._values or {}), **(self._session or {"pid": None, "began": None})}
        if fetched(conn.execute(query.on(), values)) != [(True,)]:
            raise self._lost()

    def __enter__(self) -> SessionLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Ends the session's transaction, which releases the lock. Raises nothing if the session was lost."""
        self._conn, self._is_taken = None, False
        with suppress(psycopg.Error):
            self._lent.close()


def _answers(conn: psycopg.Connection[Any]) -> bool:
    """Returns whether the session answers a statement.

    Another thread may use the connection at the same time.
    """
    try:
        conn.execute("", prepare=False)
    except psycopg.Error as error:
        logger.warning("a session that keeps a lock was lost: %s", one_line(error))
        return False
    return True


@contextmanager
def _kept(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Keeps a transaction open until the context ends."""
    idle_ms = session.lower(session.KEPT[session.IDLE], limits_of(conn).highest.get(session.IDLE, 0))
    seconds = min(session.KEPT_PULSE_SECONDS, idle_ms / 1_000 / PULSES_A_LIMIT)
    with bounded(conn, session.KEPT), Pulse(lambda: _answers(conn), seconds, "session lock"):
        yield


MARGIN_SECONDS = 60.0
"""The time by which the clock may go back without correction; a lease may then last that much longer."""

ROW_LOCK_SECONDS = 30.0
PAYLOAD_DAY_SECONDS = 60.0
WORKER_SECONDS = 30.0
"""The default lease of a worker."""

WORKER_IDLE_SECONDS = 60.0
"""The time that is added to the lease of a worker that has no jobs."""

WORKER_ASLEEP_SECONDS = 86_400.0
"""The time that is added to the lease of a worker that has closed its connection."""

COMPACTION_SECONDS = 6 * 3_600.0
RUN_SECONDS = 2 * 86_400.0
"""The longest time that compaction jobs can belong to one run."""

HOLD_SECONDS = 900.0
METADATA_BACKUP_SECONDS = 2 * 86_400.0
HOLD_MARGIN_SECONDS = 600.0
"""The time before a hold's beginning that the hold also covers.

Files that lost their last reference in this time stay, too.
"""

REPORTED_SECONDS = 7 * 86_400.0
"""The time for which `clock_jumps` reports a jump."""

_SPANS = {
    "margin": MARGIN_SECONDS,
    "row_lock": ROW_LOCK_SECONDS,
    "payload_day": PAYLOAD_DAY_SECONDS,
    "worker": WORKER_SECONDS,
    "worker_idle": WORKER_IDLE_SECONDS,
    "worker_asleep": WORKER_ASLEEP_SECONDS,
    "compaction": COMPACTION_SECONDS,
    "run": RUN_SECONDS,
    "hold": HOLD_SECONDS,
    "metadata_backup": METADATA_BACKUP_SECONDS,
    "hold_margin": HOLD_MARGIN_SECONDS,
}
_QUERIES = load(__package__ or "", "lease")
_LEASES = (
    "lease_of_row_lock",
    "lease_of_payload_day",
    "lease_of_job_worker",
    "lease_of_compaction_job",
    "lease_of_hold",
)
_TIMES = (
    "time_of_history",
    "time_of_truncation",
    "time_of_removals",
    "time_of_write_attempt",
    "time_of_watermark",
    "time_of_deletion",
    "time_of_last_round",
    "time_of_rehydrated_day",
    "time_of_row_index",
)


@dataclass(frozen=True, slots=True)
class ClockJump:
    """A detected jump of the database's clock: it went back by at least `seconds`.

    `leases` is the number of leases that were shortened, because they were written under the wrong clock.
    `times` is the number of other times that were set to `found_at`.
    """

    found_at: datetime
    seconds: float
    leases: int
    times: int

    def __str__(self) -> str:
        days, hours = divmod(round(self.seconds / 3_600), 24)
        span = f"{days} d {hours} h" if days else f"{hours} h" if hours else f"{self.seconds:,.0f} s"
        return (
            f"the database's clock went back by about {span}, found at {self.found_at:%Y-%m-%d %H:%M:%S} "
            f"UTC; {self.leases:,} leases were restarted, and {self.times:,} other times corrected"
        )


def restart_leases(supplier: Supplier) -> ClockJump | None:
    """Shortens the leases, and corrects the times, that were written while the database's clock was ahead.

    Returns the jump of the clock. Returns None, after one short statement, if no stored time is too late.
    """
    if (
        run_lookup(supplier, rows_of(_QUERIES["seconds_ahead"], _SPANS), operation="read leases")[0][0]
        is None
    ):
        return None

    def work(conn: psycopg.Connection[Any]) -> ClockJump | None:
        # another process may be restarting leases: after it there is nothing left to do
        conn.execute(_QUERIES["alone"].on())
        [(seconds,)] = conn.execute(_QUERIES["seconds_ahead"].on(), _SPANS).fetchall()
        if seconds is None:
            return None
        leases, times = (
            sum(conn.execute(_QUERIES[name].on(), _SPANS).rowcount for name in names)
            for names in (_LEASES, _TIMES)
        )
        values = {"seconds": seconds, "leases": leases, "times": times}
        return ClockJump(*conn.execute(_QUERIES["record"].on(), values).fetchall()[0])

    jump = run_transaction(supplier, work, operation="restart leases")
    if jump is not None:
        logger.warning("%s", jump)
    return jump


def clock_jumps(supplier: Supplier) -> list[ClockJump]:
    """Returns the jumps of the clock that were found in the last week, the latest first."""
    work = rows_of(_QUERIES["jumps"], {"seconds": REPORTED_SECONDS, "margin": MARGIN_SECONDS})
    return [ClockJump(*row) for row in run_lookup(supplier, work, operation="find clock jumps")]

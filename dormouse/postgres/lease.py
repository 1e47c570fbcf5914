"""Leases: what a process has for a while, and keeps by telling the database that it lives.

A user of this module has the SQL that takes, renews, releases and fences its lease. All else is here:

- `Pulse`, the thread that renews. Only the database ends a lease. While it does not answer, it gives the
  lease to no other process, so an outage is no loss.
- `wait_for`, the wait for a lease that another process has.
- `Lease`, a row with a token, which each transaction of the work checks: a holder that was frozen for longer
  than the lease finds another token, and commits nothing.
- `SessionLock`, a lock that ends with a session of the database.
- `restart_leases`, which bounds leases after a jump of the database's clock. A lease says until when it lasts
  by that clock. When it is ahead for a while, what is written meanwhile lies in the future once it is right
  again. Clocks of clients decide nothing.

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
"""How often a lease is renewed within the time that it lasts."""

PULSES_A_LIMIT = 3
"""How often a holder says that it lives, within the time after which PostgreSQL would end its session."""

POLL_SECONDS_MIN, POLL_SECONDS_MAX = 0.002, 0.25
logger = logging.getLogger(__name__)


class Pulse(threading.Thread):
    """A thread that does some work, such as a renewal, every so many seconds for as long as a block lasts.

    Work that returns False has found that its lease is lost: `is_lost` is set, `lost` is called, and the
    thread ends. Work that raises is logged, and tried again after the next pause.
    """

    def __init__(
        self, work: Callable[[], object], seconds: float, name: str, lost: Callable[[], object] | None = None
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.seconds = seconds
        """Between the ends and beginnings of work; infinite: until `now`."""
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
                        "%s: it is tried again: %s", self.name, one_line(error), exc_info=not is_known
                    )
        if self._lost is not None:
            self._lost()

    def now(self) -> None:
        """Does the work at once."""
        self._woken.set()

    def close(self) -> None:
        """Begins no more work; work that is under way goes on."""
        self._is_closed = True
        self._woken.set()

    def __enter__(self) -> Pulse:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it, and waits for work that is under way, unless the server does not answer."""
        self.close()
        if self._working.acquire(timeout=END_SECONDS_MAX):
            self._working.release()


def wait_for(take: Callable[[float], T | Exception], wait_seconds: float) -> T:
    """Calls `take`, with the seconds that are left, until it returns a lease.

    After `wait_seconds` raises the refusal that `take` returned last in place of a lease.
    """
    pause = partial(backoff_seconds, seconds_min=POLL_SECONDS_MIN, seconds_max=POLL_SECONDS_MAX)
    for this in tries(wait_seconds, pause=pause):
        taken = take(this.seconds_left)
        if not isinstance(taken, Exception):
            return taken
        refusal = taken
    raise refusal


def this_holder() -> str:
    """Returns the name of this process as a holder of leases, for people."""
    return f"{socket.gethostname()}:{os.getpid()}"


def held_by(holder: str, does: str, until: datetime) -> str:
    """Returns the refusal of a lease that a holder has until then, unless the holder renews it."""
    return f"worker {holder} {does}, until {until:%H:%M:%S} UTC or longer; try again later"


@dataclass(eq=False)
class Lease:
    """A lease that is a row of the database, with a token.

    The queries `renew` and `fence`, or others in its place, return no row when another holder has the lease.
    """

    supplier: Supplier
    kind: str
    name: str
    """What is leased, in logs; `kind` names it in errors and metrics."""
    queries: Queries
    values: Mapping[str, Any]
    """Given to each query: what is leased, by which token, and `lease_seconds`."""
    lost: Callable[[], DormouseError]
    """Makes the error that is raised where another holder has the lease."""

    def execute(self, query: str, *, lock_ms: int | None = None, **values: Any) -> list[Any]:
        """Returns the rows of one of the queries, which is a transaction of its own."""
        work = rows_of(self.queries[query], {**self.values, **values})
        return run_statement(self.supplier, work, lock_ms=lock_ms, operation=f"{self.kind} {query}")

    def pulse(self) -> Pulse:
        """Renews the lease while the block of `with` runs."""
        seconds = self.values["lease_seconds"] / PULSES
        return Pulse(lambda: bool(self.execute("renew")), seconds, f"{self.kind} {self.name}")

    def fence(self, conn: psycopg.Connection[Any], query: str = "fence", **values: Any) -> list[Any]:
        """Checks, within a transaction of the work, that the lease is this holder's. Raises `lost()`."""
        return self.must(conn.execute(self.queries[query].on(), {**self.values, **values}).fetchall())

    def must(self, rows: list[Any]) -> list[Any]:
        """Returns rows that only the holder gets; raises `lost()` when there are none."""
        if not rows:
            raise self.lost()
        return rows

    def release(self, **values: Any) -> None:
        """Gives the lease back; it ends by itself when the database does not answer."""
        try:
            try:
                self.execute("release", **values)
            except CommitOutcomeUnknown:  # twice is no harm
                self.execute("release", **values)
        except (DormouseError, psycopg.Error) as error:
            logger.warning("%s %s ends by itself: %s", self.kind, self.name, one_line(error))


class SessionLock:
    """A lock that `query` takes for a transaction, which stays open for as long as the work goes on.

    A transaction keeps its session through a pooler, too, and between statements it keeps no snapshot. The
    lock ends with the session, for example when the server restarts. So the holder calls `check` before each
    unit of its work. A pulse asks the server something every `KEPT_PULSE_SECONDS`, or sooner where the role
    has a lower limit: a process that is frozen does not, so PostgreSQL ends its session.

    The lock is released at the end of a `with` block. `lost` makes the error that is raised where another
    session may have it.
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

        Raises what `Supplier.connection` raises, and `InstanceError` when the session ends meanwhile.
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

    def is_held(self) -> bool:
        """Returns whether the session that took the lock still lives; this takes a round trip."""
        return self._is_taken and self._conn is not None and _answers(self._conn)

    def check(self) -> None:
        """Takes the lock anew when the session that had it was lost.

        Raises `lost()` when another session has the lock now, and what `take` raises.
        """
        if not self.is_held() and not self.take():
            raise self._lost()

    def fence(self, conn: psycopg.Connection[Any], query: Query) -> None:
        """Checks, within a transaction of the work, that the session that took the lock has it still.

        The query tells, of the values of the lock and of the session: `pid`, and when it `began`. Raises
        `lost()`.
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
        """Ends the session's transaction, and with it the lock. A session that is lost is no error."""
        self._conn, self._is_taken = None, False
        with suppress(psycopg.Error):
            self._lent.close()


def _answers(conn: psycopg.Connection[Any]) -> bool:
    """Returns whether the session answers, by a statement: another thread may use the connection just now."""
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
"""What the clock may go back without being noticed: a lease lasts so much longer at most."""

ROW_LOCK_SECONDS = 30.0
PAYLOAD_DAY_SECONDS = 60.0
WORKER_SECONDS = 30.0
"""The lease of a worker that did not tell another."""

WORKER_IDLE_SECONDS = 60.0
"""How much longer the lease of a worker is while it has no jobs."""

WORKER_ASLEEP_SECONDS = 86_400.0
"""How much longer the lease of a worker is while it has no connection."""

COMPACTION_SECONDS = 6 * 3_600.0
RUN_SECONDS = 2 * 86_400.0
"""How long compaction jobs are at most those of one run."""

HOLD_SECONDS = 900.0
METADATA_BACKUP_SECONDS = 2 * 86_400.0
HOLD_MARGIN_SECONDS = 600.0
"""A hold covers what lost its last reference so long before it began."""

TOLD_SECONDS = 7 * 86_400.0
"""How long a jump is reported."""

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
    """A jump of the database's clock, as it was found; `seconds` is how far the clock went back, at least.

    `leases` were given under the wrong clock, and were restarted; `times` are other times that were set to
    `found_at`.
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
    """Restarts the leases that a wrong clock made too long, and corrects the times that it wrote.

    Returns the jump, or None when no lease and no time is further ahead than it may be, which one short
    statement tells.
    """
    if (
        run_lookup(supplier, rows_of(_QUERIES["seconds_ahead"], _SPANS), operation="look at leases")[0][0]
        is None
    ):
        return None

    def work(conn: psycopg.Connection[Any]) -> ClockJump | None:
        # another process may be restarting them: after it there is nothing left to do
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
    """Returns the jumps of the last week, the latest first."""
    work = rows_of(_QUERIES["jumps"], {"seconds": TOLD_SECONDS, "margin": MARGIN_SECONDS})
    return [ClockJump(*row) for row in run_lookup(supplier, work, operation="look for clock jumps")]

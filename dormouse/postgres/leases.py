"""Leases after a jump of the database's clock: none lasts longer than it may.

A lease says until when it lasts, by the database's clock. When that clock is ahead for a while, the leases
and times that are written meanwhile lie in the future once it is right again. `restart_leases` finds them by
the largest span that each may have, starts them again from now, and records the jump. Clocks of clients
decide nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import TupleRow

from dormouse.errors import one_line
from dormouse.postgres import session
from dormouse.postgres.connection import Supplier
from dormouse.postgres.cutting import limits_of, lower
from dormouse.postgres.queries import Query, load
from dormouse.postgres.transaction import bounded, rows_of, run_lookup, run_transaction

# An advisory lock for work that takes longer than a transaction may, and a way to notice its loss.

PULSES_A_LIMIT = 3
"""How often a holder says that it lives, within the time after which PostgreSQL would end its session."""


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
    with bounded(conn, session.KEPT):
        ended = threading.Event()
        idle_ms = lower(session.KEPT[session.IDLE], limits_of(conn).highest.get(session.IDLE, 0))
        seconds = min(session.KEPT_PULSE_SECONDS, idle_ms / 1_000 / PULSES_A_LIMIT)
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
_QUERIES = load(__package__ or "", "leases")
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

logger = logging.getLogger(__name__)


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

"""Leases after a jump of the database's clock: none lasts longer than it may.

A lease says until when it lasts, by the database's clock. When that clock is ahead for a while, the leases
and times that are written meanwhile lie in the future once it is right again. `restart_leases` finds them by
the largest span that each may have, starts them again from now, and records the jump. Clocks of clients
decide nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

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

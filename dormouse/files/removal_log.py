"""The log of removed references, a partition a day: made ahead, and dropped when no table needs it."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import psycopg
from psycopg import errors as pg

from dormouse.model.properties import TableProperties
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import run_transaction

DAYS_AHEAD = 7
LOCK_WAIT_MS_MAX = 500
_QUERIES = load(__package__ or "", "removal_log")
_PREFIX = "removed_reference_"


def roll(supplier: Supplier) -> None:
    """Makes the coming days' partitions and drops those that are not needed; busy days wait for next time.

    A session that does not own the log leaves it to those that do, such as the maintenance of a deployment.
    """
    today = datetime.now(UTC).date()
    with supplier.connection() as conn:
        if not conn.execute(_QUERIES["may_roll"].on()).fetchall()[0][0]:
            return
        have = {_day(name) for (name,) in conn.execute(_QUERIES["days"].on()).fetchall()}
    ahead = (today + timedelta(days=n) for n in range(DAYS_AHEAD))
    for day in sorted(set(ahead) - have):
        _try(supplier, lambda conn, day=day: _add(conn, day))
    for day in sorted(day for day in have if day < today):
        _try(supplier, lambda conn, day=day: _drop_unless_needed(conn, day))


def _add(conn: psycopg.Connection[Any], day: date) -> None:
    limits = {"from_day": f"{day} 00:00:00+00", "to_day": f"{day + timedelta(days=1)} 00:00:00+00"}
    conn.execute(_QUERIES["add_day"].literally(**limits).on(day=_name(day)))


def _drop_unless_needed(conn: psycopg.Connection[Any], day: date) -> None:
    # first the lock, then the look: what a transaction commits between the two would be lost
    conn.execute(_QUERIES["lock_day"].on(day=_name(day)))
    conn.execute(_QUERIES["forget_totals"].on())
    retention = {"retention_seconds": TableProperties().history_retention_seconds}
    if not conn.execute(_QUERIES["still_needed"].on(day=_name(day)), retention).fetchall()[0][0]:
        conn.execute(_QUERIES["drop_day"].on(day=_name(day)))


def _try(supplier: Supplier, work: Any) -> None:
    def patient(conn: psycopg.Connection[Any]) -> None:
        conn.execute(f"set local lock_timeout = '{LOCK_WAIT_MS_MAX}ms'")
        work(conn)

    try:
        run_transaction(supplier, patient, operation="roll the removal log")
    except (pg.LockNotAvailable, pg.DuplicateTable, pg.UndefinedTable, pg.CheckViolation):
        # busy, done by another, or the default partition has rows of that day already: no removal is lost
        return


def _name(day: date) -> str:
    return f"{_PREFIX}{day:%Y%m%d}"


def _day(name: str) -> date:
    return datetime.strptime(name.removeprefix(_PREFIX), "%Y%m%d").replace(tzinfo=UTC).date()

"""The log of removed references, a partition a day: made ahead, and dropped when no table needs it."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import psycopg
from psycopg import errors as pg

from dormouse.files.holds import MARGIN_SECONDS
from dormouse.model.properties import TableProperties
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

DAYS_AHEAD = 7
LOCK_WAIT_MS_MAX = 500
_QUERIES = load(__package__ or "", "removal_log")
_PREFIX = "removal_"


def roll(supplier: Supplier) -> None:
    """Makes the coming days' partitions and drops those that are not needed; busy days wait for next time.

    A session that does not own the log leaves it to those that do, such as the maintenance of a deployment.
    """
    if not _first_column(supplier, "may_roll")[0]:
        return
    [today] = _first_column(supplier, "today")
    ahead = {today + timedelta(days=n) for n in range(DAYS_AHEAD)}
    have = {_day(name) for name in _first_column(supplier, "days")}
    late = set(_first_column(supplier, "days_without_partition"))
    if late and max(late) > max(ahead):
        _try(supplier, lambda conn: _date_back(conn, max(ahead)))
    for day in sorted((ahead | {day for day in late if day < today}) - have):
        _try(supplier, lambda conn, day=day: _add(conn, day))
    for day in sorted(day for day in have if day < today):
        _try(supplier, lambda conn, day=day: _drop_unless_needed(conn, day))


def _add(conn: psycopg.Connection[Any], day: date) -> None:
    limits = {"from_day": _midnight(day), "to_day": _midnight(day + timedelta(days=1))}
    conn.execute(_QUERIES["lock_log"].on())
    conn.execute(_QUERIES["create_day"].on(day=_name(day)))
    for step in ("move_to_day", "attach_day"):
        conn.execute(_QUERIES[step].literally(**limits).on(day=_name(day)))


def _date_back(conn: psycopg.Connection[Any], last: date) -> None:
    conn.execute(_QUERIES["date_back"].on(), {"first_day": _midnight(last + timedelta(days=1))})


def _drop_unless_needed(conn: psycopg.Connection[Any], day: date) -> None:
    # first the lock, then the look: what a transaction commits between the two would be lost
    conn.execute(_QUERIES["lock_day"].on(day=_name(day)))
    if _is_needed(conn, day):
        return
    # who holds a moment looks whether it can be read: before this, and then is seen, or after it
    conn.execute(_QUERIES["lock_tables"].on(day=_name(day)))
    if _is_needed(conn, day):
        return
    end = _midnight(day + timedelta(days=1))
    conn.execute(_QUERIES["note_dropped"].literally(to_day=end).on(day=_name(day)))
    conn.execute(_QUERIES["note_history"].on(day=_name(day)), {"margin_seconds": MARGIN_SECONDS})
    conn.execute(_QUERIES["drop_day"].on(day=_name(day)))


def _is_needed(conn: psycopg.Connection[Any], day: date) -> bool:
    seconds = TableProperties().history_retention_seconds
    values = {"retention_seconds": seconds, "margin_seconds": MARGIN_SECONDS}
    return bool(conn.execute(_QUERIES["still_needed"].on(day=_name(day)), values).fetchall()[0][0])


def _try(supplier: Supplier, work: Any) -> None:
    def patient(conn: psycopg.Connection[Any]) -> None:
        conn.execute(f"set local lock_timeout = '{LOCK_WAIT_MS_MAX}ms'")
        work(conn)

    try:
        run_transaction(supplier, patient, operation="roll the removal log")
    except (pg.LockNotAvailable, pg.DuplicateTable, pg.UndefinedTable):
        return  # busy, or done by another: no removal is lost


def _first_column(supplier: Supplier, name: str) -> list[Any]:
    return [row[0] for row in run_lookup(supplier, rows_of(_QUERIES[name]), operation="removal log")]


def _name(day: date) -> str:
    return f"{_PREFIX}{day:%Y%m%d}"


def _day(name: str) -> date:
    return date.fromisoformat(name.removeprefix(_PREFIX))


def _midnight(day: date) -> str:
    return f"{day} 00:00:00+00"

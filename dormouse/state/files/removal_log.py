"""The removal log: a record of removed references, with one PostgreSQL partition for each day.

Partitions are made some days ahead, and dropped when no table needs them.
"""

from __future__ import annotations

from datetime import date, timedelta
from functools import partial
from typing import Any

import psycopg
from psycopg import errors as pg

from dormouse.model.table import TableProperties
from dormouse.postgres.connection import Supplier
from dormouse.postgres.days import DayPartitions, days_ahead
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup
from dormouse.state.files.holds import MARGIN_SECONDS

DAYS = DayPartitions("removal")
_QUERIES = load(__package__ or "", "removal_log")


def roll(supplier: Supplier) -> None:
    """Makes the partitions of the coming days, and drops those that are not needed.

    A day that is in use is left for the next call. Does nothing for a role that does not own the log. Then a
    process with the owner's role must call it, such as the maintenance of a deployment.
    """
    if not DAYS.may_roll(supplier):
        return
    today = DAYS.today(supplier)
    ahead = days_ahead(today)
    have = set(DAYS.days(supplier))
    rows = run_lookup(supplier, rows_of(_QUERIES["days_without_partition"]), operation="removal log")
    late = {day for (day,) in rows}
    if late and max(late) > max(ahead):
        DAYS.attempt(supplier, lambda conn: _date_back(conn, max(ahead)))
    DAYS.make(supplier, sorted((ahead | {day for day in late if day < today}) - have))
    for day in sorted(day for day in have if day < today):
        # dropping locks the log briefly, so try it only where it is likely to succeed
        if not _seems_needed(supplier, day):
            DAYS.attempt(supplier, partial(_drop_unless_needed, day=day))


def _date_back(conn: psycopg.Connection[Any], last: date) -> None:
    """Sets the time of removals after the day `last` to now.

    A wrong clock had dated them into the future.
    """
    conn.execute(_QUERIES["date_back"].on(), {"first_day": _midnight(last + timedelta(days=1))})


def _drop_unless_needed(conn: psycopg.Connection[Any], day: date) -> None:
    # lock before looking: rows that a transaction commits between the two would be lost
    conn.execute(_QUERIES["lock_day"].on(day=DAYS.name(day)))
    if _is_needed(conn, day):
        return
    # a hold that checked its moment before this lock is seen below; a later one finds the day dropped
    conn.execute(_QUERIES["lock_tables"].on(day=DAYS.name(day)))
    if _is_needed(conn, day):
        return
    end = _midnight(day + timedelta(days=1))
    conn.execute(_QUERIES["note_dropped"].literally(to_day=end).on(day=DAYS.name(day)))
    conn.execute(_QUERIES["note_history"].on(day=DAYS.name(day)), {"margin_seconds": MARGIN_SECONDS})
    # locked last, so that readers, which lock the log before its days, did not wait for the checks above
    conn.execute(_QUERIES["lock_log"].on())
    DAYS.drop(conn, day)


def _seems_needed(supplier: Supplier, day: date) -> bool:
    try:
        return run_lookup(supplier, partial(_is_needed, day=day), operation="removal log")
    except pg.UndefinedTable:  # another process has dropped it
        return True


def _is_needed(conn: psycopg.Connection[Any], day: date) -> bool:
    seconds = TableProperties().history_retention_seconds
    values = {"retention_seconds": seconds, "margin_seconds": MARGIN_SECONDS}
    return bool(conn.execute(_QUERIES["still_needed"].on(day=DAYS.name(day)), values).fetchall()[0][0])


def _midnight(day: date) -> str:
    return f"{day} 00:00:00+00"

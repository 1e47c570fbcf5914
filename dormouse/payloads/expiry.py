"""Days that are past their retention: first the partition, then its objects."""

from __future__ import annotations

from datetime import date
from functools import partial
from typing import Any

import psycopg

from dormouse.errors import PayloadDayBusy
from dormouse.payloads.exchange import Names
from dormouse.payloads.objects import PayloadObjects
from dormouse.payloads.rows import DAYS
from dormouse.payloads.status import days
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load

TRIES = 20
_QUERIES = load(__package__ or "", "expiry")


def expire(supplier: Supplier, before: date, *, dry_run: bool = False) -> tuple[list[date], list[date]]:
    """Drops the days before one; gives them, and those that are worked on or used all the time, and stay."""
    due = [one.day for one in days(supplier, 0) if one.day < before]
    if dry_run:
        return due, []
    gone, busy = list[date](), list[date]()
    for day in due:
        try:
            done = DAYS.attempt(supplier, partial(_drop, day=day), attempts=TRIES)
        except PayloadDayBusy:
            done = False
        (gone if done else busy).append(day)
    return gone, busy


def _drop(conn: psycopg.Connection[Any], day: date) -> None:
    names = Names(day)
    if not conn.execute(_QUERIES["expire"].on(), {"day": day, "name": names.day}).fetchall():
        raise PayloadDayBusy(f"payloads of {day}: somebody works on the day")
    if conn.execute(_QUERIES["is_partition"].on(), {"name": names.day}).fetchall()[0][0]:
        DAYS.drop(conn, day)
    conn.execute(_QUERIES["drop_work"].on(copy=names.copy, written=names.written, old=names.old))
    conn.execute(_QUERIES["drop_mirror"].on(mirror=names.mirror))
    PayloadObjects.change(conn, day, ["live", "staged", "block", "pending"], "dead")

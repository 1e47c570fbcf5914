"""Holds: leases that keep the files of a moment while a reader, such as a backup, needs them.

Garbage collection keeps each file that lost its last reference after the oldest hold began. It also keeps the
objects of tables that were dropped after that. A hold is a lease, so it ends by itself when its holder dies.
A holder that was frozen for longer than the lease gets an error, since files that it needs may have been
deleted.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import psycopg

from dormouse.errors import InstanceError
from dormouse.model.table import TableRecord
from dormouse.postgres.connection import Supplier
from dormouse.postgres.lease import HOLD_MARGIN_SECONDS, HOLD_SECONDS, Lease
from dormouse.postgres.queries import Query, load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

LEASE_SECONDS = HOLD_SECONDS
MARGIN_SECONDS = HOLD_MARGIN_SECONDS
"""A time, in seconds, longer than any transaction that removes references."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A hold by `holder`, until `until`, on files that lost their last reference after `since`."""

    holder: str
    since: datetime
    until: datetime

    @property
    def is_of_history(self) -> bool:
        """True if the holder is a named cut or a consumer, which the table lists."""
        return self.holder.startswith(("cut ", "consumer "))


_QUERIES = load(__package__ or "", "holds")
DELETABLE = _QUERIES["deletable"]


@contextmanager
def held(supplier: Supplier, holder: str) -> Iterator[None]:
    """Holds all files that are referenced now until the end of the context; `holder` names the purpose.

    Raises `InstanceError` at the end if the hold ended too early, because this process was frozen.
    """
    lease = _lease(supplier, holder)
    begin = rows_of(_QUERIES["hold"], {**lease.values, "margin_seconds": MARGIN_SECONDS})
    run_transaction(supplier, begin, operation="hold files")
    try:
        with lease.pulse():
            yield
    finally:
        is_held = release(supplier, lease.values["holder"])
    if not is_held:
        raise lease.lost()


@contextmanager
def moment_held(supplier: Supplier, table_id: int, since: datetime, snapshot: str) -> Iterator[bool]:
    """Holds the files that a table had at a moment until the end of the context.

    Yields True, or False if some of the files may have been deleted already.
    """
    lease = _lease(supplier, "reader")
    values = {**lease.values, "table_id": table_id, "since": since, "snapshot": snapshot}
    [(is_held,)] = run_transaction(
        supplier, lambda conn: _after_others(conn, "hold_moment", values), operation="hold files"
    )
    try:
        with lease.pulse():
            yield is_held
    finally:
        release(supplier, lease.values["holder"])


def _lease(supplier: Supplier, holder: str) -> Lease:
    # a name may be held twice at the same time
    values = {"holder": f"{holder} {uuid.uuid4().hex}", "lease_seconds": LEASE_SECONDS}
    lost = partial(
        InstanceError,
        f"the {holder} was stopped for more than {LEASE_SECONDS:,.0f} s, so files that it needs may have "
        "been deleted; its result was discarded: run it again",
    )
    return Lease(supplier, "hold", repr(holder), _QUERIES, values, lost)


def _after_others(conn: psycopg.Connection[Any], name: str, values: Mapping[str, Any]) -> list[Any]:
    """Runs a statement that sees all earlier holds and deletions of the table's files; returns its rows.

    It waits for other transactions that hold or delete files of the table.
    """
    lock_history(conn, values["table_id"])
    return conn.execute(_whole(name).on(), values).fetchall()


def lock_history(conn: psycopg.Connection[Any], table_id: int) -> bool:
    """Locks a table against transactions that delete, hold or restore its files.

    Returns False if the table does not exist.
    """
    return conn.execute(_QUERIES["lock_history"].on(), {"table_id": table_id}).rowcount > 0


@contextmanager
def held_until_next(supplier: Supplier, holder: str, seconds_max: float) -> Iterator[None]:
    """Holds all files that are referenced now, also after the context, until the holder's next such hold.

    The hold lasts at most `seconds_max`. The end of the context releases the holder's earlier holds. If the
    context raises an error, this hold is released instead.
    """
    name = f"{holder} {uuid.uuid4().hex}"
    values = {"holder": name, "margin_seconds": MARGIN_SECONDS, "lease_seconds": seconds_max}
    run_transaction(supplier, rows_of(_QUERIES["hold"], values), operation="hold files")
    try:
        yield
    except BaseException:
        run_transaction(supplier, rows_of(_QUERIES["release"], {"holder": name}), operation="release files")
        raise
    others = {"prefix": f"{holder} ", "kept": name}
    run_transaction(supplier, rows_of(_QUERIES["release_others"], others), operation="release files")


def holds(supplier: Supplier) -> list[Hold]:
    """Returns the holds that have not ended, sorted by their ends."""
    rows = run_lookup(supplier, rows_of(_QUERIES["holds"]), operation="find holds")
    return [Hold(*row) for row in rows]


def release(supplier: Supplier, holder: str) -> bool:
    """Ends a hold; returns False if there is none or if it had ended already."""
    work = rows_of(_QUERIES["release"], {"holder": holder})
    return bool(run_transaction(supplier, work, operation="release files")[0][0])


def deletable_before(supplier: Supplier, table: TableRecord) -> datetime:
    """Returns a time: files that lost their last reference before it may be deleted.

    The time depends on the table's properties and on the holds.
    """
    work = rows_of(_whole("before"), kept_of(table))
    before: datetime = run_lookup(supplier, work, operation="find holds")[0][0]
    return before


def let_go(supplier: Supplier, table: TableRecord) -> datetime | None:
    """Returns the time that `deletable_before` returns, and records it.

    From now on, no moment before that time can be read, and the caller deletes the files. Returns None if the
    table was dropped.
    """
    rows = run_transaction(
        supplier, lambda conn: _after_others(conn, "let_go", kept_of(table)), operation="release files"
    )
    return rows[0][0] if rows else None


def kept_of(table: TableRecord) -> dict[str, Any]:
    """Returns the values of the query `DELETABLE`."""
    properties = table.properties
    kept_seconds = max(properties.gc_delay_seconds, properties.files_kept_seconds)
    return {
        "table_id": table.table_id,
        "delay_seconds": properties.gc_delay_seconds,
        "kept_seconds": kept_seconds,
    }


def _whole(name: str) -> Query:
    return _QUERIES[name].including(deletable=DELETABLE)


def is_held(supplier: Supplier, table_id: int, snapshot: str, seconds: float) -> bool:
    """Returns True if a hold keeps a moment of a table for at least `seconds` more.

    Holds of named cuts, for example, keep their moments in this way.
    """
    values = {"table_id": table_id, "snapshot": snapshot, "seconds": seconds}
    return bool(run_lookup(supplier, rows_of(_QUERIES["is_held"], values), operation="find holds")[0][0])
